"""A model's config and tokenizer as transformers loads them, saved for workers that have no transformers.

config      old names are translated and missing lists filled in; it decides whether and how a model can be packed
tokenizer   some classes take only vocabulary and merges from tokenizer.json and bring rules of their own, so the file
            alone does not give the ids that training will see

Each is made once, by another process unless transformers is loaded already.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.core.artifacts import make_folder_once, read_json, write_json
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError, ConfigError, in_one_line, install_hint
from packtrain.core.fingerprint import digest, files_state
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract, ProcessorSettings

KIND, VERSION = "model_config", 1
NOT_CHECKED = (
    "whether this model can be trained on packs was not checked: that needs transformers (pip install packtrain[train])"
)
ON_PROOF = (
    "packs of this model are trained only where a check on the model and the data passes; `packtrain verify` makes it "
    "now, and padded rows (data.packing=false) do without"
)
_loaded: dict[str, Mapping[str, Any]] = {}  # of this process, by content


def model_contract(settings: ProcessorSettings, *, packing: bool = True) -> BatchContract:
    """The contract of a model folder, and the one verdict on it: what `contract_for` says of the loaded config.

    Without transformers it is that of the file.
    """
    contract = contract_for(settings, packing=packing)  # what its file is refused for needs no transformers
    version = _transformers()
    if not settings.config or version is None:
        return contract
    config = _loaded_config(settings, version)
    return contract_for(replace(settings, config=config, model_type=str(config.get("model_type"))), packing=packing)


def outer_shell(folder: str) -> Any:
    """The whole model without weights, for what its classes say: arguments and methods."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    try:
        with torch.device("meta"):
            return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    except Exception as error:  # a model may fail in any way
        raise ConfigError(
            folder,
            got=f"model type {config.model_type!r}, which cannot be built: {in_one_line(error)[:300]}",
            expected="a language model of transformers, with or without images",
            fix=install_hint(error) or "try it with AutoModelForImageTextToText.from_pretrained",
        ) from error


def why_unpackable(settings: ProcessorSettings) -> str:
    """Why a model is trained on padded rows only; an empty string where it may be packed, or is not trained at all."""
    try:
        model_contract(settings)
    except ConfigError as error:
        with contextlib.suppress(ConfigError):
            model_contract(settings, packing=False)
            return str(error.got)
    return ""


def packing_notes(settings: ProcessorSettings) -> tuple[str, ...]:
    """Notes for measuring and packing: what training will refuse or ask for, or that nobody has looked."""
    if reason := why_unpackable(settings):
        return (f"packtrain trains this model on padded rows only (data.packing=false): {reason}",)
    try:
        unlisted = model_contract(settings).unlisted
    except ConfigError as error:
        return (f"packtrain cannot train this model: {error.got}",)
    if not _transformers():
        return (NOT_CHECKED,)
    return (ON_PROOF,) if unlisted else ()


def _transformers() -> str | None:
    """The version that is installed, if any is."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _loaded_config(settings: ProcessorSettings, version: str) -> Mapping[str, Any]:
    name = digest({"config": settings.config, "transformers": version})
    if name not in _loaded:
        file = cache_dir() / "configs" / f"{name}.json"
        _loaded[name] = _read(file) or _load_and_keep(settings.folder, file)
    return _loaded[name]


def _read(file: Path) -> dict[str, Any] | None:
    """The cached config; None if it is missing or damaged."""
    try:
        return dict(read_json(file, KIND, VERSION, checked=True)["config"])
    except (ArtifactError, OSError):
        return None


def _load_and_keep(folder: str, file: Path) -> dict[str, Any]:
    try:
        text = _load(folder) if "transformers" in sys.modules else in_another_process(folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        if "trust_remote_code" in reason:
            raise ConfigError(
                f"{folder}/config.json",
                got="a model whose code is in its own repository (auto_map), not in transformers",
                expected="a model of transformers: code of models is never run",
                fix="use a version of the model that transformers has, or a newer transformers",
            ) from None
        raise ConfigError(
            f"{folder}/config.json",
            got=f"a config that transformers cannot load: {reason}",
            expected="a model of transformers without remote code",
            fix="check the folder with AutoConfig.from_pretrained; a newer transformers may support the model",
        ) from None
    config: dict[str, Any] = json.loads(text)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, KIND, VERSION, {"config": config}, checked=True)
    return config


def _load(folder: str) -> str:
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_json_string(use_diff=False))


# Classes that take the file as it is, and classes whose own rules are those of their published files (tested).
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
AS_PUBLISHED = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")
_VOCABULARIES = ("vocab*", "merges.txt", "*.model", "*.tiktoken")  # where there is no tokenizer.json


def finished_tokenizer(settings: ProcessorSettings, cache: Path) -> str | None:
    """The folder of the saved tokenizer; None where the model's own files give the same ids, or are all there is."""
    if _file_is_enough(settings) or importlib.util.find_spec("transformers") is None:
        return None
    source = Path(settings.folder)
    vocabularies = {path.name for pattern in _VOCABULARIES for path in source.glob(pattern)}
    if not vocabularies and not (source / "tokenizer.json").exists():
        raise ConfigError(
            settings.folder,
            got="no tokenizer",
            expected="tokenizer.json, or the vocabulary of a tokenizer",
            fix="copy the tokenizer's files from the model's repository, where the weights come from",
        )
    state = files_state({name: source / name for name in sorted({*_FILES, *vocabularies})}, content=True)
    folder = cache / digest({"files": state, "transformers": importlib.metadata.version("transformers")})
    return str(make_folder_once(folder, lambda fresh: _save_in_another_process(settings.folder, fresh)))


def _file_is_enough(settings: ProcessorSettings) -> bool:
    config, folder = settings.tokenizer_config, Path(settings.folder)
    name = config.get("tokenizer_class")
    if not (folder / "tokenizer.json").exists() or "eos_token" not in settings.special_tokens:
        return False
    if (folder / "added_tokens.json").exists() and not config.get("added_tokens_decoder"):
        return False
    return name in GENERIC or (name in AS_PUBLISHED and not config.get("add_prefix_space"))


def in_another_process(*arguments: str) -> str:
    """Run this module in another process and return its output; RuntimeError has the last line of its error."""
    command = [sys.executable, "-m", "packtrain.delivery.encode.from_transformers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def _save_in_another_process(source: str, folder: Path) -> None:
    try:
        in_another_process(source, str(folder))
    except RuntimeError as error:
        raise ConfigError(
            source,
            got=str(error),
            expected="a fast tokenizer (of the tokenizers library) that transformers can load",
            fix="check the folder with AutoTokenizer.from_pretrained",
        ) from None


def _save(source: str, folder: str) -> None:
    """Save the tokenizer; runs in the other process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    (Path(folder) / "special_tokens.json").write_text(json.dumps(dict(tokenizer.special_tokens_map)))
    (Path(folder) / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _save(*sys.argv[1:])
    else:
        sys.stdout.write(_load(sys.argv[1]))
