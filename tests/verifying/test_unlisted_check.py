"""Unlisted models are proven, not trusted: the right join passes, faults planted into it are caught by both checks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packtrain.app.verify import verify
from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.modeling.load import build_model
from packtrain.training.loss import LogitsTokenLoss, loss_on
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.compare import Collate
from packtrain.verifying.packing_check import RowRoom, Training, check_packing
from packtrain.verifying.samples import processor_samples
from packtrain.verifying.verification import verify_model

sys.path.append(str(Path(__file__).parents[1] / "delivery"))  # small folders of unlisted models
from unlisted_data import encoder_of, folder_of, request_for, weights_of

Rows = dict[str, Any]
CPU = torch.device("cpu")

# ---- the right join

QUICK = ("glm4v", "mistral3", "qwen3_vl_moe")
MORE = (
    *("aya_vision", "cohere_compass", "deepseek_vl", "ernie4_5_vl_moe", "gemma4", "gemma4_unified", "glm46v"),
    *("glm_ocr", "hyperclovax_vision_v2", "idefics2", "janus", "kimi_k25", "lighton_ocr", "llava_next_video"),
    *("ovis2", "paddleocr_vl", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "video_llama_3"),
    "vipllava",
)


@pytest.mark.parametrize("model_type", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_an_unlisted_type_is_verified(model_type: str) -> None:
    report = verify(str(weights_of(model_type)), device="cpu")
    assert report.passed, (report.failures, report.inconclusive)
    assert any("2 images" in one for one in report.samples)


@pytest.mark.full
def test_a_type_whose_layers_need_more_fails() -> None:
    report = verify(str(weights_of("minimax_m3_vl")), device="cpu")
    assert report.outcome == "failed"
    assert any(one.check.startswith("logits") for one in report.failures)


# Their layers let samples of a row see each other: they are refused before anything runs.
@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4", "lfm2_vl", "paligemma", "mllama"])
def test_a_type_that_cannot_be_packed_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(ConfigError, match=model_type) as refused:
        verify(str(folder_of(model_type)), device="cpu")
    assert "data.packing=false" in refused.value.fix


# ---- faults planted into the join


class Planted:
    """One model with its samples, whose packed rows can be spoilt."""

    def __init__(self, model_type: str) -> None:
        encoder = encoder_of(model_type)
        self.contract, self.pad_id = encoder.contract, encoder.pad_id
        self.samples = [one.sample for one in processor_samples(request_for(model_type), encoder)]
        self.model = build_model(str(folder_of(model_type)))
        self.loss = loss_on(LogitsTokenLoss(), CPU)

    def collate(self, spoil: Callable[[Rows, Sequence[EncodedSample]], Rows]) -> Collate:
        right = PackCollator(self.contract, pad_id=self.pad_id)

        def collate(rows: Any) -> Any:
            batch = right(rows)
            batch.update(spoil(batch, rows[0].samples))
            return batch

        return collate

    def verify(self, collate: Collate) -> CheckReport:
        return verify_model(
            self.model, self.samples, self.contract, collate, attn_implementation="sdpa", backward=False
        )

    def check(self, collate: Collate) -> CheckReport:
        return check_packing(
            self.model,
            self.samples,
            collate,
            self.contract,
            pack=self.samples,
            room=RowRoom(tokens=1024),
            training=Training(loss=self.loss),
        )


@functools.cache
def planted(model_type: str) -> Planted:
    return Planted(model_type)


def _right(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    return {}


def _swapped_patches(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    """Of two images of different samples with equally many patches."""
    counts = batch["image_grid_thw"].prod(-1).tolist()
    owners = [at for at, sample in enumerate(samples) for _ in range(sample.num_images)]
    blocks = list(batch["pixel_values"].split(counts))
    one, other = next(
        (i, j)
        for j in range(len(blocks))
        for i in range(j)
        if counts[i] == counts[j] and owners[i] != owners[j]
    )  # fmt: skip
    blocks[one], blocks[other] = blocks[other], blocks[one]
    return {"pixel_values": torch.cat(blocks)}


def _swapped_images(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    order = list(range(len(batch["pixel_values"])))
    order[0], order[-1] = order[-1], order[0]
    return {"pixel_values": batch["pixel_values"][order]}


def _running_positions(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    """As if the row were one sample."""
    positions = batch["position_ids"].clone()
    starts, at = [], 0
    for sample in samples:
        starts.append(at)
        positions[..., at : at + len(sample)] += at
        at += len(sample)
    assert len(starts) > 1
    return {"position_ids": positions}


def _along_columns(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    """Two images of one size side by side, instead of one below the other: the tensor has the same shape."""
    counts = batch["image_grid_thw"].prod(-1).tolist()
    blocks = list(batch["pixel_values"].split(counts))
    one, other = next((i, j) for j in range(len(blocks)) for i in range(j) if counts[i] == counts[j])
    beside = torch.cat([blocks[one], blocks[other]], dim=1).reshape(-1, blocks[one].shape[1])
    blocks[one], blocks[other] = beside.split(counts[one])
    return {"pixel_values": torch.cat(blocks)}


def _sizes_reversed(name: str) -> Callable[[Rows, Sequence[EncodedSample]], Rows]:
    def spoil(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
        sizes: Tensor = batch[name].flip(0)
        return {name: sizes}

    return spoil


def _kinds_of_one(batch: Rows, samples: Sequence[EncodedSample]) -> Rows:
    """Which tokens are images, moved by one."""
    return {"mm_token_type_ids": batch["mm_token_type_ids"].roll(1, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is spoilt in the rows of which type."""

    name: str
    model_type: str
    spoil: Callable[[Rows, Sequence[EncodedSample]], Rows]
    stops: bool = False  # the row does not run at all


FAULTS = (
    Fault(name="pixels swapped", model_type="glm4v", spoil=_swapped_patches),
    Fault(name="images swapped", model_type="mistral3", spoil=_swapped_images),
    Fault(name="positions run on", model_type="mistral3", spoil=_running_positions),
    Fault(name="three-dimensional positions run on", model_type="glm4v", spoil=_running_positions),
    Fault(name="pixels joined along columns", model_type="glm4v", spoil=_along_columns),
    Fault(name="sizes in another order", model_type="mistral3", spoil=_sizes_reversed("image_sizes")),
    Fault(name="grids in another order", model_type="glm4v", spoil=_sizes_reversed("image_grid_thw")),
)


@pytest.mark.parametrize("model_type", ["glm4v", "mistral3"])
def test_without_a_fault_both_checks_pass(model_type: str) -> None:
    it = planted(model_type)
    for report in (it.verify(it.collate(_right)), it.check(it.collate(_right))):
        assert report.passed, report.checks


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_join_is_caught_by_both_checks(fault: Fault) -> None:
    it = planted(fault.model_type)
    verified = it.verify(it.collate(fault.spoil))
    assert verified.outcome == "failed", verified.checks
    checked = it.check(it.collate(fault.spoil))
    assert checked.outcome == "failed", checked.checks
