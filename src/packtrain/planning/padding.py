"""What training without packing computes: batches padded to their longest sample, as they would really be formed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.arrays import pack_sums
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import Samples
from packtrain.planning.clock import Clock, PassColumns, padded_batches
from packtrain.planning.question import Question
from packtrain.planning.study_values import PaddedRun

Order = Literal["random", "by_length"]
ORDERS: tuple[Order, ...] = ("random", "by_length")
MEGA_BATCHES = 50  # accumulated batches that are sorted together when grouping by length, as transformers does


def padded_order(lengths: np.ndarray, order: Order, group: int, seed: int) -> np.ndarray:
    """The order in which samples are batched: random, or long to short inside random groups of samples.

    >>> padded_order(np.array([3, 1, 2]), "by_length", 3, 0).tolist()
    [0, 2, 1]
    """
    shuffled = stream(seed, "padded").permutation(len(lengths))
    if order == "random":
        return shuffled
    group_of = np.arange(len(lengths)) // group
    return shuffled[np.lexsort((-lengths[shuffled], group_of))]


def padded_passes(samples: Samples, order: np.ndarray, batch_size: int) -> PassColumns:
    """Batches of consecutive samples; the last may have fewer rows."""
    return padded_batches(samples.take(order).columns, np.arange(0, len(order), batch_size))


def padded_run(
    question: Question,
    samples: Samples,
    dropped: int,
    order: Order,
    batch_size: int,
    kernels: Literal["own", "packs"] = "own",
) -> PaddedRun:
    """An epoch of padded batches over these samples."""
    scale = question.rows.scale
    passes = padded_passes(samples, _batched(question, samples, order, batch_size), batch_size)
    per_step = max(1, round(question.samples_per_step / batch_size))
    worst = passes.worst()
    real, computed = int(samples["tokens"].sum()), int(passes["tokens"].sum())
    clock, memory = _clock(question, kernels), question.padded_memory_of(worst).total
    if kernels == "packs":
        memory = question.memory_of(worst, clock.setup).total
    batches = round(len(passes) * scale)
    return PaddedRun(
        order=order,
        batch_size=batch_size,
        batches=batches,
        steps=-(-batches // per_step),
        samples=round(len(samples) * scale),
        dropped=round(dropped * scale),
        real_tokens=round(real * scale),
        computed_tokens=round(computed * scale),
        waste=1 - real / computed,
        worst=worst,
        seconds=clock.epoch(passes, per_step) * scale,
        memory_bytes=memory,
        fits=memory <= question.usable_bytes,
        kernels=kernels,
    )


def padding_cost(question: Question, samples: Samples, run: PaddedRun) -> float:
    """The share of a padded run's time that goes into its padding: small where time is not in tokens."""
    order = _batched(question, samples, run.order, run.batch_size)
    offsets = np.append(np.arange(0, len(order), run.batch_size), len(order))
    real = samples["tokens"][order]
    bare = {"tokens": pack_sums(real, offsets), "squared_tokens": pack_sums(real * real, offsets)}
    passes = PassColumns({**padded_passes(samples, order, run.batch_size).columns, **bare})
    per_step = max(1, round(question.samples_per_step / run.batch_size))
    seconds = _clock(question, run.kernels).epoch(passes, per_step) * question.rows.scale
    return max(0.0, 1 - seconds / run.seconds)


def padded_samples(question: Question, packed: Samples) -> Samples:
    """What an epoch without packing reads: every sample, however long; cut ones where the user cuts."""
    if question.packing.overlong == "truncate" or question.packing.cutoff_len is not None:
        return packed
    rows = question.rows
    counts = rows.counts(PackingConfig(packing_length=int(rows.samples["tokens"].max()), seed=question.packing.seed))
    return rows.samples if counts is None else rows.samples.take(np.repeat(np.arange(len(rows)), counts))


def baseline_run(question: Question, packed: Samples) -> PaddedRun:
    """The padded run that packing replaces, on all its samples; `packed` are those in packs."""
    samples = padded_samples(question, packed)
    return padded_run(question, samples, 0, baseline_order(question), question.baseline.per_device_train_batch_size)


def padded_runs(question: Question, packed: Samples) -> tuple[PaddedRun, ...]:
    """The baseline first, then the other order, then the fastest larger batch by length that fits; all its samples."""
    samples, dropped = padded_samples(question, packed), 0
    size = question.baseline.per_device_train_batch_size
    mine = baseline_order(question)
    other: Order = "by_length" if mine == "random" else "random"
    runs = [padded_run(question, samples, dropped, order, size) for order in (mine, other)]
    larger: list[PaddedRun] = []
    while size * 2 <= min(question.samples_per_step // question.setup.gpus, len(samples)):
        size *= 2
        larger.append(padded_run(question, samples, dropped, "by_length", size))
        if not larger[-1].fits:
            break
    better = [run for run in larger if run.fits and run.seconds < min(before.seconds for before in runs)]
    return (*runs, *sorted(better, key=lambda run: run.seconds)[:1])


def best_padded(question: Question, packed: Samples, dropped: int) -> PaddedRun:
    """The fastest padded run that fits, with the kernels and layers that packs have, over the samples in packs.

    What packing is faster than this, it is by packing alone.
    """
    most = max(question.baseline.per_device_train_batch_size, question.samples_per_step // question.setup.gpus)
    runs: list[PaddedRun] = []
    size = 1
    while size <= min(most, len(packed)):
        tried = [padded_run(question, packed, dropped, order, size, "packs") for order in ORDERS]
        runs += tried
        if not any(run.fits for run in tried):
            break
        size *= 2
    return min(runs, key=lambda run: (not run.fits, run.seconds))


def baseline_order(question: Question) -> Order:
    """How the user orders samples today."""
    return "by_length" if question.baseline.group_by_length else "random"


def _clock(question: Question, kernels: str) -> Clock:
    """Seconds of padded passes with their own kernels, or with those that packs have."""
    if kernels == "own":
        return question.padded_clock
    return replace(question.clock, setup=replace(question.setup, attn_implementation="varlen"))


def _batched(question: Question, samples: Samples, order: Order, batch_size: int) -> np.ndarray:
    """Samples in the order in which such a run batches them."""
    accumulated = max(1, round(question.samples_per_step / (batch_size * question.setup.gpus)))
    most = max(1, len(samples) // (4 * batch_size * accumulated))  # small sets are grouped in at least four parts
    group = batch_size * accumulated * min(MEGA_BATCHES, most)
    return padded_order(samples["tokens"], order, group, question.seed)
