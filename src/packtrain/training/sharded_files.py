"""Sharded checkpoints hold pickles that torch unpickles as they are; all of them are looked through before.

    .metadata     which tensors and values there are, and where: only descriptions, each made in the way torch makes it
    *.distcp      tensors, which torch reads safely, and values as optimizers have them, which it reads as pickles

The first is unpickled into stand-ins for the classes that it names, so nothing in it can do harm.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

from packtrain.core.artifacts import refuse_links
from packtrain.core.errors import ArtifactError, in_one_line

_METADATA = "*.metadata"  # of all ranks; where torch cannot read that one, it takes the rank's own
_ARCHIVE = b"PK\x03\x04"  # how every value begins that torch writes there


def refuse_code(checkpoint: Path) -> None:
    """Refuse a sharded checkpoint in which anything but tensors, plain values and their descriptions would be made."""
    refuse_links(Path(checkpoint))  # torch would follow what is not looked through here
    for path in sorted(Path(checkpoint).rglob(_METADATA)):
        with _in_words(path):
            _check_values(path.parent, _metadata(path))


def tensors_in(path: Path) -> set[str]:
    """Names of the tensors that a list describes; read without making anything of it."""
    with _in_words(path):
        return _tensors(_metadata(path))


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever bytes that are no pickle may raise
        raise ArtifactError(
            str(path),
            got=in_one_line(error),
            expected="tensors, plain values and metadata, as torch writes them",
            fix="resume only from checkpoints that you trust",
        ) from None


def _check_values(folder: Path, metadata: _Description) -> None:
    """Places lie inside the checkpoint's files, and values that are no tensors are plain."""
    import torch

    tensors = _tensors(metadata)
    for index, place in metadata.get("storage_data", dict).items():
        if type(index) is not _Index or type(place) is not _Place:
            raise pickle.UnpicklingError("it has an invalid offset")
        name, relative = index.get("fqn", str), place.get("relative_path", str)
        offset, length = place.get("offset", int), place.get("length", int)
        if _leaves_folder(relative):
            raise pickle.UnpicklingError(f"{name} is outside the checkpoint, in {relative}")
        with open(folder / relative, "rb") as stream:
            size = stream.seek(0, io.SEEK_END)
            if offset < 0 or length < 0 or offset + length > size:
                raise pickle.UnpicklingError(f"{name} is past the end of {relative}")
            if name in tensors:  # torch reads them with weights_only
                continue
            stream.seek(offset)
            value = stream.read(length)
        if not value.startswith(_ARCHIVE):
            raise pickle.UnpicklingError(f"{name} is not a torch archive")
        try:
            torch.load(io.BytesIO(value), weights_only=True, map_location="cpu")
        except Exception:  # whose words say how to run it
            raise pickle.UnpicklingError(f"{name} would create more than plain values") from None


def _metadata(path: Path) -> _Description:
    """All of one file."""
    metadata = _Descriptions(io.BytesIO(path.read_bytes())).load()
    if type(metadata) is not _Metadata:
        raise pickle.UnpicklingError("it is not checkpoint metadata")
    return metadata


def _tensors(metadata: _Description) -> set[str]:
    """Names of what torch reads as tensors."""
    entries = metadata.get("state_dict_metadata", dict)
    if not all(type(name) is str and type(what) in (_Tensor, _Bytes) for name, what in entries.items()):
        raise pickle.UnpicklingError("an entry is neither a tensor nor a plain value")
    return {name for name, what in entries.items() if type(what) is _Tensor}


def _leaves_folder(path: str) -> bool:
    return any(kind(path).is_absolute() or ".." in kind(path).parts for kind in (PurePosixPath, PureWindowsPath))


# ---- stand-ins


class _Fixed(type):
    """Metaclass of classes that a pickle cannot change."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}")


class _Description(metaclass=_Fixed):
    """Made without arguments, then given its fields, once; `fields` are those that torch knows."""

    __slots__ = ("state",)
    fields: tuple[str, ...] = ()
    state: Mapping[str, Any]

    def __new__(cls) -> _Description:
        instance = super().__new__(cls)
        object.__setattr__(instance, "state", None)
        return instance

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it would set {name} of {type(self).__name__}")

    def __setstate__(self, state: object) -> None:
        if self.state is not None or type(state) is not dict or not set(state) <= set(self.fields):
            raise pickle.UnpicklingError(f"{type(self).__name__} does not have the fields that torch writes")
        object.__setattr__(self, "state", state)

    def get(self, name: str, kind: type) -> Any:
        """A field, exactly of this type."""
        value = (self.state or {}).get(name)
        if type(value) is not kind:
            raise pickle.UnpicklingError(f"{name} of {type(self).__name__} is no {kind.__name__}")
        return value


class _Properties(_Description):
    """Properties of a tensor; torch stores them without names."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if self.state is not None or type(state) is not tuple:
            raise pickle.UnpicklingError("tensor properties are not in torch's format")
        object.__setattr__(self, "state", {})


def _stand_in(name: str, *fields: str) -> type[_Description]:
    """The stand-in for a class of torch, with its fields."""
    return cast("type[_Description]", _Fixed(name, (_Description,), {"__slots__": (), "fields": fields}))


_Metadata = _stand_in("Metadata", "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_Index = _stand_in("MetadataIndex", "fqn", "offset", "index")
_Tensor = _stand_in("TensorStorageMetadata", "properties", "size", "chunks")
_Bytes = _stand_in("BytesStorageMetadata")
# A part of a file. What torch would have to transform when it reads it, is not looked into, and is refused.
_Place = _stand_in("_StorageInfo", "relative_path", "offset", "length")
_OTHERS = (
    _stand_in("ChunkStorageMetadata", "offsets", "sizes"),
    _stand_in("StorageMeta", "checkpoint_id", "save_id", "load_id", "modules"),
)


class _Plain:
    """Replaces a value, and the function that makes it from plain values."""

    __slots__ = ()

    def __call__(self, *args: Any) -> _Plain:
        return _Plain()


_DCP = "torch.distributed.checkpoint"
_KNOWN: Mapping[tuple[str, str], type[_Description]] = {
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Place,
    **{(f"{_DCP}.metadata", one.__name__): one for one in (_Metadata, _Index, _Tensor, _Bytes, *_OTHERS)},
}
_CALLED = {
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _Descriptions(pickle.Unpickler):
    """Makes only stand-ins, and those only for what is known to do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if (module, name) in _CALLED or (module == "torch" and name in _dtypes()):
            return _Plain()
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


def _dtypes() -> set[str]:
    """Names in torch itself: one with a dot is not among them."""
    import torch

    return {name for name, value in vars(torch).items() if type(value) is torch.dtype}
