"""A loss in chunks is the loss of whole logits, with the same gradients, and the model is otherwise as it was."""

from __future__ import annotations

from typing import Any

import encoded
import pytest
import torch
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

from packtrain.core.errors import ConfigError
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.modeling.preparation import prepare_model

FAMILIES = (*encoded.VISION, *encoded.TEXT_ONLY)


def batch_of(family: str) -> Any:
    kinds = ("image",) if family in encoded.VISION else ()
    return encoded.packed(family, encoded.sample(family, *kinds, words=7), encoded.sample(family, words=12, seed=1))


def ready(family: str) -> Any:
    model = encoded.fresh_model(family).train()
    prepare_model(model, attn_implementation="sdpa")
    return model


def whole(model: Any, batch: Any, weights: Tensor | None = None) -> Tensor:
    """The sum from whole logits."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits, targets = model(**given).logits[:, :-1].float(), batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return (each if weights is None else each * weights[:, 1:]).sum()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], allowed: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    assert any(float(grad.abs().max()) > 0 for grad in expected.values())
    for name, grad in expected.items():
        scale = max(1.0, float(grad.abs().max()))
        assert float((found[name] - grad).abs().max()) <= allowed * scale, name


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model, batch = ready(family), batch_of(family)
    expected_loss = whole(model, batch)
    expected = gradients(model, expected_loss)
    loss = ChunkedLoss.install(model, chunk=5)
    with loss.using(Targets.of(batch["labels"])):
        found = model(**batch).loss
    assert float(found) == pytest.approx(float(expected_loss), rel=1e-6)
    assert_same(gradients(model, found), expected)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_change_nothing(chunk: int) -> None:
    model, batch = ready("llama"), batch_of("llama")
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0))
    expected_loss = whole(model, batch, weights)
    expected = gradients(model, expected_loss)
    loss = ChunkedLoss.install(model, chunk=chunk)
    with loss.using(Targets.of(batch["labels"], weights)):
        found = model(**batch).loss
    assert float(found) == pytest.approx(float(expected_loss), rel=1e-6)
    assert_same(gradients(model, found), expected)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_labels_are_smoothed_as_transformers_does_it(chunk: int) -> None:
    model, batch = ready("llama"), batch_of("llama")
    given = {name: value for name, value in batch.items() if name != "labels"}
    expected_loss = LabelSmoother(0.2)(model(**given), batch["labels"], shift_labels=True, num_items_in_batch=1)
    expected = gradients(model, expected_loss)
    loss = ChunkedLoss.install(model, chunk=chunk, smoothing=0.2)
    with loss.using(Targets.of(batch["labels"])):
        found = model(**batch).loss
    assert float(found) == pytest.approx(float(expected_loss), rel=1e-6)
    assert_same(gradients(model, found), expected)


def test_no_logits_are_made() -> None:
    model, batch = ready("llama"), batch_of("llama")
    loss = ChunkedLoss.install(model)
    with loss.using(Targets.of(batch["labels"])):
        outputs = model(**batch)
    assert outputs.logits.shape[-1] == model.config.hidden_size


def test_outside_the_model_is_unchanged() -> None:
    model, batch = ready("llama").eval(), batch_of("llama")
    before = model(**batch)
    loss = ChunkedLoss.install(ChunkedLoss.install(model)._base)  # idempotent
    with pytest.raises(RuntimeError, match="planted"), loss.using(Targets.of(batch["labels"])):
        raise RuntimeError("planted")
    after = model(**batch)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    loss.remove()
    assert "forward" not in vars(model.lm_head) or model.lm_head.forward.__func__ is torch.nn.Linear.forward
    assert torch.equal(before.loss, model(**batch).loss)


def test_a_batch_without_loss_has_gradients_of_zero() -> None:
    """Wrappers wait for the gradient of every parameter."""
    model, batch = ready("llama"), batch_of("llama")
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    loss = ChunkedLoss.install(model)
    with loss.using(Targets.of(batch["labels"])):
        found = model(**batch).loss
    assert float(found) == 0
    grads = gradients(model, found)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(not grad.any() for grad in grads.values())


def test_rows_of_a_padded_batch() -> None:
    model = ready("llama")
    labels = torch.tensor([[IGNORED, 5, 6, IGNORED], [IGNORED, IGNORED, 7, 8]])
    ids = torch.tensor([[3, 5, 6, 0], [4, 5, 7, 8]])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    expected = whole(model, batch)
    loss = ChunkedLoss.install(model, chunk=2)
    with loss.using(Targets.of(labels)):
        found = model(**batch).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_frozen_head_and_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(ready("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    batch = batch_of("llama")
    expected_loss = whole(model, batch)
    expected = gradients(model, expected_loss)
    loss = ChunkedLoss.install(model, chunk=4)
    with loss.using(Targets.of(batch["labels"])):
        found = model(**batch).loss
    assert_same(gradients(model, found), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_good_as_whole_logits(autocast: bool) -> None:
    """Both differ from fp32 by what bf16 rounds; ours not by more."""
    exact_model, batch = ready("llama"), batch_of("llama")
    exact = gradients(exact_model, whole(exact_model, batch))
    errors = []
    for chunked in (False, True):
        model = ready("llama") if autocast else ready("llama").bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if chunked:
                loss = ChunkedLoss.install(model, chunk=3)
                with loss.using(Targets.of(batch["labels"])):
                    value = model(**batch).loss
            else:
                value = whole(model, batch)
        assert value.dtype == torch.float32
        found = gradients(model, value)
        errors.append(sum(float((found[name].float() - grad).norm() ** 2) for name, grad in exact.items()) ** 0.5)
    assert errors[1] <= 1.5 * errors[0]


def test_what_the_sum_is_divided_by_is_not_rounded() -> None:
    """1 / 1020 in bf16 is 0.38 % too large, and all gradients would be."""
    model, batch = ready("llama").bfloat16(), batch_of("llama")
    hidden: list[Tensor] = []
    model.model.register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state))
    loss = ChunkedLoss.install(model)
    found = []
    for divisor in (1, 1020):
        with loss.using(Targets.of(batch["labels"])):
            total = model(**batch).loss / divisor
        (gradient,) = torch.autograd.grad(total, hidden[-1])
        found.append(gradient.double() * divisor)
    assert float(found[1].norm() / found[0].norm()) == pytest.approx(1, abs=5e-4)


def test_what_chunks_cannot_express_is_refused() -> None:
    model = ready("gemma3_text")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="capped"):
        ChunkedLoss.install(model)
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(ready("llama"), peft.LoraConfig(target_modules=["lm_head"], r=2))
    with pytest.raises(ConfigError, match="output head"):
        ChunkedLoss.install(wrapped)
