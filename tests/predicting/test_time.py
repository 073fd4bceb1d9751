"""The time model agrees with what was measured, and moves the way that hardware does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published import CONFIGS, QWEN3_VL_2B

from packtrain.core.errors import ConfigError
from packtrain.predicting.flops import forward_flops, training_flops
from packtrain.predicting.gpus import CATALOGUE, Gpu, find_gpu
from packtrain.predicting.memory_parts import count
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.time import (
    Coefficients,
    StepTime,
    launch_seconds,
    step_time,
    waiting_seconds,
    with_launches,
    work_seconds,
)
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

SHAPE = shape_from_config(QWEN3_VL_2B)
H200 = find_gpu("h200")
MEMORY = H200.bandwidth * Coefficients().bandwidth_efficiency  # bytes per second
CHECKPOINTED = TrainingSetup(optimizer="sgd", master_weights=False, loss_chunk=2048)  # as it was measured
PLAIN = replace(CHECKPOINTED, gradient_checkpointing=False, vision_checkpointing=False)


def trainable(shape: ModelShape, setup: TrainingSetup) -> int:
    return count(shape, setup).trainable


def speed(shape: ModelShape, setup: TrainingSetup, load: Load, gpu: Gpu = H200) -> float:
    """Tokens per second of all GPUs."""
    return setup.gpus * load.tokens / step_time(shape, setup, load, gpu).seconds


def mix(tokens: int, square: float = 3_000, patches: float = 1.05, patch_square: float = 1_510) -> Load:
    """A pack of annotated photographs: its numbers per token."""
    return Load(
        tokens=tokens,
        squared_tokens=int(tokens * square),
        longest=min(tokens, 8_000),
        samples=max(2, tokens // 1_300),
        supervised_tokens=int(0.7 * tokens),
        patches=int(patches * tokens),
        squared_patches=int(patch_square * tokens),
    )


@pytest.mark.parametrize(
    ("setup", "load", "measured"),
    [
        (CHECKPOINTED, mix(20_000), 17_453),
        (PLAIN, mix(8_167, 2_232, 1.12, 1_622), 20_198),
        (replace(PLAIN, attn_implementation="sdpa"), mix(8_167, 2_232, 1.12, 1_622), 12_767),
    ],
)
def test_throughput_measured_on_an_h200_before_it_was_calibrated(
    setup: TrainingSetup, load: Load, measured: float
) -> None:
    step = step_time(SHAPE, setup, load, H200, Coefficients())
    assert step == step_time(SHAPE, setup, load, H200)
    waited = waiting_seconds(SHAPE, setup, load, Coefficients())  # sizes of images were on the GPU then
    assert load.tokens / (step.seconds + waited) == pytest.approx(measured, rel=0.04)


def test_a_step_is_the_sum_of_its_parts() -> None:
    step = step_time(SHAPE, TrainingSetup(gpus=8), mix(8_192), H200, replace(Coefficients(), overlap=0.0))
    assert step.seconds == step.compute + step.memory_traffic + step.communication + step.overhead
    assert min(step.compute, step.memory_traffic, step.communication, step.overhead) > 0


@pytest.mark.parametrize("name", ["Qwen3-VL-2B", "Qwen2.5-VL-7B", "Gemma-3-4B", "Llama-3.2-1B"])
def test_more_tokens_take_longer_and_fill_the_gpu_better(name: str) -> None:
    shape = shape_from_config(CONFIGS[name])
    loads = [mix(tokens) for tokens in (1_000, 2_000, 4_000, 8_000, 16_000)]
    if shape.vision is None:
        loads = [replace(load, patches=0, squared_patches=0) for load in loads]
    seconds = [step_time(shape, PLAIN, load, H200).seconds for load in loads]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)
    speeds = [speed(shape, PLAIN, load) for load in loads]
    assert speeds == sorted(speeds)


def test_more_gpus_compute_no_faster_per_pass_but_add_up() -> None:
    one, eight = (replace(PLAIN, gpus=gpus) for gpus in (1, 8))
    load = mix(8_192)
    alone, together = step_time(SHAPE, one, load, H200), step_time(SHAPE, eight, load, H200)
    assert together.compute == alone.compute
    assert alone.communication == 0
    assert together.seconds >= alone.seconds
    faster = speed(SHAPE, eight, load) / speed(SHAPE, one, load)
    assert 4 < faster <= 8


def test_communication_follows_what_is_sharded() -> None:
    bare = replace(Coefficients(), overlap=0.0)

    def exchanged(**changes: object) -> float:
        setup = replace(PLAIN, **{"gpus": 8, **changes})  # type: ignore[arg-type]
        return step_time(SHAPE, setup, mix(8_192), H200, bare, micro_batches=4).communication

    assert exchanged() == pytest.approx(2 * 2 * SHAPE.parameters.total * 7 / 8 / H200.link_bandwidth)
    assert exchanged(sharding="zero1") == exchanged()
    assert exchanged(sharding="fsdp") == exchanged(sharding="zero3")
    assert exchanged(sharding="zero3") > exchanged(sharding="zero2") > exchanged(sharding="zero1")
    assert exchanged(method="lora", train_vision=False, train_projector=False) < 0.05 * exchanged()
    assert exchanged(gpus=16) > 4 * exchanged(), "between nodes the network is the link"


def test_communication_hides_behind_computing() -> None:
    setup = replace(PLAIN, gpus=8)
    open_, hidden = (
        step_time(SHAPE, setup, mix(8_192), H200, replace(Coefficients(), overlap=overlap)) for overlap in (0.0, 0.5)
    )
    assert hidden.communication < open_.communication
    assert hidden.compute == open_.compute


def test_checkpointing_adds_about_a_third_of_the_computing() -> None:
    load = mix(8_192)
    plain, again = (step_time(SHAPE, setup, load, H200) for setup in (PLAIN, CHECKPOINTED))
    assert 1.2 < again.compute / plain.compute < 1.3, "without the last matrix of each layer"
    assert 1.2 < again.seconds / plain.seconds < 1.34
    whole = [
        step_time(SHAPE, replace(setup, compiled=True), load, H200, Coefficients()).compute
        for setup in (PLAIN, CHECKPOINTED)
    ]
    assert whole[0] == plain.compute
    assert whole[1] > 1.03 * again.compute, "a compiled layer is recomputed whole"
    flops, once = training_flops(SHAPE, CHECKPOINTED, load), forward_flops(SHAPE, load)
    assert flops.recomputed == pytest.approx(once.total - once.head - once.projector, rel=0.01)


def test_a_frozen_encoder_and_adapters_are_cheaper() -> None:
    load = mix(8_192)
    full = step_time(SHAPE, PLAIN, load, H200)
    frozen = step_time(SHAPE, replace(PLAIN, train_vision=False, train_projector=False), load, H200)
    adapters = step_time(SHAPE, replace(PLAIN, method="lora", train_vision=False, train_projector=False), load, H200)
    assert adapters.compute < frozen.compute < full.compute
    assert frozen.memory_traffic < adapters.memory_traffic, "adapters in fp32 cast all that they read"
    half = replace(PLAIN, method="lora", train_vision=False, train_projector=False, master_weights=True)
    assert step_time(SHAPE, half, load, H200).seconds < full.seconds


def test_adapters_in_half_precision_multiply_and_move_less() -> None:
    setup = replace(PLAIN, method="lora", train_vision=False, train_projector=False, optimizer="adamw")
    load, adapters = mix(8_192), trainable(SHAPE, setup)
    wide, half = (step_time(SHAPE, replace(setup, master_weights=masters), load, H200) for masters in (False, True))
    products = 14 * training_flops(SHAPE, setup, load).adapters / (Coefficients().matmul_efficiency * H200.bf16_flops)
    assert wide.compute - half.compute == pytest.approx(products)
    assert half.memory_traffic < wide.memory_traffic, "nothing is cast"
    empty = replace(load, tokens=0, squared_tokens=0, supervised_tokens=0, patches=0, squared_patches=0)
    wide, half = (step_time(SHAPE, replace(setup, master_weights=masters), empty, H200) for masters in (False, True))
    assert half.memory_traffic - wide.memory_traffic == pytest.approx(7 * 2 * adapters / MEMORY)


def test_adapters_read_and_write_beside_their_matrices() -> None:
    """All in proportion to the widths of the matrices, and less of it where kernels are fused."""
    load, setup = mix(8_192), replace(PLAIN, method="lora", train_vision=False, train_projector=False)
    setup = replace(setup, optimizer="adamw", master_weights=True)
    shape = replace(SHAPE, language=replace(SHAPE.language, layers=1))

    def moved(**changes: object) -> float:
        changed = replace(setup, **changes)  # type: ignore[arg-type]
        still = replace(Coefficients(), elementwise_passes=0.0)
        full = replace(changed, method="full")
        loss = [step_time(shape, one, replace(load, tokens=0), H200, still).memory_traffic for one in (changed, full)]
        both = [step_time(shape, one, load, H200, still).memory_traffic for one in (changed, full)]
        return (both[0] - loss[0] - both[1] + loss[1]) * MEMORY / (2 * load.tokens)

    read, written = 3 * 2048 + 2048 + 2 * 2048 + 6144, 2048 + 2 * 1024 + 2048 + 2 * 6144 + 2048
    assert moved() == pytest.approx(6 * read + 10 * written, rel=1e-3)
    assert moved(gradient_checkpointing=True) == pytest.approx(7 * read + 16 * written, rel=1e-3)
    assert moved(compiled=True) < 0.7 * moved()


def test_launches_go_with_the_kernels_of_a_layer() -> None:
    load, text = mix(8_192), replace(mix(8_192), patches=0, squared_patches=0)
    adapters = replace(PLAIN, method="lora", train_vision=False, train_projector=False)
    chosen = Coefficients(layer_seconds=0.113)  # a millisecond for each of 38 forward and 75 backward
    plain, more = (launch_seconds(SHAPE, setup, text, chosen) for setup in (PLAIN, adapters))
    assert plain == pytest.approx(28 * (38 + 16 + 75 + 29) / 1000)
    assert more - plain == pytest.approx(28 * 7 * (4 + 4) / 1000)
    again = launch_seconds(SHAPE, replace(PLAIN, gradient_checkpointing=True), text, chosen)
    assert again - plain == pytest.approx(28 * (38 + 16) / 1000), "forward once more"
    compiled = [launch_seconds(SHAPE, replace(one, compiled=True), text, chosen) for one in (PLAIN, adapters)]
    assert compiled[0] == pytest.approx(28 * 0.113)
    assert compiled[0] < compiled[1] < 2 * compiled[0]
    assert launch_seconds(SHAPE, PLAIN, load, chosen) > plain, "the encoder has launches too"


def test_a_encoder_without_our_kernel_is_launched_for_each_image() -> None:
    chosen, called = Coefficients(layer_seconds=0.113), replace(PLAIN, attn_implementation="sdpa")
    few, many = (replace(mix(8_192), images=images) for images in (2, 5))
    one = launch_seconds(SHAPE, called, many, chosen) - launch_seconds(SHAPE, called, few, chosen)
    assert one == pytest.approx(3 * 24 * (12 + 24) / 1000), "in each of 24 layers"
    assert launch_seconds(SHAPE, PLAIN, many, chosen) == launch_seconds(SHAPE, PLAIN, few, chosen)


def test_launches_show_where_the_gpu_is_faster_than_the_host() -> None:
    chosen = Coefficients()
    short, long = (step_time(SHAPE, PLAIN, load, H200, chosen) for load in (mix(256), mix(65_536)))
    host = launch_seconds(SHAPE, PLAIN, mix(256), chosen)
    assert short.compute + short.memory_traffic + short.overhead == pytest.approx(host, rel=0.1)
    assert long.overhead < 0.01 * long.seconds, "they hide behind what the GPU does"
    loads = [mix(tokens) for tokens in (256, 1_024, 4_096, 16_384)]
    idle = [step_time(SHAPE, PLAIN, load, H200, chosen).overhead for load in loads]
    assert idle == sorted(idle, reverse=True)


def test_a_host_that_asks_for_sizes_makes_the_gpu_wait() -> None:
    asking = shape_from_config(CONFIGS["Qwen2.5-VL-7B"])
    load, chosen = mix(8_192), Coefficients()
    without = replace(chosen, waiting_seconds=0.0)

    def waited(shape: ModelShape, setup: TrainingSetup, load: Load) -> float:
        steps = [step_time(shape, setup, load, H200, one).seconds for one in (chosen, without)]
        return steps[0] - steps[1]

    assert waited(asking, PLAIN, load) == pytest.approx(chosen.waiting_seconds)
    assert waited(asking, CHECKPOINTED, load) == pytest.approx(2 * chosen.waiting_seconds), "it runs forward twice"
    assert waited(asking, replace(CHECKPOINTED, train_vision=False), load) == pytest.approx(chosen.waiting_seconds)
    assert waited(asking, PLAIN, replace(load, patches=0, squared_patches=0)) == 0
    assert waited(SHAPE, PLAIN, load) == 0, "training keeps its sizes on the host"
    assert waited(shape_from_config(CONFIGS["Gemma-3-4B"]), PLAIN, load) == 0


def test_micro_batches_share_one_optimizer_step() -> None:
    setup = replace(PLAIN, optimizer="adamw", weights_dtype="fp32")
    one, four = (step_time(SHAPE, setup, mix(8_192), H200, micro_batches=count) for count in (1, 4))
    assert four.compute == pytest.approx(4 * one.compute)
    assert four.overhead == pytest.approx(4 * one.overhead)
    optimizer = (7 + 3) * 4 * SHAPE.parameters.total / MEMORY  # gradients are clipped before
    assert 4 * one.memory_traffic - four.memory_traffic == pytest.approx(3 * optimizer)


def test_sharding_divides_the_optimizer() -> None:
    def traffic(**changes: object) -> float:
        setup = replace(PLAIN, **{"optimizer": "adamw", "gpus": 8, **changes})  # type: ignore[arg-type]
        return step_time(SHAPE, setup, mix(8_192), H200).memory_traffic

    masters = {"master_weights": True}
    saved = traffic(**masters) - traffic(**masters, sharding="fsdp")
    assert saved == pytest.approx(7 / 8 * (7 * 4 + 3 * 2) * SHAPE.parameters.total / MEMORY)
    saved = traffic() - traffic(sharding="fsdp")
    assert saved == pytest.approx(7 / 8 * (7 + 3) * 2 * SHAPE.parameters.total / MEMORY)
    assert traffic(optimizer="adamw_8bit") < traffic() < traffic(**masters)


def test_all_logits_move_more_than_supervised_ones() -> None:
    load = mix(8_192)
    chunked, whole = (step_time(SHAPE, replace(PLAIN, chunked_loss=chunked), load, H200) for chunked in (True, False))
    logits = 151936 * (24 * load.tokens - 12 * load.supervised_tokens)
    gradient = 8 * 151936 * 2048 * load.supervised_tokens / 2048  # of the head, summed chunk by chunk
    assert whole.memory_traffic - chunked.memory_traffic == pytest.approx((logits - gradient) / MEMORY)
    assert whole.compute > chunked.compute


def test_trainable_parameters() -> None:
    counts = SHAPE.parameters
    assert trainable(SHAPE, PLAIN) == counts.total
    assert trainable(SHAPE, replace(PLAIN, train_vision=False)) == counts.total - counts.vision
    adapters = replace(PLAIN, method="lora", lora_rank=8, train_vision=False, train_projector=False)
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)
    assert trainable(SHAPE, adapters) == 28 * 8 * per_layer


@pytest.mark.parametrize("setup", [PLAIN, CHECKPOINTED, replace(PLAIN, train_vision=False, chunked_loss=False)])
def test_seconds_per_pack_are_those_of_the_step_without_optimizer(setup: TrainingSetup) -> None:
    load = mix(8_192)
    model = work_seconds(SHAPE, setup, H200, longest=load.longest)
    predicted = model.of(
        tokens=load.tokens,
        squared_tokens=load.squared_tokens,
        patches=load.patches,
        squared_patches=load.squared_patches,
        supervised_tokens=load.supervised_tokens,
    )
    step = step_time(SHAPE, setup, load, H200)
    predicted = with_launches(predicted, launch_seconds(SHAPE, setup, load, Coefficients()))
    gradients = 3 * 3 * 2 * trainable(SHAPE, setup) / MEMORY  # added up, clipped, and the optimizer
    assert model.unit == "seconds"
    assert predicted == pytest.approx(step.seconds - gradients, rel=1e-6)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_gpu_gives_a_finite_time(name: str) -> None:
    step = step_time(SHAPE, replace(TrainingSetup(), gpus=4), mix(8_192), find_gpu(name))
    assert isinstance(step, StepTime)
    assert 0.05 < step.seconds < 60


def test_faster_gpus_are_faster() -> None:
    order = ("t4", "a10", "a100-80", "h100", "h200", "b200")
    speeds = [speed(SHAPE, PLAIN, mix(8_192), find_gpu(name)) for name in order]
    assert speeds == sorted(speeds)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batches"):
        step_time(SHAPE, PLAIN, mix(8_192), H200, micro_batches=0)
    with pytest.raises(ConfigError, match="matmul_efficiency"):
        Coefficients(matmul_efficiency=1.5)
