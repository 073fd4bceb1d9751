"""Samples of packs -> the arguments of one forward pass, packed into one row or padded.

Takes `PackedRow`s and a family's `BatchContract`, and gives a `Batch`: tensors for the model, and a `BatchInfo` that
stays on the host. With `StaticShapes` every batch has the same shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import Batch as Batch
    from packtrain.delivery.collate.batch_values import BatchInfo as BatchInfo
    from packtrain.delivery.collate.collators import PackCollator as PackCollator
    from packtrain.delivery.collate.collators import PaddedCollator as PaddedCollator
    from packtrain.delivery.collate.collators import StaticShapes as StaticShapes

__getattr__, __dir__, __all__ = lazy_names(__name__)
