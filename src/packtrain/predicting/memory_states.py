"""Weights, gradients, optimizer states and communication buffers: what does not depend on the data."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.predicting.flops import language_matrices
from packtrain.predicting.memory_layers import FLOAT, adapter_bytes, compute_bytes
from packtrain.predicting.values import ModelShape, TrainingSetup

QUANTIZED = 0.5625  # bytes of one NF4 number: 4 bits, and one fp32 scale for every 64 of them
_BUCKET = 500_000_000  # numbers in one of the two reduction buckets of DeepSpeed
_BLOCK_SCALES = 2 * FLOAT / 256  # of 8-bit states: one fp32 scale for every 256 numbers of either state


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
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


def count(shape: ModelShape, setup: TrainingSetup) -> Counts:
    """Adapters replace training in the decoder; encoder and projector are trained themselves, or frozen."""
    parameters = shape.parameters
    beside = (parameters.vision if setup.train_vision else 0) + (parameters.projector if setup.train_projector else 0)
    if setup.method == "full":
        trained = parameters.language + beside
        return Counts(trained=trained, adapters=0, frozen=parameters.total - trained, quantized=0)
    quantized = decoder_matrices(shape) if setup.method == "qlora" else 0
    return Counts(
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


def _optimizer(shape: ModelShape, setup: TrainingSetup, counts: Counts) -> int:
    """Beside fp32 masters, states are fp32 too, as they are for fp32 adapters."""
    wide = state_bytes(shape, setup, FLOAT)
    each = wide + FLOAT if setup.has_masters else state_bytes(shape, setup, compute_bytes(setup))
    own = each if setup.half_adapters else wide
    total = counts.trained * each + counts.adapters * own
    if setup.optimizer == "adamw_8bit" and setup.method == "full" and not setup.sharding.startswith("zero"):
        total += shape.parameters.embedding * (2 * FLOAT - wide)  # its states stay fp32 with bitsandbytes
    return int(total) if setup.sharding == "ddp" else int(-(-total // setup.gpus))


def _buffers(shape: ModelShape, setup: TrainingSetup, counts: Counts) -> int:
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
