"""FLOPs of a forward pass and of a training step, from a model's shape and what the pass sees.

Matrix products only, a multiply and an add counted as two. Causal attention is counted once: a position attends to
those before it, half of the square. See docs/internals/time-model.md for the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

CountArray: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Where the FLOPs of a pass go. The last three are executed too, but a better setup would not need them."""

    language: float = 0.0  # the matrices of the decoder
    attention: float = 0.0  # scores and weighted sums of the decoder
    head: float = 0.0  # logits where loss is taken
    vision: float = 0.0  # the matrices of the encoder, patch embedding included
    vision_attention: float = 0.0
    projector: float = 0.0
    adapters: float = 0.0
    recomputed: float = 0.0  # checkpointed layers, a second time forward
    unused_logits: float = 0.0  # logits where no loss is taken
    masked_attention: float = 0.0  # pairs that a dense mask throws away

    @property
    def total(self) -> float:
        """Useful FLOPs: what model FLOP utilisation is measured by."""
        return self.executed - self.recomputed - self.unused_logits - self.masked_attention

    @property
    def executed(self) -> float:
        """Everything that the GPU computes."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkModel:
    """The work of a pack as a sum over its numbers: fast enough for millions of packs at once."""

    per_token: float
    per_squared_token: float
    per_supervised_token: float
    per_patch: float
    per_squared_patch: float
    constant: float = 0.0  # per pack
    unit: Literal["flops", "seconds"] = "flops"

    @overload
    def of(
        self, *, tokens: int, squared_tokens: int, patches: int, squared_patches: int, supervised_tokens: int
    ) -> float: ...

    @overload
    def of(
        self,
        *,
        tokens: CountArray,
        squared_tokens: CountArray,
        patches: CountArray,
        squared_patches: CountArray,
        supervised_tokens: CountArray,
    ) -> NDArray[np.float64]: ...

    def of(
        self, *, tokens: Any, squared_tokens: Any, patches: Any, squared_patches: Any, supervised_tokens: Any
    ) -> Any:
        """The work of one pack, or of many when given arrays."""
        return (
            self.constant
            + self.per_token * tokens
            + self.per_squared_token * squared_tokens
            + self.per_patch * patches
            + self.per_squared_patch * squared_patches
            + self.per_supervised_token * supervised_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How often a part's forward FLOPs are spent in a training step: forward, and once for each kind of gradient."""

    language: float
    attention: float
    head: float
    vision: float
    vision_attention: float
    projector: float
    patch_embedding: float
    recomputed_language: float
    recomputed_vision: float


def layer_matrices(shape: LanguageShape) -> int:
    """Elements of the matrices of one decoder layer that one token meets."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = (3 if shape.gated else 2) * shape.hidden * shape.intermediate * shape.experts_used
    router = shape.hidden * shape.experts if shape.experts > 1 else 0
    return shape.hidden * (2 * queries + 2 * keys) + block + router


def language_matrices(shape: LanguageShape) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers of one decoder layer: four of attention, then those of one expert."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
    return (*attention, *((hidden, inner),) * (2 if shape.gated else 1), (inner, hidden))


def adapted_matrices(shape: LanguageShape) -> tuple[tuple[int, int], ...]:
    """Those whose adapters take time; experts are left out."""
    return language_matrices(shape)[: 4 if shape.experts > 1 else None]


def encoder_layer_matrices(shape: VisionShape) -> int:
    """Elements of the matrices of one layer of the encoder."""
    return 4 * shape.hidden**2 + (3 if shape.gated else 2) * shape.hidden * shape.intermediate


def forward_flops(shape: ModelShape, load: Load) -> Flops:
    """Useful FLOPs of one forward pass; padding is work, since the load's tokens include it."""
    language, vision = shape.language, shape.vision
    flops = Flops(
        language=2.0 * load.tokens * language.layers * layer_matrices(language),
        attention=2.0 * _per_pair(language) * _layer_pairs(language, load),
        head=2.0 * load.supervised_tokens * language.hidden * language.vocabulary,
    )
    if vision is None or not load.patches:
        return flops
    per_patch = vision.patch_elements * vision.hidden + vision.layers * encoder_layer_matrices(vision)
    windowed = vision.layers - vision.full_attention_layers
    near = min(load.squared_patches, load.patches * vision.window_patches)
    pairs = vision.full_attention_layers * load.squared_patches + windowed * near
    return replace(
        flops,
        vision=2.0 * load.patches * per_patch,
        vision_attention=4.0 * vision.hidden * pairs,
        # By patches, not by media tokens: some families cut or pool tokens after the projector.
        projector=load.patches / vision.patches_per_token * vision.projector_flops_per_token,
    )


def training_flops(shape: ModelShape, setup: TrainingSetup, load: Load) -> Flops:
    """FLOPs of forward and backward of one pass, recomputation and other avoidable work apart."""
    once, passes = forward_flops(shape, load), passes_of(setup)
    rows = load.patches * shape.vision.patch_elements * shape.vision.hidden if shape.vision else 0
    embedding = 2.0 * rows
    adapters, norms = _adapter_flops(shape.language, setup, load.tokens), _norm_flops(shape.language, setup)
    again = passes.recomputed_language * (once.language + once.attention + adapters + norms)
    again += passes.recomputed_vision * (once.vision - embedding + once.vision_attention)
    every_logit = 2.0 * load.tokens * shape.language.hidden * shape.language.vocabulary
    return Flops(
        language=passes.language * once.language,
        attention=passes.attention * once.attention,
        head=passes.head * once.head,
        vision=passes.vision * (once.vision - embedding) + passes.patch_embedding * embedding,
        vision_attention=passes.vision_attention * once.vision_attention,
        projector=passes.projector * once.projector,
        adapters=3.0 * adapters + norms,  # both matrices of an adapter are trained; norms have no gradient
        recomputed=again,
        unused_logits=0.0 if setup.chunked_loss else passes.head * (every_logit - once.head),
        masked_attention=(passes.attention + passes.recomputed_language) * _masked(shape.language, setup, load, once),
    )


