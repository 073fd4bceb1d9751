"""The memory model's own rules: what adds up, what grows, what is shared out, and what one GPU has shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import ConfigError
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.memory import (
    ACTIVATIONS,
    GIB,
    STATES,
    MemoryCoefficients,
    estimate_memory,
    largest_tokens,
    scale_load,
)
from packtrain.predicting.memory_parts import (
    QUANTIZED,
    adapter_parameters,
    count,
    decoder_matrices,
    language_layer,
    states,
)
from packtrain.predicting.values import (
    Load,
    ModelShape,
    ParameterCounts,
    TrainingSetup,
)

QWEN3_VL_2B = ModelShape(
    model_type="qwen3_vl",
    language=LanguageShape(
        hidden=2048,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=6144,
        vocabulary=151936,
        tied=True,
        context_length=262144,
    ),
    vision=VisionShape(
        hidden=1024,
        layers=24,
        heads=16,
        intermediate=4096,
        gated=False,
        patch_elements=1536,
        full_attention_layers=24,
        patches_per_token=4,
        projector_flops_per_token=201_326_592,
        projector_elements_per_token=57_344,
    ),
    parameters=ParameterCounts(
        embedding=311_164_928, layers=1_409_410_048, head=0, vision=306_242_560, projector=100_714_496
    ),
    counted_from="config",
)
TEXT = replace(QWEN3_VL_2B, model_type="qwen3", vision=None)
SGD = TrainingSetup(optimizer="sgd", master_weights=False)  # as measurements without an optimizer
KEEP = {"gradient_checkpointing": False, "vision_checkpointing": False}


def pack(tokens: int, patches_per_token: float = 1.03) -> Load:
    """A pack of detection data: samples of 1,334 tokens on average, each with one picture."""
    samples, patches = max(1, round(tokens / 1334)), int(tokens * patches_per_token)
    return Load(
        tokens=tokens,
        squared_tokens=tokens * 2700,
        longest=min(tokens, 4000),
        samples=samples,
        supervised_tokens=int(0.65 * tokens),
        vision_tokens=patches // 4,
        patches=patches,
        squared_patches=patches * 1400,
        largest_patches=min(2136, patches),
        images=samples,
    )


def total(setup: TrainingSetup, load: Load, shape: ModelShape = QWEN3_VL_2B) -> float:
    return estimate_memory(shape, setup, load).total / GIB


# One H200, forward and backward without an optimizer. A run's peak is that of a heavy pack: with these pictures one in
# twenty has 1.63 patches per token or more at 8,192 tokens and 1.46 at 20,000, where the mean is 1.03.
@pytest.mark.parametrize(
    ("measured", "tokens", "patches", "changes"),
    [
        (47, 20_000, 1.46, {"chunked_loss": False}),
        (19, 20_000, 1.46, {}),
        (53, 8_192, 1.63, KEEP),
        (59, 8_192, 1.63, {**KEEP, "attn_implementation": "sdpa"}),
    ],
    ids=["full logits", "chunked loss", "nothing recomputed", "dense mask"],
)
def test_what_an_h200_showed(measured: int, tokens: int, patches: float, changes: dict[str, Any]) -> None:
    assert total(replace(SGD, **changes), pack(tokens, patches)) == pytest.approx(measured, rel=0.15)


# The same model on an H200 with torch 2.11 and transformers 5.17: one sample of so many tokens with square pictures of
# 1,600 patches, all logits, gradients kept from the pass before. Peak of allocated memory, so without the framework's.
@pytest.mark.parametrize(
    ("measured", "tokens", "pictures", "recompute"),
    [
        (26.30, 4_096, 0, False),
        (45.37, 8_192, 0, False),
        (22.15, 8_192, 0, True),
        (37.06, 16_384, 0, True),
        (54.86, 8_192, 6, False),
        (23.63, 8_192, 6, True),
        (39.26, 16_384, 12, True),
    ],
)
def test_one_sample_on_an_h200(measured: float, tokens: int, pictures: int, recompute: bool) -> None:
    patches = 1_600 * pictures
    load = Load(
        tokens=tokens,
        squared_tokens=tokens**2,
        longest=tokens,
        supervised_tokens=tokens,
        vision_tokens=patches // 4,
        patches=patches,
        squared_patches=1_600 * patches,
        largest_patches=1_600 if pictures else 0,
        images=pictures,
    )
    setup = replace(SGD, gradient_checkpointing=recompute, vision_checkpointing=recompute, chunked_loss=False)
    estimate = estimate_memory(QWEN3_VL_2B, setup, load)
    allocated = estimate.total - estimate.part("framework").bytes
    assert allocated / GIB == pytest.approx(measured, rel=0.035)


def test_a_long_pack_without_recomputing_does_not_fit_an_h200() -> None:
    assert total(replace(TrainingSetup(), **KEEP, chunked_loss=False), pack(20_000, 1.7)) > 139
    assert estimate_memory(TEXT, replace(SGD, **KEEP), pack(20_000)).activations > 40 * GIB


SETUPS = st.builds(
    TrainingSetup,
    method=st.sampled_from(["full", "lora", "dora", "qlora"]),
    train_vision=st.booleans(),
    train_projector=st.booleans(),
    weights_dtype=st.sampled_from(["bf16", "fp32"]),
    optimizer=st.sampled_from(["adamw", "adamw_8bit", "adafactor", "sgd"]),
    sharding=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp"]),
    gpus=st.integers(1, 64),
    gradient_checkpointing=st.booleans(),
    vision_checkpointing=st.booleans(),
    vision_batch_patches=st.none() | st.integers(1, 30_000),
    chunked_loss=st.booleans(),
    attn_implementation=st.sampled_from(["varlen", "sdpa", "eager"]),
)


@settings(max_examples=150, deadline=None)
@given(SETUPS, st.integers(1, 40_000), st.floats(0, 3))
def test_parts_add_up_and_more_data_never_needs_less(setup: TrainingSetup, tokens: int, patches: float) -> None:
    load = pack(tokens, patches)
    estimate = estimate_memory(QWEN3_VL_2B, setup, load)
    assert all(part.bytes >= 0 and part.why for part in estimate.parts)
    rest = sum(part.bytes for part in estimate.parts if part.name not in (*STATES, *ACTIVATIONS))
    assert estimate.total == estimate.states + estimate.activations + rest
    more = estimate_memory(QWEN3_VL_2B, setup, scale_load(load, 2 * tokens))
    assert more.total > estimate.total
    assert more.states == estimate.states


@settings(max_examples=100, deadline=None)
@given(SETUPS, st.integers(100, 40_000))
def test_recomputing_and_smaller_parts_never_need_more(setup: TrainingSetup, tokens: int) -> None:
    load = pack(tokens)
    for better, worse in (
        ({"chunked_loss": True}, {"chunked_loss": False}),
        ({"vision_batch_patches": 1}, {"vision_batch_patches": None}),
        ({"train_vision": False}, {"train_vision": True}),
        ({"attn_implementation": "varlen"}, {"attn_implementation": "sdpa"}),
        ({"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}),
    ):
        if "chunked_loss" in better and tokens < 2000:
            continue  # the head's gradient, once more for each chunk, is more than so few logits
        low, high = (estimate_memory(QWEN3_VL_2B, replace(setup, **one), load).total for one in (better, worse))
        assert low <= high, (better, worse)


def test_checkpointing_keeps_one_input_per_layer() -> None:
    kept = estimate_memory(TEXT, replace(SGD, **KEEP), pack(8192)).part("language activations").bytes
    recomputed = estimate_memory(TEXT, SGD, pack(8192)).part("language activations").bytes
    inputs = 28 * 8192 * 2048 * 2
    assert inputs < recomputed < inputs + kept / 10
    # By hand, of one token and layer: two norms, norms of queries and keys, attention, the block, inputs of matrices.
    layer = 2 * (2048 * 6 + 4) + (3072 * 6 + 4 * 24) + 2 * (2 * 2048 + 2 * 1024) + 4 * 16 + 2 * 3 * 6144
    layer += 2 * (2 * 2048 + 6144)
    assert kept == pytest.approx(28 * 8192 * layer, rel=0.01)


def test_a_frozen_encoder_keeps_nothing() -> None:
    frozen = replace(SGD, **KEEP, train_vision=False, train_projector=False)
    assert estimate_memory(QWEN3_VL_2B, frozen, pack(8192)).part("vision activations").bytes == 0
    trained = estimate_memory(QWEN3_VL_2B, replace(SGD, **KEEP), pack(8192)).part("vision activations").bytes
    assert trained > 6 * GIB


def test_sub_batches_bound_what_is_recomputed_but_never_cut_an_image() -> None:
    load = replace(pack(10), supervised_tokens=0, patches=60_000, vision_tokens=15_000, largest_patches=2000)
    whole, quarter, tiny = (
        estimate_memory(QWEN3_VL_2B, replace(SGD, vision_batch_patches=patches), load) for patches in (None, 15_000, 1)
    )
    assert whole.moment == tiny.moment == "the vision encoder"
    assert whole.total > quarter.total > tiny.total
    assert tiny.total == estimate_memory(QWEN3_VL_2B, replace(SGD, vision_batch_patches=2000), load).total
    inputs = 60_000 * 24 * 1024 * 2
    assert tiny.part("vision activations").bytes > inputs, "the inputs of all layers stay for all patches"


def test_states_by_hand() -> None:
    every = QWEN3_VL_2B.parameters.total
    ddp = states(QWEN3_VL_2B, TrainingSetup(gpus=4))
    assert (ddp.weights, ddp.gradients, ddp.optimizer, ddp.buffers) == (2 * every, 2 * every, 12 * every, 2 * every)
    rounded = states(QWEN3_VL_2B, TrainingSetup(gpus=4, master_weights=False))
    assert rounded == replace(ddp, optimizer=4 * every)
    exact = states(QWEN3_VL_2B, TrainingSetup(weights_dtype="fp32"))  # its own masters
    assert (exact.weights, exact.gradients, exact.optimizer, exact.buffers) == (4 * every, 4 * every, 8 * every, 0)
    zero1, zero2, zero3 = (
        states(QWEN3_VL_2B, TrainingSetup(sharding=sharding, gpus=4))  # type: ignore[arg-type]
        for sharding in ("zero1", "zero2", "zero3")
    )
    assert zero1.optimizer == zero2.optimizer == zero3.optimizer == pytest.approx(12 * every / 4)
    assert zero1.weights == zero2.weights == 2 * every
    assert zero3.weights == pytest.approx(2 * every / 4)
    assert zero1.gradients == pytest.approx(2 * every + 4 * every / 4)
    assert zero2.gradients == zero3.gradients == pytest.approx(6 * every / 4)
    fsdp = states(QWEN3_VL_2B, TrainingSetup(sharding="fsdp", gpus=8))
    assert fsdp.weights == fsdp.gradients == pytest.approx(2 * every / 8)
    assert fsdp.optimizer == pytest.approx(12 * every / 8)
    assert 0 < fsdp.buffers < 3 * GIB
    small = states(QWEN3_VL_2B, TrainingSetup(optimizer="adamw_8bit"))
    embedding = QWEN3_VL_2B.parameters.embedding
    assert small.optimizer == pytest.approx(8 * embedding + (2 + 1 / 32) * (every - embedding)), "it has no masters"
    beside = TrainingSetup(optimizer="adamw_8bit", method="lora", train_vision=False, train_projector=False)
    assert states(QWEN3_VL_2B, beside).optimizer == pytest.approx(
        (2 + 1 / 32) * adapter_parameters(QWEN3_VL_2B, beside)
    ), "the embedding is frozen"
    assert 4 * every < states(QWEN3_VL_2B, TrainingSetup(optimizer="adafactor")).optimizer < 4.01 * every
    assert states(QWEN3_VL_2B, TrainingSetup(optimizer="sgd")).optimizer == 4 * every


def test_adapters_in_half_precision_have_masters() -> None:
    setup = TrainingSetup(method="lora", train_vision=False, train_projector=False)
    adapters = adapter_parameters(QWEN3_VL_2B, setup)
    half, wide = (states(QWEN3_VL_2B, replace(setup, master_weights=masters, gpus=2)) for masters in (True, False))
    assert (half.gradients, half.optimizer, half.buffers) == (2 * adapters, 12 * adapters, 2 * adapters)
    assert (wide.gradients, wide.optimizer, wide.buffers) == (4 * adapters, 8 * adapters, 4 * adapters)
    assert wide.weights - half.weights == 2 * adapters
    said = estimate_memory(QWEN3_VL_2B, setup, pack(4_096)).part("optimizer states").why
    assert "fp32 masters of 17.4 M" in said
    for same in ({"master_weights": False}, {"optimizer": "adamw_8bit"}, {"method": "dora"}, {"weights_dtype": "fp32"}):
        assert not replace(setup, **same).half_adapters  # type: ignore[arg-type]
    assert replace(setup, method="qlora").half_adapters
    assert replace(setup, master_weights=False, sharding="zero2").half_adapters, "DeepSpeed has one type for all"


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_in_half_precision_cast_nothing(compiled: bool) -> None:
    """What adapters of seven matrices read in fp32 is no longer there; in bf16 it is kept for others already."""
    setup = TrainingSetup(method="lora", train_vision=False, train_projector=False, compiled=compiled)
    load = pack(1_000)
    half, wide = (
        language_layer(QWEN3_VL_2B, replace(setup, master_weights=masters), load).saved for masters in (True, False)
    )
    full = language_layer(QWEN3_VL_2B, replace(setup, method="full"), load).saved
    read = 4 * (2 * 2048 + 2048 + 6144) if compiled else 4 * (5 * 2048 + 2048 + 6144)
    assert wide - half == 1_000 * (read - 2 * (2 * 2048 + 6144) + 2 * 7 * 16)
    scaled = 0 if compiled else 2 * (2 * 2048 + 2048 + 1024)  # what trained norms keep
    assert full - half == 1_000 * (scaled - 2 * 7 * 16)


def test_only_what_is_trained_itself_has_masters() -> None:
    """DoRA's adapters are fp32; an encoder beside them is not."""
    beside = TrainingSetup(method="dora", train_projector=False)
    adapters, vision = adapter_parameters(QWEN3_VL_2B, beside), QWEN3_VL_2B.parameters.vision
    assert states(QWEN3_VL_2B, beside).optimizer == 8 * adapters + 12 * vision
    assert states(QWEN3_VL_2B, replace(beside, train_vision=False)).optimizer == 8 * adapters
    said = estimate_memory(QWEN3_VL_2B, beside, pack(4_096)).part("optimizer states").why
    assert "fp32 masters of 306.2 M" in said
    alone = estimate_memory(QWEN3_VL_2B, replace(beside, train_vision=False), pack(4_096))
    assert "masters" not in alone.part("optimizer states").why


