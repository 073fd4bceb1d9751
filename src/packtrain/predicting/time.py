"""How long a training step takes: FLOPs, memory traffic, communication and launches, each over what a GPU can do.

The defaults are what a calibration of one H200 found (docs/benchmarks/calibration.md); coefficients fitted to
measurements of the machine at hand replace them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.families.registry import find_family
from packtrain.predicting.flops import (
    WorkModel,
    adapted_matrices,
    attention_work,
    encoder_layer_matrices,
    forward_flops,
    layer_matrices,
    passes_of,
    training_flops,
)
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory_parts import (
    FLOAT,
    adapter_bytes,
    compute_bytes,
    count,
    language_layer,
    small_parts,
    vision_layer,
    vision_traits,
)
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

_ACTIVATION_BYTES = 2  # activations are bf16 whatever the weights are kept in
_LOGIT_BYTES = 24  # traffic of one logit: written, widened, normalised, its gradient written and read twice
_CHUNK_LOGIT_BYTES = 12  # in chunks, with one kernel: written, read twice, its gradient written and read twice
_HEAD_BYTES = 8  # of one number of the head's gradient per chunk: the sum in fp32 read and written
_FP32_PRODUCTS = 15.0  # how much slower than bf16 products: where adapters are fp32 beside weights in bf16
_BACKWARD = 2.0  # element-wise kernels backward touch about twice what they touch forward
# How often the optimizer reads or writes a number of the weights' size per trained parameter, and bytes beside that.
_OPTIMIZER_TRAFFIC = {"adamw": (7, 0), "adamw_8bit": (3, 4), "adafactor": (4, 0), "sgd": (3, 0)}
# With masters, all of that in fp32, and beside it the gradient read and widened, the master read and rounded; where one
# kernel does both, the gradient is read and the weight written in half precision instead.
_MASTER_BYTES, _KERNEL_MASTER_BYTES = 12, {"adamw": 0}
_CLIPPING = 3  # accesses to a gradient before that: read for its norm, then scaled
# Of adapters, how often all that their matrices read and write is moved, forward and backward. As it is written, the
# result is made, scaled and added in three kernels; compiled, it is scaled and added where it is read next.
_ADAPTER_MOVES = {False: ((1, 6), (5, 4)), True: ((1, 2), (3, 3))}
_SHARP = 4  # how much the longer of two things at the same time decides
# Kernels of one layer forward and backward, as it is written: what launching them takes goes with their number.
_LAYER_KERNELS, _HEAD_NORM_KERNELS, _ADAPTER_KERNELS = (38, 75), (16, 29), (4, 4)
_IMAGE_KERNELS = (12, 24)  # of a call of attention, where an encoder calls it for each image by itself
_COMPILED_ADAPTERS = 1.25  # times as long as a compiled layer without them


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """How near real kernels come to the data sheet. `fitted`: from measurements of this machine."""

    matmul_efficiency: float = 0.803
    attention_efficiency: float = 0.337  # kernels that see only what attends
    masked_attention_efficiency: float = 0.175  # kernels over whole rows with a dense mask
    bandwidth_efficiency: float = 0.691  # of the memory's, as the optimizer shows it
    elementwise_passes: float = 5.23  # how often a layer forward moves as many bytes as it keeps for its backward pass
    vision_factor: float = 1.24  # how much slower the encoder is than these shares say
    recomputed_share: float = 0.902  # of a layer's forward that recomputing it costs
    layer_seconds: float = 0.00462  # launching one layer of 113 kernels, forward and backward
    waiting_seconds: float = (
        0.0313  # of an encoder's forward, while the host asks for sizes and has launched nothing ahead
    )
    overlap: float = 0.5  # share of the compute time that communication overlaps with
    network_bandwidth: float = 50e9  # bytes per second and GPU between nodes
    gpus_per_node: int = 8
    fitted: bool = False

    def __post_init__(self) -> None:
        shares = ("matmul_efficiency", "attention_efficiency", "masked_attention_efficiency", "bandwidth_efficiency")
        for name in shares:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(name, got=getattr(self, name), expected="above 0 and at most 1")
        for name in ("elementwise_passes", "vision_factor", "recomputed_share", "layer_seconds", "waiting_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, got=getattr(self, name), expected="0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, by what they are spent on."""

    compute: float
    memory_traffic: float  # element-wise kernels, gradients, the optimizer
    communication: float  # what does not overlap with computing
    overhead: float  # in which the GPU waits for launches and for the host

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.memory_traffic + self.communication + self.overhead


