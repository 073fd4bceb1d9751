"""Tiny models by name: writes the folder of a small random model of any family, and finds a model's folder.

`tiny:qwen3_vl` names such a model wherever a model is asked for. Its folder has everything a real one has except
weights, which `build_model` draws from a seed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError, in_one_line, nearest
from packtrain.core.folders import made_once
from packtrain.models.tiny_parts import Id, TinySpec, VocabularySize
from packtrain.models.tiny_specs import TINY
from packtrain.models.tiny_templates import chat_template
from packtrain.models.tiny_tokenizer import build_tokenizer, tokenizer_json

PREFIX = "tiny:"
TINY_FAMILIES: tuple[str, ...] = tuple(TINY)
# What measuring and packing read of a model on the hub: everything but its weights.
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# How folders that are made for names are called.
_TINY_FOLDER, _HUB_FOLDER = re.compile(r"tiny-(\w+)-[0-9a-f]{12}"), re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def write(family: str, folder: Path) -> Path:
    """Write the model folder of one family; the same family always gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(family).items():
        (folder / name).write_bytes(content)
    return folder


def resolve(name_or_path: str, cache_dir: Path) -> Path:
    """The folder of a model: a tiny one made on demand, a local folder, or a hub model without its weights."""
    if name_or_path.startswith(PREFIX):
        return _cached(name_or_path.removeprefix(PREFIX), cache_dir)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_NAME.fullmatch(name_or_path):
        return _download(name_or_path)
    raise ConfigError(
        f"model {name_or_path!r}",
        got="a file" if folder.exists() else _no_folder(folder),
        expected=f"a model folder, a hub name like org/name, or {PREFIX}FAMILY",
        fix=f"did you mean {PREFIX}{name_or_path}?" if name_or_path in TINY else _beside(folder) or "check the path",
    )


def _no_folder(folder: Path) -> str:
    return "no folder of that name" + ("" if folder.is_absolute() else f" in {Path.cwd()}")


def _beside(folder: Path) -> str:
    """A folder of nearly this name where it was looked for."""
    parent = folder.parent
    names = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    return nearest(folder.name, names)


def known_as(folder: str | Path) -> str:
    """The name that a folder of `resolve` has for users: such folders may have no weights. Other folders stay."""
    path = Path(folder)
    tiny = _TINY_FOLDER.fullmatch(path.name)
    if tiny is not None and tiny[1] in TINY:
        return f"{PREFIX}{tiny[1]}"
    hub = _HUB_FOLDER.fullmatch(path.parent.parent.name) if path.parent.name == "snapshots" else None
    return f"{hub[1]}/{hub[2]}" if hub is not None else str(folder)


def build_model(folder: str | Path, seed: int = 0) -> Any:
    """A random model for the folder's config.json, in fp32 and evaluation mode; the same seed, the same weights."""
    path = Path(folder) / "config.json"
    try:
        model_type = json.loads(path.read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            str(path), got=str(error), expected="a model's config.json", fix="name a model folder"
        ) from error
    if model_type == "nanovlm":
        raise ConfigError(
            str(path),
            got="model type 'nanovlm'",
            expected="a model type that transformers knows",
            fix="its model comes later; measuring, planning and packing work without it",
        )
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    except ImportError as error:
        raise ConfigError("building a model", got=str(error), fix="pip install 'packtrain[train]'") from error
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32).eval()
        # Some matrices start at zero and wait for a checkpoint (Gemma3's projector: it would hide every image).
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():
                torch.nn.init.normal_(weight, std=0.1)
        return model


def _files(family: str) -> dict[str, bytes]:
    """Every file of a family's folder, by name."""
    if family not in TINY:
        raise ConfigError(
            f"tiny model {family!r}",
            got="a family without a tiny model",
            expected="one of " + ", ".join(TINY_FAMILIES),
            fix=nearest(family, TINY_FAMILIES) or "choose one of these",
        )
    spec = TINY[family]
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


def _cached(family: str, cache_dir: Path) -> Path:
    """The folder of a tiny model under the cache, named by its content and made at most once."""
    digest = hashlib.sha256()
    for name, content in sorted(_files(family).items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return made_once(cache_dir / f"tiny-{family}-{digest.hexdigest()[:12]}", lambda fresh: write(family, fresh))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        folder = Path(name)
        # Where the first part of the name is a folder here, a path was meant, and the hub has nothing to do with it.
        local = folder.parent.is_dir()
        raise ConfigError(
            f"model {name!r}",
            got=_no_folder(folder) + ("" if local else f", and not on the hub: {in_one_line(error)}"),
            expected="a model folder, or a model on the Hugging Face hub that can be reached or is in its local cache",
            fix=_beside(folder)
            or f"name a local model folder, use a tiny model ({PREFIX}qwen3_vl), or check name, network and access",
        ) from error
