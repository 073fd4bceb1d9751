"""Media are joined with one copy: in a worker, straight into memory that the process which trains can see."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import image_of_patches, synthetic_sample
from packtrain.families.contracts import contract_for

CONTRACT = contract_for({"model_type": "qwen3_vl"})


def sample(patches: int) -> EncodedSample:
    image = image_of_patches(torch.full((patches, 6), float(patches)), 2, patches // 2, merged=4, token_id=7)
    return synthetic_sample(f"{patches}", torch.arange(image.tokens + 2), supervised=0, images=image, position_rows=4)


ROWS = [PackedRow(key=PackKey(0, pack), samples=(sample(4 + 4 * pack), sample(8))) for pack in range(3)]


class Watching:
    """The collator, and whether what it made is shared already when it leaves the worker."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._collate = PackCollator(CONTRACT, pad_id=0, dtype=dtype)

    def __call__(self, rows: list[PackedRow]) -> tuple[Any, bool]:
        batch = self._collate(rows)
        return batch, batch["pixel_values"].is_shared() and batch["image_grid_thw"].is_shared()


def test_workers_hand_over_what_they_joined() -> None:
    collate = Watching(torch.bfloat16)
    here = list(DataLoader(ROWS, batch_size=1, collate_fn=collate))
    there = list(DataLoader(ROWS, batch_size=1, collate_fn=collate, num_workers=2))
    assert [shared for _, shared in here] == [False] * 3
    assert [shared for _, shared in there] == [True] * 3
    for (mine, _), (theirs, _), row in zip(here, there, ROWS, strict=True):
        expected = torch.cat([one.media["pixel_values"] for one in row.samples]).bfloat16()
        assert torch.equal(mine["pixel_values"], expected)
        assert torch.equal(theirs["pixel_values"], expected)
        assert mine["pixel_values"].dtype == theirs["pixel_values"].dtype == torch.bfloat16
        assert torch.equal(mine["image_grid_thw"], theirs["image_grid_thw"])
