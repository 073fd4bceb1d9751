"""A stand-in for the kernel of attention inside segments, which needs a GPU: the same operator, computed on a CPU.

What is compiled calls the operator itself, so that graphs are those of a GPU.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from packtrain.modeling import varlen

CALLS: list[tuple[int, int]] = []  # longest segment, number of segments


def _scores(query: Tensor, key: Tensor, scale: float | None, window: list[int] | None) -> Tensor:
    scores = query @ key.transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
    if window is not None and window[1] == 0:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1)


def _grouped(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _segments(ends: Tensor, *tensors: Tensor) -> Any:
    for start, end in pairwise(ends.tolist()):
        if end > start:
            yield slice(start, end), *(tensor[start:end].transpose(0, 1) for tensor in tensors)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    CALLS.append((longest, len(ends) - 1))
    out = torch.empty_like(query)
    for part, q, k, v in _segments(ends, query, _grouped(key, query), _grouped(value, query)):
        out[part] = (_scores(q, k, scale, window_size) @ v).transpose(0, 1)
    return out, torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    _: Tensor,
    ends: Tensor,
    __: Tensor,
    longest: int,
    ___: int,
    is_causal: bool,
    rng: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _grouped(key, query), _grouped(value, query)
    by_query, by_key, by_value = torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values)
    factor = scale or query.shape[-1] ** -0.5
    for part, q, k, v, g in _segments(ends, query, keys, values, grad):
        shares = _scores(q, k, scale, window_size)
        by_shares = g @ v.transpose(1, 2)
        by_scores = shares * (by_shares - (by_shares * shares).sum(-1, keepdim=True)) * factor
        by_query[part] = (by_scores @ k).transpose(0, 1)
        by_key[part] = (by_scores.transpose(1, 2) @ q).transpose(0, 1)
        by_value[part] = (shares.transpose(1, 2) @ g).transpose(0, 1)
    tokens, heads, size = key.shape
    return by_query, by_key.view(tokens, heads, -1, size).sum(2), by_value.view(tokens, heads, -1, size).sum(2)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention take the way of the kernel, here."""
    torch_varlen._varlen_attn.register_kernel("cpu")(_forward)
    torch_varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    CALLS.clear()
