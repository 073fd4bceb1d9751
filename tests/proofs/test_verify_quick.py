"""The small proof before training: bounded, the same work on every rank, and able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_made import failed, text_samples

from packtrain.batches.collate import PackCollator
from packtrain.core.errors import DataError
from packtrain.models import tiny
from packtrain.packs.values import IGNORED, TEXT
from packtrain.proofs.quick import FORWARDS, MOST_SAMPLES, MOST_TOKENS, quick_check, short_samples

VOCABULARY = 200


@pytest.fixture(scope="module")
def llama(subject: Any) -> Any:
    return tiny.build_model(subject("llama").folder)


def right(found: Any) -> PackCollator:
    return PackCollator(found.contract, pad_id=found.pad_id, pad_to_multiple=8)


def test_it_passes(subject: Callable[[str], Any], llama: Any) -> None:
    found = subject("llama")
    verdict = quick_check(llama, text_samples(VOCABULARY), right(found), found.contract)
    assert verdict.passed, verdict.failures
    assert {finding.check for finding in verdict.findings} == {
        *("labels", "hidden states (forward 1)", "hidden states (forward 3)"),
        *("neighbours' hidden states", "changes are seen"),
    }


def test_with_media(subject: Callable[[str], Any]) -> None:
    found = subject("qwen3_vl")
    model = tiny.build_model(found.folder)
    verdict = quick_check(model, found.some("text", "image", "video"), right(found), found.contract)
    assert verdict.passed, verdict.failures


def test_in_half_precision(subject: Callable[[str], Any]) -> None:
    found = subject("llama")
    model = tiny.build_model(found.folder)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    verdict = quick_check(model, text_samples(VOCABULARY), right(found), found.contract)
    assert verdict.passed, verdict.failures
    moved = next(finding for finding in verdict.findings if finding.check == "neighbours' hidden states")
    assert (moved.difference, moved.allowed) == (0.0, 0.0)
    wrong = quick_check(model, text_samples(VOCABULARY), _with_cache(right(found)), found.contract)
    assert failed(wrong) >= {"hidden states (forward 1)", "neighbours' hidden states"}


def _with_cache(collate: PackCollator) -> Callable[[Any], Any]:
    return lambda rows: {**collate(rows), "use_cache": True}


def test_contamination_and_labels_are_seen(subject: Callable[[str], Any], llama: Any) -> None:
    found = subject("llama")
    wrong = quick_check(llama, text_samples(VOCABULARY), _with_cache(right(found)), found.contract)
    assert failed(wrong) == {"hidden states (forward 1)", "hidden states (forward 3)", "neighbours' hidden states"}

    def across(rows: Any) -> Any:
        batch = dict(right(found)(rows))
        return {**batch, "labels": torch.where(batch["position_ids"] == 0, batch["input_ids"], batch["labels"])}

    assert failed(quick_check(llama, text_samples(VOCABULARY), across, found.contract)) == {"labels"}


@pytest.mark.parametrize("lengths", [(30,), (30, 20), (30, 20, 10), (5, 6, 7, 8, 9, 10), (1500, 1500), (3000,)])
def test_every_rank_runs_the_same_number_of_forwards(
    subject: Callable[[str], Any], llama: Any, lengths: tuple[int, ...]
) -> None:
    found = subject("llama")
    calls, tokens = 0, 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal calls, tokens
        calls, tokens = calls + 1, max(tokens, output.logits.shape[1])

    handle = llama.register_forward_hook(count)
    try:
        verdict = quick_check(llama, text_samples(VOCABULARY, lengths), right(found), found.contract)
    finally:
        handle.remove()
    assert verdict.passed, verdict.failures
    assert calls == FORWARDS
    assert tokens <= MOST_TOKENS


def test_what_is_chosen() -> None:
    chosen = short_samples(text_samples(VOCABULARY, (900, 40, 800, 30, 20, 50)))
    assert [len(sample) for sample in chosen] == [20, 30, 40, 50]
    assert len(chosen) == MOST_SAMPLES
    assert [len(sample) for sample in short_samples(text_samples(VOCABULARY, (1900, 1800)))] == [1800, 200]


@pytest.mark.parametrize("lengths", [(176,), (170, 175), (60, 90, 100), (176, 12)])
def test_what_is_chosen_fits_into_a_pack(lengths: tuple[int, ...]) -> None:
    chosen = short_samples(text_samples(VOCABULARY, lengths), 176)
    assert len(chosen) > 1
    assert sum(len(sample) for sample in chosen) <= 176


def test_a_sample_without_loss_is_not_chosen_unless_there_is_no_other() -> None:
    one, two, three = text_samples(VOCABULARY, (10, 20, 30))
    silent = replace(one, labels=torch.full_like(one.labels, IGNORED))
    assert [sample.id for sample in short_samples([silent, two, three])] == [two.id, three.id]
    alone = short_samples([silent])
    assert len(alone) == 2
    assert all((sample.labels[1:] != IGNORED).all() for sample in alone)
    with pytest.raises(DataError, match="no samples"):
        short_samples([])


def test_the_text_of_a_sample_that_is_too_long_has_no_media(subject: Callable[[str], Any]) -> None:
    (image,) = subject("qwen3_vl").some("image")
    chosen = short_samples([image])
    assert chosen[0] is image
    assert not chosen[1].media
    assert (chosen[1].token_kinds == TEXT).all()
    assert chosen[1].position_ids.shape == (4, len(chosen[1]))
