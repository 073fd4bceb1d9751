"""Before the first step: does this model, as it will be trained, keep the samples of a pack apart?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from packtrain.core.errors import DataError, PacktrainError, in_one_line
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackKey
from packtrain.delivery.encode.pack_source import StreamedSource
from packtrain.delivery.loader.sampler import PackSampler
from packtrain.families.family import BatchContract
from packtrain.modeling.compiled import refuse_uncompiled
from packtrain.packing.online import OnlinePlan
from packtrain.packing.schedule import EMPTY_PACK, Schedule
from packtrain.training.agreement import gather_faults
from packtrain.training.loss import preserve_random_state
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.packing_check import RowRoom, Training, check_packing, short_samples
from packtrain.verifying.padding_check import check_padding

_PACKS = 8  # that are looked into for samples
_ROWS_OF = 8_000  # tokens of the samples whose padded rows are checked
Samples = tuple[EncodedSample, ...]


def check_first_packs(
    model: Any,
    dataset: Any,
    collate: Any,
    *,
    contract: BatchContract,
    rank: int,
    world_size: int,
    training: Training | None = None,
) -> CheckReport:
    """Run the packing check on samples of this rank's first packs; all ranks end with an error when one of them fails.

    Random numbers continue as if it had not run. A rank whose first pack is empty, or has nothing that can be decoded,
    takes the samples of another: all of them have to run the model equally often.
    """
    packs = _first_packs(dataset, rank, world_size)
    _raise_together(None if packs else f"nothing to check in the first {_PACKS} packs")
    packing = dataset.schedule.plan.config
    patches = _most_patches(dataset.schedule.plan, packs)
    room = RowRoom(tokens=packing.packing_length, patches=patches, alignment=packing.pack_alignment)
    # Not compiled: samples alone have other shapes than packs, and layers would be compiled for any shape from then on.
    with preserve_random_state(), torch.compiler.set_stance("force_eager"):
        try:
            report = check_packing(
                model,
                [sample for pack in packs for sample in pack],
                collate,
                contract,
                pack=max(packs, key=lambda pack: max(map(len, pack))),
                room=room,
                training=training,
            )
        except Exception as error:  # a model may fail in any way
            refuse_uncompiled(error)
            if contract.unlisted:
                _raise_together(f"a packed row does not run: {in_one_line(error)[:300]}", unlisted=True)
            raise
    _raise_together(_failed(report) or _unproven(report, contract), unlisted=contract.unlisted)
    return report


def check_first_rows(
    model: Any, dataset: Any, collate: Any, *, contract: BatchContract, training: Training | None = None
) -> CheckReport:
    """Padded rows of the first samples against each of them alone, for a model that nobody has listed."""
    packs = [_samples_of_pack(dataset, key) for key in islice(_keys(dataset.schedule, 0, 1), _PACKS)]
    samples, _ = short_samples([sample for pack in packs for sample in pack], RowRoom(tokens=_ROWS_OF))
    if dataset.rows_per_batch == 1:  # nothing is shared, and nothing is padded
        samples = samples[-1:]
    with preserve_random_state():
        try:
            report = check_padding(model, samples, collate, contract, training)
        except PacktrainError:
            raise
        except Exception as error:  # a model may fail in any way
            refuse_uncompiled(error)
            raise PacktrainError(
                "the check before the first step",
                got=f"a padded batch does not run: {in_one_line(error)[:300]}",
                expected="a model that takes batches as its processor makes them",
                fix="try the model with its own processor; it may need a family of its own (docs/guides/extending.md)",
            ) from error
    if failed := _failed(report):
        raise PacktrainError(
            "the check before the first step",
            problems=[failed],
            expected="padded rows in which each sample comes out as it does alone",
            fix="something in this model depends on the whole batch: train with per_device_train_batch_size 1",
        )
    return report


def _failed(report: CheckReport) -> str | None:
    """The checks that did not pass, in one line."""
    failed = [
        f"{one.check}: {one.difference:.3g} where {one.allowed:.3g} is allowed" + (f" ({one.where})" * bool(one.where))
        for one in report.failures
    ]
    return "; ".join(failed) or None


def _unproven(report: CheckReport, contract: BatchContract) -> str | None:
    """What an unlisted model still lacks to be trained on packs: every check has to have shown something."""
    if not contract.unlisted:
        return None
    if report.inconclusive:
        return "; ".join(f"{one.check}: inconclusive, {one.where}" for one in report.inconclusive)
    missing = [reason for reason in report.left_out if reason.startswith("gradients")]
    return f"not checked: {missing[0]}" if missing else None


def _most_patches(plan: Any, packs: list[Samples]) -> int | None:
    """The most patches of a pack in the first epoch; for a stream, the limit of a pack or the most in these packs."""
    if not isinstance(plan, OnlinePlan):
        return int(plan.epoch(0).load("patches").max())
    here = [sum(one.vision.patches for one in samples if one.vision is not None) for samples in packs]
    return plan.config.max_patches_per_pack or max(here)


def _raise_together(fault: str | None, *, unlisted: bool = False) -> None:
    faults = gather_faults(fault)
    if faults:
        way_out = (
            "train on padded rows (data.packing=false)" if unlisted else "turn the check off (packing_check=False)"
        )
        raise PacktrainError(
            "the check before the first step",
            problems=faults,
            expected="packed samples that do not attend to each other",
            fix=f"run `packtrain verify` for details, try attn_implementation sdpa, or {way_out}",
        )


def _first_packs(dataset: Any, rank: int, world_size: int) -> list[Samples]:
    """The first pack of several samples, then those that have what it lacks: a modality, the longest sample."""
    packs: list[Samples] = []
    for key in islice(_keys(dataset.schedule, rank, world_size), _PACKS):
        samples = _samples_of_pack(dataset, key)
        if len(samples) > 1:
            packs = [samples]
            break
        packs = packs or ([samples] if samples else [])
    if packs:
        for key in _keys_of_other_kinds(dataset, packs[0]):
            samples = _samples_of_pack(dataset, key)
            packs += [samples] if samples else []
    return packs


def _samples_of_pack(dataset: Any, key: PackKey) -> Samples:
    try:
        samples: Samples = dataset.source[key].samples
    except DataError:  # said when it is trained, or by another rank
        return ()
    return samples


def _keys_of_other_kinds(dataset: Any, checked: Samples) -> Iterator[PackKey]:
    """Packs of the first epoch in training order: with images, videos, text, and the one with the longest sample.

    Of a stream only the first packs are checked: others would have to be fetched.
    """
    if isinstance(dataset.schedule.plan, OnlinePlan):
        return
    packs, order = dataset.schedule.plan.epoch(0), dataset.schedule.order(0)
    order = order[:_PACKS] if isinstance(dataset.source, StreamedSource) else order
    images, videos, samples = (packs.load(name)[order] for name in ("images", "videos", "samples"))
    candidates: list[int] = []
    for has, there in (
        (any(one.num_images for one in checked), images > 0),
        (any(one.num_videos for one in checked), videos > 0),
        (any(not one.num_images + one.num_videos for one in checked), images + videos < samples),  # surely some of text
    ):
        if not has and there.any():
            candidates.append(int(order[there][0]))
    longest = packs.load("longest")[order]
    if longest.max() > max(map(len, checked)):
        candidates.append(int(order[np.argmax(longest)]))
    for pack in dict.fromkeys(candidates):
        yield PackKey(epoch=0, pack=pack)


def _keys(schedule: Schedule, rank: int, world_size: int) -> Iterator[PackKey]:
    """Packs of this rank's first batch, then those that are trained first."""
    for key in next(iter(PackSampler(schedule, rank, world_size)), []):
        if key.pack != EMPTY_PACK:
            yield key
    for pack in schedule.order(0):
        yield PackKey(epoch=0, pack=int(pack))
