"""What GPU memory holds: what autograd keeps of one layer, and weights, gradients, optimizer states and buffers.

Layers are counted tensor by tensor as transformers' layers keep them, compiled or not. Legend, all of one token or
patch: `b` bytes of the compute type, `hidden` the residual stream, `queries` and `keys` the widths of the projections.
A tensor counts once, however many hold it; parameters and inputs of the model do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.families.registry import find_family
from packtrain.families.shape import Composition, Decoder, LanguageShape, VisionShape, VisionTraits
from packtrain.families.text.model import GENERIC
from packtrain.predicting.flops import language_matrices
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

FLOAT = 4  # statistics, softmax and the inner part of RMSNorm are fp32 whatever the weights are
QUANTIZED = 0.5625  # bytes of one NF4 number: 4 bits, and one fp32 scale for every 64 of them
_BUCKET = 500_000_000  # numbers in one of the two reduction buckets of DeepSpeed
_BLOCK_SCALES = 2 * FLOAT / 256  # of 8-bit states: one fp32 scale for every 256 numbers of either state


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """One layer of one forward pass: `saved` for its backward pass, of which `entry` is its input."""

    saved: int
    entry: int  # all that stays when the layer is recomputed
    working: int  # what its backward pass needs on top


def compute_bytes(setup: TrainingSetup) -> int:
    """Bytes of one number of the activations."""
    return 2 if setup.weights_dtype == "bf16" else 4


def adapter_bytes(setup: TrainingSetup) -> int:
    """Bytes of one number of the adapters, and of what they compute."""
    return compute_bytes(setup) if setup.half_adapters else FLOAT


def language_layer(shape: ModelShape, setup: TrainingSetup, load: Load) -> LayerBytes:
    """One decoder layer, without what grows with the square of the tokens."""
    if setup.compiled:
        return _compiled_layer(shape, setup, load)
    language, b = shape.language, compute_bytes(setup)
    norms, head_norms = small_parts(shape)
    adapted = setup.method != "full"
    queries, keys = language.heads * language.head_dim, language.kv_heads * language.head_dim
    # A norm keeps its fp32 input, one statistic, and what it multiplies with its weight unless that is frozen.
    scaled = 0 if adapted else FLOAT if _decoder(shape).fp32_scales else b
    norm = norms * (language.hidden * (FLOAT + scaled) + FLOAT)
    if head_norms:
        norm += (queries + keys) * (FLOAT + scaled) + FLOAT * (language.heads + language.kv_heads)
    shared = _shared_width(shape, setup, load)
    attention = b * (2 * queries + 2 * shared) + (0 if setup.attn_implementation == "eager" else FLOAT * language.heads)
    block = b * language.intermediate * language.experts_used * (3 if language.gated else 1)
    linears = _adapter_inputs(language, setup, b) if adapted else _linear_inputs(language, b)
    working = 2 * b * max(language.intermediate * language.experts_used, 2 * language.hidden)
    return LayerBytes(
        saved=load.tokens * (norm + attention + block + linears) + _adapter_constants(language, setup),
        entry=load.tokens * b * language.hidden,
        working=load.tokens * working,
    )


def _shared_width(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """The width of keys as the kernel gets them: with a dense mask it wants as many key heads as query heads."""
    repeated = setup.attn_implementation == "eager" or (
        setup.attn_implementation == "sdpa" and has_dense_mask(shape, load)
    )
    return (shape.language.heads if repeated else shape.language.kv_heads) * shape.language.head_dim


def _compiled_layer(shape: ModelShape, setup: TrainingSetup, load: Load) -> LayerBytes:
    """One compiled decoder layer: fp32 parts of norms and what is cheap to compute again are not kept.

    What a matrix or a kernel reads is kept all the same, since it would have to be written once more.
    """
    language, b = shape.language, compute_bytes(setup)
    norms, head_norms = small_parts(shape)
    hidden, inner = language.hidden, language.intermediate * language.experts_used
    queries, keys = language.heads * language.head_dim, language.kv_heads * language.head_dim
    shared = _shared_width(shape, setup, load)
    attention = b * (2 * queries + 2 * shared) + FLOAT * language.heads
    if head_norms:  # queries and keys before their norms, too
        attention += b * (queries + keys) + FLOAT * (language.heads + language.kv_heads)
    stream = 2 * b * hidden * (norms - 1) + FLOAT * norms  # the residual stream, and further norms' results
    if setup.method == "full":
        linears = b * (2 * hidden + (3 if language.gated else 2) * inner)
    else:  # what adapters read is kept in their type, once for all matrices that read it
        matrices, own = language_matrices(language), adapter_bytes(setup)
        linears = (2 if language.gated else 1) * b * inner + own * setup.lora_rank * len(matrices)
        linears += own * (2 * hidden + inner + (queries if own > b else 0))  # else the kernel's result, kept already
        if setup.method == "dora":
            linears += (b + own) * sum(columns for _, columns in matrices)
    working = 2 * b * max(inner, 2 * hidden)
    return LayerBytes(
        saved=load.tokens * (stream + attention + linears) + _adapter_constants(language, setup),
        entry=load.tokens * b * hidden,
        working=load.tokens * working,
    )


def _linear_inputs(language: LanguageShape, b: int) -> int:
    """What trained matrices keep to compute their gradients; the output projection's input is the kernel's output."""
    routed = language.hidden * (language.experts_used - 1)  # each expert has its own copy of its tokens
    return b * (2 * language.hidden + routed + language.intermediate * language.experts_used)


def _adapter_inputs(language: LanguageShape, setup: TrainingSetup, b: int) -> int:
    """What adapters keep. Where they are wider than the model, every adapted matrix casts its input for itself."""
    matrices, own = language_matrices(language), adapter_bytes(setup)
    inputs = own * sum(rows for rows, _ in matrices) if own > b else _linear_inputs(language, b)
    kept = inputs + own * setup.lora_rank * len(matrices)
    if setup.method == "dora":  # the magnitude multiplies the frozen result and the adapter's
        kept += (b + own) * sum(columns for _, columns in matrices)
    return kept


def _adapter_constants(language: LanguageShape, setup: TrainingSetup) -> int:
    """DoRA sends an identity matrix through each adapter to compute the norm of the adapted matrix, and keeps it."""
    if setup.method != "dora":
        return 0
    own = adapter_bytes(setup)
    return sum(own * rows * (rows + setup.lora_rank) for rows, _ in language_matrices(language))


def language_attention(shape: ModelShape, setup: TrainingSetup, load: Load) -> LayerBytes:
    """What one decoder layer keeps of the square of the tokens; flash kernels keep none of it."""
    b, square = compute_bytes(setup), _row_square(load)
    if setup.attn_implementation == "eager":
        return _scores(shape.language.heads * square, b)
    if setup.attn_implementation == "sdpa" and has_dense_mask(shape, load):
        return LayerBytes(saved=b * square, entry=0, working=0)  # the mask as numbers, made again in every layer
    return LayerBytes(saved=0, entry=0, working=0)


def _scores(scores: int, b: int) -> LayerBytes:
    """Written-out attention: the softmax in fp32, cast where the values are smaller, and the gradients of both."""
    return LayerBytes(saved=scores * (FLOAT + (b if b < FLOAT else 0)), entry=0, working=scores * (FLOAT + b))


def attention_mask(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """The mask that all layers share, one more where some have a window; only recomputing layers still hold it."""
    dense = setup.attn_implementation == "eager" or (
        setup.attn_implementation == "sdpa" and has_dense_mask(shape, load)
    )
    if not setup.gradient_checkpointing or not dense:
        return 0
    each = _row_square(load) * (1 if setup.attn_implementation == "sdpa" else compute_bytes(setup))
    return each * (2 if shape.language.window_layers else 1)


def has_dense_mask(shape: ModelShape, load: Load) -> bool:
    """One sample alone needs no mask, for kernels know what causal means; but they know nothing of windows."""
    if load.samples > 1 or load.rows > 1:
        return True
    if vision_traits(shape).two_way_images and load.images:
        return True
    window = shape.language.window
    return window is not None and shape.language.window_layers > 0 and load.tokens >= window


def _row_square(load: Load) -> int:
    """Sum over rows of the row's length squared; rows are padded to one length."""
    return load.tokens * load.tokens // max(load.rows, 1)


