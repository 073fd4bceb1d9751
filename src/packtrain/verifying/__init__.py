"""A model and packed samples -> is packing correct on it? Packed and alone compared, neighbours changed.

Takes a model, an attention backend and samples (the user's or synthetic ones) and gives a `CheckReport`: every check
with its largest difference, the tolerance, and whether it passed. `check_packing` is what runs before training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.verifying.check_result import CheckReport as CheckReport
    from packtrain.verifying.packing_check import check_packing as check_packing
    from packtrain.verifying.verification import verify_model as verify_model

__getattr__, __dir__, __all__ = lazy_names(__name__)
