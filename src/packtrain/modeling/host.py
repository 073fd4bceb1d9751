"""What the host does between sending kernels to the GPU, so that neither waits for the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_one_thread() -> Iterator[None]:
    """As a context or a decorator: torch's work on the host is not shared among threads.

    Work of some ten thousand numbers is shared among as many threads as there are processors, and waits for the last
    of them. While workers make batches, that one has to wait for a processor: milliseconds instead of microseconds,
    several times in a step, in which nothing is sent to the GPU.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; only from pinned memory does the host not wait for all that the GPU has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
