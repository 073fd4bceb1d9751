"""Batches in the order of a schedule, from several processes, with a position as their state.

Takes a source of packs, a collator and a schedule, and gives each rank its batches: `PackSampler` says which packs they
are, `PackLoader` delivers them, and `FailureCounter` counts samples that could not be delivered, over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.delivery.loader.failures import FailureCounter as FailureCounter
    from packtrain.delivery.loader.pack_loader import PackLoader as PackLoader
    from packtrain.delivery.loader.sampler import PackSampler as PackSampler
    from packtrain.delivery.loader.sampler import check_ranks as check_ranks

__getattr__, __dir__, __all__ = lazy_names(__name__)
