"""Packs -> batches: samples encoded, collated, and handed out in the order of a schedule, exactly resumable.

Takes a plan, its cost table and the data, and gives `Batch`es: `SampleEncoder` encodes a sample, `PackCollator` joins a
pack into one row (`PaddedCollator` pads rows), `PackLoader` hands out every rank's batches. `OnlineSource` packs a
stream that was not measured, `batch_contents` lists a batch token by token. `PackedTrainerMixin` and
`trainer_arguments` bring packs to one's own Trainer, `token_loss` and `step_tokens` to one's own loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import Batch as Batch
    from packtrain.delivery.collate.batch_values import BatchInfo as BatchInfo
    from packtrain.delivery.collate.collators import PackCollator as PackCollator
    from packtrain.delivery.collate.collators import PaddedCollator as PaddedCollator
    from packtrain.delivery.encode.encode import SampleEncoder as SampleEncoder
    from packtrain.delivery.encode.encoded_sample import EncodedSample as EncodedSample
    from packtrain.delivery.encode.encoded_sample import PackedRow as PackedRow
    from packtrain.delivery.loader.failures import FailureCounter as FailureCounter
    from packtrain.delivery.loader.pack_loader import PackLoader as PackLoader
    from packtrain.delivery.loader.sampler import check_ranks as check_ranks
    from packtrain.delivery.online_source import OnlineSource as OnlineSource
    from packtrain.delivery.trainers.mixin import PackedTrainerMixin as PackedTrainerMixin
    from packtrain.delivery.trainers.mixin import trainer_arguments as trainer_arguments
    from packtrain.delivery.trainers.token_loss import step_tokens as step_tokens
    from packtrain.delivery.trainers.token_loss import token_loss as token_loss
    from packtrain.delivery.trainers.watch import RankWatchdog as RankWatchdog

__getattr__, __dir__, __all__ = lazy_names(__name__)
