"""The text side of a sample: what the tokenizer makes of its layout, each run of media tokens once, and then repeated.

layout    <s>user: <image>what?  assistant: a cat</s>
ids       1  2      9      3     4          5 6  7        as kept
supervised                                  ^----^        spans [5, 8) of what is kept
runs                9 x 4
expanded  1  2   9 9 9 9   3     4          5 6  7        as the model gets it
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import RecordError
from packtrain.core.modality import MODALITIES
from packtrain.core.values import MediaKind, Record, TokenIds
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT
from packtrain.families.family import Expansion
from packtrain.families.layout import Layout
from packtrain.families.skeleton import shape_of, texts_of
from packtrain.families.tokenizer import LightTokenizer, covered_tokens

_KINDS: dict[MediaKind, int] = {kind: one.token_kind for kind, one in MODALITIES.items()}
_NAMES: dict[int, MediaKind] = {number: kind for kind, number in _KINDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleTokens:
    """Tokens of one whole sample. They depend on its text and on the expansions of its media, and on no pixel."""

    ids: np.ndarray  # (tokens,) int32, a run of media tokens as one of them
    supervised: np.ndarray  # (spans, 2) int32: tokens that carry loss, start and end
    runs: np.ndarray  # (runs, 3) int32: which token, how often, of which kind
    key: int = 0  # `sample_key` of what they were made from, where they are kept

    @classmethod
    def of(cls, layout: Layout, tokenizer: LightTokenizer) -> SampleTokens:
        """Tokenize the layout of a record."""
        encoding = tokenizer.encode(layout.text, special=layout.special)
        ids = np.array(encoding.ids, dtype=np.int32)
        if not len(ids):
            raise RecordError("template", "no tokens")
        supervised = np.full(len(ids), layout.supervised is None)
        for span in layout.supervised or ():
            first, count = covered_tokens(encoding, *span)
            supervised[first : first + count] = True
        runs, used = [], set()
        for run in layout.runs:
            at = encoding.char_to_token(run.at)
            if at is None or at in used:
                raise RecordError(
                    "template", "a media token is merged with its neighbours by the tokenizer", f"at character {run.at}"
                )
            used.add(at)
            supervised[at] = False
            runs.append((at, run.count, _KINDS[run.kind]))
        supervised[0] = False
        return cls(ids=ids, supervised=_spans(supervised), runs=np.array(runs, dtype=np.int32).reshape(-1, 3))

    @classmethod
    def of_ids(cls, tokens: TokenIds) -> SampleTokens:
        """Tokens that came as such."""
        spans = [(max(first, 1), end) for first, end in tokens.supervised if end > 1]
        return cls(
            ids=np.array(tokens.ids, dtype=np.int32),
            supervised=np.array(spans, dtype=np.int32).reshape(-1, 2),
            runs=np.zeros((0, 3), dtype=np.int32),
        )

    @property
    def run_kinds(self) -> list[MediaKind]:
        """The kinds of media tokens, in the order of the text."""
        return [_NAMES[kind] for kind in self.runs[:, 2].tolist()]

    @property
    def check(self) -> int:
        """A checksum of everything in it."""
        checksum = zlib.crc32(self.key.to_bytes(8, "little", signed=True))
        for part in (self.ids, self.supervised, self.runs):
            checksum = zlib.crc32(len(part).to_bytes(8, "little"), checksum)
            checksum = zlib.crc32(part.tobytes(), checksum)
        return checksum

    def expand(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, labels and kinds of tokens, int64, runs of media repeated; arrays of their own."""
        ids = self.ids.astype(np.int64)
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        for first, end in self.supervised.tolist():
            labels[first:end] = ids[first:end]
        kinds = np.full(len(ids), TEXT, dtype=np.int64)
        if not len(self.runs):
            return ids, labels, kinds
        at, repeats, kind = self.runs.T
        counts = np.ones(len(ids), dtype=np.int64)
        counts[at], kinds[at] = repeats, kind
        return ids.repeat(counts), labels.repeat(counts), kinds.repeat(counts)


def sample_key(record: Record, expansions: Sequence[Expansion]) -> int:
    """A hash of all that decides the text side of a sample.

    Roles, what carries loss, kinds of parts, texts, ids, what the chat template is given beside them, and what the
    processor writes for media: those of other sizes give another key.
    """
    texts = texts_of(record)
    lengths = [len(text) for text in texts]  # with them, no two lists of texts can join to the same
    parts = (record.tokens, record.plain, shape_of(record), lengths, tuple(expansions))
    key = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8)
    if record.structured:
        extras = record.variables, [message.extras for message in record.messages]
        key.update(repr(extras).encode("utf-8", "surrogatepass"))
    key.update("".join(texts).encode("utf-8", "surrogatepass"))
    return int.from_bytes(key.digest(), "little", signed=True)


def _spans(marked: np.ndarray) -> np.ndarray:
    """Start and end of each span of marked positions.

    >>> _spans(np.array([False, True, True, False, True])).tolist()
    [[1, 3], [4, 5]]
    """
    edges = np.diff(np.concatenate([[0], marked.astype(np.int8), [0]]))
    return np.flatnonzero(edges).astype(np.int32).reshape(-1, 2)
