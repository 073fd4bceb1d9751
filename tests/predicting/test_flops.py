"""FLOPs are those that torch counts when the same models really run, forward and backward.

torch counts the whole square of the decoder's attention, which is twice what a causal kernel has to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import CONFIGS, QWEN3_VL_2B

from packtrain.families import tiny
from packtrain.modeling.load import build_model
from packtrain.predicting.flops import Flops, forward_flops, training_flops, work_model
from packtrain.predicting.memory_parts import count
from packtrain.predicting.shapes import read_shape, shape_from_config
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

PLAIN = TrainingSetup(gradient_checkpointing=False, vision_checkpointing=False)
TEXT = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text")
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava_onevision", "internvl", "gemma3")
QUICK = ("llama", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A tiny model, one batch for it, and what the batch is in numbers."""

    model: Any
    batch: dict[str, Any]
    shape: ModelShape
    load: Load


def case_of(family: str, folder: Path) -> Case:
    torch = pytest.importorskip("torch")
    tiny.write(family, folder)
    model, shape = build_model(folder), read_shape(folder)
    model.set_attn_implementation("eager")  # plain products, which torch counts one by one
    model.train()
    text = torch.arange(100, 148)[None]
    if shape.vision is None:
        return Case(model=model, batch={"input_ids": text}, shape=shape, load=load_of(48, []))
    from PIL import Image
    from transformers import AutoProcessor

    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    content = [{"type": "image", "image": Image.fromarray(noise)}, {"type": "text", "text": "How many circles?"}]
    batch = AutoProcessor.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    return Case(
        model=model,
        batch=dict(batch),
        shape=shape,
        load=load_of(batch["input_ids"].shape[1], spans(model, batch)),
    )


