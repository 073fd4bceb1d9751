"""Files of sharded checkpoints are listed in a pickle, which torch unpickles as it is: it is looked through before."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from packtrain.core.errors import ArtifactError

_METADATA = ".metadata"
# What torch writes there: descriptions of tensors and files, none of which does anything when it is made.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {
    *(("torch", name) for name in ("Size", "device")),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("builtins", name) for name in ("set", "frozenset", "slice", "complex")),
}


def refuse_code(checkpoint: Path) -> None:
    """Refuse a checkpoint whose lists would call anything but descriptions of tensors."""
    for path in sorted(Path(checkpoint).rglob(_METADATA)):
        try:
            _Descriptions(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
            raise ArtifactError(
                str(path),
                got=f"{type(error).__name__}: {error}",
                expected="descriptions of tensors, as torch writes them",
                fix="resume only from checkpoints that you trust",
            ) from None


class _Descriptions(pickle.Unpickler):
    """Makes only what is known to do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        known = (module in _MODULES and "." not in name) or (module, name) in _NAMES
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return super().find_class(module, name)