def test_qlora_by_hand() -> None:
    setup = TrainingSetup(method="qlora", lora_rank=16, train_vision=False, train_projector=False)
    layer = {"q": (2048, 2048), "k": (2048, 1024), "v": (2048, 1024), "o": (2048, 2048)}
    layer |= {"gate": (2048, 6144), "up": (2048, 6144), "down": (6144, 2048)}
    assert decoder_matrices(QWEN3_VL_2B) == 28 * sum(rows * columns for rows, columns in layer.values())
    adapters = 28 * sum(16 * (rows + columns) for rows, columns in layer.values())
    assert adapter_parameters(QWEN3_VL_2B, setup) == adapters
    counts = count(QWEN3_VL_2B, setup)
    assert counts.trained == 0
    assert counts.frozen + counts.quantized == QWEN3_VL_2B.parameters.total
    fixed = states(QWEN3_VL_2B, setup)
    assert fixed.weights == 2 * adapters + 2 * counts.frozen + int(QUANTIZED * counts.quantized)
    assert (fixed.gradients, fixed.optimizer) == (2 * adapters, 12 * adapters)
    dora = replace(setup, method="dora")
    magnitudes = 28 * sum(columns for _, columns in layer.values())
    assert adapter_parameters(QWEN3_VL_2B, dora) == adapters + magnitudes


