"""The model's tokenizer without transformers, and which tokens cover a span of characters.

Ids are the same from tokenizer.json and tokenizer_config.json alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from packtrain.core.errors import ConfigError
from packtrain.families.family import ProcessorSettings

if TYPE_CHECKING:
    from tokenizers import Encoding


_TRIMS = re.compile(r'("trim_offsets":\s*)true')
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LightTokenizer:
    """A tokenizer as a model folder defines it; no truncation, no padding."""

    def __init__(self, settings: ProcessorSettings) -> None:
        path = Path(settings.tokenizer_folder or settings.folder) / "tokenizer.json"
        try:
            # Trimmed offsets leave blanks without a token; ids are the same without trimming.
            self._tokenizer = Tokenizer.from_str(_TRIMS.sub(r"\1false", path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises a bare Exception for every fault
            raise ConfigError(
                str(path),
                got="no such file" if not path.exists() else str(error),
                expected="the tokenizer's own file",
                fix="save the tokenizer with save_pretrained() into the model's folder",
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(settings.tokenizer_config.get("split_special_tokens", False))
        self.bos_token = settings.special_tokens.get("bos_token")
        self.eos_token = settings.special_tokens.get("eos_token")
        if settings.tokenizer_folder is None:
            self._add_missing(settings)
        self._size: int | None = None
        self.eos_id = self.id_of(self.eos_token) if self.eos_token else None
        self.ends = tuple(dict.fromkeys([*([self.eos_token] if self.eos_token else []), *self.special_tokens()]))
        self.appends_eos = self.eos_id is not None and self.encode("a", special=True).ids[-1:] == [self.eos_id]

    def encode(self, text: str, *, special: bool) -> Encoding:
        """Ids with character offsets; `special` adds what the tokenizer puts around every text."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where the tokens of a text begin and end, nothing put around it."""
        return self.encode(text, special=False).offsets  # type: ignore[no-any-return]

    def encode_batch(self, texts: list[str], *, special: bool) -> list[Encoding]:
        """As `encode`, for many texts at once."""
        return self._tokenizer.encode_batch(texts, add_special_tokens=special)  # type: ignore[no-any-return]

    def special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        if self._size is None:
            self._size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return self._size

    def id_of(self, token: str) -> int | None:
        """The id of one token, None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)  # type: ignore[no-any-return]

    def _add_missing(self, settings: ProcessorSettings) -> None:
        """Tokens that only tokenizer_config.json has, or has with other flags, are added as transformers adds them."""
        config = settings.tokenizer_config
        declared = config.get("added_tokens_decoder") or {}
        own = self._tokenizer.get_added_tokens_decoder().values()
        tokens = [_added_token(token) for _, token in sorted(declared.items(), key=lambda item: int(item[0]))]
        tokens = [token for token in tokens if repr(token) not in set(map(repr, own))]
        known = {token.content for token in (*own, *tokens)}
        for value in _special_values(settings):
            token = _added_token(value)
            if token.content not in known:
                tokens.append(token)
                known.add(token.content)
        if tokens:
            self._tokenizer.add_tokens(tokens)


def _special_values(settings: ProcessorSettings) -> list[Any]:
    """The special tokens of tokenizer_config.json, as text or with flags, those that have a name first."""
    config, named = settings.tokenizer_config, settings.special_tokens
    names = sorted(named, key=lambda name: _NAMES.index(name) if name in _NAMES else len(_NAMES))
    values: list[Any] = [config[name] if isinstance(config.get(name), Mapping) else named[name] for name in names]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return values + list(extra.values() if isinstance(extra, Mapping) else extra)


def _added_token(value: Any) -> AddedToken:
    """A token from its text, or from its serialized flags; a text alone stands for a special one."""
    if not isinstance(value, Mapping):
        return AddedToken(str(value), special=True, normalized=False)
    special = bool(value.get("special", False))
    return AddedToken(
        value["content"],
        **{flag: bool(value.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word")},
        special=special,
        normalized=bool(value.get("normalized", not special)),
    )


TokenSpan = tuple[int, int]  # its first token, and the one after its last


class Runs:
    """Lengths of the spans that tokens fall into, in turn without and with loss."""

    def __init__(self) -> None:
        self._lengths = [0]

    def add(self, count: int, *, loss: bool) -> None:
        """The next tokens."""
        if not count:
            return
        if loss == (len(self._lengths) % 2 == 0):
            self._lengths[-1] += count
        else:
            self._lengths.append(count)

    def add_text(self, count: int, spans: Iterable[TokenSpan], begin: int = 0) -> None:
        """The tokens of a text from `begin` to `count`; those inside the spans, which are in order, carry loss."""
        for first, end in spans:
            first = max(first, begin)
            if first < end:
                self.add(first - begin, loss=False)
                self.add(end - first, loss=True)
                begin = end
        self.add(count - begin, loss=False)

    def lengths(self) -> tuple[int, ...]:
        """The spans so far."""
        return tuple(self._lengths)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one record, media apart."""

    text_tokens: int
    supervised_tokens: int
    tail_tokens: int  # after the last media token; all of them where there are no media
    tail_runs: tuple[int, ...]  # lengths of the spans of that tail, in turn without and with loss

    @classmethod
    def all_supervised(cls, text_tokens: int, supervised_tokens: int, tail_tokens: int) -> TokenCounts:
        """Where all text carries loss; the first token, where it is in the tail, is predicted from nothing."""
        first = int(text_tokens == tail_tokens > supervised_tokens)
        runs = Runs()
        runs.add_text(tail_tokens, [(first, tail_tokens)])
        return cls(text_tokens, supervised_tokens, tail_tokens, runs.lengths())


def covered_tokens(encoding: Encoding, start: int, end: int) -> tuple[int, int]:
    """The first token that covers a character in [start, end), and how many do."""
    first = _token_at(encoding, start, end, 1)
    last = _token_at(encoding, end - 1, start - 1, -1)
    if first is None or last is None:
        return 0, 0
    # A rare character is several tokens, all with its offsets: the span ends with the last of them. Where a
    # normalizer has composed characters, the later ones have no token, so the span may end after that.
    while last + 1 < len(encoding):
        characters = encoding.token_to_chars(last + 1)
        if characters is None or characters[0] >= end:
            break
        last += 1
    return first, last - first + 1


def covered_by_all(encoding: Encoding, spans: Iterable[tuple[int, int]], *, after: int = 0) -> list[TokenSpan]:
    """The tokens that cover a character of any of these spans, in order; those before token `after` never do."""
    tokens = []
    for start, end in spans:
        first, count = covered_tokens(encoding, start, end)
        first, stop = max(first, after), first + count  # a token may reach from one span into the next
        if first < stop:
            tokens.append((first, stop))
            after = stop
    return tokens


def tokens_after(encoding: Encoding, at: int) -> int:
    """The tokens after the one that covers a character; none where it has no token, so that nothing is promised."""
    token = encoding.char_to_token(at)
    return 0 if token is None else len(encoding) - 1 - int(token)


def _token_at(encoding: Encoding, at: int, stop: int, step: int) -> int | None:
    """The token that covers a character, or the next character that any token covers, before `stop`."""
    while (at < stop) if step > 0 else (at > stop):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
        at += step
    return None
