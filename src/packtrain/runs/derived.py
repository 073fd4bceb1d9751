"""What follows from a run's config and data before its first step: the derived numbers of run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNumbers:
    """Every number that follows from config and data."""

    mode: str  # packed or padded
    samples: int  # per epoch; one that is split counts once
    left_out: int  # entries of the ledger, except those not drawn: unusable, filtered out, or fitting no pack
    too_large: int  # samples among them that fit no pack
    unlabelled: int  # pieces of cut samples among them that have no labels
    cut: int  # samples that were truncated or split
    cut_tokens: int  # after the cut, trained nowhere
    cut_supervised: int  # labels lost by cutting
    not_drawn: int  # records beyond max_samples
    held_out: int  # records held out for evaluation by eval_size
    waiting: int  # samples that this epoch does not use, because their source has a weight below 1
    packs: int  # of the first epoch; padded: its samples, or their pieces where they are split
    packing_length: int
    fill: float  # share of real tokens in packs, or in padded batches
    samples_per_pack: float
    packs_per_step: int
    samples_per_step: float
    step_samples: tuple[int, int]  # the fewest and the most of a whole step of the first epoch
    rows_per_batch: int
    micro_batches: int  # forward passes of each process in a step
    steps: int
    steps_per_epoch: int
    epochs: float
    tokens: int  # per epoch
    supervised_tokens: int
    longest: int
    images: int
    videos: int
    frames: int
    world_size: int
    first_packs: tuple[tuple[int, float], ...] = ()  # samples and fill of the packs that are trained first
    evaluation_samples: int = 0
    evaluation_left_out: int = 0
    evaluation_batches: int = 0  # over all processes
    looked_at: int | None = None  # packs of a stream from which samples and tokens are estimated


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How a run optimizes, saves and evaluates, as its user wants to see it before the first step."""

    rates: Mapping[str, float]  # by trained part of the model
    schedule: str
    warmup_steps: int
    optimizer: str
    weight_decay: float
    max_grad_norm: float  # 0: gradients are not clipped
    precision: str  # compute dtype
    saves: str
    saved_times: int  # checkpoints that are written
    kept: int | None  # checkpoints that are kept; None: all
    evaluates: str
    logged_every: int  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRun:
    """Predicted speed and memory of a run."""

    gpu: str
    tokens_per_second: float  # without padding, over all GPUs
    step_seconds: float
    run_seconds: float
    memory_bytes: int  # of one GPU, for a batch with the most of everything
    gpu_bytes: int
    host_bytes: int  # of a node, with its data loader workers
    fitting_tokens: int  # of a batch like the heaviest one that would fit
    fitted: bool  # coefficients come from a calibration of this GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """How the adapters of a run are made."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None  # ends of module names; None: every linear layer of the decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(RunNumbers):
    """The derived numbers of run.json."""

    attn_implementation: str  # that really runs
    dtype: str
    master_weights: bool
    compiled: bool
    trainable: Mapping[str, int]  # weights by part
    weights: Mapping[str, int]
    method: str
    course: Course
    sharding: str
    packing_check: bool | None  # has it passed? None: not made
    lora: Adapters | None = None
    expected: PredictedRun | None = None
