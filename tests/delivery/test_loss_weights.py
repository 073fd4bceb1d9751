"""Weights of tokens: of a sample they add up to what was asked for, and a step's loss does not depend on its layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.batch_values import Batch, BatchInfo
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample, PackedRow, PackKey, VisionCounts
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract
from packtrain.packing.schedule import EMPTY_PACK

TEXT_MODEL = BatchContract(model_type="llama")
COLLATORS = [PackCollator, PaddedCollator]
OF_ALL = {"token": float, "sample": lambda n: float(n > 0), "sqrt": math.sqrt}  # what n tokens weigh together


def made(tokens: int, supervised: int, *, vision: VisionCounts | None = None, name: str = "a") -> EncodedSample:
    """A sample whose last tokens carry loss."""
    return replace(synthetic_sample(name, torch.arange(tokens) + 10, supervised=supervised), vision=vision)


def row(*samples: EncodedSample, pack: int = 0) -> PackedRow:
    return PackedRow(key=PackKey(0, pack), samples=samples)


samples_of = st.lists(
    st.integers(2, 12).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens - 1))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(shapes=samples_of, weighting=st.sampled_from(sorted(OF_ALL)), collator=st.sampled_from(COLLATORS))
def test_the_tokens_of_a_sample_weigh_the_same_and_together_what_was_asked_for(
    shapes: list[tuple[int, int]], weighting: str, collator: Any
) -> None:
    batch = collator(TEXT_MODEL, pad_id=0, loss_weighting=weighting)([row(*(made(*shape) for shape in shapes))])
    wanted = [OF_ALL[weighting](supervised) for _, supervised in shapes]
    assert batch.info.loss_total == pytest.approx(sum(wanted))
    if weighting == "token":
        assert "loss_weights" not in batch
        return
    weights, labels = batch["loss_weights"], batch["labels"]
    assert weights.shape == labels.shape
    assert weights.dtype == torch.float32
    assert torch.equal(weights > 0, labels != IGNORED)
    rows = weights[0].split([tokens for tokens, _ in shapes]) if collator is PackCollator else list(weights)
    for mine, total in zip(rows, wanted, strict=True):
        assert float(mine.sum()) == pytest.approx(total)
        assert len(mine[mine > 0].unique()) <= 1


@pytest.mark.parametrize("weighting", ["sample", "sqrt"])
def test_what_only_fills_up_weighs_nothing(weighting: Any) -> None:
    shapes = StaticShapes(tokens=16, segments=4)
    batch = PackCollator(TEXT_MODEL, pad_id=0, static_shapes=shapes, loss_weighting=weighting)([row(made(6, 4))])
    assert batch["loss_weights"].shape == (1, 16)
    assert not batch["loss_weights"][0, 6:].any()
    assert batch["loss_weights"][0, 2:6].all()


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("weighting", sorted(OF_ALL))
def test_an_empty_pack_weighs_nothing(collator: Any, family: str, weighting: Any) -> None:
    contract = contract_for({"model_type": family})
    batch = collator(contract, pad_id=0, loss_weighting=weighting)([row(pack=EMPTY_PACK)])
    assert batch.info.loss_total == 0
    if weighting != "token":
        assert batch["loss_weights"].shape == batch["labels"].shape
        assert not batch["loss_weights"].any()


def step_loss(batches: list[Batch], table: Tensor) -> Tensor:
    """The weighted losses of a step over the sum of its weights; next tokens are looked up in a table."""
    total = torch.zeros(())
    for batch in batches:
        targets = batch["labels"][..., 1:]
        weights = batch.get("loss_weights", (batch["labels"] != IGNORED).float())[..., 1:]
        logits = table[batch["input_ids"][..., :-1]]
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
        total = total + (losses * weights.flatten()).sum()
    return total / sum(batch.info.loss_total for batch in batches)


@pytest.mark.parametrize("weighting", sorted(OF_ALL))
def test_the_loss_of_a_step_is_the_mean_that_was_asked_for_in_any_layout(weighting: Any) -> None:
    table = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    samples = [made(tokens, supervised, name=str(tokens)) for tokens, supervised in ((12, 11), (5, 2), (7, 1), (9, 4))]
    each = []
    for sample in samples:
        losses = cross_entropy(table[sample.input_ids[:-1]], sample.labels[1:], reduction="sum")
        each.append((float(losses), int((sample.labels != IGNORED).sum())))
    share = OF_ALL[weighting]
    wanted = sum(loss / n * share(n) for loss, n in each) / sum(share(n) for _, n in each)
    pack = PackCollator(TEXT_MODEL, pad_id=0, loss_weighting=weighting)
    padded = PaddedCollator(TEXT_MODEL, pad_id=0, loss_weighting=weighting)
    layouts = [
        [pack([row(*samples)])],
        [pack([row(*samples[:1])]), pack([row(*samples[1:])])],
        [padded([row(sample) for sample in samples])],
        [padded([row(sample)]) for sample in samples] + [padded([row(pack=EMPTY_PACK)])],
    ]
    found = [float(step_loss(batches, table)) for batches in layouts]
    assert found == pytest.approx([wanted] * len(layouts), rel=1e-5)


def test_the_three_weightings_differ() -> None:
    table = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    batches = [row(made(12, 11), made(5, 1))]
    found = {
        weighting: float(step_loss([PackCollator(TEXT_MODEL, pad_id=0, loss_weighting=weighting)(batches)], table))  # type: ignore[arg-type]
        for weighting in OF_ALL
    }
    assert len({round(loss, 4) for loss in found.values()}) == 3


@pytest.mark.parametrize("collator", COLLATORS)
def test_unknown_weightings_are_refused_with_the_nearest(collator: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'sample'"):
        collator(TEXT_MODEL, pad_id=0, loss_weighting="samples")


# ---- what else a batch says of itself


@pytest.mark.parametrize("collator", COLLATORS)
def test_squares_are_those_of_what_attends_to_itself(collator: Any) -> None:
    image = VisionCounts(tiles=1, patches=6, squared_patches=36)
    video = VisionCounts(frames=4, tiles=2, patches=8, squared_patches=32)
    batch = collator(TEXT_MODEL, pad_id=0)([row(made(4, 1, vision=image), made(7, 2, vision=video))])
    info = batch.info
    assert info.squared_tokens == 16 + 49, "padding is not counted"
    assert (info.tiles, info.frames, info.patches, info.squared_patches) == (3, 4, 14, 68)
    nothing = collator(TEXT_MODEL, pad_id=0)([row(made(4, 1))])
    assert (nothing.info.tiles, nothing.info.patches, nothing.info.squared_patches) == (0, 0, 0)


def test_without_weights_every_supervised_token_weighs_one() -> None:
    assert BatchInfo(supervised_tokens=5).loss_total == 5.0
    assert BatchInfo(supervised_tokens=5, loss_total=0.0).loss_total == 0.0
    assert BatchInfo().loss_total == 0.0
