"""What the machine beside the GPUs needs: memory, shared memory and disk of one node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packtrain.core.errors import ConfigError
from packtrain.core.numbers import MIB, counted
from packtrain.core.numbers import memory as in_bytes
from packtrain.predicting.memory import MemoryPart
from packtrain.predicting.memory_parts import adapter_bytes, compute_bytes, count, states
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

PROCESS_BYTES = 900 * MIB  # one with torch, transformers and a processor; measured
_IDS = 64  # bytes of a token's ids, labels, positions and masks
_PINNED = 2  # batches on their way to a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeeds:
    """Per node, worst case."""

    memory: tuple[MemoryPart, ...]
    shared_memory: tuple[MemoryPart, ...]  # of the memory, what workers share with the process that trains
    disk: tuple[MemoryPart, ...]

    @property
    def memory_bytes(self) -> int:
        """RAM, shared memory included."""
        return sum(part.bytes for part in (*self.memory, *self.shared_memory))

    @property
    def shared_memory_bytes(self) -> int:
        """Batches on their way from the workers; on Linux none of them is in /dev/shm."""
        return sum(part.bytes for part in self.shared_memory)

    @property
    def disk_bytes(self) -> int:
        """What this run writes."""
        return sum(part.bytes for part in self.disk)


def host_needs(
    *,
    shape: ModelShape,
    setup: TrainingSetup,
    load: Load,
    workers: int,
    prefetch: int = 2,
    gpus_per_node: int = 1,
    pixel_bytes: int = 4,
    cost_table_bytes: int = 0,
    plan_bytes: int = 0,
    cache_bytes: int = 0,
    checkpoints_kept: int = 1,
) -> HostNeeds:
    """What one node needs; `workers` and `prefetch` are those of each GPU's loader, `load` the worst batch."""
    given = {"workers": workers, "prefetch": prefetch, "checkpoints_kept": checkpoints_kept}
    for name, value in (*given.items(), ("gpus_per_node", gpus_per_node)):
        least = 1 if name == "gpus_per_node" else 0
        if value < least:
            raise ConfigError(name, got=value, expected=f"at least {least}")
    batch = batch_bytes(shape, load, pixel_bytes)
    waiting = workers * prefetch * gpus_per_node
    disk = (
        MemoryPart(name="cost table", bytes=cost_table_bytes, why="one row per sample"),
        MemoryPart(
            name="plan", bytes=plan_bytes, why="which samples share a pack, read by all processes from one copy"
        ),
        MemoryPart(name="cache", bytes=cache_bytes, why="the budget for downloaded shards and prepared samples"),
        *_checkpoints(shape, setup, checkpoints_kept),
    )
    each = counted(prefetch, "batch", "batches")
    shared = MemoryPart(
        name="waiting batches",
        bytes=waiting * batch,
        why=f"{counted(gpus_per_node, 'GPU')} x {counted(workers, 'worker')} x {each} of at most {in_bytes(batch)}",
    )
    memory = _memory(shape, setup, batch, workers=workers, gpus=gpus_per_node, plan_bytes=plan_bytes)
    return HostNeeds(memory=memory, shared_memory=(shared,), disk=disk)


def batch_bytes(shape: ModelShape, load: Load, pixel_bytes: int = 4) -> int:
    """One batch as the loader hands it over."""
    elements = 0 if shape.vision is None else shape.vision.patch_elements
    return _IDS * load.tokens + pixel_bytes * elements * load.patches


def _memory(
    shape: ModelShape, setup: TrainingSetup, batch: int, *, workers: int, gpus: int, plan_bytes: int
) -> tuple[MemoryPart, ...]:
    stored = sum(_model_bytes(shape, setup))
    return (
        MemoryPart(name="training processes", bytes=gpus * PROCESS_BYTES, why=f"{gpus} of {in_bytes(PROCESS_BYTES)}"),
        MemoryPart(
            name="loader workers",
            bytes=gpus * workers * (PROCESS_BYTES + 2 * batch),
            why=f"{gpus * workers} of {in_bytes(PROCESS_BYTES)}, each with the batch it makes: decoded, and as tensors",
        ),
        MemoryPart(name="pinned batches", bytes=gpus * _PINNED * batch, why=f"{_PINNED} for each GPU, on their way"),
        MemoryPart(name="weights", bytes=stored, why="one copy while they are loaded, or gathered to be saved"),
        MemoryPart(name="plan", bytes=plan_bytes, why="mapped from disk, one copy for all processes"),
    )


def _checkpoints(shape: ModelShape, setup: TrainingSetup, kept: int) -> tuple[MemoryPart, ...]:
    """Training checkpoints, one more than is kept while it is written, and the final weights."""
    counts = count(shape, setup)
    saved, frozen = _model_bytes(shape, setup)
    whole = states(shape, replace(setup, gpus=1))
    size = saved + whole.optimizer
    adapted = counts.adapters > 0
    what = "adapters and what is trained beside them" if adapted else "the whole model"
    return (
        MemoryPart(
            name="checkpoints",
            bytes=(kept + 1) * size if kept else 0,
            why=f"{kept} kept and one being written, {in_bytes(size)} each: {what}, and optimizer states",
        ),
        MemoryPart(
            name="final weights",
            bytes=saved if adapted else saved + frozen,
            why=f"{what}, without optimizer states",
        ),
    )


def _model_bytes(shape: ModelShape, setup: TrainingSetup) -> tuple[int, int]:
    """(what training changes, the rest), whole and as stored."""
    counts = count(shape, setup)
    whole = states(shape, replace(setup, gpus=1)).weights
    trained = counts.trained * compute_bytes(setup) + counts.adapters * adapter_bytes(setup)
    return trained, max(whole - trained, 0)