@settings(max_examples=40, deadline=None)
@given(SETUPS, st.integers(1, 200))
def test_largest_tokens_fit_and_one_more_do_not(setup: TrainingSetup, gib: int) -> None:
    load = pack(8192)
    tokens = largest_tokens(QWEN3_VL_2B, setup, gib * GIB, load)
    if tokens:
        assert estimate_memory(QWEN3_VL_2B, setup, scale_load(load, tokens)).total <= gib * GIB
    assert estimate_memory(QWEN3_VL_2B, setup, scale_load(load, tokens + 1)).total > gib * GIB


def test_scaling_a_load_keeps_its_mix() -> None:
    load = pack(8192)
    assert scale_load(load, 8192) == load
    doubled = scale_load(load, 16384)
    assert (doubled.patches, doubled.rows, doubled.longest) == (2 * load.patches, 1, load.longest)
    padded = scale_load(replace(load, rows=4), 16384)
    assert padded.rows == 8, "a padded batch gets more rows, a pack gets longer"
    with pytest.raises(ConfigError, match="at least one"):
        scale_load(replace(load, tokens=0), 100)


def test_fitted_coefficients_are_used() -> None:
    setup, load = replace(SGD, **KEEP), pack(8192)
    plain = estimate_memory(QWEN3_VL_2B, setup, load, MemoryCoefficients(framework_bytes=0, fragmentation=0))
    twice = MemoryCoefficients(activation_scale=2, framework_bytes=7, fragmentation=0, fitted=True)
    scaled = estimate_memory(QWEN3_VL_2B, setup, load, twice)
    for name in ("language activations", "vision activations"):
        assert scaled.part(name).bytes == pytest.approx(2 * plain.part(name).bytes, rel=1e-9)
    assert scaled.part("framework").bytes == 7
    with pytest.raises(ConfigError, match="activation_scale"):
        MemoryCoefficients(activation_scale=0)
    with pytest.raises(ConfigError, match="fragmentation"):
        MemoryCoefficients(fragmentation=-0.1)
