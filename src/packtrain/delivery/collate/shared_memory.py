"""Batches in memory that workers share with their loader.

It has no name, so nothing of it is left when its processes are killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


def empty_batch_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor; of a worker, memory that it shares, so that handing it over does not copy it again."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None or not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(_storage(size), 0, tuple(shape))


def _storage(size: int) -> torch.UntypedStorage:
    if not hasattr(os, "memfd_create"):
        return torch.UntypedStorage._new_shared(size)
    # A file in /dev/shm, as torch makes it, stays there where its process is killed before it could be unlinked, and
    # /dev/shm of a container is small.
    descriptor = os.memfd_create("packtrain-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)  # the storage has its own


class SharedBatches:
    """A collator whose batches are, in a worker, all in such memory."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if get_worker_info() is not None and isinstance(batch, dict):
            for name, value in batch.items():
                if isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_shared():
                    batch[name] = empty_batch_tensor(value.shape, value.dtype).copy_(value)
        return batch
