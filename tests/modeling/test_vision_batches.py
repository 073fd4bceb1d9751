"""Encoders that run on some images at a time, or are recomputed: nothing but memory changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoded import VISION, WITH_VIDEO, contract, fresh_model, gradients, logits, loss_of, packed, sample
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from two_ranks import SPLIT, STEPS, build, loss, run_ranks, update, whole
from two_ranks import batch_of as batch_of_rank

from packtrain.core.errors import ConfigError
from packtrain.modeling import vision as encoder_module
from packtrain.modeling.attention import set_attention
from packtrain.modeling.model_parts import model_parts
from packtrain.modeling.vision import add_empty_media_hook, checkpoint_parts, grid_pieces, split_vision

ROWS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QUICK = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # one of each kind of encoder
FAMILIES = [family if family in QUICK else pytest.param(family, marks=pytest.mark.more) for family in VISION]
DEADLINE = 240.0


def batch_of(family: str) -> Any:
    """Several images in several samples, and a video where the family takes one."""
    members = [sample(family, "image", seed=1), sample(family), sample(family, "image", "image", seed=3)]
    if family in WITH_VIDEO:
        members.append(sample(family, "video", seed=4))
    return packed(family, *members)


def trained(model: Any, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    model.zero_grad()
    loss_of(model, batch).backward()
    with torch.no_grad():
        return gradients(model), logits(model, batch)


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative to the largest gradient, because the loss is a sum over tokens."""
    assert set(found) == set(wanted)
    scale = max(1.0, max(float(value.abs().max()) for value in wanted.values()))
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale


class Runs:
    """Counts what an encoder runs on."""

    def __init__(self, model: Any) -> None:
        self.patches: list[int] = []
        self.encoder: Any = model_parts(model).vision
        inside = getattr(self.encoder, "patch_embed", None) or self.encoder.embeddings
        inside.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pixels = args[0] if args else kwargs["pixel_values"]
        patch = self.encoder.config.patch_size
        side = patch[0] if isinstance(patch, list | tuple) else patch
        each = 1 if pixels.ndim == 2 else (pixels.shape[-1] // side) * (pixels.shape[-2] // side)
        self.patches.append(len(pixels) * each)

    def take(self) -> list[int]:
        found, self.patches = self.patches, []
        return found


def largest_unit(family: str) -> int:
    """Patches of the largest frame or tile of the batch."""
    batch = batch_of(family)
    if family in ROWS:
        grids = [*batch["image_grid_thw"].tolist(), *batch["video_grid_thw"].tolist()]
        return max(height * width for _, height, width in grids)
    config = fresh_model(family).config.vision_config
    side = config.patch_size[0] if isinstance(config.patch_size, list) else config.patch_size
    return (batch["pixel_values"].shape[-1] // side) ** 2


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_the_same_numbers(family: str) -> None:
    """Also where a limit is smaller than one image, and where pieces hold several images."""
    model, batch = fresh_model(family).train(), batch_of(family)
    wanted, scores = trained(model, batch)
    runs, unit = Runs(model), largest_unit(family)
    trained(model, batch)
    once = runs.take()
    for limit in (1, 2 * max(once) // 3):
        split = split_vision(model, limit)
        assert split is not None
        found, again = trained(model, batch)
        assert furthest(found, wanted) <= 1e-5
        assert float((again - scores).abs().max()) <= 1e-5
        ran = runs.take()
        assert len(ran) > len(once), "nothing was split"
        assert sum(ran) == sum(once)
        assert max(ran) <= max(limit, unit)
    split.remove()
    trained(model, batch)
    assert runs.take() == once, "the encoder was not left as it was"


def test_a_fault_at_a_boundary_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices one image that was taken twice, in place of its neighbour."""
    model, batch = fresh_model("gemma3").train(), batch_of("gemma3")
    wanted, _ = trained(model, batch)
    joined = encoder_module._concatenated

    def wrong(outputs: Any, again: Any) -> Any:
        return joined([outputs[0], *outputs[:-1]], again)

    monkeypatch.setattr(encoder_module, "_concatenated", wrong)
    split_vision(model, 256)
    found, _ = trained(model, batch)
    assert furthest(found, wanted) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_what_fits_runs_at_once(family: str) -> None:
    model, batch = fresh_model(family), batch_of(family)
    split_vision(model, 10**6)
    runs = Runs(model)
    with torch.no_grad():
        logits(model, batch)
    assert len(runs.take()) == 1 + ("pixel_values_videos" in batch)


@given(
    grids=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=8),
    limit=st.integers(1, 80),
)
def test_frames_stay_whole_and_in_order(grids: list[tuple[int, int, int]], limit: int) -> None:
    pieces = list(grid_pieces(grids, limit))
    frames = [(height, width) for time, height, width in grids for _ in range(time)]
    assert [(h, w) for piece in pieces for t, h, w in piece for _ in range(t)] == frames
    sizes = [sum(t * h * w for t, h, w in piece) for piece in pieces]
    for size, piece in zip(sizes, pieces, strict=True):
        assert size <= limit or sum(t for t, _, _ in piece) == 1
    for size, following in zip(sizes, pieces[1:], strict=False):
        assert size + following[0][1] * following[0][2] > limit, "a piece that had room for one more"


def test_pieces_under_varlen_attention_and_without_media() -> None:
    """The encoder's segments are those of its own piece, and ranks without images still take part."""
    family = "qwen3_vl"
    model, batch = fresh_model(family).train(), batch_of(family)
    wanted, _ = trained(model, batch)
    set_attention(model, "varlen", contract(family))
    add_empty_media_hook(model, contract(family))
    split_vision(model, 100)
    runs = Runs(model)
    assert furthest(trained(model, batch)[0], wanted) <= 1e-5
    assert len(runs.take()) > 4
    text, _ = trained(model, packed(family, sample(family)))
    assert set(text) == set(wanted)
    assert len(runs.take()) == 1


def test_pieces_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "qkv", "linear_fc1"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(fresh_model("qwen3_vl"), config).train()
    batch = batch_of("qwen3_vl")
    wanted, _ = trained(model, batch)
    assert any("visual" in name for name in wanted)
    split_vision(model, 300)
    runs = Runs(model)
    assert furthest(trained(model, batch)[0], wanted) <= 1e-5
    assert len(runs.take()) > 2


def test_a_copy_of_a_model_splits_its_own_encoder() -> None:
    model, batch = fresh_model("gemma3"), batch_of("gemma3")
    split_vision(model, 256)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for weight in again.parameters():
            weight.zero_()
        assert not logits(again, batch).any()
    split_vision(model, 512)  # replaces the first
    runs = Runs(model)
    with torch.no_grad():
        logits(model, batch)
    assert runs.take() == [512, 256]


def test_models_of_text_are_left_alone() -> None:
    assert split_vision(fresh_model("llama"), 10) is None


def test_what_was_worked_out_before_is_cut_as_well() -> None:
    """Positions of patches and ends of frames, as they are handed to the encoder to spare waiting for the GPU."""
    vision_utils = pytest.importorskip("transformers.vision_utils")
    model, batch = fresh_model("qwen3_vl"), batch_of("qwen3_vl")
    set_attention(model, "varlen", contract("qwen3_vl"))
    encoder = model.model.visual
    pixels = torch.cat([batch["pixel_values"], batch["pixel_values_videos"]])
    grid = torch.cat([batch["image_grid_thw"], batch["video_grid_thw"]])
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=encoder.spatial_merge_size,
    )
    known = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, encoder.spatial_merge_size),
        "interp_indices": indices,
        "interp_weights": weights,
        "max_seqlen": 4096,
    }
    with torch.no_grad():
        wanted = encoder(pixels, grid_thw=grid)
        runs = Runs(model)
        split_vision(model, 40)
        found = encoder(pixels, grid_thw=grid, **known)
    assert len(runs.take()) > 3
    assert torch.allclose(found.pooler_output, wanted.pooler_output, atol=1e-5)
    for one, other in zip(found.deepstack_features, wanted.deepstack_features, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_what_cannot_be_cut_is_refused() -> None:
    model, batch = fresh_model("qwen2_5_vl"), batch_of("qwen2_5_vl")
    split_vision(model, 10)
    with pytest.raises(ConfigError, match="window_index"):
        model.model.visual(
            batch["pixel_values"], grid_thw=batch["image_grid_thw"], window_index=torch.arange(len(batch))
        )


# ---- recomputing


def _saved(model: Any, batch: Any) -> dict[str, int]:
    """Numbers that are kept for the backward pass by layers of the encoder and of the language model."""
    parts = model_parts(model)
    kept = {"language": 0, "vision": 0, "": 0}
    inside = [""]

    def pack(tensor: Tensor) -> Tensor:
        kept[inside[-1]] += tensor.numel()
        return tensor

    handles = []
    for name, part in (("language", parts.language), ("vision", parts.vision)):
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))  # type: ignore[union-attr]
        handles.append(part.register_forward_hook(lambda *_: inside.pop() and None))  # type: ignore[union-attr]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_recomputed_independently(family: str) -> None:
    model, batch = fresh_model(family).train(), batch_of(family)
    wanted, _ = trained(model, batch)
    plain = _saved(model, batch)
    assert plain["language"] > 0
    assert plain["vision"] > 0
    for language, vision in ((True, False), (False, True), (True, True), (False, False)):
        checkpoint_parts(model, language=language, vision=vision)
        kept = _saved(model, batch)
        assert (kept["language"] < 0.9 * plain["language"]) == language
        assert (kept["vision"] < 0.9 * plain["vision"]) == vision
        assert furthest(trained(model, batch)[0], wanted) <= 1e-5


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_that_are_recomputed(family: str) -> None:
    model, batch = fresh_model(family).train(), batch_of(family)
    wanted, _ = trained(model, batch)
    split_vision(model, largest_unit(family))
    checkpoint_parts(model, language=True, vision=True)
    runs = Runs(model)
    assert furthest(trained(model, batch)[0], wanted) <= 1e-5
    assert len(runs.take()) > 4


