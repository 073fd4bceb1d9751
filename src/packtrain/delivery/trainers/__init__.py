"""What your own trainer needs for packs: loss over tokens, evaluation, ranks that watch each other.

Takes batches, and a Trainer of transformers or TRL or a loop of your own. `PackedTrainerMixin` and `trainer_arguments`
are for a Trainer, `step_tokens` and the module `token_loss` for a loop; a `RankWatchdog` ends all ranks when one fails
or hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.delivery.trainers.mixin import PackedTrainerMixin as PackedTrainerMixin
    from packtrain.delivery.trainers.mixin import trainer_arguments as trainer_arguments
    from packtrain.delivery.trainers.token_loss import step_tokens as step_tokens
    from packtrain.delivery.trainers.watch import RankWatchdog as RankWatchdog

__getattr__, __dir__, __all__ = lazy_names(__name__)
