"""Attention inside segments, by itself: against a dense mask, and what reaches the kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packtrain.core.errors import ConfigError
from packtrain.modeling import varlen
from packtrain.modeling.varlen import as_mask, attend, find_segments

MODULE = SimpleNamespace(is_causal=True)


def segment_ids(ends: list[int]) -> Tensor:
    return torch.cat([torch.full((b - a,), at) for at, (a, b) in enumerate(pairwise(ends))])


def dense(ends: list[int], *, causal: bool, window: int | None) -> Tensor:
    ids = segment_ids(ends)
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))[None]
    seen = ids[:, None] == ids[None]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    return seen


def tensors(rows: int, tokens: int, heads: int = 4, keys: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, tokens, 8, generator=generator) for n in (heads, keys, keys))  # type: ignore[return-value]


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 3), (True, 100), (False, None)])
def test_the_loop_is_a_dense_mask(causal: bool, window: int | None, keys: int) -> None:
    ends = [0, 1, 8, 8, 20, 20]  # a sample of one token, and segments of no length
    query, key, value = tensors(1, 20, keys=keys)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = dense(ends, causal=causal, window=window)
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    given = as_mask(torch.tensor(ends))
    found, _ = attend(MODULE, query, key, value, given, scaling=0.3, sliding_window=window, is_causal=causal)
    assert float((found - wanted).detach().abs().max()) <= 1e-6
    weights = torch.randn(wanted.shape)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (query, key, value), retain_graph=True),
        torch.autograd.grad((wanted * weights).sum(), (query, key, value)),
        strict=True,
    ):
        assert float((one - other).abs().max()) <= 1e-5


def test_rows_without_boundaries_are_segments() -> None:
    query, key, value = tensors(3, 5, keys=4)
    found, _ = attend(MODULE, query, key, value, None)
    wanted = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    assert float((found - wanted).abs().max()) <= 1e-6


def test_boundaries_of_the_batch_come_before_those_that_were_found() -> None:
    query, key, value = tensors(1, 6)
    given, wrong = torch.tensor([0, 2, 6]), as_mask(torch.tensor([0, 3, 6]))
    found, _ = attend(MODULE, query, key, value, wrong, cu_seq_lens_q=given)
    wanted, _ = attend(MODULE, query, key, value, as_mask(given))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.ones(1)}, {"dropout": 0.1}])
def test_nothing_is_left_out_silently(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="varlen"):
        attend(MODULE, *tensors(1, 4), None, **option)


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        (None, True),
        (["full_attention", "sliding_attention"], True),
        (["sliding_attention", "full_attention"], False),
    ],
)
def test_a_window_that_is_only_in_the_mask_is_not_lost(kinds: list[str] | None, refused: bool) -> None:
    config = SimpleNamespace(sliding_window=2, layer_types=kinds)
    module = SimpleNamespace(is_causal=True, config=config, layer_idx=1)
    attend(module, *tensors(1, 4), None, sliding_window=2)
    with pytest.raises(ConfigError, match="only in its mask") if refused else nullcontext():
        attend(module, *tensors(1, 4), None)


# ---- finding segments


def mask_of(ids: Tensor) -> Callable[..., Tensor]:
    """A causal mask inside segments, in the form that transformers hands over."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (ids[row, query] == ids[row, key])

    return seen


@pytest.mark.parametrize("seed", range(20))
def test_segments_are_found_wherever_they_are(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(3, 17, generator=generator) < 0.3
    starts[:, 0] = True
    found = find_segments(3, 17, 17, mask_function=mask_of(starts.cumsum(1)))
    assert found.shape[:3] == (1, 1, 1)
    assert found.dtype == torch.int32
    assert found.flatten().tolist() == [*starts.flatten().nonzero().flatten().tolist(), 51]


def test_padding_is_a_segment_of_its_own() -> None:
    padding = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = find_segments(3, 5, 5, mask_function=mask_of(torch.zeros(3, 5)), attention_mask=padding)
    assert found.flatten().tolist() == [0, 3, 5, 6, 10, 15]


def test_one_token_is_one_segment() -> None:
    assert find_segments(1, 1, 1, mask_function=mask_of(torch.zeros(1, 1))).flatten().tolist() == [0, 1]


def test_a_mask_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="attend to later tokens"):
        find_segments(1, 6, 6, mask_function=lambda row, head, query, key: (query - key).abs() < 2)


def test_keys_of_a_cache_give_an_ordinary_mask() -> None:
    found = find_segments(1, 1, 9, q_offset=8, mask_function=mask_of(torch.zeros(1, 9)))
    assert found.dtype == torch.bool
    assert found.shape == (1, 1, 1, 9)
    assert found.all()


# ---- what reaches the kernel; the kernel itself needs a GPU


@pytest.mark.parametrize("groups", [True, False])
def test_the_kernel_is_called_as_its_version_wants(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append((k.shape, rest, options))
        return torch.zeros_like(q)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_GROUPS", {"enable_gqa": True} if groups else {})
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    query, key, value = tensors(2, 6)
    ends = as_mask(torch.tensor([0, 4, 6, 12]))
    out, _ = attend(MODULE, query, key, value, ends, scaling=0.5, sliding_window=3)
    attend(MODULE, query, key, value, None, is_causal=False, cu_seq_lens_q=ends.flatten(), max_length_q=4)
    assert out.shape == (2, 6, 4, 8)
    (keys, rest, options), (_, other, full) = calls
    assert keys == (12, 2, 8), "keys must not be repeated: the kernel shares them among queries"
    assert rest[0] is rest[1], "some kernels take causal attention only with the same boundaries for both"
    assert rest[0].tolist() == [0, 4, 6, 12]
    assert rest[2:] == (6, 6)
    assert other[2:] == (4, 4)
    assert options["scale"] == 0.5
    assert options["window_size"] == (2, 0)
    assert full["window_size"] == (-1, -1)
    assert ("enable_gqa" in options) == groups


def test_heads_with_smaller_values_are_filled_up_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(1, 6)
    ends, small = as_mask(torch.tensor([0, 4, 6])), value[..., :3]
    expected, _ = attend(MODULE, query, key, small, ends)

    def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *_: Any, window_size: Any, **__: Any) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return varlen._loop(q, k, v, bounds, None, window_size)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    found, _ = attend(MODULE, query, key, small, ends)
    assert found.shape == expected.shape == (1, 6, 4, 3)
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("device", "dtype", "head", "has"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 80, True),
        ("cuda", torch.float32, 128, False),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.bfloat16, 512, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_where_the_kernel_runs(device: str, dtype: torch.dtype, head: int, has: bool) -> None:
    assert varlen.has_kernel(torch.device(device), dtype, head) == has