def test_a_frozen_encoder_keeps_nothing_when_layers_are_recomputed() -> None:
    """Trainer's own way makes inputs need gradients, which draws frozen encoders into the backward pass."""
    model, batch = fresh_model("gemma3").train(), batch_of("gemma3")
    model.model.vision_tower.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.model.vision_tower.modules():
        module.gradient_checkpointing = False
    assert _saved(model, batch)["vision"] > 0, "no problem any more: this need not be undone"
    checkpoint_parts(model, language=True, vision=True)
    assert _saved(model, batch)["vision"] == 0


def test_a_part_without_layers_is_refused() -> None:
    model = fresh_model("llama")
    model.model.layers = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="no layers"):
        checkpoint_parts(model, language=True, vision=False)


# ---- two processes

SCENARIOS = ("fsdp-own-split", "fsdp-own-frozen-split", "fsdp-own-checkpointed-split", "fsdp-split", "ddp-split")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = run_ranks(SCENARIOS, tmp_path_factory.mktemp("split-ranks"), DEADLINE)
    assert not isinstance(found, str), found
    return found


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_with_other_numbers_of_pieces_train_as_one_process(scenario: str, ranks: Any) -> None:
    """Sharded layers are gathered equally often on both ranks, whatever their images."""
    model, _ = build("one-frozen" if "frozen" in scenario else "one", hook=False)
    for step, kinds in enumerate(STEPS):
        batches = [batch_of_rank(each) for each in kinds]
        total = sum(batch.info.supervised_tokens for batch in batches)
        (sum(loss(model, batch) for batch in batches) / total).backward()
        wanted = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        for result in ranks[scenario]:
            found = result["gradients"][step]
            assert set(wanted) <= set(found)
            assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-5
        update(model)


def test_ranks_really_have_other_numbers_of_pieces() -> None:
    counts = []
    for kinds in STEPS[2]:
        batch = batch_of_rank(kinds)
        grids = batch["video_grid_thw"].tolist() if "video_grid_thw" in batch else []
        counts.append(len(list(grid_pieces(grids, SPLIT))))
    assert counts[0] < 2 <= counts[1]
