"""Batches from packs: samples side by side with nothing between them, media joined as the model wants them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from packtrain.core.errors import ConfigError, DataError, InternalError
from packtrain.core.values import LedgerEntry
from packtrain.delivery.collate.batch_values import Batch, BatchInfo
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator, StaticShapes, sample_offsets
from packtrain.delivery.collate.join import EMPTY_TOKENS
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, EncodedSample, PackedRow, PackKey
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract
from packtrain.families.registry import all_families
from packtrain.packing.schedule import EMPTY_PACK

PAD_ID = 7
TEXT_MODEL = BatchContract(model_type="llama")
QWEN = contract_for({"model_type": "qwen3_vl"})


def made(
    name: str,
    tokens: int,
    *,
    media: Mapping[str, Tensor] | None = None,
    rows: int = 1,
    images: int = 0,
    kinds: Tensor | None = None,
) -> EncodedSample:
    ids = torch.arange(100, 100 + tokens)
    labels = ids.clone()
    labels[: max(1, tokens // 2)] = IGNORED
    positions = torch.arange(tokens) + torch.arange(rows)[:, None] * 10  # rows that can be told apart
    return EncodedSample(
        id=name,
        row=tokens,
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        token_kinds=torch.zeros_like(ids) if kinds is None else kinds,
        media=media or {},
        num_images=images,
    )


def row(*samples: EncodedSample, pack: int = 3, failures: tuple[LedgerEntry, ...] = ()) -> PackedRow:
    return PackedRow(key=PackKey(1, pack), samples=samples, failures=failures)


def packed(*samples: EncodedSample, contract: BatchContract = TEXT_MODEL, **options: Any) -> Batch:
    return PackCollator(contract, pad_id=PAD_ID, **options)([row(*samples)])


# ---- tokens


def test_samples_stand_side_by_side_and_positions_restart() -> None:
    batch = packed(made("a", 4), made("b", 2), made("c", 3))
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert batch["use_cache"] is False
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103, 100, 101, 100, 101, 102]]
    assert batch["labels"].tolist() == [[-100, -100, 102, 103, -100, 101, -100, 101, 102]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]


def test_four_rows_of_positions_are_kept_apart() -> None:
    batch = packed(made("a", 3, rows=4), made("b", 2, rows=4), contract=QWEN, pad_to_multiple=8)
    assert batch["position_ids"].shape == (4, 1, 8)
    assert batch["position_ids"][:, 0, :5].tolist() == [
        [offset + at for at in (0, 1, 2, 0, 1)] for offset in (0, 10, 20, 30)
    ]
    assert batch["position_ids"][:, 0, 5:].tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("multiple", [1, 4, 9, 16])
def test_padding_is_one_more_segment_without_loss(multiple: int) -> None:
    batch = packed(made("a", 4), made("b", 5), pad_to_multiple=multiple, boundaries=True)
    width = batch["input_ids"].shape[1]
    assert width % multiple == 0
    assert 9 <= width < 9 + multiple
    assert batch.info.padding == width - 9
    assert batch["input_ids"][0, 9:].tolist() == [PAD_ID] * (width - 9)
    assert batch["labels"][0, 9:].tolist() == [IGNORED] * (width - 9)
    positions = batch["position_ids"][0, 9:].tolist()
    assert positions == [at % 5 for at in range(width - 9)], "none is larger than a sample's"
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 9] + ([width] if width > 9 else [])


@pytest.mark.parametrize("contract", [TEXT_MODEL, QWEN])
def test_aligned_samples_begin_at_multiples(contract: BatchContract) -> None:
    """What fills up behind each is a segment without loss, with positions that no sample exceeds."""
    rows = 4 if contract is QWEN else 1
    samples = [made(str(at), tokens, rows=rows) for at, tokens in enumerate((5, 8, 2))]
    options = {"contract": contract, "boundaries": True, "loss_weighting": "sample"}
    batch = packed(*samples, alignment=4, pad_to_multiple=10, **options)
    plain = packed(*samples, **options)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 16, 18, 20]  # one segment for both kinds of filling
    assert (batch.info.tokens, batch.info.padding) == (15, 5)
    at = torch.cat([torch.arange(start, start + len(one)) for start, one in zip((0, 8, 16), samples, strict=True)])
    assert sample_offsets(samples, 4) == [0, 8, 16]
    for name in ("input_ids", "labels", "position_ids", "loss_weights"):
        assert torch.equal(batch[name][..., at], plain[name]), name
    others = torch.ones(20, dtype=torch.bool)
    others[at] = False
    assert (batch["input_ids"][0, others] == PAD_ID).all()
    assert (batch["labels"][0, others] == IGNORED).all()
    assert not batch["loss_weights"][0, others].any()
    assert batch["position_ids"].reshape(rows, -1)[:, others].tolist() == [[0, 1, 2, 0, 1]] * rows
    with pytest.raises(DataError, match="20"):
        packed(made("a", 5), made("b", 9), alignment=4, capacity=19)
    assert packed(alignment=4)["labels"].tolist() == packed()["labels"].tolist()


def test_boundaries_are_those_of_the_samples() -> None:
    batch = packed(made("a", 4), made("b", 2), boundaries=True)
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 4, 6]
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == 4
    assert "cu_seq_lens_q" not in packed(made("a", 4))


@pytest.mark.parametrize("lengths", [(), (4,), (4, 2, 3), (16,)])
def test_static_shapes_are_constant(lengths: tuple[int, ...]) -> None:
    shapes = StaticShapes(tokens=16, segments=5)
    batch = packed(*(made(str(at), tokens) for at, tokens in enumerate(lengths)), static_shapes=shapes)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 16)
    assert batch["cu_seq_lens_q"].shape == (6,)
    assert batch["cu_seq_lens_q"][-1] == 16
    assert batch["max_length_q"] == 16
    ends = batch["cu_seq_lens_q"].tolist()
    assert ends == sorted(ends)
    assert ends[1 : 1 + len(lengths)] == [sum(lengths[: at + 1]) for at in range(len(lengths))]


@pytest.mark.parametrize("lengths", [(), (4,), (4, 2, 3), (16,)])
def test_constant_tokens_leave_boundaries_as_they_are(lengths: tuple[int, ...]) -> None:
    """Kernels that take any number of samples spend no time on segments that are empty or shorter than said."""
    samples = [made(str(at), tokens) for at, tokens in enumerate(lengths)]
    batch = packed(*samples, static_shapes=StaticShapes(tokens=16))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 16)
    padding = 16 - sum(lengths)
    found = [*lengths, *([padding] if padding else [])]
    assert batch["cu_seq_lens_q"].diff().tolist() == found
    assert batch["max_length_q"] == max(found)


def test_more_than_static_shapes_hold_is_refused() -> None:
    shapes = StaticShapes(tokens=16, segments=2)
    assert packed(made("a", 8), made("b", 8), static_shapes=shapes)["cu_seq_lens_q"].tolist() == [0, 8, 16]
    with pytest.raises(DataError, match="at most 2 segments"):
        packed(made("a", 4), made("b", 2), static_shapes=shapes)
    with pytest.raises(DataError, match="pack 3 of epoch 1"):
        packed(made("a", 17), static_shapes=shapes)
    with pytest.raises(ConfigError, match="static shapes"):
        PackCollator(TEXT_MODEL, pad_id=0, capacity=32, static_shapes=shapes)


@pytest.mark.parametrize("collator", [PackCollator, PaddedCollator])
def test_more_than_was_planned_is_an_error_that_names_the_pack(collator: Any) -> None:
    collate = collator(TEXT_MODEL, pad_id=0, capacity=8)
    assert collate([row(made("short", 3), made("fits", 5))]).info.tokens == 8
    with pytest.raises(DataError, match=r"pack 3 of epoch 1[\s\S]*long \(9\)[\s\S]*at most 8"):
        collate([row(made("long", 9))])


def test_a_pack_is_a_whole_batch() -> None:
    collate = PackCollator(TEXT_MODEL, pad_id=0)
    for rows in ([], [row(made("a", 2)), row(made("b", 2))]):
        with pytest.raises(ConfigError, match="packs in one batch"):
            collate(rows)


@pytest.mark.parametrize("collator", [PackCollator, PaddedCollator])
def test_what_the_encoder_promises_is_checked(collator: Any) -> None:
    good = made("a", 4)
    predicted = good.labels.clone()
    predicted[0] = 5
    broken = [
        {"labels": predicted},
        {"labels": good.labels[:-1]},
        {"position_ids": good.position_ids + 1},
        {"position_ids": good.position_ids.repeat(4, 1)},
        {"media": {"pixel_values": torch.zeros(1)}},
    ]
    collate = collator(TEXT_MODEL, pad_id=0)
    collate([row(good)])
    for change in broken:
        with pytest.raises(InternalError, match="a: "):
            collate([row(_with(good, **change))])


def _with(sample: EncodedSample, **changes: Any) -> EncodedSample:
    from dataclasses import replace

    return replace(sample, **changes)


# ---- packs without samples


@pytest.mark.parametrize("family", sorted(name for name, one in all_families().items() if one.contract is not None))
@pytest.mark.parametrize("collator", [PackCollator, PaddedCollator])
def test_an_empty_pack_is_a_row_without_loss_and_media(collator: Any, family: str) -> None:
    contract = contract_for({"model_type": family})
    lost = LedgerEntry(id="gone", origin="here:1", stage="decode", reason="corrupt")
    for failures in ((), (lost,)):
        batch = collator(contract, pad_id=PAD_ID)([row(pack=EMPTY_PACK, failures=failures)])
        assert batch["input_ids"].tolist() == [[PAD_ID] * EMPTY_TOKENS]
        assert batch["labels"].tolist() == [[IGNORED] * EMPTY_TOKENS]
        assert batch["position_ids"].shape[-2:] == (1, EMPTY_TOKENS)
        assert not set(contract.media) & set(batch)
        assert (contract.token_types in batch) == (contract.token_types is not None)
        assert batch.info.failures == failures
        assert (batch.info.samples, batch.info.tokens, batch.info.supervised_tokens) == (0, 0, 0)
        assert batch.info.padding == EMPTY_TOKENS


# ---- media


def test_rows_of_media_are_joined_in_order() -> None:
    first = {"pixel_values": torch.ones(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    last = {"pixel_values": torch.full((8, 6), 2.0), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    samples = [made("a", 3, rows=4, media=first), made("b", 3, rows=4), made("c", 3, rows=4, media=last)]
    for collator in (PackCollator, PaddedCollator):
        batch = collator(QWEN, pad_id=0, dtype=torch.bfloat16)([row(*samples)])
        assert batch["pixel_values"].dtype == torch.bfloat16
        assert batch["pixel_values"][:, 0].tolist() == [1.0] * 4 + [2.0] * 8
        assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
        assert batch["image_grid_thw"].dtype == torch.int64
        assert "pixel_values_videos" not in batch
        assert batch.info.patches == 12


def test_images_of_several_sizes_share_one_row_or_one_each() -> None:
    contract = contract_for({"model_type": "idefics3"})
    small = {"pixel_values": torch.ones(1, 2, 3, 4, 4), "pixel_attention_mask": torch.ones(1, 2, 4, 4)}
    large = {"pixel_values": torch.ones(1, 1, 3, 6, 4), "pixel_attention_mask": torch.ones(1, 1, 6, 4)}
    samples = [made("a", 3, media=small, images=2), made("b", 3), made("c", 3, media=large, images=1)]
    batch = packed(*samples, contract=contract, patch_size=2)
    assert batch["pixel_values"].shape == (1, 3, 3, 6, 4)
    assert batch["pixel_attention_mask"].sum(dim=(0, 2, 3)).tolist() == [16, 16, 24]
    assert batch.info.images == 3
    assert batch.info.patches == 2 * 4 + 6
    padded = PaddedCollator(contract, pad_id=0)([row(*samples)])
    assert padded["pixel_values"].shape == (3, 2, 3, 6, 4)
    assert padded["pixel_attention_mask"].sum(dim=(2, 3)).tolist() == [[16, 16], [0, 0], [24, 0]]
    assert padded.info.patches is None, "tiles were counted without knowing the size of a patch"


def test_tiles_are_filled_up_and_images_counted_for_each_sample() -> None:
    contract = contract_for({"model_type": "llava_onevision"})
    one = {"pixel_values": torch.ones(1, 5, 3, 2, 2), "image_sizes": torch.tensor([[9, 9]])}
    two = {"pixel_values": torch.ones(2, 1, 3, 2, 2), "image_sizes": torch.tensor([[4, 4], [5, 5]])}
    samples = [made("a", 3, media=one, images=1), made("b", 3), made("c", 3, media=two, images=2)]
    batch = packed(*samples, contract=contract)
    assert batch["pixel_values"].shape == (3, 5, 3, 2, 2)
    assert batch["pixel_values"].sum(dim=(2, 3, 4)).tolist() == [[12] * 5, [12, 0, 0, 0, 0], [12, 0, 0, 0, 0]]
    assert batch["image_sizes"].tolist() == [[9, 9], [4, 4], [5, 5]]
    assert batch["batch_num_images"].tolist() == [1, 0, 2]
    assert "batch_num_images" not in packed(made("b", 3), contract=contract)


def test_videos_that_cannot_be_one_block_are_refused_by_name() -> None:
    contract = contract_for({"model_type": "llava_onevision"})
    short, long = ({"pixel_values_videos": torch.ones(1, frames, 3, 2, 2)} for frames in (2, 5))
    assert (
        packed(made("a", 3, media=short), made("b", 3, media=short), contract=contract)["pixel_values_videos"].shape[0]
        == 2
    )
    with pytest.raises(DataError, match=r"(?s)a \(1, 2.*b \(1, 5.*num_frames"):
        packed(made("a", 3, media=short), made("b", 3, media=long), contract=contract)


def test_image_blocks_of_two_samples_must_not_touch() -> None:
    contract = contract_for({"model_type": "gemma3"})
    ends = made("ends", 4, kinds=torch.tensor([0, 0, IMAGE, IMAGE]))
    begins = made("begins", 3, kinds=torch.tensor([IMAGE, IMAGE, 0]))
    types = packed(ends, made("text", 1), begins, contract=contract, pad_to_multiple=10)["token_type_ids"]
    assert types.tolist() == [[0, 0, 1, 1, 0, 1, 1, 0, 0, 0]]
    packed(begins, ends, contract=contract)
    with pytest.raises(DataError, match="'ends' and 'begins'"):
        packed(ends, begins, contract=contract)
    padded = PaddedCollator(contract, pad_id=0)([row(ends, begins)])
    assert padded["token_type_ids"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


# ---- padded


def test_padded_rows_are_samples() -> None:
    collate = PaddedCollator(TEXT_MODEL, pad_id=PAD_ID)
    batch = collate([row(made("a", 4), made("b", 2)), row(made("c", 3), pack=4)])
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103], [100, 101, 7, 7], [100, 101, 102, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 102, 103], [-100, 101, -100, -100], [-100, 101, 102, -100]]
    assert batch["position_ids"].shape == (3, 4)
    assert batch.info.padding == 3
    assert [key.pack for key in batch.info.keys] == [3, 4]
    three = PaddedCollator(QWEN, pad_id=0)([row(made("a", 3, rows=4), made("b", 2, rows=4))])
    assert three["position_ids"].shape == (3, 2, 3)
    assert three["position_ids"][:, 0].tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


# ---- what is known about a batch


def test_the_batch_knows_what_it_holds() -> None:
    lost = LedgerEntry(id="gone", origin="here:1", stage="decode", reason="corrupt")
    batch = PackCollator(TEXT_MODEL, pad_id=0)([row(made("a", 4), made("b", 2), failures=(lost,))])
    assert batch.info == BatchInfo(
        keys=(PackKey(1, 3),),
        ids=("a", "b"),
        rows=(4, 2),
        lengths=(4, 2),
        tokens=6,
        squared_tokens=20,
        supervised_tokens=3,
        loss_total=3.0,
        failures=(lost,),
    )
    assert batch.info.samples == 2
    assert batch.info.supervised_tokens == int((batch["labels"] != IGNORED).sum())


@pytest.mark.parametrize(
    "moved",
    [
        copy.copy,
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.to("cpu"),
        lambda batch: Batch(batch),
    ],
    ids=["copied", "pickled", "moved", "rebuilt"],
)
def test_what_is_known_travels_with_the_batch(moved: Any) -> None:
    batch = packed(made("a", 4), boundaries=True)
    after = moved(batch)
    assert isinstance(after, Batch)
    assert after.info == batch.info
    assert set(after) == set(batch)
    assert all(
        torch.equal(after[name], batch[name]) if isinstance(batch[name], Tensor) else after[name] == batch[name]
        for name in batch
    )


def test_a_batch_rebuilt_from_plain_items_has_empty_information() -> None:
    assert Batch({"input_ids": 1}).info == BatchInfo()
