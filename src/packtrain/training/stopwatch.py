"""Time and memory of a step: the GPU's where there is one, and the moment at which a rank's own work is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Moments that can be marked without waiting, and the seconds between them, known once `wait` is over.

    Where the host computes, the present moment is all there is.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> Any:
        return self._clock()

    def wait(self) -> None:
        pass

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)


class GpuStopwatch(Stopwatch):
    """Marks are in the GPU's queue, after the work that they are to be the end of."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


class Memory:
    """The most memory that a step needed. Without a GPU nothing is counted."""

    def restart(self) -> None:
        pass

    def peak(self) -> int:
        return 0

    def limit(self) -> int:
        return 0


class GpuMemory(Memory):
    """Memory that torch has allocated; its peak counter is reset at every step, so each step has its own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._limit = device, 0

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def limit(self) -> int:
        self._limit = self._limit or int(torch.cuda.mem_get_info(self._device)[1])  # which asks the driver
        return self._limit


class BackwardEnd:
    """Says when a rank's own backward pass is over, before it waits for the gradients of others.

    DDP waits inside `backward()`, so the step of a fast rank lasts as long as that of the slowest and the clock alone
    shows no difference. The gradient that comes last is this rank's last own work. Which ones come last is found in the
    first pass, with a hook on every parameter; then only those keep theirs. Under FSDP, where ranks meet in every
    layer, there is no such moment, and nothing is said.
    """

    _KEPT = 4  # packs without images may end elsewhere

    def __init__(self, model: nn.Module, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._order: list[int] | None = []
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._hooks = {id(one): one.register_post_accumulate_grad_hook(self._on_gradient) for one in trained}

    def keep_last(self) -> None:
        """A step is over: keep the hooks on what came last in it."""
        if not self._order:
            return
        kept = set(self._order[-self._KEPT :])
        for parameter in set(self._hooks) - kept:
            self._hooks.pop(parameter).remove()
        self._order = None

    def close(self) -> None:
        """Take every hook away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _on_gradient(self, weight: torch.Tensor) -> None:
        if self._order is not None:
            self._order.append(id(weight))
        self._on_end()


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for where training runs, which need not be the GPU of the machine."""
    return GpuStopwatch(device) if device.type == "cuda" else Stopwatch()


def device_memory(device: torch.device) -> Memory:
    """The one for where training runs."""
    return GpuMemory(device) if device.type == "cuda" else Memory()
