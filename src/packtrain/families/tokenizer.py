"""The model's tokenizer without transformers: the same ids from tokenizer.json and tokenizer_config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

from packtrain.core.errors import ConfigError
from packtrain.families.base import ProcessorSettings

if TYPE_CHECKING:
    from tokenizers import Encoding


class LightTokenizer:
    """A tokenizer as a model folder defines it; no truncation, no padding."""

    def __init__(self, settings: ProcessorSettings) -> None:
        path = Path(settings.folder) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for every fault
            raise ConfigError(
                str(path),
                got="no such file" if not path.exists() else str(error),
                expected="the tokenizer's own file",
                fix="save the tokenizer with save_pretrained() into the model's folder",
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos_token = settings.special_tokens.get("bos_token")
        self.eos_token = settings.special_tokens.get("eos_token")
        self._add_missing(settings)
        self.eos_id = self.id_of(self.eos_token) if self.eos_token else None
        self.appends_eos = self.eos_id is not None and self.encode("a", special=True).ids[-1:] == [self.eos_id]

    def encode(self, text: str, *, special: bool) -> Encoding:
        """Ids with character offsets; `special` adds what the tokenizer puts around every text."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def encode_batch(self, texts: list[str], *, special: bool) -> list[Encoding]:
        """As `encode`, for many texts at once."""
        return self._tokenizer.encode_batch(texts, add_special_tokens=special)  # type: ignore[no-any-return]

    def id_of(self, token: str) -> int | None:
        """The id of one token, None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)  # type: ignore[no-any-return]

    def _add_missing(self, settings: ProcessorSettings) -> None:
        """Special tokens that only tokenizer_config.json names are added, as transformers adds them."""
        declared = settings.tokenizer_config.get("added_tokens_decoder", {})
        tokens = [
            AddedToken(
                token["content"],
                **{flag: bool(token.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word", "special")},
                normalized=bool(token.get("normalized", True)),
            )
            for _, token in sorted(declared.items(), key=lambda item: int(item[0]))
            if isinstance(token, dict) and self.id_of(token.get("content", "")) is None
        ]
        tokens += [
            AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys(settings.special_tokens.values())
            if self.id_of(token) is None and token not in {str(t.content) for t in tokens}
        ]
        if tokens:
            self._tokenizer.add_tokens(tokens)
