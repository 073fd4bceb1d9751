"""Counts parameters by part from the headers of safetensors files; the weights themselves are never read.

A safetensors file starts with eight bytes, the length of a JSON header that names every tensor's type and shape.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.families.registry import registered_modules
from packtrain.predicting.values import ParameterCounts

_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_INDEX = 256 * 2**20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Types in which one number is one parameter; quantised files pack several into one.
_PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64")
# A tensor belongs to the first part that one of these is a piece of its name for; the rest are decoder layers.
_PROJECTOR = ("merger", "multi_modal_projector", "connector", "modality_projection", "image_newline", "MP", "mlp1")
_PROJECTOR_LISTS = ("deepstack_merger_list", "merger_list")
_VISION = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision")
_HEAD = ("lm_head",)
_EMBEDDING = ("embed_tokens", "token_embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One entry of a header."""

    name: str
    dtype: str
    elements: int


def count_weights(folder: Path, *, tied: bool) -> ParameterCounts | None:
    """Counts by part, or None where the weights are not (all) there or are quantised."""
    files = weight_files(folder)
    if not files:
        return None
    counts = dict.fromkeys(("embedding", "layers", "head", "vision", "projector"), 0)
    for file in files:
        for tensor in read_header(file):
            if tensor.dtype not in _PLAIN:
                return None
            counts[part_of(tensor.name)] += tensor.elements
    if tied:
        # Some checkpoints hold the shared matrix twice, some only under the head's name.
        counts["embedding"] = counts["embedding"] or counts["head"]
        counts["head"] = 0
    return ParameterCounts(**counts)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold a model's weights, in order; none where some are missing."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        return (single,) if single.is_file() else ()
    names = list(_weight_map(index).values())
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise _broken(index, "a shard outside the folder", "file names")
    files = tuple(folder / name for name in sorted(set(names)))
    return files if all(file.is_file() for file in files) else ()


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to; users' families add what they call theirs."""
    pieces, own = name.split("."), registered_modules()
    if not {*_PROJECTOR, *_PROJECTOR_LISTS, *(names.projector for names in own)}.isdisjoint(pieces):
        return "projector"
    if not {*_VISION, *(names.vision for names in own)}.isdisjoint(pieces):
        return "vision"
    if any(piece in _EMBEDDING for piece in pieces):
        return "embedding"
    if any(piece in _HEAD for piece in pieces) or name == "decoder.head.weight":
        return "head"
    return "layers"


def read_header(path: Path) -> Iterator[TensorInfo]:
    """Every tensor that a file names; nothing after the header is read, and no header beyond the format's limit."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise _broken(path, f"a header of {length:,} bytes in a file of {size:,}", "a header within the file")
            raw = file.read(length)
    except OSError as error:
        raise _broken(path, str(error), "a readable file") from error
    header = _json_object(path, raw)
    header.pop("__metadata__", None)
    end = size - 8 - length
    for name, entry in header.items():
        yield _tensor(path, name, entry, end)


def _tensor(path: Path, name: str, entry: Any, end: int) -> TensorInfo:
    """One checked entry: its shape must fill its place in the file exactly, so a false count cannot pass."""
    if not isinstance(entry, dict):
        raise _broken(path, f"{name!r} is a {type(entry).__name__}", "a tensor's type, shape and place")
    dtype, shape, place = entry.get("dtype"), _numbers(entry.get("shape")), _numbers(entry.get("data_offsets"))
    if dtype not in _PLAIN and dtype not in _OTHERS:
        raise _broken(path, f"{name!r} has type {str(dtype)[:40]!r}", "a type of the safetensors format")
    if shape is None or place is None or len(place) != 2 or not place[0] <= place[1] <= end:
        raise _broken(path, f"{name!r} has no place in the file", "a shape, and offsets within the file")
    elements, size = prod(shape), place[1] - place[0]
    if dtype in _PLAIN and elements * _PLAIN[dtype] != size:
        raise _broken(path, f"{name!r} has {elements:,} numbers in {size:,} bytes", "as many as fit")
    return TensorInfo(name=name, dtype=dtype, elements=elements)


def _numbers(value: Any) -> list[int] | None:
    """A short list of integers, or None; the product of a long one could take for ever."""
    if not isinstance(value, list) or len(value) > 16:
        return None
    return value if all(type(item) is int and 0 <= item < 2**63 for item in value) else None


def _weight_map(index: Path) -> Mapping[str, Any]:
    try:
        size = index.stat().st_size
        raw = index.read_bytes() if size <= _MAX_INDEX else b""
    except OSError as error:
        raise _broken(index, str(error), "a readable file") from error
    if not raw:
        raise _broken(index, f"{size:,} bytes", f"between 1 and {_MAX_INDEX:,} bytes")
    files = _json_object(index, raw).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise _broken(index, "no weight_map", "which file holds which tensor")
    return files


def _json_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not valid JSON: {error}", "a JSON object") from error
    if not isinstance(value, dict):
        raise _broken(path, f"a JSON {type(value).__name__}", "a JSON object")
    return value


def _broken(path: Path, got: str, expected: str) -> ConfigError:
    return ConfigError(str(path), got=got, expected=expected, fix="copy this file again from where the model came from")
