"""A model learns, and learns the same packed and padded: what is left of a difference is the order of sums.

The padded run is given the samples of each pack as rows of their own, so that every step has the same samples in both.
In double precision the two then agree to the last digits; what they differ by in single precision is rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from transformers.utils import logging

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.delivery.collate.collators import PaddedCollator
from packtrain.records.synthetic import write_dataset

pytestmark = pytest.mark.full
EPOCHS = 8
RUNS = {"full": ("qwen3_vl", {}), "lora": ("qwen3_vl", {"method": "lora"}), "text only": ("llama", {})}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's pictures and captions."""
    return write_dataset(tmp_path_factory.mktemp("pictures"), pictures=24)


def packs(pictures: Path, family: str) -> MultiModalDataset:
    if family == "llama":
        return small_run.dataset(family, epochs=EPOCHS)
    made = MultiModalDataset(
        DatasetConfig(
            dataset_path=str(pictures),
            model=f"tiny:{family}",
            processor_config={"max_pixels": 64 * 64},
            packing_length=1024,
            packs_per_step=2,
            epochs=EPOCHS,
            cache_dir=str(pictures.parent / "cache"),
            workers=1,
            check=0,
            max_failure_rate=0.5,
        )
    )
    made.build()
    return made


def trained(
    data: MultiModalDataset, folder: Path, settings: dict[str, Any], *, padded: bool, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step, and the weights at the end."""
    logging.set_verbosity_error()
    model = small_run.model_of(data.config.model_name.removeprefix("tiny:"), dropout=0.0, **settings).to(dtype)
    collator: Any = data.get_collator(dtype=dtype)
    if padded:
        contract, pad_id = data.encoder.contract, data.encoder.pad_id
        collator = PaddedCollator(contract, pad_id=pad_id, dtype=dtype)
    rate = 0.01 if settings else 0.003
    trainer = small_run.trainer_of(
        data, folder, model, parts={"data_collator": collator}, save_strategy="no", learning_rate=rate, weight_decay=0.0
    )
    trainer.train()
    return list(small_run.losses(trainer).values()), small_run.weights(trainer)


@pytest.mark.parametrize("name", RUNS)
def test_packed_and_padded_learn_the_same(name: str, pictures: Path, tmp_path: Path) -> None:
    family, settings = RUNS[name]
    data = packs(pictures, family)
    assert data.plan.epoch(0).load("samples").max() > 1, "something is packed"
    apart = {}
    for dtype in (torch.float64, torch.float32):
        packed, ours = trained(data, tmp_path / f"packed-{dtype}", settings, padded=False, dtype=dtype)
        padded, theirs = trained(data, tmp_path / f"padded-{dtype}", settings, padded=True, dtype=dtype)
        assert len(packed) == len(padded) == data.schedule.num_steps()
        assert padded == pytest.approx(packed, rel=1e-3)
        assert packed[-1] < 0.6 * packed[0], f"{packed[0]} to {packed[-1]}: it learns"
        apart[dtype] = small_run.difference(ours, theirs)
    print(name, apart)
    assert apart[torch.float64] < 1e-6
    assert apart[torch.float64] < 0.01 * apart[torch.float32], "rounding is all the difference there is"
