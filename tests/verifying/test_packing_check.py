"""The small proof before training: bounded, the same work on every rank, and able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_made import failed, text_samples

from packtrain.core.errors import DataError
from packtrain.delivery.collate.collators import PackCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT
from packtrain.families.contracts import contract_for
from packtrain.modeling.attention import set_attention
from packtrain.modeling.load import build_model
from packtrain.training.loss import ChunkedTokenLoss, loss_on
from packtrain.verifying.packing_check import (
    FORWARDS,
    MOST_SAMPLES,
    MOST_TOKENS,
    WITH_LOSS,
    RowRoom,
    Training,
    check_packing,
    short_samples,
)
from packtrain.verifying.verification import long_enough, verify_model

VOCABULARY = 200


@pytest.fixture(scope="module")
def llama(subject: Any) -> Any:
    return build_model(subject("llama").folder)


def right(found: Any) -> PackCollator:
    return PackCollator(found.contract, pad_id=found.pad_id, pad_to_multiple=8)


def trained(model: Any, smoothing: float = 0.0) -> Training:
    return Training(loss=loss_on(ChunkedTokenLoss(model, 16, smoothing), torch.device("cpu")), smoothing=smoothing)


def test_it_passes(subject: Callable[[str], Any], llama: Any) -> None:
    found = subject("llama")
    report = check_packing(llama, text_samples(VOCABULARY), right(found), found.contract, training=trained(llama))
    assert report.passed, report.failures
    assert {finding.check for finding in report.checks} == {
        *("labels", "hidden states (forward 1)", "hidden states (later)", "hidden states (whole pack)"),
        *("neighbours, other text", "training loss", "training loss, tokens", "training gradients"),
    }
    assert not report.left_out
    assert all(weight.grad is None for weight in llama.parameters())


def test_with_media(subject: Callable[[str], Any]) -> None:
    found = subject("qwen3_vl")
    model = build_model(found.folder)
    samples = [*text_samples(VOCABULARY, (8, 9, 10, 11)), *found.some("text", "image", "two-images", "video")]
    samples[:4] = [replace(one, position_ids=one.position_ids.expand(4, -1)) for one in samples[:4]]
    report = check_packing(
        model, samples, right(found), found.contract, room=RowRoom(tokens=600), training=trained(model)
    )
    assert report.passed, report.failures
    assert {one.split("(")[1].split(",")[0] for one in report.samples} == {"text", "image", "2 images", "video"}
    assert "neighbours, other pixels" in {finding.check for finding in report.checks}


def test_media_that_hardly_matter_stop_no_run_and_prove_nothing(subject: Callable[[str], Any]) -> None:
    found = subject("qwen3_vl")
    model = build_model(found.folder)

    def faint(module: Any, inputs: Any, output: Any) -> Any:
        output.pooler_output = 1 + 1e-6 * output.pooler_output
        output.deepstack_features = [1e-6 * one for one in output.deepstack_features]
        return output

    model.model.visual.register_forward_hook(faint)
    report = check_packing(model, found.some("text", "image"), right(found), found.contract)
    assert not report.failures
    assert (report.outcome, report.passed) == ("inconclusive", False)
    assert "image changes itself by" in report.inconclusive[0].where


@pytest.mark.parametrize(
    ("weighting", "smoothing", "alignment"), [("token", 0.1, 1), ("sample", 0.1, 16), ("sqrt", 0.0, 1)]
)
def test_losses_as_they_are_taken(
    subject: Callable[[str], Any], llama: Any, weighting: Any, smoothing: float, alignment: int
) -> None:
    found = subject("llama")
    collate = PackCollator(found.contract, pad_id=found.pad_id, loss_weighting=weighting, alignment=alignment)
    taken = trained(llama, smoothing)
    report = check_packing(llama, text_samples(VOCABULARY), collate, found.contract, training=taken)
    assert report.passed, report.failures
    other = replace(taken, smoothing=smoothing + 0.1)
    assert not check_packing(llama, text_samples(VOCABULARY), collate, found.contract, training=other).passed


def test_the_attention_of_the_model_comes_back(subject: Callable[[str], Any]) -> None:
    found = subject("qwen3_vl")
    model = build_model(found.folder)
    set_attention(model, "varlen", found.contract)

    def names() -> list[str]:
        configs = (model.config, model.config.text_config, model.config.vision_config)
        return [config._attn_implementation for config in configs]

    before, used = names(), []
    model.model.language_model.register_forward_pre_hook(lambda module, args: used.append(names()))
    collate = PackCollator(found.contract, pad_id=found.pad_id, boundaries=True)
    assert check_packing(model, found.some("text", "image"), collate, found.contract).passed
    assert names() == before
    assert ["sdpa"] * 3 in used, "the reference is the model's own"
    assert before in used


def test_random_numbers_of_training_are_no_fault() -> None:
    """A router that draws: packed and alone differ by chance, and evaluation mode says what there is to say."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    torch.manual_seed(0)
    config = PhimoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, initializer_range=0.2, router_jitter_noise=0.1,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = PhimoeForCausalLM(config).eval()
    contract, samples = contract_for(config.to_dict()), text_samples(VOCABULARY, (9, 12, 7))
    collate = PackCollator(contract, pad_id=0)
    first = check_packing(model, samples, collate, contract, training=trained(model))
    whole = verify_model(model, samples, contract, collate, loss=trained(model).loss)
    for report in (first, whole):
        assert report.passed, report.failures
        assert any("random beyond dropout" in line for line in report.left_out)


