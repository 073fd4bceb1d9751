"""The contents of a batch as the model gets it: its arguments, its samples and their media, and every token.

A `RecordingEncoder` stands in for the encoder while a pack is delivered; `batch_contents` lists what came of it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.core.modality import MODALITIES
from packtrain.core.values import LedgerEntry, MediaHeader, Record
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample, PackedRow
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import ProcessorSettings
from packtrain.families.registry import load_rule
from packtrain.packing.pack_plan import PackPlan

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import Batch
    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.delivery.encode.encoded_sample import SampleCounts
    from packtrain.delivery.encode.unlisted import ProcessorEncoder
    from packtrain.records.media import MediaStore

PADDING = "padding"
_KINDS = {TEXT: "text", **{one.token_kind: name for name, one in MODALITIES.items()}}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how tokenizers with a byte fallback write one byte


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchToken:
    """One token of the row."""

    at: int  # place in the row
    id: int
    text: str | None  # None where it has no text, or is a part of a character
    bytes: str | None  # in hexadecimal, of a part of a character
    kind: str  # text, image, video or padding
    medium: int | None  # number of the image or video in its sample, from 1
    sample: int | None  # number of the sample in the row, from 0
    positions: tuple[int, ...]  # one, or four with M-RoPE: in the sample, time, height, width
    loss: bool
    label: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMedium:
    """One medium of a sample."""

    kind: str
    number: int  # among those of its kind, from 1
    name: str
    width: int
    height: int
    tokens: int | None  # None where only the processor knows which of several media a token is of


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSample:
    """One sample of the row."""

    number: int
    id: str
    origin: str
    row: int  # of the cost table
    first: int  # place of its first token in the row
    tokens: int
    start: int  # first token of the sample that is used, 0 unless it is split
    supervised_tokens: int
    media: tuple[BatchMedium, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardArgument:
    """One argument of the model's forward pass."""

    name: str
    shape: tuple[int, ...] | None  # None where it is no tensor
    dtype: str
    value: str | None  # of what is no tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedBatch:
    """Everything about one pack as the model gets it."""

    pack: int
    epoch: int
    model: str
    model_type: str
    attn_implementation: str
    packing_length: int
    num_tokens: int  # of samples
    padding: int
    supervised_tokens: int
    images: int
    videos: int
    patches: int | None  # None where pixels come as tiles of unknown patch size
    arguments: tuple[ForwardArgument, ...]
    boundaries: tuple[int, ...]  # where samples, and padding after them, start and end
    samples: tuple[BatchSample, ...]
    failures: tuple[LedgerEntry, ...]  # samples that were planned and are not in the batch
    tokens: tuple[BatchToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoded:
    """Facts about an encoded sample that its tensors do not hold."""

    record: Record
    start: int
    media: tuple[BatchMedium, ...]


class RecordingEncoder:
    """An encoder that also records the media of its samples and how many tokens each of them takes.

    `headers`, by row, are those that were measured, so that an error names both sizes of a medium that has changed.
    """

    def __init__(
        self, encoder: SampleEncoder | ProcessorEncoder, headers: Mapping[int, tuple[MediaHeader, ...]]
    ) -> None:
        self.encoder, self._headers = encoder, headers
        self.encoded: list[_Encoded] = []  # samples without failures, in order
        self._rule: RecordEncoder | None = None

    def encode(
        self, record: Record, store: MediaStore, *, row: int, expected: SampleCounts | None, start: int, tokens: int
    ) -> EncodedSample:
        """Like the encoder itself."""
        expected = replace(expected, headers=self._headers.get(row)) if expected is not None else None
        sample = self.encoder.encode(record, store, row=row, expected=expected, start=start, tokens=tokens)
        media = self._media(record, store, sample) if start == 0 else ()
        self.encoded.append(_Encoded(record=record, start=start, media=media))
        return sample

    def _media(self, record: Record, store: MediaStore, sample: EncodedSample) -> tuple[BatchMedium, ...]:
        from packtrain.delivery.encode.decode import media_header

        media = tuple(record.media())
        headers = [media_header(store, medium) for medium in media]
        numbers: Counter[str] = Counter()
        samples_media = []
        for medium, header, tokens in zip(media, headers, self._tokens(headers, sample), strict=True):
            numbers[medium.kind] += 1
            samples_media.append(
                BatchMedium(
                    kind=medium.kind,
                    number=numbers[medium.kind],
                    name=medium.ref.name,
                    width=header.width,
                    height=header.height,
                    tokens=tokens,
                )
            )
        return tuple(samples_media)

    def _tokens(self, headers: Sequence[MediaHeader], sample: EncodedSample) -> list[int | None]:
        """The tokens of each medium, by the rule; without one, those of its kind where it is the only one."""
        from packtrain.delivery.encode.encode import SampleEncoder

        if not isinstance(self.encoder, SampleEncoder):
            shown = Counter(header.kind for header in headers)
            kinds = [MODALITIES[header.kind].token_kind for header in headers]
            return [
                int((sample.token_kinds == kind).sum()) if shown[header.kind] == 1 else None
                for header, kind in zip(headers, kinds, strict=True)
            ]
        if not headers:
            return []
        if self._rule is None:
            request, settings = self.encoder.request, self.encoder.request.settings()
            family = load_rule(settings, request.limits)
            assert family is not None, "a SampleEncoder has a rule"
            self._rule = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
        return [expansion.media_tokens for expansion in self._rule.layouter.expansions(headers)]


def _numbers(sample: EncodedSample, media: tuple[BatchMedium, ...]) -> list[int | None]:
    """Which medium of its kind each token belongs to. Media of one kind are in order, whatever is between them."""
    kinds = sample.token_kinds.numpy()
    numbers = np.zeros(len(kinds), np.int64)
    for kind in MODALITIES.values():
        own = [medium for medium in media if medium.kind == kind.name]
        places = np.flatnonzero(kinds == kind.token_kind)
        counts = [medium.tokens for medium in own if medium.tokens is not None]
        if len(counts) < len(own):
            continue
        assert len(places) == sum(counts), f"{sample.id}: {len(places)} {kind.name} tokens, but its media have {counts}"
        numbers[places] = np.repeat([medium.number for medium in own], counts) if own else 0
    return [number or None for number in numbers.tolist()]


def batch_contents(
    plan: PackPlan,
    row: PackedRow,
    recorder: RecordingEncoder,
    batch: Batch,
    attn_implementation: str,
    texts: TokenTexts,
) -> InspectedBatch:
    """A row that was encoded by `recorder` and collated into `batch`."""
    from packtrain.delivery.collate.collators import sample_offsets

    info, encoder = batch.info, recorder.encoder
    starts = sample_offsets(row.samples, plan.config.pack_alignment)
    ends = [start + len(sample) for start, sample in zip(starts, row.samples, strict=True)]
    boundaries = tuple(sorted({0, *starts, *ends, info.tokens + info.padding}))
    samples = tuple(
        BatchSample(
            number=number,
            id=sample.id,
            origin=encoded.record.origin,
            row=sample.row,
            first=starts[number],
            tokens=len(sample),
            start=encoded.start,
            supervised_tokens=int((sample.labels != IGNORED).sum()),
            media=encoded.media,
        )
        for number, (sample, encoded) in enumerate(zip(row.samples, recorder.encoded, strict=True))
    )
    return InspectedBatch(
        pack=row.key.pack,
        epoch=row.key.epoch,
        model=encoder.request.model,
        model_type=encoder.contract.model_type,
        attn_implementation=attn_implementation,
        packing_length=plan.config.packing_length,
        num_tokens=info.tokens,
        padding=info.padding,
        supervised_tokens=info.supervised_tokens,
        images=info.images,
        videos=info.videos,
        patches=info.patches,
        arguments=tuple(_argument(name, value) for name, value in batch.items()),
        boundaries=boundaries,
        samples=samples,
        failures=info.failures,
        tokens=_tokens(row, samples, batch, texts),
    )


def _argument(name: str, value: Any) -> ForwardArgument:
    if hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return ForwardArgument(name=name, shape=tuple(value.shape), dtype=dtype, value=None)
    return ForwardArgument(name=name, shape=None, dtype=type(value).__name__, value=str(value))


def _tokens(
    row: PackedRow, samples: tuple[BatchSample, ...], batch: Mapping[str, Any], texts: TokenTexts
) -> tuple[BatchToken, ...]:
    """Every token, from the tensors that the model gets; the samples only say whose it is."""
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    positions = batch["position_ids"].reshape(-1, len(ids)).T.tolist()
    owners: list[tuple[int | None, str, int | None]] = []
    for sample, batch_sample in zip(row.samples, samples, strict=True):
        owners += [(None, PADDING, None)] * (batch_sample.first - len(owners))
        kinds = map(_KINDS.__getitem__, sample.token_kinds.tolist())
        owners += [
            (batch_sample.number, kind, medium)
            for kind, medium in zip(kinds, _numbers(sample, batch_sample.media), strict=True)
        ]
    owners += [(None, PADDING, None)] * (len(ids) - len(owners))
    return tuple(
        BatchToken(
            at=at,
            id=token,
            text=texts.of(token)[0],
            bytes=texts.of(token)[1],
            kind=kind,
            medium=medium,
            sample=sample_number,
            positions=tuple(place),
            loss=label != IGNORED,
            label=label,
        )
        for at, (token, label, place, (sample_number, kind, medium)) in enumerate(
            zip(ids, labels, positions, owners, strict=True)
        )
    )


TokenText = tuple[str | None, str | None]  # a text; or, of a part of a character, bytes in hexadecimal


class TokenTexts:
    """The texts of a model's tokens, by its tokenizer as transformers loads it."""

    def __init__(self, settings: ProcessorSettings) -> None:
        from packtrain.delivery.encode.pixels import load_processor

        self._tokenizer: Any = load_processor(settings, multimodal=False).backend_tokenizer
        self._known: dict[int, TokenText] = {}
        # Decoders leave out the blank in front of a text, so nothing is decoded as the first token.
        self._before: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._lead = self._decode(self._before)

    def of(self, token: int) -> TokenText:
        """The text of a token; nothing where the vocabulary does not have it."""
        if token not in self._known:
            self._known[token] = self._text(token)
        return self._known[token]

    def _text(self, token: int) -> TokenText:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None, None
        if self._tokenizer.decoder is None:
            return name, None
        text = self._decode([*self._before, token])
        text = text.removeprefix(self._lead) if text.startswith(self._lead) else self._decode([token])
        if "\ufffd" in text and (raw := _token_bytes(name)) is not None:
            try:
                return raw.decode("utf-8"), None
            except UnicodeDecodeError:
                return None, raw.hex()
        return text, None

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _token_bytes(name: str) -> bytes | None:
    """The bytes that a token's name in the vocabulary encodes; None where the name is the text itself."""
    one = _BYTE.fullmatch(name)
    if one is not None:
        return bytes.fromhex(one[1])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in name) if all(char in alphabet for char in name) else None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: visible characters of Latin-1 as themselves, the rest from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
