"""Faults planted into models, rows and losses: which of them `verify` and the check before the first step see.

What is missed stands in docs/guides/verifying.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hand_made import text_samples
from torch import Tensor, nn

from packtrain.delivery.collate.collators import PackCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, EncodedSample
from packtrain.modeling import chunked_loss, varlen
from packtrain.modeling.attention import set_attention
from packtrain.modeling.load import build_model
from packtrain.training.loss import ChunkedTokenLoss, loss_on
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.compare import Collate
from packtrain.verifying.packing_check import RowRoom, Training, check_packing
from packtrain.verifying.verification import long_rows, verify_model

Rows = dict[str, Any]
BF16 = torch.bfloat16


class Planted:
    """One model with its samples, and the places where faults go."""

    def __init__(self, found: Any, family: str, dtype: torch.dtype, backend: str) -> None:
        self.found, self.family, self.backend = found, family, backend
        self.model = build_model(found.folder)
        for weight in self.model.parameters():
            weight.data = weight.data.to(dtype)
        self.dtype, self.spoil = dtype, lambda batch: batch
        self.spoil_loss: Callable[[Tensor, Any], Tensor] = lambda total, batch: total
        set_attention(self.model, backend, found.contract)
        total = loss_on(ChunkedTokenLoss(self.model, 16), torch.device("cpu"))
        self.loss = lambda model, batch: self.spoil_loss(total(model, batch), batch)

    @property
    def sees(self) -> bool:
        return bool(self.found.contract.media)

    @property
    def samples(self) -> list[EncodedSample]:
        """Beside short texts, which would otherwise be all that is looked at."""
        texts = text_samples(200, (21, 40, 17, 23))
        if not self.sees:
            return texts
        texts = [replace(one, position_ids=one.position_ids.expand(4, -1)) for one in texts]
        return [*texts, *self.found.some("image", "two-images")]

    def collate(self, **options: Any) -> Collate:
        right = PackCollator(
            self.found.contract,
            pad_id=self.found.pad_id,
            dtype=self.dtype,
            boundaries=self.backend == "varlen",
            **options,
        )
        return lambda rows: self.spoil(right(rows))

    def verify(self, *, backward: bool) -> CheckReport:
        long = text_samples(200, (600,))[0]
        if self.sees:
            long = replace(long, position_ids=long.position_ids.expand(4, -1))
        samples, contract = self.samples[-4:], self.found.contract
        rows = long_rows(samples, long, contract, lambda shape: self.collate(static_shapes=shape))
        return verify_model(
            self.model, samples, contract, self.collate(pad_to_multiple=64), attn_implementation=self.backend,
            backward=backward, rows=rows, loss=self.loss,
        )  # fmt: skip

    def check_packing(self) -> CheckReport:
        samples = self.samples
        long = [] if self.sees else text_samples(200, (600,))
        return check_packing(
            self.model,
            samples,
            self.collate(static_shapes=StaticShapes(tokens=1024)),
            self.found.contract,
            pack=[*samples, *long],
            room=RowRoom(tokens=1024),
            training=Training(loss=self.loss),
        )


# ---- faults of rows


def _replaced(change: Callable[[Rows], Rows]) -> Callable[[Planted], Any]:
    @contextmanager
    def plant(it: Planted) -> Iterator[None]:
        def spoil(batch: Any) -> Any:
            batch.update(change(batch))
            return batch

        it.spoil = spoil
        yield

    return plant


def _starts(batch: Rows) -> Tensor:
    positions = batch["position_ids"]
    return (positions if positions.ndim == 2 else positions[0]).eq(0)


def _second_half(batch: Rows) -> Tensor:
    """Tokens 10 to 19 of the row, which belong to one sample."""
    inside = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    inside[:, 10:17] = True
    return inside


def _axis(batch: Rows) -> Rows:
    positions = batch["position_ids"].clone()
    positions[2, _second_half(batch)] += 5
    return {"position_ids": positions}


def _last_dropped(batch: Rows) -> Rows:
    ends = _starts(batch).roll(-1, 1)
    return {"labels": batch["labels"].masked_fill(ends, IGNORED)}


def _ends_moved(batch: Rows) -> Rows:
    ends = batch["cu_seq_lens_q"].clone()
    ends[1:-1] += 1
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


# ---- faults of models


def _hooked(part: Callable[[Any], nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Callable[[Planted], Any]:
    @contextmanager
    def plant(it: Planted) -> Iterator[None]:
        handle = part(it.model).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return plant


def _first_layer(model: Any) -> nn.Module:
    inner = model.model
    return getattr(inner, "language_model", inner).layers[0]


def _encoder(model: Any) -> nn.Module:
    return model.model.visual


def _convolution(weight: float) -> Callable[[Planted], Any]:
    def hook(_: Any, inputs: Any, out: Tensor) -> Tensor:
        return out + weight * nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    return _hooked(_first_layer, hook)


def _row_mean(weight: float) -> Callable[[Planted], Any]:
    return _hooked(_first_layer, lambda _, inputs, out: out + weight * out.mean(1, keepdim=True))


def _see_the_first(_: Any, inputs: Any, out: Tensor) -> Tensor:
    late = torch.arange(out.shape[1]) >= 50
    return out + 0.1 * late[None, :, None] * out[:, :1]


def _with_dropout_only(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    leaks = module.training and getattr(module, "dropout_leak", 0.0)
    return out + out.mean(1, keepdim=True) if leaks else out


def _rolled(_: Any, inputs: Any, out: Any) -> Any:
    out.pooler_output = out.pooler_output.roll(1, 0)
    return out


def _detached(it: Planted) -> Any:
    """The gradient of more images than one sample has."""
    (most,) = it.found.some("two-images")
    tokens = int((most.token_kinds == IMAGE).sum())

    def hook(_: Any, inputs: Any, out: Any) -> Any:
        if len(out.pooler_output) > tokens:
            out.pooler_output = out.pooler_output.detach()
        return out

    return _hooked(_encoder, hook)(it)


@contextmanager
def _images_attend(it: Planted) -> Iterator[None]:
    def together(_: Any, args: Any, kwargs: Rows) -> tuple[Any, Rows]:
        ends = kwargs["cu_seqlens"]
        return args, {**kwargs, "cu_seqlens": ends[[0, -1]]}

    handles = [block.register_forward_pre_hook(together, with_kwargs=True) for block in it.model.model.visual.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _patched(module: Any, name: str, made: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, made)
        yield


def _no_segments(it: Planted) -> Any:
    from transformers import masking_utils

    return _patched(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)


def _no_window(it: Planted) -> Any:
    """For packed and alone alike, as where a model gives its window by the mask only."""
    right = varlen._loop
    return _patched(varlen, "_loop", lambda *args: right(*args[:-1], (-1, args[-1][1])))


# ---- faults of the loss


def _loses_a_token(it: Planted) -> Any:
    right = chunked_loss.Targets.of

    def of(labels: Tensor, weights: Tensor | None = None) -> Any:
        found = right(labels, weights)
        return replace(found, positions=found.positions[:-1], ids=found.ids[:-1])

    return _patched(chunked_loss.Targets, "of", of)


def _loss(change: Callable[[Tensor, Any], Tensor]) -> Callable[[Planted], Any]:
    @contextmanager
    def plant(it: Planted) -> Iterator[None]:
        it.spoil_loss = change
        yield

    return plant


@contextmanager
def _nothing(it: Planted) -> Iterator[None]:
    yield


# ---- the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One fault, and who sees it."""

    name: str
    plant: Callable[[Planted], Any]
    verify: bool = True
    first: bool = True
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    backend: str = "sdpa"
    backward: bool = False  # of verify: only its gradients show it