def test_in_half_precision(subject: Callable[[str], Any]) -> None:
    found = subject("llama")
    model = build_model(found.folder)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    report = check_packing(model, text_samples(VOCABULARY), right(found), found.contract)
    assert report.passed, report.failures
    moved = next(finding for finding in report.checks if finding.check == "neighbours, other text")
    assert (moved.difference, moved.allowed) == (0.0, 0.0)
    wrong = check_packing(model, text_samples(VOCABULARY), _with_cache(right(found)), found.contract)
    assert failed(wrong) >= {"hidden states (forward 1)", "neighbours, other text"}


def _with_cache(collate: PackCollator) -> Callable[[Any], Any]:
    return lambda rows: {**collate(rows), "use_cache": True}


def test_contamination_and_labels_are_seen(subject: Callable[[str], Any], llama: Any) -> None:
    found = subject("llama")
    wrong = check_packing(llama, text_samples(VOCABULARY), _with_cache(right(found)), found.contract)
    assert failed(wrong) == {
        "hidden states (forward 1)",
        "hidden states (later)",
        "hidden states (whole pack)",
        "neighbours, other text",
    }

    def across(rows: Any) -> Any:
        batch = dict(right(found)(rows))
        return {**batch, "labels": torch.where(batch["position_ids"] == 0, batch["input_ids"], batch["labels"])}

    assert failed(check_packing(llama, text_samples(VOCABULARY), across, found.contract)) == {"labels"}


@pytest.mark.parametrize("lengths", [(30,), (30, 20), (30, 20, 10), (5, 6, 7, 8, 9, 10), (1500, 1500), (3000,)])
def test_every_rank_runs_the_same_number_of_forwards(
    subject: Callable[[str], Any], llama: Any, lengths: tuple[int, ...]
) -> None:
    """And no logits of a row that is looked at whole."""
    found = subject("llama")
    calls, logits = 0, 0
    samples = text_samples(VOCABULARY, lengths)

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal calls, logits
        calls += 1
        if output.logits is not None and output.logits.shape[-1] == llama.config.vocab_size:
            logits = max(logits, output.logits.shape[1])

    handle = llama.register_forward_hook(count)
    try:
        report = check_packing(llama, samples, right(found), found.contract, pack=samples, training=trained(llama))
    finally:
        handle.remove()
    assert report.passed, report.failures
    assert calls == FORWARDS + WITH_LOSS
    assert logits <= MOST_TOKENS


