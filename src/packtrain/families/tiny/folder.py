"""Tiny models: writes the folder of a small model of any family, with everything that a real one has except weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.core.artifacts import made_once
from packtrain.core.errors import ConfigError, nearest
from packtrain.families.registry import find_family, tiny_families
from packtrain.families.tiny.parts import Id, TinySpec, VocabularySize
from packtrain.families.tiny.templates import chat_template
from packtrain.families.tiny.tokenizer import build_tokenizer, tokenizer_json


def write(family: str, folder: Path) -> Path:
    """Write the model folder of one family; the same family always gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(family).items():
        (folder / name).write_bytes(content)
    return folder


def _files(family: str) -> dict[str, bytes]:
    """Every file of a family's folder, by name."""
    known = find_family(family)
    if known is None or known.tiny is None:
        raise ConfigError(
            f"tiny model {family!r}",
            got="a family without a tiny model",
            expected="one of " + ", ".join(tiny_families()),
            fix=nearest(family, tiny_families()) or "use one of these",
        )
    spec = known.tiny
    tokenizer = build_tokenizer(
        (*spec.tokens.values(), *spec.special), spec.added, bos=spec.tokens["bos_token"] if spec.adds_bos else None
    )
    texts = {
        "config.json": _json(_fill({**spec.config, "dtype": "float32"}, tokenizer)),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": _json(_tokenizer_config(spec)),
        "chat_template.jinja": chat_template(spec.template),
    }
    if spec.processor:
        texts["processor_config.json"] = _json(spec.processor)
    return {name: text.encode() for name, text in texts.items()}


def _tokenizer_config(spec: TinySpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is, instead of rebuilding it by a family's own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        **spec.tokens,
        "extra_special_tokens": list(spec.special),
    }
    if spec.processor:
        config["processor_class"] = spec.processor["processor_class"]
    return config


def _fill(value: Any, tokenizer: Any) -> Any:
    """A config with its stand-ins replaced by what the tokenizer says."""
    if isinstance(value, Id):
        return tokenizer.token_to_id(value.token)
    if isinstance(value, VocabularySize):
        return tokenizer.get_vocab_size()
    if isinstance(value, Mapping):
        return {key: _fill(inner, tokenizer) for key, inner in value.items()}
    return value


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def cached(family: str, cache_dir: Path) -> Path:
    """The folder of a tiny model under the cache, named by its content and made at most once."""
    digest = hashlib.sha256()
    for name, content in sorted(_files(family).items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return made_once(cache_dir / f"tiny-{family}-{digest.hexdigest()[:12]}", lambda fresh: write(family, fresh))
