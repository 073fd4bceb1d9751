"""The loss of a model without its logits: at supervised positions only, a chunk of them at a time.

Logits of a long pack are the largest tensor of a step. Here the output head hands hidden states on, and the model's own
loss function, which is called inside the wrapped forward, multiplies them with the head chunk by chunk. Gradients are
computed with each chunk, while its logits are there: nothing is computed twice, and no logits are kept.

Everything happens inside the forward that DDP and FSDP wrap: the head's weights are whole there, and their gradients
take the ordinary way. The loss is a plain sum, because only the caller knows the number of tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.errors import ConfigError
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.modeling.host_sync import in_one_thread, send
from packtrain.modeling.model_parts import transformers_model
from packtrain.modeling.patches import patch_on, put, set_back, take_off


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """Where a batch carries loss. Made of labels on the host, it spares waiting for the GPU."""

    positions: Tensor  # (supervised,) in the flattened batch: the tokens that predict
    ids: Tensor  # (supervised,): what they should predict
    weights: Tensor | None = None  # (supervised,) float32; None: 1 each

    @classmethod
    @in_one_thread()
    def of(cls, labels: Tensor, weights: Tensor | None = None) -> Targets:
        """From labels, and weights of the same shape."""
        labels = labels.view(-1, labels.shape[-1])
        rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        chosen = weights.view_as(labels)[rows, columns + 1].float() if weights is not None else None
        return cls(positions=rows * labels.shape[-1] + columns, ids=labels[rows, columns + 1], weights=chosen)

    def to(self, device: torch.device) -> Targets:
        """On another device, without waiting for it."""
        weights = send(self.weights, device) if self.weights is not None else None
        return Targets(positions=send(self.positions, device), ids=send(self.ids, device), weights=weights)


class ChunkedLoss:
    """The loss of one model. `with loss.using(targets): model(**batch).loss` is a sum; else nothing is changed."""

    def __init__(self, model: Any, *, chunk: int, smoothing: float = 0.0) -> None:
        base = transformers_model(model)
        head = base.get_output_embeddings()
        _require_plain(base)
        self._base, self._head, self._chunk, self._smoothing = base, head, chunk, smoothing
        self._targets: Targets | None = None
        self._ordinary, self._multiply = base.loss_function, head.forward
        self._before = head.__dict__.get("forward")  # of another patch
        head.forward = self._forward
        base.loss_function = self._loss

    @classmethod
    def install(cls, model: Any, *, chunk: int = 4096, smoothing: float = 0.0) -> ChunkedLoss:
        """For a model, also one inside wrappers; an earlier one is taken away. `smoothing`: of labels, as Trainer's."""
        base = transformers_model(model)
        take_off(base, "chunked_loss")
        loss = cls(model, chunk=chunk, smoothing=smoothing)
        put(base, "chunked_loss", loss._undo, loss)
        return loss

    def remove(self) -> None:
        """The model as it was."""
        if patch_on(self._base, "chunked_loss") is self:  # else another one is there
            take_off(self._base, "chunked_loss")

    def _undo(self) -> None:
        set_back(self._head, "forward", self._before)
        self._base.loss_function = self._ordinary

    @contextmanager
    def using(self, targets: Targets) -> Iterator[None]:
        """While this lasts, a forward with labels gives the sum of the losses of these tokens, and no logits."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _forward(self, hidden: Tensor) -> Tensor:
        return hidden if self._targets is not None else self._multiply(hidden)

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        targets = self._targets
        if targets is None:
            return self._ordinary(*args, **kwargs)
        hidden: Tensor = kwargs["logits"] if "logits" in kwargs else args[0]
        targets = targets.to(hidden.device)
        chosen = hidden.flatten(0, -2).index_select(0, targets.positions)
        return _SumOfLosses.apply(
            *(chosen, self._head.weight, self._head.bias, targets.ids, targets.weights, self._chunk, self._smoothing)
        )


def why_not_chunked(model: Any) -> str:
    """Why chunks cannot express the loss of a model; an empty string where they can."""
    base = transformers_model(model)
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"an output head that is a {type(head).__name__}"
    if getattr(base.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return "logits that are capped after the head"
    return ""


def _require_plain(model: Any) -> None:
    """What the chunks cannot express is refused."""
    if why := why_not_chunked(model):
        raise ConfigError(
            "chunked_loss", got=why, expected="logits = hidden states x weight", fix="chunked_loss: false"
        )


class _SumOfLosses(torch.autograd.Function):
    """Sum of weighted cross-entropies, with gradients computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        weights: Tensor | None,
        chunk: int,
        smoothing: float,
    ) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else matrix.dtype
        wanted = ctx.needs_input_grad[:3]
        with torch.autocast(kind, enabled=False):
            total, grads = _in_chunks(hidden.to(dtype), matrix.to(dtype), bias, ids, weights, chunk, smoothing, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtypes = hidden.dtype, matrix.dtype, bias.dtype if bias is not None else None
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = _compiled(_scaled, outer[0].device.type)
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            *(scaled(grad, outer[0], dtype) if grad is not None else None for grad, dtype in gradients),
            *(None,) * 4,
        )


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once, at the end: numbers on a coarse grid times a common factor would mostly be rounded the same way."""
    return (gradient * factor).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is summed in: fp32, unless the model itself is more exact."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def _in_chunks(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor | None,
    chunk: int,
    smoothing: float,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Grads]:
    """The sum, and its gradients by hidden states, matrix and bias where they are wanted."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)  # thousands of summands, one result
    wide: dict[str, Any] = {"dtype": _wide(hidden.dtype), "device": hidden.device}
    by_hidden = torch.empty(hidden.shape, **wide) if wanted[0] else None
    by_matrix = torch.zeros(matrix.shape, **wide) if wanted[1] else None
    by_bias = torch.zeros(matrix.shape[:1], **wide) if wanted[2] else None
    soften: Soften = _compiled(_losses, hidden.device.type)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        rows = hidden[part]
        logits = nn.functional.linear(rows, matrix, bias.to(matrix.dtype) if bias is not None else None)
        weighted = weights[part] if weights is not None else None
        lost, by_logits = soften(logits, ids[part], weighted, smoothing, any(wanted))
        total += lost
        if by_hidden is not None:
            by_hidden[part] = _product(by_logits, matrix)
        if by_matrix is not None:
            _add_product(by_matrix, by_logits, rows)
        if by_bias is not None:
            by_bias += by_logits.to(by_bias.dtype).sum(0)
    return total.to(_wide(hidden.dtype)), (by_hidden, by_matrix, by_bias)


