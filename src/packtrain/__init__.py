"""packtrain: measure, pack and train multimodal datasets at the speed the GPUs have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["CostTable", "PacktrainError", "SchemaOptions", "__version__", "measure"]

if TYPE_CHECKING:
    from packtrain.app.measure import measure
    from packtrain.core.errors import PacktrainError
    from packtrain.costs.table import CostTable
    from packtrain.records.schemas.options import SchemaOptions

# Imported when first used, so that `import packtrain` and `packtrain --help` stay fast.
_LAZY = {
    "CostTable": "packtrain.costs.table",
    "PacktrainError": "packtrain.core.errors",
    "SchemaOptions": "packtrain.records.schemas.options",
    "measure": "packtrain.app.measure",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