def spans(model: Any, batch: Any) -> list[int]:
    """Patches of everything that attends to itself in the encoder."""
    if "image_grid_thw" in batch:
        return [int(height * width) for times, height, width in batch["image_grid_thw"] for _ in range(int(times))]
    height, width = batch["pixel_values"].shape[-2:]
    side = model.config.vision_config.patch_size
    side = side[0] if isinstance(side, list | tuple) else side
    return [(height // side) * (width // side)] * (batch["pixel_values"].numel() // (3 * height * width))


def load_of(tokens: int, patches: list[int]) -> Load:
    return Load(
        tokens=tokens,
        squared_tokens=tokens**2,
        longest=tokens,
        supervised_tokens=tokens,
        patches=sum(patches),
        squared_patches=sum(span**2 for span in patches),
    )


def counted(case: Case, *, backward: bool) -> tuple[float, float]:
    """FLOPs of matrices and of attention that torch counts in a real pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        logits = case.model(**case.batch).logits
        if backward:
            logits.sum().backward()
    by_kind = counter.get_flop_counts()["Global"]
    attention = sum(flops for kind, flops in by_kind.items() if "bmm" in str(kind))
    return sum(by_kind.values()) - attention, attention


def as_counted(flops: Flops, recomputed_attention: float = 0.0) -> tuple[float, float]:
    """Our figures as torch sees them: all of the square."""
    causal = flops.attention + recomputed_attention
    attention = 2 * causal + flops.vision_attention
    return flops.executed - causal - flops.vision_attention, attention


def quick_or_full(families: tuple[str, ...]) -> list[Any]:
    return [family if family in QUICK else pytest.param(family, marks=pytest.mark.more) for family in families]


@pytest.mark.contract
@pytest.mark.parametrize("family", quick_or_full(TEXT + VISION))
def test_forward_and_backward_as_torch_counts_them(family: str, tmp_path: Path) -> None:
    case = case_of(family, tmp_path)
    assert (case.load.patches > 0) is (family in VISION)
    # InternVL's encoder has one row more than patches, its class token; Qwen2.5-VL's windows are cut short at edges.
    exact = {"internvl": 2e-3}.get(family, 1e-4)
    for backward in (False, True):
        ours = training_flops(case.shape, PLAIN, case.load) if backward else forward_flops(case.shape, case.load)
        matrices, attention = counted(case, backward=backward)
        assert as_counted(ours)[0] == pytest.approx(matrices, rel=exact)
        # Some versions compute rotary angles by a small product, which is counted with attention's.
        assert as_counted(ours)[1] == pytest.approx(attention, rel=0.03 if family == "qwen2_5_vl" else 2e-3)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_towers_read_before_their_last_layer_are_counted_as_if_it_were_trained(family: str, tmp_path: Path) -> None:
    case = case_of(family, tmp_path)
    forward = as_counted(forward_flops(case.shape, case.load))
    assert forward == pytest.approx(counted(case, backward=False), rel=2e-3)
    ours, theirs = as_counted(training_flops(case.shape, PLAIN, case.load)), counted(case, backward=True)
    assert sum(theirs) < sum(ours) < 1.1 * sum(theirs)  # one of the two layers of a tiny encoder; of 24 it is little


@pytest.mark.parametrize(
    ("frozen", "setup"),
    [
        (("visual",), replace(PLAIN, train_vision=False, train_projector=False)),
        (("visual.blocks", "visual.patch", "visual.pos"), replace(PLAIN, train_vision=False)),
        (("merger",), replace(PLAIN, train_projector=False)),
    ],
)
def test_frozen_parts_need_fewer_gradients(frozen: tuple[str, ...], setup: TrainingSetup, tmp_path: Path) -> None:
    case = case_of("qwen3_vl", tmp_path)
    for name, weight in case.model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    ours = training_flops(case.shape, setup, case.load)
    assert as_counted(ours) == pytest.approx(counted(case, backward=True), rel=1e-4)
    assert ours.total < training_flops(case.shape, PLAIN, case.load).total


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_train_their_own_matrices_only(method: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    case = case_of("llama", tmp_path)
    config = peft.LoraConfig(r=4, use_dora=method == "dora", target_modules="all-linear")
    wrapped = peft.get_peft_model(case.model, config)
    case.model.enable_input_require_grads()  # as training with checkpointing does
    setup = replace(PLAIN, method=method, lora_rank=4)
    assert count(case.shape, setup).trainable == sum(w.numel() for w in wrapped.parameters() if w.requires_grad)
    ours = training_flops(case.shape, setup, case.load)
    assert as_counted(ours) == pytest.approx(counted(case, backward=True), rel=1e-4)
    assert ours.adapters > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_layers_again(reentrant: bool, tmp_path: Path) -> None:
    case = case_of("qwen3_vl", tmp_path)
    case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    case.model.enable_input_require_grads()
    ours, once = training_flops(case.shape, TrainingSetup(), case.load), forward_flops(case.shape, case.load)
    assert ours.total == training_flops(case.shape, PLAIN, case.load).total
    matrices, attention = as_counted(ours, once.attention)
    # Counted above as part of what was recomputed, yet attention.
    matrices, attention = matrices - once.vision_attention, attention + once.vision_attention
    torch_matrices, torch_attention = counted(case, backward=True)
    assert attention == pytest.approx(torch_attention, rel=1e-4)
    language, vision = case.shape.language, case.shape.vision
    assert vision is not None
    # The newer way stops before each layer's last matrix, whose result nothing needs.
    last = 2 * case.load.tokens * language.layers * language.intermediate * language.hidden
    last += 2 * case.load.patches * vision.layers * vision.intermediate * vision.hidden
    assert matrices - (0 if reentrant else last) == pytest.approx(torch_matrices, rel=1e-4)


# What a dataset of annotated photographs has per token; the model's shape is Qwen3-VL-2B's.
MIX = Load(
    tokens=20_000,
    squared_tokens=20_000 * 3_540,
    longest=12_000,
    samples=15,
    supervised_tokens=14_000,
    patches=20_540,
    squared_patches=20_000 * 1_483,
)


def test_the_reference_model_costs_what_was_worked_out_by_hand() -> None:
    flops = training_flops(shape_from_config(QWEN3_VL_2B), PLAIN, MIX)
    per_token = {name: getattr(flops, name) / MIX.tokens / 1e9 for name in Flops.__dataclass_fields__}
    assert per_token["language"] == pytest.approx(6 * 28 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144) / 1e9)
    assert per_token["language"] == pytest.approx(8.4, rel=0.02)
    assert per_token["head"] == pytest.approx(1.3, rel=0.02)
    assert per_token["attention"] == pytest.approx(1.2, rel=0.02)
    vision = per_token["vision"] + per_token["vision_attention"] + per_token["projector"]
    assert vision == pytest.approx(2.46, rel=0.02)
    assert flops.total / MIX.tokens / 1e9 == pytest.approx(13.4, rel=0.01)
    assert flops.executed == pytest.approx(flops.total)


def test_avoidable_work_is_kept_apart() -> None:
    shape = shape_from_config(QWEN3_VL_2B)
    useful = training_flops(shape, PLAIN, MIX)
    everything = training_flops(shape, replace(TrainingSetup(), chunked_loss=False, attn_implementation="sdpa"), MIX)
    assert everything.total == pytest.approx(useful.total)
    assert everything.unused_logits == pytest.approx(useful.head * (20_000 - 14_000) / 14_000)
    assert everything.executed > everything.total + everything.recomputed + everything.unused_logits
    forward = useful.language / 3 + useful.attention / 3 + useful.vision / 3 + useful.vision_attention / 3
    assert everything.recomputed == pytest.approx(forward, rel=0.01)


def test_a_dense_mask_pays_for_the_whole_row() -> None:
    shape = shape_from_config(QWEN3_VL_2B)
    flops = training_flops(shape, replace(PLAIN, attn_implementation="sdpa"), MIX)
    assert (flops.attention + flops.masked_attention) / flops.attention == pytest.approx(2 * 20_000 / 3_540)
    alone = replace(MIX, samples=1, squared_tokens=20_000**2)
    assert training_flops(shape, replace(PLAIN, attn_implementation="sdpa"), alone).masked_attention == 0
    assert training_flops(shape, replace(PLAIN, attn_implementation="eager"), alone).masked_attention > 0


def test_experts_cost_what_a_token_meets() -> None:
    shape = shape_from_config(CONFIGS["Qwen3-30B-A3B"])
    load = Load(tokens=1, squared_tokens=0, longest=1)
    language = forward_flops(shape, load).language
    attention, experts, router = 2048 * 2 * (32 + 4) * 128, 8 * 3 * 2048 * 768, 2048 * 128
    assert language == 2 * 48 * (attention + experts + router)
    active = language / 2 + 2 * 151936 * 2048  # with embedding and head
    assert active == pytest.approx(3.35e9, rel=0.01)  # "A3B"


def test_windows_bound_attention() -> None:
    shape = shape_from_config(CONFIGS["Gemma-3-4B"])
    window, layers = shape.language.window, shape.language.layers
    assert window == 1024
    short = Load(tokens=1024, squared_tokens=1024**2, longest=1024)
    width = 4 * shape.language.heads * shape.language.head_dim
    assert forward_flops(shape, short).attention == pytest.approx(width * layers * 1024**2 / 2)
    long = Load(tokens=32768, squared_tokens=32768**2, longest=32768)
    full = layers - shape.language.window_layers
    expected = width * (full * 32768**2 / 2 + (layers - full) * 32768 * 1024)
    assert forward_flops(shape, long).attention == pytest.approx(expected)


@pytest.mark.parametrize("name", ["Qwen3-VL-2B", "Qwen2.5-VL-7B", "Gemma-3-4B", "Llama-3.2-1B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(),
        PLAIN,
        replace(PLAIN, chunked_loss=False),
        TrainingSetup(method="dora", train_vision=False, train_projector=False),
    ],
)
def test_the_work_model_is_the_executed_flops(name: str, setup: TrainingSetup) -> None:
    shape = shape_from_config(CONFIGS[name])
    load = MIX if shape.vision else replace(MIX, patches=0, squared_patches=0)
    work = work_model(shape, setup, longest=load.longest)
    columns = ("tokens", "squared_tokens", "patches", "squared_patches", "supervised_tokens")
    many = {column: np.array([getattr(load, column), 0, getattr(load, column) // 2]) for column in columns}
    assert work.of(**{column: getattr(load, column) for column in columns}) == pytest.approx(
        training_flops(shape, setup, load).executed, rel=1e-9
    )
    predicted = np.asarray(work.of(**many))
    assert predicted[1] == work.constant
    assert predicted[2] - work.constant == pytest.approx((predicted[0] - work.constant) / 2, rel=1e-6)


def test_without_knowing_the_longest_sample_windows_are_taken_to_cut() -> None:
    shape = shape_from_config(CONFIGS["Gemma-3-4B"])
    short, unknown = work_model(shape, PLAIN, longest=512), work_model(shape, PLAIN)
    assert short.per_squared_token > unknown.per_squared_token
    assert short.per_token < unknown.per_token
