"""Which attention a model uses: the names users know, what each needs, and how it is switched on.

| backend            | isolates samples by                           | needs                              |
|--------------------|-----------------------------------------------|------------------------------------|
| varlen             | torch's variable-length kernel                | a GPU and bf16 or fp16, else a loop |
| flash_attention_2/3| the flash-attn packages                       | the package, a GPU, bf16 or fp16   |
| flex               | a block mask                                  | a GPU for training                 |
| sdpa               | a dense mask                                  | a model with plain attention scores |
| eager              | a dense mask, with all scores in memory       | nothing                            |
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.errors import ConfigError, in_one_line, nearest
from packtrain.families.family import BatchContract
from packtrain.modeling import varlen
from packtrain.modeling.model_parts import HALF, Arguments, ModelParts, model_parts
from packtrain.modeling.patches import is_on, put, take_off

BACKENDS = ("auto", "varlen", "flash_attention_2", "flash_attention_3", "flex", "sdpa", "eager")
VARLEN_LOOP = "varlen-loop"  # what `varlen` is where its kernel does not run
_AMPERE = (8, 0)
_FLASH = ("flash_attention_3", "flash_attention_2")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_ORIGINAL_FREQUENCIES = "original_inv_freq"  # of a rotary embedding, as transformers calls it
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # how configs call it


def set_attention(
    model: Any,
    backend: str,
    contract: BatchContract,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Switch a model to a backend and return the name of what really runs.

    `device` and `dtype` say where it will run, if not where its weights are now.
    """
    device, dtype = _place(model, device, dtype)
    if backend == "auto":
        backend = choose_backend(model, contract, device=device, dtype=dtype)
    reason = refusal(model, backend, contract, device=device, dtype=dtype)
    if reason:
        raise ConfigError(
            "attn_implementation",
            got=f"{backend} for {contract.model_type}: {reason}",
            expected="one of " + ", ".join(BACKENDS),
            fix=nearest(backend, BACKENDS)
            if backend not in BACKENDS
            else f"use auto, which is {choose_backend(model, contract, device=device, dtype=dtype)} here",
        )
    parts = model_parts(model)
    if backend == "varlen":
        _use_varlen(model, parts)
    elif backend == "flex":
        # Vision encoders are dense, or loop over images: flex would compile for every size of them.
        _switch(model, text="eager", vision="sdpa")
        # Named directly, because the Qwen classes do not say that they can, although they can.
        _set_implementation(parts.language, "flex_attention")
    else:
        _switch(model, text=backend, vision="sdpa" if backend == "eager" else backend)
    _relay_boundaries(parts, as_mask=backend == "varlen", masks=contract.given_masks)
    _reset_rope_per_row(model)
    if backend == "varlen" and not varlen.has_kernel(device, dtype, _head_dim(model)):
        return VARLEN_LOOP
    return backend


def has_own_attention(model: Any) -> bool:
    """Is its attention still that of transformers?"""
    return not is_on(model_parts(model).inner, "boundaries")