def default_coefficients(*, compiled: bool = False) -> Coefficients:
    """What to assume of any GPU before it was measured; `compiled`: decoder layers compiled for static shapes."""
    if not compiled:
        return Coefficients()
    return Coefficients(
        matmul_efficiency=0.766,
        attention_efficiency=0.322,
        bandwidth_efficiency=0.686,
        elementwise_passes=3.21,
        vision_factor=0.926,
        recomputed_share=0.955,
        layer_seconds=0.00304,
        waiting_seconds=0.0314,
    )


def step_time(
    shape: ModelShape,
    setup: TrainingSetup,
    load: Load,
    gpu: Gpu,
    coefficients: Coefficients | None = None,
    micro_batches: int = 1,
) -> StepTime:
    """One optimizer step of `micro_batches` passes over such a load on every GPU."""
    if micro_batches < 1:
        raise ConfigError("micro_batches", got=micro_batches, expected="at least 1")
    chosen = coefficients or default_coefficients(compiled=setup.compiled)
    compute, memory = _compute(shape, setup, load, gpu, chosen), _bandwidth(gpu, chosen)
    traffic = _elementwise(shape, setup, load, chosen) / memory
    busy = compute + traffic
    idle = with_launches(busy, launch_seconds(shape, setup, load, chosen)) - busy
    if waits(shape):
        idle += waiting_seconds(shape, setup, load, chosen)
    compute, traffic = micro_batches * compute, micro_batches * (traffic + _gradient_bytes(shape, setup) / memory)
    exchanged = _communication(shape, setup, gpu, chosen, micro_batches)
    return StepTime(
        compute=compute,
        memory_traffic=traffic + optimizer_seconds(shape, setup, gpu, chosen),
        communication=max(0.0, exchanged - chosen.overlap * compute),
        overhead=micro_batches * idle,
    )


def optimizer_seconds(shape: ModelShape, setup: TrainingSetup, gpu: Gpu, coefficients: Coefficients) -> float:
    """What follows the last pass of a step: gradients clipped, weights updated."""
    return _optimizer_bytes(shape, setup) / _bandwidth(gpu, coefficients)


def waiting_seconds(shape: ModelShape, setup: TrainingSetup, load: Load, coefficients: Coefficients) -> float:
    """Seconds of a pass in which the GPU has nothing to do, where the host has to ask it for the sizes of images.

    After the answer nothing is launched ahead, so that launches of the encoder show, each time that it runs forward.
    """
    if not load.patches or not vision_traits(shape).asks_sizes:
        return 0.0
    return coefficients.waiting_seconds * (1 + passes_of(setup).recomputed_vision)


def launch_seconds(shape: ModelShape, setup: TrainingSetup, load: Load, coefficients: Coefficients) -> float:
    """How long the host needs to launch one pass; checkpointing repeats what is forward."""
    each = coefficients.layer_seconds / sum(_LAYER_KERNELS)
    forward, backward = _decoder_kernels(shape, setup)
    kernels = shape.language.layers * ((2 if setup.gradient_checkpointing else 1) * forward + backward)
    if shape.vision is not None and load.patches:
        forward, backward = _encoder_kernels(shape, setup, load)
        again = setup.vision_checkpointing and setup.train_vision
        kernels += shape.vision.layers * ((2 if again else 1) * forward + setup.train_vision * backward)
    return each * kernels


def with_launches(busy: Any, launches: Any) -> Any:
    """Seconds of a pass of which the GPU is `busy` this long, numbers or arrays: the host launches meanwhile.

    The longer of both decides; near each other both show, since one is ahead in some layers and behind in others.
    """
    return (busy**_SHARP + launches**_SHARP) ** (1 / _SHARP)


def waits(shape: ModelShape) -> bool:
    """Does the host wait for the GPU in a step, as training prepares such a model?"""
    family = find_family(shape.model_type)
    kept = family is not None and family.image_sizes is not None  # on the host, so that nothing waits
    return vision_traits(shape).asks_sizes and not kept


def work_seconds(
    shape: ModelShape,
    setup: TrainingSetup,
    gpu: Gpu,
    coefficients: Coefficients | None = None,
    *,
    longest: int | None = None,
) -> WorkModel:
    """The seconds of one pass as coefficients, without optimizer and communication; `with_launches` adds launches."""
    chosen = coefficients or default_coefficients(compiled=setup.compiled)
    setup = replace(setup, attn_implementation="varlen")
    empty = Load(tokens=0, squared_tokens=0, longest=0)
    attention = _weighed_attention(shape, setup, chosen, longest)
    speed = gpu.bf16_flops * chosen.attention_efficiency

    def seconds(load: Load) -> float:
        traffic = _elementwise(shape, setup, load, chosen) / _bandwidth(gpu, chosen)
        return _compute(shape, setup, load, gpu, chosen) + traffic

    fixed = seconds(empty)
    return WorkModel(
        per_token=seconds(replace(empty, tokens=1)) - fixed + attention.per_token / speed,
        per_squared_token=attention.per_squared_token / speed,
        per_supervised_token=seconds(replace(empty, supervised_tokens=1)) - fixed,
        per_patch=seconds(replace(empty, patches=1)) - fixed + attention.per_patch / speed,
        per_squared_patch=attention.per_squared_patch / speed,
        # A pack without images would skip it; nearly every pack has one.
        constant=fixed + (waiting_seconds(shape, setup, replace(empty, patches=1), chosen) if waits(shape) else 0.0),
        unit="seconds",
    )


