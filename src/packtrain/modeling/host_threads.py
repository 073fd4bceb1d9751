"""Small sums on the host between sending kernels to the GPU: by one thread, whatever the process may use.

Work of some ten thousand numbers is shared among as many threads as there are processors, and waits for the last of
them. While workers make batches, that one has to wait for a processor: milliseconds instead of microseconds, several
times in a step, in which nothing is sent to the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_one_thread() -> Iterator[None]:
    """As a context or a decorator: torch's work on the host is not shared among threads."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
