"""What a measurement depends on, as one value whose differences can be named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import packtrain
from packtrain.core.errors import ConfigError
from packtrain.core.fingerprint import digest, files_state
from packtrain.families.base import ProcessorSettings
from packtrain.families.registry import family_code
from packtrain.measuring.request import Request
from packtrain.records.formats.hf_dataset import hub_revision
from packtrain.records.formats.source_files import local_root
from packtrain.records.open import data_files, named_files
from packtrain.records.schemas.formatting import load_formatting
from packtrain.records.shards.address import is_remote, remote_state

RULES_VERSION = 4  # raised whenever the same inputs would be measured differently
_BEGINNING, _LINE = 1 << 8, 1 << 20  # bytes, and most of the line that they end in


def measure_inputs(request: Request, *, content_hash: bool = False, by_processor: bool = False) -> dict[str, object]:
    """Data files, request, processor settings, the module of the user's formatting function and our own version.

    Nothing here says where model and data lie: see `Request.places`.
    """
    formatting = load_formatting(request.schema.formatting_func)[1] if request.schema.formatting_func else None
    request = request.dated()
    settings = request.settings()
    inputs = {
        "packtrain": packtrain.__version__,
        "rules": RULES_VERSION,
        "request": request.describe(),
        "settings": settings_state(settings),
        "date": None,  # the request has it, where the chat template writes one
        "formatting_func": digest(formatting) if formatting is not None else None,
        "data": _data_state(named_files(request.specs), content=content_hash),
        "revisions": {spec.name: found for spec in request.specs if (found := hub_revision(spec)) is not None},
        "transformers": metadata.version("transformers") if by_processor else None,
    }
    return json.loads(json.dumps(inputs, default=str))  # type: ignore[no-any-return]  # as it will be read back


def stream_inputs(request: Request) -> dict[str, object]:
    """What a stream that is not measured depends on. Its data may grow: how its first file begins stands for them."""
    local = [spec for spec in request.specs if local_root(spec) is not None]
    first = next((file for file in data_files(local) if os.path.isfile(file)), None)
    try:
        settings = settings_state(request.settings())
    except ConfigError:  # no model that we could read; whoever brings an encoder needs none
        settings = {"model": request.model}
    return {"request": request.describe(), "settings": settings, "begins": _beginning(first)}


def _beginning(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        with open(file, "rb") as stream:
            # To the end of a record: datasets of one kind begin with the same words.
            return hashlib.sha256(stream.read(_BEGINNING) + stream.readline(_LINE)).hexdigest()
    except OSError:  # which reading it will say
        return None


def _data_state(files: Mapping[str, str], *, content: bool) -> dict[str, object]:
    """What identifies each data file: size and time, or content; of a remote one what its store says."""
    remote = {name: remote_state(file) for name, file in files.items() if is_remote(file)}
    return files_state({name: file for name, file in files.items() if name not in remote}, content=content) | remote


def settings_state(settings: ProcessorSettings) -> dict[str, object]:
    """The processor's settings by name, long ones as a hash, and the tokenizer's file."""
    tokenizer = Path(settings.tokenizer_folder or settings.folder) / "tokenizer.json"
    own = family_code(settings.model_type)
    return {
        "model_type": settings.model_type,
        **({} if own is None else {"family": own}),
        "processor": dict(settings.processor),
        "image_processor": dict(settings.image),
        "video_processor": dict(settings.video),
        "vision_config": settings.config.get("vision_config", {}),
        "config": digest(dict(settings.config)),
        "chat_template": digest(settings.chat_template),
        **({} if settings.tool_template is None else {"tool_template": digest(settings.tool_template)}),
        "special_tokens": dict(settings.special_tokens),
        "tokenizer_config": digest(dict(settings.tokenizer_config)),
        "tokenizer": files_state({tokenizer.name: tokenizer}, content=True)[tokenizer.name],
    }