def vision_layer(shape: ModelShape, vision: VisionShape, setup: TrainingSetup, patches: int) -> LayerBytes:
    """One layer of the encoder over this many patches, without what grows with the square of an image's patches."""
    b = compute_bytes(setup)
    return LayerBytes(
        saved=patches * sum(vision_patch(shape, vision, setup).values()),
        entry=patches * b * vision.hidden,
        working=patches * 2 * b * max(vision.intermediate, 2 * vision.hidden),
    )


def vision_patch(shape: ModelShape, vision: VisionShape, setup: TrainingSetup) -> dict[str, int]:
    """What one layer of the encoder keeps of one patch, by part."""
    b, hidden, traits = compute_bytes(setup), vision.hidden, vision_traits(shape)
    wide = traits.rms_norms and not setup.compiled  # written-out norms keep their fp32 input
    norms = 2 * (hidden * (FLOAT + b) + FLOAT) if wide else 2 * b * (hidden + 2)
    fused, alone = traits.fused, setup.attn_implementation == "varlen"
    # Values are a view of the fused result, which therefore stays whole. Where images attend one by one, their results
    # are kept twice: apart, and joined.
    kept = 6 + (2 if fused else 0) + (1 if fused and not alone else 0) + (2 if traits.scaled else 0)
    attention = b * kept * hidden + (0 if setup.attn_implementation == "eager" else FLOAT * vision.heads)
    block = 4 if vision.gated else 3 if traits.sigmoid else 2
    if setup.compiled:
        block = 3 if vision.gated else 2
    return {"norms": norms, "queries, keys, values and output": attention, "MLP": b * block * vision.intermediate}


