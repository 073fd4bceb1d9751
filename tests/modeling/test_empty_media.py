"""Batches without media: the vision encoder takes part with gradients of zero, and ranks do not wait for each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import (
    VISION,
    WITH_VIDEO,
    contract,
    fresh_model,
    gradients,
    logits,
    loss_of,
    packed,
    sample,
)
from two_ranks import STEPS, batch_of, build, loss, run_ranks, update, whole

from packtrain.modeling.vision import add_empty_media_hook

DEADLINE = 240.0


def trained(family: str, model: Any, *members: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, packed(family, *members)).backward()
    return gradients(model)


@pytest.mark.contract
@pytest.mark.parametrize("family", VISION)
def test_text_trains_the_same_parameters_as_images_and_no_number_changes(family: str) -> None:
    model = fresh_model(family).train()
    text = sample(family, words=5)
    before, plain = logits(model, packed(family, text)), trained(family, model, text)
    handle = add_empty_media_hook(model, contract(family))
    assert handle is not None
    hooked = trained(family, model, text)
    assert torch.equal(logits(model, packed(family, text)), before)
    assert all(torch.equal(hooked[name], plain[name]) for name in plain)
    added = set(hooked) - set(plain)
    assert len(added) > 20
    assert not any(hooked[name].any() for name in added)
    assert set(hooked) == set(trained(family, model, sample(family, "image", seed=1)))
    if family in WITH_VIDEO:
        assert set(hooked) == set(trained(family, model, sample(family, "video", seed=1)))
    handle.remove()
    assert set(trained(family, model, text)) == set(plain)


@pytest.mark.contract
@pytest.mark.parametrize("family", VISION)
def test_an_empty_pack_in_half_precision_gives_finite_zeros(family: str) -> None:
    model = fresh_model(family).to(torch.bfloat16).train()
    add_empty_media_hook(model, contract(family))
    loss_of(model, packed(family)).backward()
    found = gradients(model)
    assert len(found) > 40
    assert all(torch.isfinite(grad).all() and not grad.any() for grad in found.values())


def test_media_are_left_as_they_are() -> None:
    """The encoder runs once for a batch with images, and for a video alone as well."""
    model = fresh_model("qwen3_vl").train()
    add_empty_media_hook(model, contract("qwen3_vl"))
    for kinds in (("image",), ("video",), ()):
        assert _count_encoder(model, packed("qwen3_vl", sample("qwen3_vl", *kinds, seed=1))) == 1, kinds


def _count_encoder(model: Any, batch: Any) -> int:
    calls: list[int] = []
    handle = model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    logits(model, batch)
    handle.remove()
    return len(calls)


def test_nothing_is_computed_for_nothing() -> None:
    """A frozen encoder, or no gradients: the encoder is left alone, unless its shards must be gathered."""
    model = fresh_model("qwen3_vl").train()
    add_empty_media_hook(model, contract("qwen3_vl"))
    batch = packed("qwen3_vl", sample("qwen3_vl"))
    with torch.no_grad():
        assert _count_encoder(model, batch) == 0
    model.model.visual.requires_grad_(False)
    assert _count_encoder(model, batch) == 0
    model.model.visual.merger.requires_grad_(True)
    assert _count_encoder(model, batch) == 1


def test_a_sharded_encoder_runs_equally_often_whatever_a_batch_holds() -> None:
    """Images and videos are two runs of this encoder, so one of them missing is a run missing."""
    model = fresh_model("qwen3_vl").train()
    add_empty_media_hook(model, contract("qwen3_vl"))
    next(model.model.visual.parameters()).ds_id = 0  # as a sharded parameter of DeepSpeed looks
    found = []
    for members in ((), ((),), (("image",),), (("video",),), (("image",), ("video",))):
        batch = packed("qwen3_vl", *(sample("qwen3_vl", *kinds, seed=at) for at, kinds in enumerate(members)))
        found.append(_count_encoder(model, batch))
        with torch.no_grad():
            found.append(_count_encoder(model, batch))
    assert found == [2] * 10


def test_a_projector_that_is_trained_alone_takes_part() -> None:
    model = fresh_model("llava").train()
    model.model.vision_tower.requires_grad_(False)
    plain = trained("llava", model, sample("llava"))
    add_empty_media_hook(model, contract("llava"))
    added = set(trained("llava", model, sample("llava"))) - set(plain)
    assert added == {name for name, _ in model.named_parameters() if "multi_modal_projector" in name}


def test_models_of_text_have_no_hook() -> None:
    assert add_empty_media_hook(fresh_model("llama"), contract("llama")) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    model = fresh_model("qwen3_vl").train()
    add_empty_media_hook(model, contract("qwen3_vl"))
    text, image = sample("qwen3_vl"), sample("qwen3_vl", "image", seed=1)
    plain = [trained("qwen3_vl", model, text), trained("qwen3_vl", model, image, text)]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = [trained("qwen3_vl", model, text), trained("qwen3_vl", model, image, text)]
    for before, after in zip(plain, again, strict=True):
        assert set(before) == set(after)
        assert max(float((before[name] - after[name]).abs().max()) for name in before) <= 1e-5


# ---- two processes


def expected(scenario: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Gradients of every step when one process has both ranks' batches, and each batch's loss at the end."""
    model, _ = build(scenario.replace("ddp", "one").replace("fsdp", "one"), hook=False)
    found = []
    for step in STEPS:
        batches = [batch_of(kinds) for kinds in step]
        total = sum(batch.info.supervised_tokens for batch in batches)
        (sum(loss(model, batch) for batch in batches) / total).backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        update(model)
    with torch.no_grad():
        return found, [float(loss(model, batch_of(kinds))) for kinds in STEPS[0]]


SCENARIOS = ("ddp", "ddp-frozen", "fsdp", "fsdp-frozen", "fsdp-own", "fsdp-own-frozen", "fsdp-own-checkpointed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = run_ranks(SCENARIOS, tmp_path_factory.mktemp("ranks"), DEADLINE)
    assert not isinstance(found, str), found
    return found


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_without_media_train_as_one_process(scenario: str, ranks: Any) -> None:
    steps, evaluated = expected(scenario)
    for rank, result in enumerate(ranks[scenario]):
        sharded = result["parameters"] if scenario.startswith("fsdp") else 0
        assert result["sharded"] == sharded, "not the parallelism that this is about"
        assert len(result["gradients"]) == len(STEPS)
        for step, (found, wanted) in enumerate(zip(result["gradients"], steps, strict=True)):
            assert set(wanted) <= set(found)
            for name in wanted:
                assert float((found[name] - wanted[name]).abs().max()) <= 1e-5, (rank, step, name)
        assert result["evaluated"] == pytest.approx(evaluated[rank], rel=1e-4)
    assert ("visual" in "".join(steps[0])) == ("frozen" not in scenario), "not the gradients that this is about"


@pytest.mark.full
@pytest.mark.parametrize(
    ("scenario", "symptom"), [("ddp", "finished reduction"), ("fsdp-own", "did not end|Connection|Timed out|timeout")]
)
def test_without_the_hook_ranks_fail_or_wait_for_ever(scenario: str, symptom: str, tmp_path: Path) -> None:
    found = run_ranks((scenario,), tmp_path, DEADLINE, hook=False)
    assert isinstance(found, str), "ranks without media were no problem: the tests above show nothing"
    assert re.search(symptom, found), found
    # A rank may die of mismatched collectives without a word; one that raises must say that it is about these.
    kinds = re.findall(r"rank \d: (\w+):", found)
    assert set(kinds) <= {"RuntimeError", "DistBackendError", "DistNetworkError"}, found