def _add_product(total: Tensor, by_logits: Tensor, rows: Tensor) -> None:
    """total += by_logits.T @ rows, without a product beside the total: it would be as large as the head."""
    if rows.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, by_logits.T, rows, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(by_logits.T.to(total.dtype), rows.to(total.dtype))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In wide numbers, whatever the factors are."""
    wide = _wide(left.dtype)
    if left.dtype == wide:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


Soften = Callable[[Tensor, Tensor, "Tensor | None", float, bool], tuple[Tensor, Tensor]]


def _losses(
    logits: Tensor, ids: Tensor, weights: Tensor | None, smoothing: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The sum of a chunk's losses, and its gradient by the logits in their dtype.

    What is to be predicted is the label, but for a share of `smoothing` that all of the vocabulary has in equal parts.
    """
    wide = logits.to(_wide(logits.dtype))
    normaliser, kept = torch.logsumexp(wide, dim=-1), 1 - smoothing
    lost = normaliser - kept * wide.gather(1, ids[:, None])[:, 0]
    if smoothing:
        lost = lost - smoothing * wide.mean(-1)
    if weights is not None:
        lost = lost * weights
    if not with_gradient:
        return lost.sum(), logits
    chosen = torch.arange(logits.shape[1], device=logits.device)[None] == ids[:, None]
    gradient = torch.exp(wide - normaliser[:, None]) - kept * chosen.to(wide.dtype)
    if smoothing:
        gradient = gradient - smoothing / logits.shape[1]
    if weights is not None:
        gradient = gradient * weights[:, None]
    return lost.sum(), gradient.to(logits.dtype)


@cache
def _compiled(function: Any, kind: str) -> Any:
    """On a GPU one kernel does what would otherwise pass over large tensors half a dozen times."""
    return torch.compile(function, dynamic=True) if kind == "cuda" else function