def choose_backend(
    model: Any,
    contract: BatchContract,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """The fastest backend that is expected to work; flex only when asked for."""
    device, dtype = _place(model, device, dtype)
    for backend in _FLASH:
        if not refusal(model, backend, contract, device=device, dtype=dtype):
            return backend
    kernel = varlen.has_kernel(device, dtype, _head_dim(model))
    if kernel and not refusal(model, "varlen", contract, device=device, dtype=dtype):
        return "varlen"
    return dense_backend(model, contract)


def dense_backend(model: Any, contract: BatchContract) -> str:
    """The backend with a dense mask, which runs anywhere: sdpa, or eager for what it cannot express."""
    device, dtype = _place(model, None, None)
    return "eager" if refusal(model, "sdpa", contract, device=device, dtype=dtype) else "sdpa"


def refusal(model: Any, backend: str, contract: BatchContract, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why a backend cannot be used for this model here, or an empty string."""
    if backend not in BACKENDS:
        return "no such backend"
    if backend in contract.refused_backends:
        return contract.refused_backends[backend]
    if backend == "eager":
        return ""
    language = model_parts(model).language
    if not language._can_set_attn_implementation():
        return "the model's attention cannot be replaced"
    if backend in ("varlen", "sdpa"):
        if getattr(_text_config(model), "attn_logit_softcapping", None) is not None:
            return "the model caps its attention scores, which this backend cannot express"
        if not language._supports_sdpa:
            return "the model modifies attention scores (sinks, for example) in a way this backend cannot express"
    if backend != "flex" and backend != "sdpa" and _windows_only_in_masks(language):
        return "the model's sliding windows are only in its mask, which this backend does not read"
    if backend == "varlen":
        return _varlen_refusal(model, device)
    return _flash_refusal(model, backend, device, dtype) if backend in _FLASH else ""


def _varlen_refusal(model: Any, device: torch.device) -> str:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _AMPERE:
        major, minor = capability
        return f"its kernel needs compute capability {_AMPERE[0]}.{_AMPERE[1]}, and this GPU has {major}.{minor}"
    for name in _DROPOUTS:
        if dropout := getattr(_text_config(model), name, None):
            return f"its kernel has no dropout, and {name} is {dropout}; set it to 0"
    return ""


def _flash_refusal(model: Any, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    number = backend[-1]
    if device.type != "cuda":
        return f"it needs a GPU, and the model is on {device.type}"
    if dtype not in HALF:
        return f"it needs bf16 or fp16, and the model is in {str(dtype).removeprefix('torch.')}"
    if not (is_flash_attn_3_available() if number == "3" else is_flash_attn_2_available()):
        return f"the package of FlashAttention {number} is not installed; varlen needs no package"
    language = model_parts(model).language
    named = getattr(language, "_compatible_flash_implementations", None)
    if not language._supports_flash_attn or (named is not None and backend not in named):
        return "transformers does not offer it for this model"
    return ""


def _windows_only_in_masks(language: nn.Module) -> bool:
    """Whether layers keep their sliding window to the mask, instead of handing it on to their attention."""
    kinds = {type(module) for module in language.modules() if varlen.is_windowed(module)}
    sources = (inspect.getsource(kind.forward) for kind in kinds)
    return any("attention_interface(" in source and "sliding_window" not in source for source in sources)


# ---- switching


def _switch(model: Any, *, text: str, vision: str) -> None:
    """Through transformers' own switch, for the model and every part of it."""
    parts = model.config.sub_configs
    names = {"": text, **{key: vision if "vision" in key else text for key in parts}}
    try:
        model.set_attn_implementation(names if parts else text)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "attn_implementation", got=f"{text}: {in_one_line(error)}", fix="use auto, or eager"
        ) from error
    actual = _text_config(model)._attn_implementation
    if actual != text:  # transformers only warns
        raise ConfigError("attn_implementation", got=f"a model that keeps attention {actual}", expected=text)


def _use_varlen(model: Any, parts: ModelParts) -> None:
    varlen.register()
    _switch(model, text=varlen.VARLEN, vision="sdpa")
    # Encoders of fixed size are batches of equal rows, at which sdpa is good. Those that take many images as one row
    # hand their boundaries over only to a name with flash in it, which transformers would look for on the hub.
    if parts.vision is not None and _takes_segments(parts.vision):
        _set_implementation(parts.vision, varlen.VISION_VARLEN)


def _set_implementation(part: nn.Module, name: str) -> None:
    """An implementation by name for one part of a model, without asking whether its class allows it."""
    for module in part.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def _takes_segments(encoder: nn.Module) -> bool:
    return any("cu_seqlens" in inspect.signature(module.forward).parameters for module in encoder.modules())


class _Relay:
    """Takes a batch's boundaries past the vision encoder, which would take them for its own, to the language model."""

    def __init__(self, *, as_mask: bool, masks: bool) -> None:
        self._as_mask, self._masks, self._held = as_mask, masks, Arguments()

    def take(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        self._held = {name: kwargs[name] for name in _BOUNDARIES if kwargs.get(name) is not None}
        return args, {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}

    def give(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        kwargs = {**kwargs, **self._held}
        self._held = {}
        ends = kwargs.get("cu_seq_lens_q")
        if self._as_mask and isinstance(ends, Tensor) and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = varlen.as_mask(ends)  # nothing needs to be looked for any more
            _mark_dynamic(ends, 0)
            _mark_dynamic(kwargs["attention_mask"], 3)
        elif self._masks and kwargs.get("attention_mask") is None and kwargs.get("past_key_values") is None:
            kwargs["attention_mask"] = _finished_masks(module, kwargs)
        return args, kwargs


def _finished_masks(language: Any, kwargs: Arguments) -> Arguments | None:
    """The masks of each type of layer as other models make them, for one that leaves positions out."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if ids is None or positions is None:
        return None
    like = language.get_input_embeddings().weight.new_empty((*ids.shape, 1), device=ids.device)
    given = {"attention_mask": None, "past_key_values": None, "position_ids": positions}
    kinds = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(language.config, like, **given) for kind, make in kinds.items()}


def _mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let layers that are compiled be compiled for any number of samples. Slow to import where nothing is compiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _relay_boundaries(parts: ModelParts, *, as_mask: bool, masks: bool) -> None:
    """Hooks that replace those of an earlier call."""
    take_off(parts.inner, "boundaries")
    relay = _Relay(as_mask=as_mask, masks=masks)
    handles = [parts.language.register_forward_pre_hook(relay.give, with_kwargs=True)]
    if parts.language is not parts.inner:
        handles.append(parts.inner.register_forward_pre_hook(relay.take, with_kwargs=True))
    put(parts.inner, "boundaries", partial(_remove, handles))


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


# ---- about a model


def _place(
    model: Any, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    weight = next(iter(model.parameters()))
    return torch.device(device) if device is not None else weight.device, dtype or weight.dtype


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _head_dim(model: Any) -> int:
    """Of the largest head: layers may differ."""
    sizes = [getattr(module, "head_dim", None) for module in model_parts(model).language.modules()]
    known = [size for size in sizes if isinstance(size, int)]
    if known:
        return max(known)
    config = _text_config(model)
    return int(config.hidden_size // config.num_attention_heads)


def _reset_rope_per_row(model: nn.Module) -> None:
    """Let `dynamic` frequencies follow the row at hand alone, as in a model that has just been loaded.

    Transformers keeps those of the longest row so far, until one is shorter than the original length.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else [kinds]  # one for each type of layer
        if any("dynamic" in str(kind) for kind in named) and not is_on(module, "rope"):
            put(module, "rope", module.register_forward_pre_hook(_reset_rope).remove)


def _reset_rope(module: nn.Module, args: Any) -> None:
    """Back to the state in which the module was made."""
    known: Any = dict(module.named_buffers(recurse=False))
    for name in (name for name in known if name.endswith(_ORIGINAL_FREQUENCIES)):
        prefix = name.removesuffix(_ORIGINAL_FREQUENCIES)
        setattr(module, f"{prefix}inv_freq", known[name])
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
