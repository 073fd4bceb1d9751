"""What packed rows are held against: the model on its own attention, and hidden states in place of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample
from packtrain.modeling.model_parts import transformers_model
from packtrain.verifying.compare import largest
from packtrain.verifying.comparison_passes import forward
from packtrain.verifying.verdict import Finding


@contextmanager
def stock_attention(model: Any) -> Iterator[str]:
    """The model as transformers runs it: sdpa where its classes have that, else eager. No weight is copied.

    What a backend loses for packed and alone alike (a window that comes by the mask only) shows against this only.
    """
    from transformers import PreTrainedModel

    inner = transformers_model(model)
    text = inner.config.get_text_config()
    wanted: dict[int, tuple[Any, str]] = {}
    for module in inner.modules():
        config: Any = getattr(module, "config", None)
        named = isinstance(module, PreTrainedModel) and hasattr(config, "_attn_implementation_internal")
        if named and module._can_set_attn_implementation():  # others always run their own
            # sdpa leaves out caps of scores, without a word.
            plain = module._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None
            wanted[id(config)] = config, "sdpa" if plain else "eager"
    before = [(config, config._attn_implementation_internal) for config, _ in wanted.values()]
    try:
        for config, name in wanted.values():
            config._attn_implementation_internal = name
        yield str(getattr(text, "_attn_implementation_internal", "") or "")
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@contextmanager
def hidden_states(model: Any) -> Iterator[Callable[[Mapping[str, Any]], Tensor]]:
    """What goes into the output head in a forward pass on these inputs, (tokens, width).

    The head itself does not run: logits of a long row are larger than anything else of a step without gradients.
    """
    head = transformers_model(model).get_output_embeddings()
    before = vars(head).get("forward")  # a loss that is taken in chunks has one of its own
    latest: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        latest[:] = [hidden.detach()[0]]
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


def parity(check: str, compared: Sequence[tuple[EncodedSample, Tensor, Tensor]], allowed: float) -> Finding:
    """Hidden states from which supervised tokens are predicted: norm of packed - alone over that of alone."""
    gaps = []
    for sample, reference, found in compared:
        one, ours = _supervised(reference, sample), _supervised(found, sample)
        gaps.append((sample.id, float((ours - one).norm()) / max(float(one.norm()), 1e-30)))
    return largest(check, gaps, allowed)


def _supervised(hidden: Tensor, sample: EncodedSample) -> Tensor:
    carries = (sample.labels[1:] != IGNORED).to(hidden.device)
    return (hidden[:-1][carries] if carries.any() else hidden).float()
