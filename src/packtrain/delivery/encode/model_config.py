"""A model's config as transformers loads it: old names are translated there, and lists that files leave out are made.

Whether and how a model can be packed is judged by that. It is loaded once, by another process where transformers is not
loaded anyway, and kept as JSON, so that workers need no transformers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.core.artifacts import read_json, write_json
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.fingerprint import digest
from packtrain.delivery.encode.finished_tokenizer import in_another_process
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract, ProcessorSettings

KIND, VERSION = "model_config", 1
NOT_CHECKED = (
    "whether this model can be trained on packs was not checked: that needs transformers (pip install packtrain[train])"
)
_loaded: dict[str, Mapping[str, Any]] = {}  # of this process, by content


def model_contract(settings: ProcessorSettings) -> BatchContract:
    """The contract of a model folder, and the one verdict on it: what `contract_for` says of the loaded config.

    Without transformers it is that of the file.
    """
    contract = contract_for(settings)  # what its file is refused for needs no transformers
    version = _transformers()
    if not settings.config or version is None:
        return contract
    config = _as_loaded(settings, version)
    return contract_for(replace(settings, config=config, model_type=str(config.get("model_type"))))


def packing_notes(settings: ProcessorSettings) -> tuple[str, ...]:
    """What those who only measure or pack should know: that training will refuse the model, or was not asked."""
    try:
        model_contract(settings)
    except ConfigError as error:
        return (f"packtrain cannot train this model: {error.got}",)
    return () if _transformers() else (NOT_CHECKED,)


def _transformers() -> str | None:
    """The version that is installed, if any is."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_loaded(settings: ProcessorSettings, version: str) -> Mapping[str, Any]:
    name = digest({"config": settings.config, "transformers": version})
    if name not in _loaded:
        file = cache_dir() / "configs" / f"{name}.json"
        _loaded[name] = _read(file) or _load_and_keep(settings.folder, file)
    return _loaded[name]


def _read(file: Path) -> dict[str, Any] | None:
    """None where there is none, or none that is whole."""
    try:
        return dict(read_json(file, KIND, VERSION, checked=True)["config"])
    except (ArtifactError, OSError):
        return None


def _load_and_keep(folder: str, file: Path) -> dict[str, Any]:
    try:
        text = _load(folder) if "transformers" in sys.modules else in_another_process(__name__, folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ConfigError(
            f"{folder}/config.json",
            got=f"a config that transformers cannot load: {said}",
            expected="a model of transformers without remote code",
            fix="check the folder with AutoConfig.from_pretrained; a newer transformers may support the model",
        ) from None
    found: dict[str, Any] = json.loads(text)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, KIND, VERSION, {"config": found}, checked=True)
    return found


def _load(folder: str) -> str:
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_json_string(use_diff=False))


if __name__ == "__main__":
    sys.stdout.write(_load(sys.argv[1]))