def _weighed_attention(shape: ModelShape, setup: TrainingSetup, chosen: Coefficients, longest: int | None) -> WorkModel:
    """The FLOPs of attention, each as dear as it really is: recomputed, or in the encoder."""
    kept = replace(setup, gradient_checkpointing=False, vision_checkpointing=False)
    whole, once = (attention_work(shape, one, longest=longest) for one in (setup, kept))

    def weigh(name: str, factor: float) -> float:
        least = getattr(once, name)
        return float(factor * (least + chosen.recomputed_share * (getattr(whole, name) - least)))

    return replace(
        whole,
        per_token=weigh("per_token", 1.0),
        per_squared_token=weigh("per_squared_token", 1.0),
        per_patch=weigh("per_patch", chosen.vision_factor),
        per_squared_patch=weigh("per_squared_patch", chosen.vision_factor),
    )


def _compute(shape: ModelShape, setup: TrainingSetup, load: Load, gpu: Gpu, chosen: Coefficients) -> float:
    """Seconds of matrix products and attention, of decoder and encoder."""
    flops, once, passes = training_flops(shape, setup, load), forward_flops(shape, load), passes_of(setup)
    share = chosen.recomputed_share
    vision_again, again = share * passes.recomputed_vision, share * passes.recomputed_language
    last, encoder_last = _spared(shape, setup)
    embedding = 2.0 * load.patches * shape.vision.patch_elements * shape.vision.hidden if shape.vision else 0.0
    encoder = flops.vision + flops.projector + vision_again * (1 - encoder_last) * (once.vision - embedding)
    encoder_pairs = flops.vision_attention + vision_again * once.vision_attention
    pairs = flops.attention + again * once.attention
    of_adapters = flops.recomputed - passes.recomputed_language * (once.language + once.attention)
    of_adapters -= passes.recomputed_vision * (once.vision - embedding + once.vision_attention)
    slower = _FP32_PRODUCTS if setup.weights_dtype == "bf16" and not setup.half_adapters else 1.0
    matrices = flops.language + flops.head + flops.unused_logits + again * (1 - last) * once.language
    matrices += slower * (flops.adapters + share * max(0.0, of_adapters))
    masked = flops.masked_attention * (passes.attention + again) / (passes.attention + passes.recomputed_language)
    efficiency = chosen.masked_attention_efficiency if masked > 0 else chosen.attention_efficiency
    attention = (pairs + masked) / efficiency
    vision = encoder / chosen.matmul_efficiency + encoder_pairs / chosen.attention_efficiency
    return (matrices / chosen.matmul_efficiency + attention + chosen.vision_factor * vision) / gpu.bf16_flops


def _spared(shape: ModelShape, setup: TrainingSetup) -> tuple[float, float]:
    """The last matrix of a layer, as a share of all of a decoder's and an encoder's: what recomputing does not compute.

    Its result is not needed again, and torch stops there. A compiled layer is one piece and has no such place.
    """
    if setup.compiled:
        return 0.0, 0.0
    language, vision = shape.language, shape.vision
    decoder = language.hidden * language.intermediate * language.experts_used / layer_matrices(language)
    encoder = vision.hidden * vision.intermediate / encoder_layer_matrices(vision) if vision is not None else 0.0
    return decoder, encoder


def _bandwidth(gpu: Gpu, chosen: Coefficients) -> float:
    return gpu.bandwidth * chosen.bandwidth_efficiency


def _elementwise(shape: ModelShape, setup: TrainingSetup, load: Load, chosen: Coefficients) -> float:
    """Bytes that norms, activations, rotations, sums and the loss move in one pass, forward and backward.

    What a layer keeps for its backward pass is the measure: norms, blocks and adapters write in proportion to it. What
    dense masks move is a part of how slow attention is with them.
    """
    language, vision, share = shape.language, shape.vision, chosen.recomputed_share
    setup = replace(setup, attn_implementation="varlen")
    again = share if setup.gradient_checkpointing else 0.0
    moved = (1 + _BACKWARD + again) * language.layers * language_layer(shape, setup, load).saved
    if vision is not None:
        again = share if setup.vision_checkpointing else 0.0
        encoder = vision.layers * vision_layer(shape, vision, setup, load.patches).saved
        moved += chosen.vision_factor * (1 + (_BACKWARD + again) * setup.train_vision) * encoder
    return chosen.elementwise_passes * moved + _adapter_traffic(shape, setup, load) + _loss_traffic(shape, setup, load)


