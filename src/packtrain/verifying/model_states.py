"""The states in which a model is checked: evaluation, training without dropout, checkpointing, full precision, its own
attention; and hidden states in place of logits.

Each is a context that leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample
from packtrain.modeling.model_parts import transformers_model
from packtrain.verifying.check_result import CheckResult
from packtrain.verifying.compare import forward, largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One state: evaluating or training, with or without gradient checkpointing."""

    name: str
    training: bool = False
    checkpointing: bool | None = False  # None: as the model came


EVALUATION = Mode(name="eval")
TRAINING = Mode(name="train", training=True)
CHECKPOINTING = Mode(name="checkpointed", training=True, checkpointing=True)
AS_TRAINED = Mode(name="as trained", training=True, checkpointing=None)


def supports_checkpointing(model: Any) -> bool:
    """Can gradient checkpointing be turned on?"""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


@contextmanager
def in_mode(model: Any, mode: Mode) -> Iterator[None]:
    """The model in one state, without dropout."""
    was = {module: module.training for module in model.modules()}
    with without_dropout(model), _checkpointing(model, mode.checkpointing):
        try:
            model.train(mode.training)
            yield
        finally:
            for module, training in was.items():
                module.training = training


@contextmanager
def _checkpointing(model: Any, wanted: bool | None) -> Iterator[None]:
    """With or without checkpointing; a model's own checkpointing is kept and restored."""
    if wanted is None:
        yield
        return
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    layers = [m for m in model.modules() if "gradient_checkpointing" in vars(m) or hasattr(type(m), names[0])]
    kept = [(layer, {name: vars(layer)[name] for name in names if name in vars(layer)}) for layer in layers]
    present = any(layer.gradient_checkpointing for layer in layers)
    try:
        if wanted and not present:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif not wanted:
            for layer in layers:
                layer.gradient_checkpointing = False
        yield
    finally:
        if wanted and not present:
            model.gradient_checkpointing_disable()
        for layer, values in kept:
            for name in names:
                vars(layer).pop(name, None)
            vars(layer).update(values)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout at probability 0, also those that an attention has as a number."""
    dropouts: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        names += [name for name in vars(module) if "drop" in name]
        dropouts += [(module, name, value) for name in names if isinstance(value := getattr(module, name), float)]
    try:
        for module, name, _ in dropouts:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in dropouts:
            setattr(module, name, value)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The state of torch's random numbers; drawing one changes it."""
    return (torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()))


def is_random_in_training(model: nn.Module, run: Callable[[], object]) -> bool:
    """Is training mode random apart from dropout?

    Routers that draw, layers that are left out by chance: packed and alone then differ by chance. Norms over a batch
    would keep what they saw.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return True
    device = next(model.parameters()).device
    before = random_state(device)
    with in_mode(model, TRAINING), torch.no_grad():
        run()
    return not all(map(torch.equal, before, random_state(device)))


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """The same weights in fp32, in place; going back loses nothing, because every half-precision value is exact there.

    What already is fp32 (rotary frequencies, say) is left alone, and so stays fp32 afterwards.
    """
    halves = (torch.bfloat16, torch.float16)
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in halves]
    kinds = [tensor.dtype for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, kind in zip(tensors, kinds, strict=True):
            tensor.grad = None
            tensor.data = tensor.data.to(kind)


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 means fp32: no reduced products on GPUs, which convolutions use unless told otherwise."""
    was = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was


@contextmanager
def stock_attention(model: Any) -> Iterator[str]:
    """The model as transformers runs it: sdpa where its classes have that, else eager. No weight is copied.

    What a backend loses for packed and alone alike (a window that comes by the mask only) shows against this only.
    """
    from transformers import PreTrainedModel

    inner = transformers_model(model)
    text = inner.config.get_text_config()
    backends: dict[int, tuple[Any, str]] = {}
    for module in inner.modules():
        config: Any = getattr(module, "config", None)
        named = isinstance(module, PreTrainedModel) and hasattr(config, "_attn_implementation_internal")
        if named and module._can_set_attn_implementation():  # others always run their own
            # sdpa leaves out caps of scores, without a word.
            plain = module._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None
            backends[id(config)] = config, "sdpa" if plain else "eager"
    before = [(config, config._attn_implementation_internal) for config, _ in backends.values()]
    try:
        for config, name in backends.values():
            config._attn_implementation_internal = name
        yield str(getattr(text, "_attn_implementation_internal", "") or "")
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@contextmanager
def hidden_states(model: Any, *, rows: bool = False) -> Iterator[Callable[[Mapping[str, Any]], Tensor]]:
    """The input of the output head in a forward pass, (tokens, width); with `rows`, (rows, tokens, width).

    The head itself does not run: logits of a long row are larger than anything else of a step without gradients.
    """
    head = transformers_model(model).get_output_embeddings()
    before = vars(head).get("forward")  # a loss that is taken in chunks has one of its own
    latest: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        latest[:] = [hidden.detach() if rows else hidden.detach()[0]]
        return hidden

    def run(inputs: Mapping[str, Any]) -> Tensor:
        forward(model, inputs)
        return latest[0]

    head.forward = keep
    try:
        yield run
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def parity(check: str, compared: Sequence[tuple[EncodedSample, Tensor, Tensor]], allowed: float) -> CheckResult:
    """Hidden states from which supervised tokens are predicted: norm of packed - alone over that of alone."""
    gaps = []
    for sample, reference, packed in compared:
        one, ours = _supervised_states(reference, sample), _supervised_states(packed, sample)
        gaps.append((sample.id, float((ours - one).norm()) / max(float(one.norm()), 1e-30)))
    return largest(check, gaps, allowed)


def _supervised_states(hidden: Tensor, sample: EncodedSample) -> Tensor:
    carries = (sample.labels[1:] != IGNORED).to(hidden.device)
    return (hidden[:-1][carries] if carries.any() else hidden).float()
