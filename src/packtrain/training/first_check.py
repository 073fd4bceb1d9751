"""Before the first step: does this model, as it will be trained, keep the samples of a pack apart?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from packtrain.batches.sampler import PackSampler
from packtrain.core.errors import DataError, PacktrainError
from packtrain.families.contracts import contract_for
from packtrain.packs.values import EMPTY_PACK, EncodedSample, PackKey
from packtrain.plans.schedule import Schedule
from packtrain.proofs.quick import quick_check
from packtrain.proofs.values import Verdict
from packtrain.training.agreement import faults_of_all
from packtrain.training.evaluation import kept_random_state

_PACKS = 8  # that are looked into for samples


def check_first_batch(model: Any, dataset: Any, collate: Any, *, config: Any, rank: int, world: int) -> Verdict:
    """The quick check on samples of this rank's first pack; all ranks end with an error when one of them fails.

    Random numbers go on as if it had not been. A rank whose first pack is empty, or has nothing that can be decoded,
    takes the samples of another: all of them have to run the model equally often.
    """
    verdict: Verdict | None = None
    samples = _first_samples(dataset, rank, world)
    _together(None if samples else f"nothing to look at in the first {_PACKS} packs")
    # Not compiled: samples alone have other shapes than packs, and layers would be compiled for any shape from then on.
    with kept_random_state(), torch.compiler.set_stance("force_eager"):
        held = dataset.schedule.plan.config.packing_length
        verdict = quick_check(model, samples, collate, contract_for(config.to_dict()), most_tokens=held)
    failed = [f"{one.check}: {one.difference:.3g} where {one.allowed:.3g} is allowed" for one in verdict.failures]
    _together("; ".join(failed) or None)
    return verdict


def _together(fault: str | None) -> None:
    faults = faults_of_all(fault)
    if faults:
        raise PacktrainError(
            "the check before the first step",
            got="\n            ".join(faults),
            expected="packed samples that do not see each other",
            fix="run `packtrain verify` for the details, try attention sdpa, or turn the check off (first_check=False)",
        )


def _first_samples(dataset: Any, rank: int, world: int) -> tuple[EncodedSample, ...]:
    """Of the first pack in which several stand together, as they surely fit into one; else of the first with any."""
    found: tuple[EncodedSample, ...] = ()
    for key in islice(_keys(dataset.schedule, rank, world), _PACKS):
        try:
            samples: tuple[EncodedSample, ...] = dataset.source[key].samples
        except DataError:  # said when it is trained, or by another rank
            continue
        found = found or samples
        if len(samples) > 1:
            return samples
    return found


def _keys(schedule: Schedule, rank: int, world: int) -> Iterator[PackKey]:
    """Packs of this rank's first batch, then those that are trained first."""
    for key in next(iter(PackSampler(schedule, rank, world)), []):
        if key.pack != EMPTY_PACK:
            yield key
    for pack in schedule.order(0):
        yield PackKey(epoch=0, pack=int(pack))
