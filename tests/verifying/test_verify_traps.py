"""Every known way to pack wrongly is caught, by the check that is about it; the right way passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_made import checks, failed, text_samples

from packtrain.core.errors import ConfigError, DataError
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow
from packtrain.families.family import BatchContract
from packtrain.modeling.load import build_model
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.compare import Collate
from packtrain.verifying.model_states import CHECKPOINTING, EVALUATION, TRAINING, Mode, in_mode
from packtrain.verifying.verification import verify_model

Batch = dict[str, Any]
PARITY = {"logits (forward 1)", "logits (forward 3)", "logits (eval)", "logits (train)"}


@pytest.fixture(scope="module")
def llama(subject: Any) -> Any:
    return build_model(subject("llama").folder)


@pytest.fixture(scope="module")
def qwen(subject: Any) -> Any:
    return build_model(subject("qwen3_vl").folder)


def prove_text(model: Any, subject: Any, broken: Callable[[Batch], Batch] = dict, **more: Any) -> CheckReport:
    """The proof on samples of text, with a collator whose batches are changed."""
    found = subject("llama")
    right = PackCollator(found.contract, pad_id=found.pad_id, pad_to_multiple=8)
    samples = text_samples(model.config.vocab_size)
    return verify_model(model, samples, found.contract, lambda rows: broken(dict(right(rows))), **more)


def prove_images(
    model: Any, subject: Any, collate: Callable[[Collate], Collate], samples: Sequence[EncodedSample], **more: Any
) -> CheckReport:
    """The proof on samples with images, with another collator around the right one."""
    found = subject("qwen3_vl")
    right = PackCollator(found.contract, pad_id=found.pad_id)
    return verify_model(model, samples, found.contract, collate(right), backward=False, **more)


# ---- the right way


def test_the_right_way_passes(llama: Any, subject: Any) -> None:
    report = prove_text(llama, subject)
    assert report.passed, report.failures
    assert checks(report) == {
        "labels",
        *PARITY,
        "logits (checkpointed)",
        *(f"{what} ({mode})" for what in ("loss", "gradients") for mode in ("eval", "train", "checkpointed")),
        *("neighbours, other text", "neighbours' loss, at inputs", "neighbours' gradients"),
    }
    assert not report.left_out


def test_the_model_is_left_as_it_was(llama: Any, subject: Any) -> None:
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    modes = [module.training for module in llama.modules()]
    prove_text(llama, subject)
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())
    assert [module.training for module in llama.modules()] == modes
    assert not llama.is_gradient_checkpointing
    assert all(weight.grad is None for weight in llama.parameters())


@pytest.mark.parametrize("mode", [EVALUATION, TRAINING, CHECKPOINTING])
def test_checkpointing_comes_back_as_it_was_set_up(mode: Mode, subject: Any) -> None:
    """Reentrant, and on some layers only: neither is what turning it on again would give."""
    model = build_model(subject("llama").folder)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.model.layers[0].gradient_checkpointing = False

    def state() -> list[tuple[bool, Any]]:
        found = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        return [(module.gradient_checkpointing, module._gradient_checkpointing_func) for module in found]

    before = state()
    with in_mode(model, mode):
        assert model.is_gradient_checkpointing == mode.checkpointing
    assert state() == before


# ---- broken collators


def test_a_cache_left_on(llama: Any, subject: Any) -> None:
    for broken in (
        lambda batch: {**batch, "use_cache": True},
        lambda batch: {name: value for name, value in batch.items() if name != "use_cache"},
    ):
        caught = failed(prove_text(llama, subject, broken))
        assert caught >= {*PARITY, "neighbours, other text", "neighbours' gradients", "gradients (eval)"}
        assert "neighbours' loss, at inputs" in caught
        assert "labels" not in caught
        assert "logits (checkpointed)" not in caught, "checkpointing turns the cache off, which hides it"


def test_a_mask_of_ones(llama: Any, subject: Any) -> None:
    caught = failed(prove_text(llama, subject, lambda b: {**b, "attention_mask": torch.ones_like(b["input_ids"])}))
    assert caught >= {*PARITY, "logits (checkpointed)", "neighbours, other text", "loss (eval)", "gradients (train)"}


def test_padding_with_a_mask(llama: Any, subject: Any) -> None:
    def padded(batch: Batch) -> Batch:
        """Padding tokens behind the samples, and a mask that says which they are."""
        real = sum(len(sample) for sample in text_samples(llama.config.vocab_size))
        mask = torch.ones_like(batch["input_ids"])
        mask[:, real:] = 0
        assert int((mask == 0).sum()) > 0, "there is padding"
        return {**batch, "attention_mask": mask}

    assert failed(prove_text(llama, subject, padded)) >= {*PARITY, "neighbours, other text"}


def test_positions_that_run_on(llama: Any, subject: Any) -> None:
    caught = failed(
        prove_text(llama, subject, lambda b: {**b, "position_ids": torch.arange(b["input_ids"].shape[1])[None]})
    )
    assert caught >= {*PARITY, "neighbours, other text", "neighbours' gradients"}


def test_labels_across_the_boundary(llama: Any, subject: Any) -> None:
    def across(batch: Batch) -> Batch:
        labels = batch["labels"].clone()
        starts = batch["position_ids"] == 0
        labels[starts] = batch["input_ids"][starts]
        return {**batch, "labels": labels}

    report = prove_text(llama, subject, across)
    caught = failed(report)
    assert caught >= {"labels", "loss (eval)", "gradients (eval)", "loss (checkpointed)"}
    assert not caught & PARITY, "logits do not depend on labels"
    assert "predicted from its neighbour" in next(f.where for f in report.checks if f.check == "labels")


def test_labels_of_another_token(llama: Any, subject: Any) -> None:
    report = prove_text(llama, subject, lambda b: {**b, "labels": b["labels"].roll(1, 1)}, backward=False)
    assert failed(report) >= {"labels", "loss (eval)"}


def test_three_rows_of_positions(qwen: Any, subject: Any) -> None:
    samples = subject("qwen3_vl").some("text", "image", "image-again")
    good = prove_images(qwen, subject, lambda right: right, samples)
    assert good.passed, good.failures
    wrong = prove_images(
        qwen, subject, lambda right: lambda rows: {**(b := right(rows)), "position_ids": b["position_ids"][1:]}, samples
    )
    assert failed(wrong) >= {*PARITY, "neighbours, other text", "neighbours, other pixels"}


def test_swapped_media(qwen: Any, subject: Any) -> None:
    samples = subject("qwen3_vl").some("text", "image", "image-again")
    assert samples[1].media["pixel_values"].shape == samples[2].media["pixel_values"].shape, "they would fit"

    def swapped(right: Collate) -> Collate:
        def collate(rows: Sequence[PackedRow]) -> Any:
            (row,) = rows
            text, one, two = row.samples
            return right([replace(row, samples=(text, replace(one, media=two.media), replace(two, media=one.media)))])

        return collate

    caught = failed(prove_images(qwen, subject, swapped, samples))
    assert caught >= {*PARITY, "loss (eval)", "neighbours, other pixels"}
    assert "neighbours, other text" not in caught, "text stayed with its sample"


def test_media_in_another_order_inside_one_sample(qwen: Any, subject: Any) -> None:
    """Not a matter of neighbours: only the comparison with the sample alone can see it."""
    samples = subject("qwen3_vl").some("two-images", "text")
    first = int(samples[1].media["image_grid_thw"][0].prod())

    def reversed_media(right: Collate) -> Collate:
        def collate(rows: Sequence[PackedRow]) -> Any:
            batch = right(rows)
            pixels = batch["pixel_values"]
            return {**batch, "pixel_values": torch.cat([pixels[first:], pixels[:first]])}

        return collate

    caught = failed(prove_images(qwen, subject, reversed_media, samples))
    assert caught >= PARITY
    assert not {check for check in caught if check.startswith("neighbours")}


# ---- wrong costs


@pytest.mark.parametrize("name", ["tokens", "supervised_tokens", "patches", "images", "videos"])
def test_a_wrong_cost_rule(llama: Any, subject: Any, name: str) -> None:
    found = subject("llama")
    costs = [*found.costs]
    costs[2] = replace(costs[2], **{name: getattr(costs[2], name) + 1})
    right = PackCollator(found.contract, pad_id=found.pad_id)
    report = verify_model(llama, found.samples, found.contract, right, costs=costs, backward=False)
    assert failed(report) == {"costs as computed"}
    assert found.samples[2].id in report.failures[0].where
    assert name.replace("_", " ") in report.failures[0].where


# ---- broken models


@contextmanager
def attention(model: Any, leak: float, *, backward_only: bool = False) -> Iterator[None]:
    """An attention that sees `leak` of what stands before a sample's boundary: 1 ignores boundaries altogether."""
    from torch.nn.functional import scaled_dot_product_attention as attend
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def leaky(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
        gqa = query.shape[1] != key.shape[1]
        scale = others.get("scaling")
        open_ = attend(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
        if attention_mask is None:
            return open_.transpose(1, 2), None
        shut = attend(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=gqa)
        through = leak * (open_ - shut)
        return (shut + (through - through.detach() if backward_only else through)).transpose(1, 2), None

    AttentionInterface.register("test_leaky", leaky)
    AttentionMaskInterface.register("test_leaky", sdpa_mask)
    was = model.config._attn_implementation
    model.set_attn_implementation("test_leaky")
    try:
        yield
    finally:
        model.set_attn_implementation(was)


def test_an_attention_that_ignores_boundaries(llama: Any, subject: Any) -> None:
    with attention(llama, 0.0):
        assert prove_text(llama, subject).passed, "the stand-in itself is right"
    with attention(llama, 1.0):
        caught = failed(prove_text(llama, subject))
    assert caught >= {*PARITY, "logits (checkpointed)", "neighbours, other text", "neighbours' gradients"}
    assert "labels" not in caught


def test_a_backward_pass_that_leaks(llama: Any, subject: Any) -> None:
    with attention(llama, 0.01, backward_only=True):
        caught = failed(prove_text(llama, subject))
    modes = ("eval", "train", "checkpointed")
    assert caught == {
        *(f"gradients ({mode})" for mode in modes),
        *("neighbours' loss, at inputs", "neighbours' gradients"),
    }


def test_in_half_precision_a_leak_below_rounding_is_seen(subject: Any) -> None:
    """Parity cannot tell it from rounding; that a neighbour moves at all can."""
    model = build_model(subject("llama").folder)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    with attention(model, 0.0):
        assert prove_text(model, subject).passed
    with attention(model, 0.004):
        caught = failed(prove_text(model, subject))
    assert "neighbours, other text" in caught
    assert "logits (forward 1)" not in caught, "which is what makes the other check necessary"


def test_a_fault_of_later_forwards(llama: Any, subject: Any) -> None:
    """Something that a forward leaves behind shows from the next one on."""
    calls = 0
    samples = text_samples(llama.config.vocab_size)

    def spoilt(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal calls
        if output.logits.shape[1] > max(map(len, samples)):  # a packed row
            calls += 1
            if calls == 3:
                output.logits = output.logits + 0.01
        return output

    handle = llama.register_forward_hook(spoilt)
    try:
        caught = failed(prove_text(llama, subject))
    finally:
        handle.remove()
    assert calls > 3
    assert caught == {"logits (forward 3)"}


def test_gradients_that_are_wrong_while_logits_are_right(llama: Any, subject: Any) -> None:
    weight = llama.model.layers[0].mlp.up_proj.weight
    handle = weight.register_hook(lambda gradient: gradient * (1.001 if llama.training else 1.0))
    try:
        report = prove_text(llama, subject)
    finally:
        handle.remove()
    assert failed(report) == {"gradients (train)", "gradients (checkpointed)"}
    assert {finding.where for finding in report.failures} == {"model.layers.0.mlp.up_proj.weight"}


def test_media_that_are_not_looked_at(qwen: Any, subject: Any) -> None:
    """Isolation is no proof where a change changes nothing."""
    handle = qwen.model.visual.register_forward_hook(
        lambda module, inputs, output: output.__class__(
            **{
                name: [part * 0 for part in value] if isinstance(value, (list, tuple)) else value * 0
                for name, value in output.items()
            }
        )
    )
    samples = subject("qwen3_vl").some("text", "image")
    try:
        report = prove_images(qwen, subject, lambda right: right, samples)
    finally:
        handle.remove()
    assert report.outcome == "inconclusive"
    assert not report.failures
    assert [finding.check for finding in report.inconclusive] == ["neighbours, other pixels"]
    assert "image changes itself by 0" in report.inconclusive[0].where


def test_not_a_number_never_passes(llama: Any, subject: Any) -> None:
    def spoilt(module: Any, inputs: Any, output: Any) -> Any:
        if output.logits.shape[1] > 40:
            output.logits = output.logits * float("nan")
        return output

    handle = llama.register_forward_hook(spoilt)
    try:
        caught = failed(prove_text(llama, subject))
    finally:
        handle.remove()
    assert caught >= {*PARITY, "loss (eval)", "gradients (eval)", "neighbours, other text"}


def test_a_model_that_cannot_take_a_packed_row(llama: Any, subject: Any) -> None:
    report = prove_text(llama, subject, lambda batch: {**batch, "position_ids": torch.zeros((1, 3), dtype=torch.long)})
    assert any("packed row runs" in check for check in failed(report))
    assert not report.passed


def test_a_model_that_fails_on_a_sample_alone(llama: Any, subject: Any) -> None:
    found = subject("llama")
    right = PackCollator(found.contract, pad_id=found.pad_id)
    samples = text_samples(10 * llama.config.vocab_size)
    with pytest.raises(DataError, match="the model failed"):
        verify_model(llama, samples, found.contract, right)


@pytest.mark.parametrize("module", ["torch._inductor.select_algorithm", "torch._dynamo.exc", "triton.compiler.errors"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_compiler_that_fails_is_not_the_model(llama: Any, subject: Any, module: str, alone: bool) -> None:
    found, failure = subject("llama"), type("NoValidChoicesError", (RuntimeError,), {"__module__": module})

    def fail(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if alone or kwargs["input_ids"].shape[1] > 40:
            try:
                raise failure("No choices to select")
            except RuntimeError as error:
                raise RuntimeError("in a layer") from error

    hook = llama.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(ConfigError, match=r"(?s)could not be compiled.*No choices.*varlen or sdpa"):
            verify_model(llama, text_samples(50), found.contract, PackCollator(found.contract, pad_id=found.pad_id))
    finally:
        hook.remove()


def test_one_sample_proves_nothing(llama: Any) -> None:
    contract = BatchContract(model_type="llama")
    with pytest.raises(ConfigError, match="at least two samples"):
        verify_model(llama, text_samples(50, (9,)), contract, PackCollator(contract, pad_id=0))


def test_dropout_is_off_while_looking_and_back_afterwards(subject: Any) -> None:
    model = build_model(subject("llama").folder)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
    ids = text_samples(model.config.vocab_size)[0].input_ids[None]
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits), "there is dropout"
    model.eval()
    assert prove_text(model, subject).passed
    assert {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.5}
    assert {layer.mlp[1].p for layer in model.model.layers} == {0.5}