def test_no_pass_needs_more_than_a_step(subject: Callable[[str], Any], llama: Any) -> None:
    """Rows as long as those of training, gradients of short samples, the longest without, logits where loss is."""
    found = subject("llama")
    samples = text_samples(VOCABULARY, (300, 310, 320, 330, 1500))
    for sample in samples:
        sample.labels[:-20] = IGNORED  # as behind media
    room = RowRoom(tokens=2048)
    collate = PackCollator(found.contract, pad_id=found.pad_id, static_shapes=StaticShapes(tokens=room.tokens))
    passes: list[tuple[int, int, bool]] = []

    def count(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        logits = output.logits.shape[1] if output.logits.shape[-1] == llama.config.vocab_size else 0
        passes.append((kwargs["input_ids"].shape[1], logits, torch.is_grad_enabled()))

    handle = llama.register_forward_hook(count, with_kwargs=True)
    try:
        options: Any = {"pack": samples[-1:], "room": room, "training": trained(llama)}
        report = check_packing(llama, samples, collate, found.contract, **options)
    finally:
        handle.remove()
    assert report.passed, report.failures
    assert max(tokens for tokens, *_ in passes) == room.tokens
    assert {tokens for tokens, _, learns in passes if learns} == {300, 310, 320, 330, room.tokens}
    assert (1500, 0, False) in passes
    assert {logits for _, logits, _ in passes} == {0, 20}


def test_what_is_chosen() -> None:
    chosen, _ = short_samples(text_samples(VOCABULARY, (900, 40, 800, 30, 20, 50)))
    assert [len(sample) for sample in chosen] == [20, 30, 40, 50]
    assert len(chosen) == MOST_SAMPLES
    assert [len(sample) for sample in short_samples(text_samples(VOCABULARY, (1900, 1800)))[0]] == [200, 1800]


@pytest.mark.parametrize("alignment", [1, 16, 50, 88])
@pytest.mark.parametrize("lengths", [(176,), (170, 175), (60, 90, 100), (176, 12), (161, 20)])
def test_what_is_chosen_fits_into_a_pack(lengths: tuple[int, ...], alignment: int) -> None:
    chosen, _ = short_samples(text_samples(VOCABULARY, lengths), RowRoom(tokens=176, alignment=alignment))
    assert len(chosen) > 1
    assert sum(-(-len(sample) // alignment) * alignment for sample in chosen) <= 176


def test_a_sample_without_loss_is_not_chosen_unless_there_is_no_other() -> None:
    one, two, three = text_samples(VOCABULARY, (10, 20, 30))
    silent = replace(one, labels=torch.full_like(one.labels, IGNORED))
    assert [sample.id for sample in short_samples([silent, two, three])[0]] == [two.id, three.id]
    alone, _ = short_samples([silent])
    assert len(alone) == 2
    assert all((sample.labels[1:] != IGNORED).all() for sample in alone)
    with pytest.raises(DataError, match="no samples"):
        short_samples([])


def test_the_text_of_a_sample_that_is_too_long_has_no_media(subject: Callable[[str], Any]) -> None:
    (image,) = subject("qwen3_vl").some("image")
    (text, whole), left_out = short_samples([image])
    assert whole is image
    assert not text.media
    assert (text.token_kinds == TEXT).all()
    assert text.position_ids.shape == (4, len(text))
    assert not left_out
    chosen, left_out = short_samples([image], RowRoom(tokens=len(image)))
    assert not any(sample.media for sample in chosen)
    assert "image: the shortest sample" in left_out[0]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 1024),
        ({"max_position_embeddings": 4096, "sliding_window": 2000}, 2064),
        ({"max_position_embeddings": 512}, 460),
    ],
)
def test_how_long_a_synthetic_sample_is(settings: dict[str, Any], tokens: int) -> None:
    """Longer than windows, and never longer than the model has positions for."""
    from transformers import MistralConfig

    config = MistralConfig(**{"sliding_window": None, **settings})
    assert long_enough(config, contract_for({"model_type": "mistral"})) == tokens
