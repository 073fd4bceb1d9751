"""How much the loss of each token weighs: as any other, or less in samples that have many.

The loss of a step is the sum of its weighted token losses, divided by the sum of its weights over all ranks.

    n supervised tokens in a sample      weight of each    of all of them
    token                                1                 n
    sample                               1 / n             1
    sqrt                                 1 / sqrt(n)       sqrt(n)

A piece of a sample that was split or truncated is a sample of its own here: n counts what of it is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from packtrain.core.errors import ConfigError, nearest
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample

if TYPE_CHECKING:  # configs name weightings, and are read without torch
    from torch import Tensor

LossWeighting = Literal["token", "sample", "sqrt"]
LOSS_WEIGHTS = "loss_weights"  # under this name they stand in a batch, in the shape of its labels
_POWERS: dict[str, float] = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}


def checked_weighting(weighting: str) -> LossWeighting:
    """The name, if it is one."""
    names = get_args(LossWeighting)
    if weighting not in names:
        raise ConfigError(
            "loss_weighting", got=weighting, expected=", ".join(names), fix=nearest(str(weighting), names)
        )
    return weighting  # type: ignore[return-value]


def token_weights(sample: EncodedSample, weighting: LossWeighting) -> Tensor:
    """The weight of every token of a sample, 0 where there is no loss: (tokens,) float32."""
    supervised = sample.labels != IGNORED
    return supervised.float() * max(1, int(supervised.sum())) ** _POWERS[weighting]


def loss_total(samples: Sequence[EncodedSample], weighting: LossWeighting) -> float:
    """The sum of the weights of all tokens: what a batch adds to the number that the loss of its step is divided by."""
    counts = [int((sample.labels != IGNORED).sum()) for sample in samples]
    return float(sum(count * count ** _POWERS[weighting] for count in counts if count))


def no_weights(tokens: int) -> Tensor:
    """Of tokens that only fill up."""
    import torch

    return torch.zeros(tokens)