QWEN = "qwen2_5_vl"
CONTROLS = (
    Row(name="nothing", plant=_nothing, verify=False, first=False, backward=True),
    Row(name="nothing, bf16", plant=_nothing, verify=False, first=False, dtype=BF16),
    Row(name="nothing, varlen", plant=_nothing, verify=False, first=False, backend="varlen", family="gemma3_text"),
    Row(name="nothing, images", plant=_nothing, verify=False, first=False, family=QWEN),
    Row(name="nothing, images, bf16", plant=_nothing, verify=False, first=False, family=QWEN, dtype=BF16),
    Row(
        name="all positions of the row + 7: rotary positions are relative",
        plant=_replaced(lambda batch: {"position_ids": batch["position_ids"] + 7}),
        verify=False,
        first=False,
    ),
)
FAULTS = (
    Row(name="attention ignores segments", plant=_no_segments),
    Row(
        name="positions run on",
        plant=_replaced(lambda batch: {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}),
    ),
    Row(
        name="half a sample at other positions",
        plant=_replaced(lambda batch: {"position_ids": batch["position_ids"] + 5 * _second_half(batch)}),
    ),
    Row(name="last label dropped", plant=_replaced(_last_dropped)),
    Row(
        name="label on a first token",
        plant=_replaced(lambda b: {"labels": torch.where(_starts(b), b["input_ids"], b["labels"])}),
    ),
    Row(name="labels shifted", plant=_replaced(lambda batch: {"labels": batch["labels"].roll(1, 1)})),
    Row(name="ends of samples off by one", plant=_replaced(_ends_moved), backend="varlen"),
    Row(name="convolution over boundaries", plant=_convolution(0.1)),
    Row(name="convolution, 1e-5", plant=_convolution(1e-5)),
    Row(name="convolution, 1e-7: below rounding", plant=_convolution(1e-7), verify=False, first=False),
    Row(name="convolution, 1e-2 in bf16", plant=_convolution(1e-2), dtype=BF16),
    Row(name="row mean added", plant=_row_mean(1e-3)),
    Row(name="row mean added, bf16", plant=_row_mean(1e-3), dtype=BF16),
    Row(name="late tokens see the first of the row", plant=_hooked(_first_layer, _see_the_first)),
    Row(name="one axis of M-RoPE shifted", plant=_replaced(_axis), family=QWEN),
    Row(name="image features shifted by one", plant=_hooked(_encoder, _rolled), family=QWEN),
    Row(name="images attend to each other", plant=_images_attend, family=QWEN),
    Row(name="images attend to each other, bf16", plant=_images_attend, family=QWEN, dtype=BF16),
    Row(
        name="gradient of the encoder lost with several images",
        plant=_detached,
        family=QWEN,
        backward=True,
    ),
    Row(name="windows ignored by the backend", plant=_no_window, family="gemma3_text", backend="varlen"),
    Row(name="a leak with dropout on", plant=_hooked(_first_layer, _with_dropout_only), verify=False, first=False),
    Row(name="the trainer's loss loses a token", plant=_loses_a_token),
    Row(name="loss divided by the row", plant=_loss(lambda total, batch: total / batch["input_ids"].shape[1])),
    Row(
        name="loss without gradients",
        plant=_loss(lambda total, batch: total.detach().requires_grad_()),
        backward=True,
    ),
    Row(name="something added to the loss", plant=_loss(lambda total, batch: total + 0.5)),
)


@pytest.fixture(scope="module")
def planted(subject: Any) -> Callable[[Row], Planted]:
    """Models are shared by all rows that are alike."""

    @cache
    def made(family: str, dtype: torch.dtype, backend: str) -> Planted:
        return Planted(subject(family), family, dtype, backend)

    def of(row: Row) -> Planted:
        it = made(row.family, row.dtype, row.backend)
        it.spoil, it.spoil_loss = (lambda batch: batch), (lambda total, batch: total)
        return it

    return of


@pytest.mark.parametrize("row", [*CONTROLS, *FAULTS], ids=lambda row: row.name)
def test_a_planted_fault(planted: Callable[[Row], Planted], row: Row) -> None:
    it = planted(row)
    with row.plant(it):
        first, whole = it.check_packing(), it.verify(backward=row.backward)
    assert bool(first.failures) == row.first, first.checks
    assert bool(whole.failures) == row.verify, whole.checks
    assert {first.outcome, whole.outcome} <= {"passed", "failed"}