def vision_attention(shape: ModelShape, setup: TrainingSetup, load: Load, *, windowed: bool) -> LayerBytes:
    """What one layer of the encoder keeps of the square of an image's patches."""
    vision = shape.vision
    if vision is None or setup.attn_implementation != "eager":
        return LayerBytes(saved=0, entry=0, working=0)
    square = load.patches * vision.window_patches if windowed else load.squared_patches
    scores, b = vision.heads * square, compute_bytes(setup)
    if vision_traits(shape).plain_softmax:
        return LayerBytes(saved=scores * b, entry=0, working=2 * scores * b)
    return _scores(scores, b)


def vision_forward(vision: VisionShape, setup: TrainingSetup, patches: int) -> int:
    """What one layer of an encoder without a backward pass needs while it runs."""
    return patches * compute_bytes(setup) * (5 * vision.hidden + (3 if vision.gated else 2) * vision.intermediate)


def vision_traits(shape: ModelShape) -> VisionTraits:
    """What is known of a model's encoder beside its sizes."""
    family = find_family(shape.model_type)
    known = family.shape if family is not None else None
    return known.traits if isinstance(known, Composition) else VisionTraits()


def _decoder(shape: ModelShape) -> Decoder:
    """What is known of a model's decoder beside its sizes; a plain one where nothing is."""
    known = getattr(find_family(shape.model_type), "shape", None)
    if isinstance(known, Composition):
        known = getattr(find_family(known.text), "shape", None)
    return known if isinstance(known, Decoder) else GENERIC


def rotary_bytes(shape: ModelShape, setup: TrainingSetup, load: Load) -> int:
    """Cosines and sines, shared by all layers."""
    language = 2 * compute_bytes(setup) * shape.language.head_dim * load.tokens
    if shape.vision is None or not vision_traits(shape).fused:
        return language
    return language + 2 * FLOAT * shape.vision.hidden // shape.vision.heads * load.patches


def small_parts(shape: ModelShape) -> tuple[int, bool]:
    """Norms of a decoder layer, and whether queries and keys have their own: read off the exact parameter count.

    What a layer has beside matrices are norms and biases, and each combination of them is another number.
    """
    language = shape.language
    if language.experts > 1:
        return 2, _decoder(shape).head_norms  # layers may differ, so that nothing follows from their sum
    matrices = sum(rows * columns for rows, columns in language_matrices(language))
    rest, odd = divmod(shape.parameters.layers - language.hidden, language.layers)
    queries, keys = language.heads * language.head_dim, language.kv_heads * language.head_dim
    attention_biases = (0, queries + 2 * keys, queries + 2 * keys + language.hidden)
    block_bias = language.intermediate * (2 if language.gated else 1) + language.hidden
    # Two norms more may be as many numbers as a bias: the likelier reading first.
    for norms in (4, 2) if _decoder(shape).norms == 4 else (2, 4):
        for head_norms in (False, True):
            base = matrices + norms * language.hidden + (2 * language.head_dim if head_norms else 0)
            if not odd and rest - base in {bias + more for bias in attention_biases for more in (0, block_bias)}:
                return norms, head_norms
    return 2, False


# ---- what does not depend on the data


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """The model's numbers by how they are stored and whether they are trained."""

    trained: int  # of the model itself
    adapters: int
    frozen: int
    quantized: int

    @property
    def trainable(self) -> int:
        """Everything that has a gradient."""
        return self.trained + self.adapters

    def masters(self, setup: TrainingSetup) -> int:
        """Everything that has an fp32 copy."""
        if not setup.has_masters:
            return 0
        return self.trainable if setup.half_adapters else self.trained


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int


