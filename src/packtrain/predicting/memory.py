"""GPU memory of one training step: every part at the moment when their sum is largest, and how many tokens fit.

The formulas and what they were compared with are in docs/internals/memory-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packtrain.core.errors import ConfigError
from packtrain.core.numbers import GIB, counted, exact_percent, large
from packtrain.families.shape import VisionShape
from packtrain.predicting.memory_parts import (
    FLOAT,
    LayerBytes,
    ParameterCounts,
    attention_mask,
    compute_bytes,
    count,
    has_dense_mask,
    language_attention,
    language_layer,
    rotary_bytes,
    states,
    vision_attention,
    vision_forward,
    vision_layer,
    vision_patch,
)
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

STATES = ("weights", "gradients", "optimizer states")
ACTIVATIONS = ("language activations", "vision activations", "attention", "logits and loss", "inputs")
# Of one logit at the worst moment, in fp32: the softmax's result, the gradient that enters it, the one that leaves it.
LOGIT_BYTES = 3 * FLOAT
_IDS = 64  # bytes of a token's ids, labels, up to four positions and masks, as 64-bit numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One share of the memory at its peak."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What one GPU holds when it holds most."""

    parts: tuple[MemoryPart, ...]
    moment: str  # when that is

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def states(self) -> int:
        """What does not depend on the data: weights, gradients, optimizer states."""
        return sum(part.bytes for part in self.parts if part.name in STATES)

    @property
    def activations(self) -> int:
        """What grows with the data."""
        return sum(part.bytes for part in self.parts if part.name in ACTIVATIONS)

    def part(self, name: str) -> MemoryPart:
        """The part of this name."""
        return next(part for part in self.parts if part.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCoefficients:
    """What cannot be counted: defaults, or what was fitted to one GPU."""

    activation_scale: float = 1.0  # of layers and attention, for other kernels than those that were counted
    vision_scale: float = 1.0  # of the encoder, beside that
    attention_scale: float = 1.0  # of masks and scores, beside that
    framework_bytes: int = GIB  # CUDA context and kernels, cuBLAS and NCCL workspaces
    fragmentation: float = 0.05  # of what grows with the data: memory the allocator holds and cannot use
    fitted: bool = False

    def __post_init__(self) -> None:
        for name in ("activation_scale", "vision_scale", "attention_scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, got=getattr(self, name), expected="a positive number")
        if self.framework_bytes < 0 or self.fragmentation < 0:
            got = f"{self.framework_bytes} bytes, {self.fragmentation}"
            raise ConfigError("framework_bytes and fragmentation", got=got, expected="no negative numbers")


DEFAULT_COEFFICIENTS = MemoryCoefficients()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What the data holds at one point of a step."""

    name: str
    language: int = 0
    vision: int = 0
    attention: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.language + self.vision + self.attention + self.loss


def estimate_memory(
    shape: ModelShape, setup: TrainingSetup, load: Load, coefficients: MemoryCoefficients = DEFAULT_COEFFICIENTS
) -> MemoryEstimate:
    """The peak of one forward and backward pass, with gradients and optimizer states already there."""
    moment = max(_moments(shape, setup, load, coefficients), key=lambda moment: moment.total)
    fixed, counts = states(shape, setup), count(shape, setup)
    inputs = input_bytes(shape, setup, load)
    framework = coefficients.framework_bytes + int(coefficients.fragmentation * (moment.total + inputs))
    whole = setup.gpus == 1 or setup.sharding == "ddp"
    one = "all on each GPU" if whole else f"{setup.sharding} over {setup.gpus} GPUs"
    frozen = f", {large(counts.frozen)} frozen" if counts.frozen else ""
    stored = f"{large(counts.trained)} trained{frozen} parameters in {setup.weights_dtype}"
    if counts.adapters:
        stored += f", {large(counts.adapters)} in adapters"
    if counts.quantized:
        stored += f", {large(counts.quantized)} in 4 bits"
    wasted = f"{exact_percent(coefficients.fragmentation)} fragmentation"
    sizes = (
        ("weights", fixed.weights, f"{stored}, {one}"),
        ("gradients", fixed.gradients, f"of {large(counts.trainable)} parameters, kept between micro-batches, {one}"),
        ("optimizer states", fixed.optimizer, f"{_kept_states(setup, counts)}, {one}"),
        ("language activations", moment.language, _language_why(shape, setup, load)),
        ("vision activations", moment.vision, _vision_why(shape, setup, load)),
        ("attention", moment.attention, _attention_why(shape, setup, load)),
        ("logits and loss", moment.loss, _loss_why(shape, setup, load)),
        ("inputs", inputs, f"ids of {load.tokens:,} tokens and pixels of {load.patches:,} patches"),
        ("communication buffers", fixed.buffers, f"{setup.sharding} on {counted(setup.gpus, 'GPU')}"),
        ("framework", framework, f"CUDA context and workspaces, and {wasted}"),
    )
    parts = tuple(MemoryPart(name=name, bytes=size, why=why) for name, size, why in sizes)
    return MemoryEstimate(parts=parts, moment=moment.name)


def largest_tokens(
    shape: ModelShape,
    setup: TrainingSetup,
    memory_bytes: int,
    load: Load,
    coefficients: MemoryCoefficients = DEFAULT_COEFFICIENTS,
) -> int:
    """How many tokens of this mix fit, which may be more or fewer than `load` has; 0 when not even one does."""

    def fits(tokens: int) -> bool:
        return estimate_memory(shape, setup, scale_load(load, tokens), coefficients).total <= memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scale_load(load: Load, tokens: int) -> Load:
    """A load of `tokens` of the same mix: more or fewer samples like these, in a longer pack or in more rows."""
    if load.tokens < 1:
        raise ConfigError("load", got=f"{load.tokens} tokens", expected="at least one, to know what the mix is")

    def scaled(value: int) -> int:
        return -(-value * tokens // load.tokens)

    return replace(
        load,
        tokens=tokens,
        squared_tokens=scaled(load.squared_tokens),
        longest=min(load.longest, tokens),
        samples=scaled(load.samples),
        rows=load.rows if load.rows == 1 else scaled(load.rows),
        supervised_tokens=scaled(load.supervised_tokens),
        vision_tokens=scaled(load.vision_tokens),
        patches=scaled(load.patches),
        squared_patches=scaled(load.squared_patches),
        largest_patches=min(load.largest_patches, scaled(load.patches)),
        images=scaled(load.images),
        frames=scaled(load.frames),
    )


def input_bytes(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """What the loader sent to the GPU, and pixels once more in the compute type where the first layer keeps them."""
    if shape.vision is None:
        return _IDS * load.tokens
    kept = compute_bytes(setup) if setup.train_vision else 0
    return _IDS * load.tokens + load.patches * shape.vision.patch_elements * (FLOAT + kept)


def loss_bytes(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """Logits and their gradients where they are largest, gone before the layers run backward.

    In chunks, logits and their gradient are of the compute type, and the next chunk's logits are made while those of
    the one before are there. The head's gradient is summed in fp32.
    """
    language, b = shape.language, compute_bytes(setup)
    if not setup.chunked_loss:
        return load.tokens * language.vocabulary * LOGIT_BYTES
    positions = min(setup.loss_chunk, load.supervised_tokens)
    chunk = b * language.vocabulary * positions
    head = FLOAT * language.vocabulary * language.hidden if setup.method == "full" and positions else 0
    following = b * language.vocabulary * min(positions, load.supervised_tokens - positions)
    hidden = (b + FLOAT) * language.hidden * load.supervised_tokens  # at supervised positions, and its gradient in fp32
    return hidden + 2 * chunk + head + following


def waiting_bytes(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """The gradient of a head that is the embedding: it waits for the embedding's own, until the very end."""
    language = shape.language
    waits = language.tied and setup.method == "full" and (load.supervised_tokens or not setup.chunked_loss)
    return compute_bytes(setup) * language.vocabulary * language.hidden if waits else 0


def _moments(
    shape: ModelShape, setup: TrainingSetup, load: Load, coefficients: MemoryCoefficients
) -> tuple[Moment, ...]:
    """The points of a step where memory can be largest."""
    language, b = shape.language, compute_bytes(setup)
    layer, square = language_layer(shape, setup, load), language_attention(shape, setup, load)
    shared = rotary_bytes(shape, setup, load) + attention_mask(shape, setup, load)
    ends = load.tokens * language.hidden * (FLOAT + 2 * b)  # what the last norm and the head keep
    kept, again = _kept(layer, language.layers, setup.gradient_checkpointing)
    if not setup.gradient_checkpointing:  # then the last norm, whose gradients are fp32, may need more than a layer
        again = ends + max(again, load.tokens * language.hidden * (4 * FLOAT + b))
    kept_square, again_square = _kept(square, language.layers, setup.gradient_checkpointing)
    vision = _vision(shape, setup, load)
    waiting = waiting_bytes(shape, setup, load)
    moments = (
        Moment(
            name="the loss",
            language=kept + ends,
            vision=vision.kept,
            attention=kept_square + shared + vision.kept_square,
            loss=loss_bytes(shape, setup, load),
        ),
        Moment(
            name="the backward pass of the language model",
            language=kept + again,
            vision=vision.kept,
            attention=kept_square + again_square + shared + vision.kept_square,
            loss=waiting,
        ),
        Moment(
            name="the vision encoder",
            language=2 * load.tokens * b * language.hidden if setup.train_vision else 0,  # gradients on their way
            vision=vision.kept + vision.again,
            attention=vision.kept_square + vision.again_square,
            loss=waiting,
        ),
    )
    scale = coefficients.activation_scale
    return tuple(
        replace(
            moment,
            language=int(scale * moment.language),
            vision=int(scale * coefficients.vision_scale * moment.vision),
            attention=int(scale * coefficients.attention_scale * moment.attention),
        )
        for moment in moments
    )


def _kept(layer: LayerBytes, layers: int, recompute: bool) -> tuple[int, int]:
    """(what all layers keep, what the one that runs backward has on top)."""
    if recompute:
        return layers * layer.entry, layer.saved + layer.working
    return layers * layer.saved, layer.working


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vision:
    """The encoder and its projector: what they keep, and what one layer has on top while it runs."""

    kept: int = 0
    again: int = 0
    kept_square: int = 0
    again_square: int = 0


def _vision(shape: ModelShape, setup: TrainingSetup, load: Load) -> _Vision:
    vision = shape.vision
    if vision is None or not load.patches:
        return _Vision()
    projector = load.vision_tokens * vision.projector_elements_per_token * compute_bytes(setup)
    # At least the largest image: it is never cut.
    running = min(load.patches, max(setup.vision_batch_patches or load.patches, load.largest_patches))
    if not setup.train_vision:
        square = vision_attention(shape, setup, load, windowed=False)
        return _Vision(
            kept=projector if setup.train_projector else 0,
            again=vision_forward(vision, setup, running),
            again_square=square.saved * running // load.patches,
        )
    whole, part = (vision_layer(shape, vision, setup, patches) for patches in (load.patches, running))
    kept, _ = _kept(whole, vision.layers, setup.vision_checkpointing)
    _, again = _kept(part, vision.layers, setup.vision_checkpointing)
    squares = _vision_squares(shape, vision, setup, load)
    return _Vision(
        kept=kept + projector,
        again=again,
        kept_square=0 if setup.vision_checkpointing else sum(square.saved for square in squares),
        again_square=max((square.saved if setup.vision_checkpointing else 0) + square.working for square in squares)
        * running
        // load.patches,
    )


def vision_layer_parts(shape: ModelShape, setup: TrainingSetup, load: Load) -> dict[str, int]:
    """What one layer of a trained encoder keeps while it is not recomputed, by part; attention as if written out.

    A flash kernel keeps none of the attention's scores.
    """
    vision = shape.vision
    if vision is None or not load.patches or not setup.train_vision:
        return {}
    eager = replace(setup, attn_implementation="eager")
    scores = vision_attention(shape, eager, load, windowed=not vision.full_attention_layers).saved
    parts = {name: load.patches * each for name, each in vision_patch(shape, vision, setup).items()}
    return {"attention scores, if written out": scores, **parts}


def _vision_squares(shape: ModelShape, vision: VisionShape, setup: TrainingSetup, load: Load) -> tuple[LayerBytes, ...]:
    """What each layer of the encoder keeps of the squares, windows or whole images."""
    full = vision_attention(shape, setup, load, windowed=False)
    windowed = vision_attention(shape, setup, load, windowed=True)
    return (full,) * vision.full_attention_layers + (windowed,) * (vision.layers - vision.full_attention_layers)


def _kept_states(setup: TrainingSetup, counts: ParameterCounts) -> str:
    copied = counts.masters(setup)
    masters = f", with fp32 masters of {large(copied)}" if copied else ""
    return f"{setup.optimizer} for {large(counts.trainable)} parameters{masters}"


def _language_why(shape: ModelShape, setup: TrainingSetup, load: Load) -> str:
    layers = shape.language.layers
    if setup.gradient_checkpointing:
        return f"{load.tokens:,} tokens: the inputs of {layers} layers, and one layer that is recomputed"
    return f"{load.tokens:,} tokens: everything that {layers} layers keep for their backward pass"


def _vision_why(shape: ModelShape, setup: TrainingSetup, load: Load) -> str:
    if shape.vision is None or not load.patches:
        return "no patches"
    if not setup.train_vision:
        return f"{load.patches:,} patches through a frozen encoder, which keeps nothing"
    if not setup.vision_checkpointing:
        return f"{load.patches:,} patches: everything that {shape.vision.layers} layers keep for their backward pass"
    batch = setup.vision_batch_patches
    part = f", in sub-batches of {batch:,} patches" if batch is not None and batch < load.patches else ""
    return f"{load.patches:,} patches: the inputs of {shape.vision.layers} layers, and one layer recomputed{part}"


def _attention_why(shape: ModelShape, setup: TrainingSetup, load: Load) -> str:
    if setup.attn_implementation == "varlen":
        return "a flash kernel: rotary tables only"
    if setup.attn_implementation == "eager":
        return f"scores of {load.tokens // load.rows:,} x {load.tokens // load.rows:,} positions for every head"
    if not has_dense_mask(shape, load):
        return "one sample needs no mask: rotary tables only"
    return "a dense mask, as numbers in every layer"


def _loss_why(shape: ModelShape, setup: TrainingSetup, load: Load) -> str:
    logits = f"{shape.language.vocabulary:,} logits"
    if setup.chunked_loss:
        return f"{load.supervised_tokens:,} supervised positions, {setup.loss_chunk:,} at once, of {logits} each"
    return f"all {load.tokens:,} positions: {LOGIT_BYTES} bytes for each of {logits}"
