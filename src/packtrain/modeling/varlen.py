"""Attention inside segments through torch's variable-length kernel, in the shape that transformers calls.

Segments are found once per forward pass and travel as the `attention_mask` argument: a (1, 1, 1, segments + 1) int32
tensor of their ends. Models hand a mask of four dimensions on untouched, through layers, checkpointing and wrappers.
On CPU, and in fp32, the kernel does not exist: a loop over segments computes the same, slowly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_parts import HALF, Arguments

VARLEN = "packtrain_varlen"
# Vision encoders hand all their images over in one call only to an implementation that is called flash.
VISION_VARLEN = "packtrain_flash_varlen"
_LARGEST_HEAD = 256
# Fewer keys than queries: older versions take them without being told. Asked here, since compiled code cannot.
_GROUPS: dict[str, bool] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def register() -> None:
    """Make both names known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (VARLEN, VISION_VARLEN):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, find_segments)


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the real kernel runs for such tensors, rather than the loop."""
    return device.type == "cuda" and dtype in HALF and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD


def as_mask(ends: Tensor) -> Tensor:
    """Ends of segments in the form that models hand on as an attention mask."""
    return ends.to(torch.int32).view(1, 1, 1, -1)


# ---- where segments end


def find_segments(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """The ends of segments, from asking the mask only whether each token sees the one before it: O(tokens)."""
    if q_length != kv_length or not _is_zero(q_offset) or not _is_zero(kv_offset):
        return _dense(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
        )
    assert mask_function is not None
    rows = torch.arange(batch_size, device=device)[:, None]
    heads = torch.zeros_like(rows)
    after = torch.arange(1, q_length, device=device)[None]
    if bool(torch.as_tensor(mask_function(rows, heads, after - 1, after)).any()):
        raise ConfigError(
            "attn_implementation: varlen",
            got="a model whose tokens attend to later tokens",
            expected="causal attention inside segments",
            fix="use sdpa or flex",
        )
    linked = torch.as_tensor(mask_function(rows, heads, after, after - 1)).expand(batch_size, q_length - 1)
    if attention_mask is not None:  # padding becomes a segment of its own
        real = attention_mask.to(device=device, dtype=torch.bool)[:, :q_length]
        linked = linked & (real[:, 1:] == real[:, :-1])
    first = torch.ones((batch_size, 1), dtype=torch.bool, device=device)
    starts = torch.cat([first, ~linked], dim=1).flatten().nonzero().flatten()
    return as_mask(torch.cat([starts, starts.new_tensor([batch_size * q_length])]))


def _is_zero(offset: Any) -> bool:
    return int(offset) == 0


def _dense(**arguments: Any) -> Tensor:
    """An ordinary mask: with keys from a cache, while generating, queries are not segments."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mask is not None
    return mask


# ---- attention


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of (rows, heads, tokens, head dim) tensors inside segments; gives (rows, tokens, heads, head dim)."""
    _refuse_unsupported(dropout, others)
    # Not where layers are compiled: looking at a layer's number would give each of them a graph of its own.
    if sliding_window is None and not torch.compiler.is_compiling() and is_windowed(module):
        raise _only_in_mask(module)
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        return _sdpa(query, key, value, attention_mask, scaling)
    rows, _, tokens, head_dim = query.shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    ends = cu_seq_lens_q if cu_seq_lens_q is not None else attention_mask
    if ends is None:
        ends = torch.arange(0, rows * tokens + 1, tokens, device=query.device)
    ends = ends.flatten().to(torch.int32)
    dtype = _autocast_dtype(query)
    q, k, v = (part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (query, key, value))
    window = (sliding_window - 1 if sliding_window is not None and causal else -1, 0 if causal else -1)
    if has_kernel(query.device, dtype, head_dim):
        # A longest length that is too large is right as well, and knowing the true one would wait for the GPU.
        out = _kernel(q, k, v, ends, max_length_q or tokens, scaling, window)
    else:
        out = _loop(q, k, v, ends, scaling, window)
    return out.view(rows, tokens, *out.shape[1:]), None


def is_windowed(module: torch.nn.Module) -> bool:
    """Whether a layer's attention has a sliding window, as its config says."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    if layer is None or not getattr(config, "sliding_window", None):
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or kinds[layer] == "sliding_attention"


def _only_in_mask(module: torch.nn.Module) -> ConfigError:
    return ConfigError(
        "attn_implementation: varlen",
        got=f"{type(module).__name__} with a sliding window that is only in its mask",
        expected="layers that pass their window to attention",
        fix="use sdpa",
    )


def _refuse_unsupported(dropout: float, others: Arguments) -> None:
    """What the kernel cannot express must not be left out silently."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise ConfigError(
            "attn_implementation: varlen",
            got=f"attention with {' and '.join(unknown)}",
            expected="plain attention, with or without a sliding window",
            fix="set attention_dropout to 0" if unknown == ["dropout"] else "use eager or flex",
        )


def _autocast_dtype(query: Tensor) -> torch.dtype:
    """Rotary embeddings may have turned queries and keys to fp32 under autocast; the kernel gets what was meant."""
    kind = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scaling: float | None, window: tuple[int, int]
) -> Tensor:
    groups = _GROUPS if q.shape[1] != k.shape[1] else {}
    size = v.shape[-1]
    if size < q.shape[-1]:
        v = pad(v, (0, q.shape[-1] - size))  # the kernel wants one size of heads; zeros add nothing
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, **groups)
    return out[..., :size].contiguous()


def _loop(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scaling: float | None, window: tuple[int, int]) -> Tensor:
    """The same with one ordinary attention for each segment."""
    gqa = q.shape[1] != k.shape[1]
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # (1, heads, tokens, head dim)
    bounds = ends.tolist()
    outputs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        inside = slice(start, end)
        mask = _band(end - start, window[0], q.device) if 0 <= window[0] < end - start else None
        outputs.append(
            scaled_dot_product_attention(
                q[:, :, inside],
                k[:, :, inside],
                v[:, :, inside],
                attn_mask=mask,
                is_causal=window[1] == 0 and mask is None,
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1).contiguous()  # as the kernel's: models take views of it


def _band(length: int, left: int, device: torch.device) -> Tensor:
    """Each token sees itself and `left` tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance <= left)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> tuple[Tensor, None]:
    """With a mask of queries and keys, as it is while generating."""
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous(), None