def _adapter_traffic(shape: ModelShape, setup: TrainingSetup, load: Load) -> float:
    """Bytes that adapters move beside what the layer without them does: their products are too thin to be more."""
    if setup.method == "full":
        return 0.0
    read, written = (sum(widths) for widths in zip(*adapted_matrices(shape.language), strict=True))
    forward, backward = (one * read + two * written for one, two in _ADAPTER_MOVES[setup.compiled])
    numbers = (1 + passes_of(setup).recomputed_language) * forward + backward
    return adapter_bytes(setup) * load.tokens * shape.language.layers * numbers


def _loss_traffic(shape: ModelShape, setup: TrainingSetup, load: Load) -> float:
    """Bytes that the loss moves: its logits, and the sum of the head's gradient over chunks."""
    language = shape.language
    if not setup.chunked_loss:
        return load.tokens * language.vocabulary * _LOGIT_BYTES
    chunks = load.supervised_tokens / setup.loss_chunk if setup.method == "full" else 0.0
    per_chunk = _HEAD_BYTES * language.vocabulary * language.hidden
    return load.supervised_tokens * language.vocabulary * _CHUNK_LOGIT_BYTES + chunks * per_chunk


def _gradient_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes of adding one pass's gradients to those there are: two reads and a write."""
    return 3 * compute_bytes(setup) * count(shape, setup).trainable


def _optimizer_bytes(shape: ModelShape, setup: TrainingSetup) -> float:
    accesses, others = _OPTIMIZER_TRAFFIC[setup.optimizer]
    shards = 1 if setup.sharding == "ddp" else setup.gpus
    moved = ((accesses + _CLIPPING) * compute_bytes(setup) + others) * count(shape, setup).trainable
    wider = accesses * (FLOAT - compute_bytes(setup)) + _KERNEL_MASTER_BYTES.get(setup.optimizer, _MASTER_BYTES)
    moved += wider * count(shape, setup).masters(setup)
    return moved / shards


def _communication(
    shape: ModelShape, setup: TrainingSetup, gpu: Gpu, chosen: Coefficients, micro_batches: int
) -> float:
    """Seconds on the links in one optimizer step, hidden or not."""
    if setup.gpus == 1:
        return 0.0
    gradients = compute_bytes(setup) * count(shape, setup).trainable
    if setup.sharding in ("zero3", "fsdp"):
        # Weights are gathered for forward and again for backward, gradients scattered, in every pass.
        moved = micro_batches * (2 * _ACTIVATION_BYTES * shape.parameters.total + gradients)
    elif setup.sharding == "zero2":
        moved = micro_batches * gradients + compute_bytes(setup) * count(shape, setup).trainable
    else:
        moved = 2 * gradients  # summed once a step: scattered, then gathered
    across = setup.gpus > chosen.gpus_per_node
    speed = min(gpu.link_bandwidth, chosen.network_bandwidth) if across else gpu.link_bandwidth
    return moved * (setup.gpus - 1) / setup.gpus / speed


def _decoder_kernels(shape: ModelShape, setup: TrainingSetup) -> tuple[float, float]:
    """Of one layer forward and backward; of a compiled one, which is launched as a whole, in proportion to that."""
    forward, backward = _LAYER_KERNELS
    adapted = setup.method != "full"
    if setup.compiled:
        factor = _COMPILED_ADAPTERS if adapted else 1.0
        return factor * forward, factor * backward
    norms = small_parts(shape)[1] > 0
    matrices = len(adapted_matrices(shape.language)) if adapted else 0
    return (
        forward + norms * _HEAD_NORM_KERNELS[0] + matrices * _ADAPTER_KERNELS[0],
        backward + norms * _HEAD_NORM_KERNELS[1] + matrices * _ADAPTER_KERNELS[1],
    )


def _encoder_kernels(shape: ModelShape, setup: TrainingSetup, load: Load) -> tuple[float, float]:
    """Of one layer of the encoder, the same way."""
    if setup.compiled:
        return _LAYER_KERNELS
    traits = vision_traits(shape)
    forward, backward = traits.kernels
    calls = load.images if setup.attn_implementation == "sdpa" and traits.image_by_image else 0
    return forward + calls * _IMAGE_KERNELS[0], backward + calls * _IMAGE_KERNELS[1]
