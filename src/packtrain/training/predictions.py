"""BatchInfo -> its `Load`, and the time and memory that the estimates expect of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from packtrain.core.errors import MemoryLimitError
from packtrain.core.numbers import counted, gib
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.packing.schedule import EMPTY_PACK
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory, largest_tokens
from packtrain.predicting.time import Coefficients, step_time
from packtrain.predicting.values import Load, ModelShape, TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPrediction:
    """Predicted FLOPs, time and memory of a model in training, with default or fitted coefficients."""

    shape: ModelShape
    setup: TrainingSetup
    gpu: Gpu | None = None  # None: nothing is known of time
    time: Coefficients | None = None
    memory: MemoryCoefficients = DEFAULT_COEFFICIENTS
    heaviest: Load | None = None  # the largest of everything that a batch of the plan has

    def seconds(self, loads: Sequence[Load]) -> float:
        """One optimizer step over these passes. Time is a sum over their numbers, so their mean represents them."""
        assert self.gpu is not None
        mean = Load.mean(loads)
        return step_time(self.shape, self.setup, mean, self.gpu, self.time, micro_batches=len(loads)).seconds

    def memory_bytes(self, loads: Sequence[Load]) -> int:
        """The peak of what torch allocates; it excludes the context and what the allocator cannot use."""
        estimates = [estimate_memory(self.shape, self.setup, load, self.memory) for load in loads]
        return max(estimate.total - estimate.part("framework").bytes for estimate in estimates)

    def fitting(self, load: Load, usable: int) -> int:
        """Tokens of this mix that fit into a number of bytes."""
        return largest_tokens(self.shape, self.setup, usable, load, self.memory)


def useful_load(info: BatchInfo) -> Load:
    """The real samples of a batch, without padding: what model FLOP utilisation counts."""
    return Load.from_counts(
        tokens=info.tokens,
        squared_tokens=info.squared_tokens or sum(length * length for length in info.lengths),
        longest=max(info.lengths, default=0),
        samples=info.samples,
        rows=info.samples if len(info.keys) > 1 else 1,  # a padded batch has a row for each sample
        supervised_tokens=info.supervised_tokens,
        vision_tokens=info.vision_tokens,
        patches=info.patches or 0,
        squared_patches=info.squared_patches or None,
        largest_patches=None,
        images=info.images,
        spans=max(info.tiles, info.images + info.videos),
        frames=info.frames,
    )


def batch_load(info: BatchInfo) -> Load:
    """A batch as the GPU computes it, as plans and studies count it: padding attends too.

    In a pack the padding is a segment of its own; in a padded batch every row is as long as the longest.
    """
    load, tokens = useful_load(info), info.tokens + info.padding
    if load.rows > 1:
        return replace(load, tokens=tokens, squared_tokens=tokens * tokens // load.rows)
    return replace(
        load,
        tokens=tokens,
        squared_tokens=load.squared_tokens + info.padding**2,
        longest=max(load.longest, info.padding),
    )


# ---- out of memory, explained: which pack it was, what it held, and what would have fitted

# How libraries say it that do not raise torch's own error.
_WORDS = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_HOST_ALLOCATION_FAILED)"
    r"|can't allocate memory|failed to allocate memory",
    re.IGNORECASE,
)
_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([KMGT]?)i?B", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_ROUND = 64  # lengths are given in multiples of it
_SHOWN = 8  # samples that are named
_GUESS = 0.75  # of what failed, where nothing else is known


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of one GPU, in bytes; all 0 where there is none."""

    free: int = 0
    total: int = 0
    reserved: int = 0  # by this process
    before: int = 0  # allocated by this process between two steps: weights, gradients, states

    @property
    def usable(self) -> int:
        """The memory that this process can have: other processes may hold some of the GPU."""
        return self.free + self.reserved

    @classmethod
    def of(cls, device: torch.device, *, before: int = 0) -> DeviceMemory:
        """The device's memory as it is now."""
        if device.type != "cuda":
            return cls()
        free, total = torch.cuda.mem_get_info(device)
        return cls(free=free, total=total, reserved=torch.cuda.memory_reserved(device), before=before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Where a run was when memory ended."""

    rank: int
    step: int  # counted from 1
    doing: str  # in words
    batch: BatchInfo
    capacity: int | None = None  # packing_length of the plan
    fitted: int = 0  # tokens of the largest batch that has fitted so far


def is_memory_error(error: BaseException) -> bool:
    """Is this an out-of-memory error?"""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
    )


def explain(
    error: BaseException, failure: Failure, memory: DeviceMemory, model: ModelPrediction | None = None
) -> MemoryLimitError:
    """The error to raise in its place. Its first line says enough for the other ranks."""
    batch = failure.batch
    where = f"rank {failure.rank}, step {failure.step}: out of memory in {failure.doing}, {_packs_in_words(batch)}"
    facts = [
        _contents_in_words(batch),
        _samples_in_words(batch),
        str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
    ]
    if memory.total:
        facts.insert(0, f"{gib(memory.free)} of {gib(memory.total)} free, {gib(memory.reserved)} held here")
    room = _fitting_tokens(error, failure, memory, model)
    return MemoryLimitError(
        where,
        problems=[line for line in facts if line],
        expected="packs that fit in memory",
        fix=_advice(room, failure),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fitting:
    """How many tokens of a load would have fitted, and how that is known."""

    tokens: int
    load: Load
    why: str

    @property
    def share(self) -> float:
        """The share of the load that would have fitted."""
        return self.tokens / max(1, self.load.tokens)


def _fitting_tokens(
    error: BaseException, failure: Failure, memory: DeviceMemory, model: ModelPrediction | None
) -> _Fitting:
    load = batch_load(failure.batch)
    tokens = load.tokens
    if model is not None and memory.usable and failure.batch.tokens:
        predicted = model.fitting(load, memory.usable)
        # A length that helped this pack alone would fail at the next one with more patches.
        for_all = predicted if model.heaviest is None else model.fitting(model.heaviest, memory.usable)
        if model.heaviest is not None and for_all < min(predicted, tokens):
            why = "by the memory model, for the heaviest pack of the plan"
            return _Fitting(tokens=for_all, load=model.heaviest, why=why)
        if predicted < tokens:
            return _Fitting(tokens=predicted, load=load, why="by the memory model")
    requested = requested_bytes(error)
    used = memory.reserved + requested - memory.before
    if requested and memory.usable and used > 0 and tokens:
        share = (memory.usable - memory.before) / used
        if 0 < share < 1:
            why = "in proportion to the failed allocation, so it may still be too much"
            return _Fitting(tokens=int(tokens * share), load=load, why=why)
    if 0 < failure.fitted < tokens:
        return _Fitting(tokens=failure.fitted, load=load, why="the largest batch that has fitted so far")
    return _Fitting(tokens=int(tokens * _GUESS), load=load, why="a guess: no smaller batch has run")


def _advice(room: _Fitting, failure: Failure) -> str:
    load, capacity = room.load, failure.capacity
    if not load.tokens or not room.tokens:
        return "no pack would have fitted: use gradient_checkpointing, LoRA, FSDP2 or a smaller model"
    others = "; or gradient_checkpointing, vision_batch_patches, FSDP2"
    if load.rows > 1 and len(failure.batch.keys) > 1:  # packing_length bounds single samples there
        rows = int(load.rows * room.share)
        shorter = "shorter samples (packing_length)"
        fewer = f"at most {rows} samples per batch instead of {load.rows}" if rows else shorter
        return f"{fewer} ({room.why}){others}"
    tokens = room.tokens if capacity is None else min(room.tokens, int(capacity * room.share))
    length = tokens // _ROUND * _ROUND or tokens
    now = f" instead of {capacity:,}" if capacity is not None else ""
    words = [f"packing_length of at most {length:,}{now} ({room.why})"]
    if load.patches:
        words.append(f"max_patches_per_pack of at most {int(load.patches * room.share):,}")
    return ", or ".join(words) + others


def requested_bytes(error: BaseException) -> int:
    """The size of the allocation that failed; 0 where the error does not state it."""
    match = _ASKED.search(str(error))
    return int(float(match[1]) * 2 ** _UNITS[match[2].upper()]) if match else 0


def _packs_in_words(batch: BatchInfo) -> str:
    if not batch.keys:
        return "no pack"
    real = [str(key.pack) for key in batch.keys if key.pack != EMPTY_PACK]
    return f"epoch {batch.keys[0].epoch}, pack {', '.join(real)}" if real else "an empty pack"


def _contents_in_words(batch: BatchInfo) -> str:
    patches = "an unknown number of" if batch.patches is None else f"{batch.patches:,}"
    return (
        f"{batch.tokens:,} tokens and {batch.padding:,} padding tokens, {patches} patches, "
        f"{counted(batch.images, 'image')}, {counted(batch.videos, 'video')} in {counted(batch.samples, 'sample')}"
    )


def _samples_in_words(batch: BatchInfo) -> str:
    if not batch.ids:
        return ""
    more = f" and {len(batch.ids) - _SHOWN} more" if len(batch.ids) > _SHOWN else ""
    return f"samples {', '.join(batch.ids[:_SHOWN])}{more}"
