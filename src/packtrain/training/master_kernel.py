"""A step of AdamW on fp32 masters in one pass: half-precision gradients go in, and rounded weights come out.

By torch's own kernels it is three passes: gradients are widened, masters are stepped, and they are rounded into the
weights. That is 40 bytes of traffic a parameter where 28 suffice, and a buffer for wide gradients. The arithmetic is
that of torch's fused AdamW. All tensors are stepped by one launch, which finds them in a table of addresses.

Imported where there is a GPU and Triton only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from packtrain.modeling.host_sync import send

_BLOCK = 1_024
_CHUNK = 64 * _BLOCK  # numbers that one program steps
_COLUMNS = 7  # of the table: six addresses and a count
_HALF = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamRates:
    """The numbers of a group."""

    rate: float
    first: float  # the betas
    second: float
    epsilon: float
    decay: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stepped:
    """One weight with all that belongs to it; all contiguous and on one GPU."""

    weight: Tensor
    gradient: Tensor
    master: Tensor
    state: Mapping[str, Tensor]  # exp_avg, exp_avg_sq, step

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """The device and dtype shared by all tensors that one launch steps."""
        return self.weight.device, self.weight.dtype

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the table."""
        state = self.state
        return self.weight, self.gradient, self.master, state["exp_avg"], state["exp_avg_sq"], state["step"]


def step_all(every: Sequence[Stepped], rates: AdamRates) -> None:
    """Update masters and their moments, and round masters into weights, all of one place.

    What counts steps in their states counts this one already.
    """
    device, dtype = every[0].place
    sizes = [one.master.numel() for one in every]
    table = [[*(part.data_ptr() for part in one.tensors()), size] for one, size in zip(every, sizes, strict=True)]
    spans = _spans(sizes)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _step[(len(spans),)](
            send(torch.tensor(table, dtype=torch.int64), device),
            send(torch.from_numpy(spans), device),
            float(rates.rate),
            float(rates.rate * rates.decay),
            # Numbers arrive in fp32: differences of near ones are taken before.
            float(1 - rates.first),
            float(1 - rates.second),
            _log(rates.first),
            _log(rates.second),
            float(rates.epsilon),
            HALF=_HALF[dtype],
            COLUMNS=_COLUMNS,
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
        )


def _spans(sizes: Sequence[int]) -> np.ndarray:
    """For each program, which tensor it steps and from which number on."""
    counts = -(-np.asarray(sizes, np.int64) // _CHUNK)
    owners = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owners, (np.arange(len(owners)) - firsts) * _CHUNK], axis=1)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    table,
    spans,
    rate,
    decayed,
    new_in_mean,
    new_in_square,
    log_first,
    log_second,
    epsilon,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    here = spans + 2 * tl.program_id(0)
    row, start = table + COLUMNS * tl.load(here), tl.multiple_of(tl.load(here + 1), BLOCK)
    weights = tl.multiple_of(tl.load(row).to(tl.pointer_type(HALF)), 16)
    gradients = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(HALF)), 16)
    masters = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    means = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    squares = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), 16)
    # In fp64: in the first steps these are small differences too.
    step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32))).to(tl.float64)
    count = tl.load(row + 6)
    mean_share = (1.0 - tl.exp(step * log_first)).to(tl.float32)
    square_root = tl.sqrt((1.0 - tl.exp(step * log_second)).to(tl.float32))
    rates = rate / mean_share, decayed, new_in_mean, new_in_square, square_root, epsilon
    if start + CHUNK <= count:  # nearly all: without a mask, several numbers are moved at once
        for block in range(0, CHUNK, BLOCK):
            places = start + block + tl.arange(0, BLOCK)
            _advance(weights, gradients, masters, means, squares, places, None, rates, HALF)
    else:
        for block in range(0, CHUNK, BLOCK):
            places = start + block + tl.arange(0, BLOCK)
            _advance(weights, gradients, masters, means, squares, places, places < count, rates, HALF)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    weights, gradients, masters, means, squares, places, inside, rates, HALF: tl.constexpr
):
    rate, decayed, new_in_mean, new_in_square, square_root, epsilon = rates
    gradient = tl.load(gradients + places, mask=inside).to(tl.float32)
    mean = tl.load(means + places, mask=inside)
    square = tl.load(squares + places, mask=inside)
    master = tl.load(masters + places, mask=inside)
    mean += (gradient - mean) * new_in_mean
    square += (gradient * gradient - square) * new_in_square
    master -= master * decayed
    master -= rate * mean / (tl.sqrt(square) / square_root + epsilon)
    tl.store(means + places, mean, mask=inside)
    tl.store(squares + places, square, mask=inside)
    tl.store(masters + places, master, mask=inside)
    tl.store(weights + places, master.to(HALF), mask=inside)