def passes_of(setup: TrainingSetup) -> Passes:
    """Trained matrices: forward, gradient of inputs, gradient of weights. Frozen ones lack the last, or both gradients.

    A frozen encoder has nothing trained below it, so no gradient flows through it. Its patch embedding is the first
    layer and never needs the gradient of its inputs.
    """
    language = 3.0 if setup.method == "full" else 2.0
    vision = 3.0 if setup.train_vision else 1.0
    frozen_projector = 2.0 if setup.train_vision else 1.0
    return Passes(
        language=language,
        attention=3.0,  # no weights of its own: two products forward, four backward
        head=language,
        vision=vision,
        vision_attention=vision,
        projector=3.0 if setup.train_projector else frozen_projector,
        patch_embedding=2.0 if setup.train_vision else 1.0,
        recomputed_language=1.0 if setup.gradient_checkpointing else 0.0,
        recomputed_vision=1.0 if setup.vision_checkpointing and setup.train_vision else 0.0,
    )


def work_model(shape: ModelShape, setup: TrainingSetup, *, longest: int | None = None) -> WorkModel:
    """Everything that a pack makes the GPU compute, as coefficients.

    `longest`: the longest sample, which decides whether sliding windows ever cut anything off; without it they are
    taken to. Dense masks depend on how samples are laid out and are left out.
    """
    empty = Load(tokens=0, squared_tokens=0, longest=0)
    attention = attention_work(shape, setup, longest=longest)
    constant = training_flops(shape, setup, empty).executed

    def one(load: Load) -> float:
        return training_flops(shape, setup, load).executed - constant

    setup = replace(setup, attn_implementation="varlen")
    return WorkModel(
        per_token=one(replace(empty, tokens=1)) + attention.per_token,
        per_squared_token=attention.per_squared_token,
        per_supervised_token=one(replace(empty, supervised_tokens=1)),
        per_patch=one(replace(empty, patches=1)) + attention.per_patch,
        per_squared_patch=attention.per_squared_patch,
        constant=constant,
    )


def attention_work(shape: ModelShape, setup: TrainingSetup, *, longest: int | None = None) -> WorkModel:
    """The part of the work that is attention, in the decoder and in the encoder."""
    language, vision, passes = shape.language, shape.vision, passes_of(setup)
    pair = 2.0 * _per_pair(language) * (passes.attention + passes.recomputed_language)
    cut = language.window if language.window and (longest is None or longest > language.window) else 0
    whole_layers = language.layers - (language.window_layers if cut else 0)
    per_patch = per_square = 0.0
    if vision is not None:
        patch_pair = 4.0 * vision.hidden * (passes.vision_attention + passes.recomputed_vision)
        per_square = patch_pair * vision.full_attention_layers
        per_patch = patch_pair * (vision.layers - vision.full_attention_layers) * vision.window_patches
    return WorkModel(
        per_token=pair * language.window_layers * cut,
        per_squared_token=pair * whole_layers / 2,
        per_supervised_token=0.0,
        per_patch=per_patch,
        per_squared_patch=per_square,
    )


def _per_pair(shape: LanguageShape) -> float:
    """Multiply-adds of one query meeting one key in one layer: the score, and the value's share of the sum."""
    return 2.0 * shape.heads * shape.head_dim


def _layer_pairs(shape: LanguageShape, load: Load) -> float:
    """Pairs of positions that attend, over all layers; sliding windows cut long samples."""
    pairs = load.squared_tokens / 2
    if shape.window is None or load.longest <= shape.window:
        return shape.layers * pairs
    return (shape.layers - shape.window_layers) * pairs + shape.window_layers * min(pairs, load.tokens * shape.window)


def _masked(shape: LanguageShape, setup: TrainingSetup, load: Load, once: Flops) -> float:
    """What attention over whole rows computes beyond what samples need, forward."""
    if setup.attn_implementation == "varlen" or (
        setup.attn_implementation == "sdpa" and load.samples == load.rows == 1
    ):
        return 0.0
    whole = load.tokens * load.tokens / load.rows
    return max(0.0, 2.0 * _per_pair(shape) * shape.layers * whole - once.attention)


def _adapter_flops(shape: LanguageShape, setup: TrainingSetup, tokens: int) -> float:
    """Adapters, forward only."""
    if setup.method == "full":
        return 0.0
    elements = sum(setup.lora_rank * (inputs + outputs) for inputs, outputs in adapted_matrices(shape))
    return 2.0 * tokens * shape.layers * elements


def _norm_flops(shape: LanguageShape, setup: TrainingSetup) -> float:
    """DoRA multiplies its two matrices out in every forward pass, by way of a unit matrix, to take norms of the sum."""
    if setup.method != "dora":
        return 0.0
    elements = sum(inputs * (inputs + outputs) for inputs, outputs in adapted_matrices(shape))
    return 2.0 * setup.lora_rank * shape.layers * elements