def count(shape: ModelShape, setup: TrainingSetup) -> ParameterCounts:
    """Adapters replace training in the decoder; encoder and projector are trained themselves, or frozen."""
    parameters = shape.parameters
    beside = (parameters.vision if setup.train_vision else 0) + (parameters.projector if setup.train_projector else 0)
    if setup.method == "full":
        trained = parameters.language + beside
        return ParameterCounts(trained=trained, adapters=0, frozen=parameters.total - trained, quantized=0)
    quantized = decoder_matrices(shape) if setup.method == "qlora" else 0
    return ParameterCounts(
        trained=beside,
        adapters=adapter_parameters(shape, setup),
        frozen=parameters.total - beside - quantized,
        quantized=quantized,
    )


def decoder_matrices(shape: ModelShape) -> int:
    """The numbers of all linear layers of the decoder, its head excepted."""
    language = shape.language
    attention, block = language_matrices(language)[:4], language_matrices(language)[4:]
    layer = sum(rows * columns for rows, columns in attention)
    layer += language.experts * sum(rows * columns for rows, columns in block)
    return min(language.layers * layer, shape.parameters.layers)


def adapter_parameters(shape: ModelShape, setup: TrainingSetup) -> int:
    """Adapters of this rank on every linear layer of the decoder; DoRA has one magnitude per output beside."""
    language, dora = shape.language, setup.method == "dora"
    per_layer = 0
    for position, (rows, columns) in enumerate(language_matrices(language)):
        copies = language.experts if position >= 4 else 1  # the first four belong to attention
        per_layer += copies * (setup.lora_rank * (rows + columns) + (columns if dora else 0))
    return language.layers * per_layer


def states(shape: ModelShape, setup: TrainingSetup) -> StateBytes:
    """What one GPU holds whatever the batch is."""
    counts, gpus = count(shape, setup), setup.gpus
    sharded = setup.sharding in ("zero3", "fsdp")
    stored = compute_bytes(setup)
    adapters = adapter_bytes(setup)
    weights = (counts.trained + counts.frozen) * stored + counts.adapters * adapters
    weights += int(counts.quantized * QUANTIZED)
    gradients = counts.trained * stored + counts.adapters * adapters
    if setup.sharding in ("zero2", "zero3", "fsdp"):
        gradients = -(-gradients // gpus)
    if setup.sharding.startswith("zero"):
        gradients += -(-counts.trainable * FLOAT // gpus)  # the fp32 share that the optimizer reads
    return StateBytes(
        weights=-(-weights // gpus) if sharded else weights,
        gradients=gradients,
        optimizer=_optimizer(shape, setup, counts),
        buffers=_buffers(shape, setup, counts) if gpus > 1 else 0,
    )


def state_bytes(shape: ModelShape, setup: TrainingSetup, stored: int) -> float:
    """Bytes of optimizer state for one number that is `stored` in this many bytes."""
    if setup.optimizer == "adamw":
        return 2 * stored
    if setup.optimizer == "adamw_8bit":
        return 2 + _BLOCK_SCALES
    if setup.optimizer == "adafactor":
        return 2 * FLOAT / shape.language.hidden  # one number for each row and column of a matrix
    return 0


def _optimizer(shape: ModelShape, setup: TrainingSetup, counts: ParameterCounts) -> int:
    """Beside fp32 masters, states are fp32 too, as they are for fp32 adapters."""
    wide = state_bytes(shape, setup, FLOAT)
    each = wide + FLOAT if setup.has_masters else state_bytes(shape, setup, compute_bytes(setup))
    own = each if setup.half_adapters else wide
    total = counts.trained * each + counts.adapters * own
    if setup.optimizer == "adamw_8bit" and setup.method == "full" and not setup.sharding.startswith("zero"):
        total += shape.parameters.embedding * (2 * FLOAT - wide)  # its states stay fp32 with bitsandbytes
    return int(total) if setup.sharding == "ddp" else int(-(-total // setup.gpus))


def _buffers(shape: ModelShape, setup: TrainingSetup, counts: ParameterCounts) -> int:
    b = compute_bytes(setup)
    if setup.sharding == "ddp":  # buckets of 25 MiB that together hold every gradient once more
        return counts.trained * b + counts.adapters * adapter_bytes(setup)
    reduction = 2 * b * min(counts.trainable, _BUCKET)
    if setup.sharding in ("zero1", "zero2"):
        return reduction
    parameters, unit = shape.parameters, largest_unit(shape)
    gathered = b * (2 * unit + parameters.embedding + parameters.head)  # two layers, one of them ahead of time
    unreduced = 0 if not counts.trained else 2 * b * unit
    return gathered + (unreduced if setup.sharding == "fsdp" else reduction)


def largest_unit(shape: ModelShape) -> int:
    """The parameters of the largest layer: what is gathered at once when weights are shared out."""
    decoder = -(-shape.parameters.layers // shape.language.layers)
    encoder = 0 if shape.vision is None else -(-shape.parameters.vision // shape.vision.layers)
    return max(decoder, encoder)
