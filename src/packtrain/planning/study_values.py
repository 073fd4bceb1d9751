"""The study: what `plan` computes for a dataset, a model and GPUs. Computed once, rendered many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from packtrain.core.numbers import limits_text
from packtrain.packing.schedule import BalanceLine
from packtrain.planning.question import Baseline, Sections
from packtrain.predicting.host_memory import HostNeeds
from packtrain.predicting.memory import MemoryEstimate
from packtrain.predicting.options import Saving
from packtrain.predicting.values import Load, TrainingSetup

Statistics = Mapping[str, float]  # mean, median, std, min, max, p95, p99, total; empty for an empty column


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts between edges, for a chart; the last edge may be far out, so that it holds the maximum."""

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]
    without_zeros: Statistics = field(default_factory=dict)  # of what is counted, where samples that have none are not


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A part of the dataset: one source, or one modality."""

    name: str  # as data gave it for sources; text, image, images, video, mixed for modalities
    samples: int
    tokens: int
    share_of_tokens: float
    statistics: Mapping[str, Statistics]  # by column


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStats:
    """What the data is."""

    samples: int
    tokens: int
    statistics: Mapping[str, Statistics]  # by column, objects included
    histograms: Mapping[
        str, Histogram
    ]  # tokens, text_tokens, vision_tokens, patches, images, objects, where they differ
    by_source: tuple[Group, ...]
    by_modality: tuple[Group, ...]
    modality_tokens: Mapping[str, int] = field(default_factory=dict)  # text, image, video: those that there are
    observations: tuple[str, ...] = ()  # what stands out, in sentences
    entries_read: int
    measured_ledger: Mapping[str, int]  # "stage: reason" -> records that measuring left out


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedRun:
    """What training without packing would compute, on the batches it would form."""

    order: Literal["random", "by_length"]
    batch_size: int  # samples per GPU and forward
    batches: int  # an epoch, over all GPUs
    steps: int  # optimizer steps of an epoch
    samples: int
    dropped: int  # samples that the packing it is compared with leaves out, and so this run too
    real_tokens: int
    computed_tokens: int  # padding included
    waste: float  # share of computed tokens that is padding
    worst: Load  # the largest batch
    seconds: float  # an epoch, predicted; over all GPUs
    memory_bytes: int  # of the worst batch
    fits: bool
    kernels: Literal["own", "packs"] = "own"  # attention and layers of the padded run, or those that packs have

    @property
    def tokens_per_second(self) -> float:
        """Real tokens, over all GPUs."""
        return self.real_tokens / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One packing of the dataset: a length and further limits."""

    packing_length: int
    limits: Mapping[str, int]  # setting -> value, besides packing_length
    packs: int
    bound: int
    of_bound: float  # bound / packs
    fill: float  # real tokens / (packs x packing_length)
    samples_packed: int
    samples_dropped: int
    tokens_dropped: int
    samples_per_pack: float
    packs_per_step: int  # so that a step has about the baseline's samples
    samples_per_step: float
    micro_batches: int  # forward passes of each GPU in a step: gradient accumulation
    steps: int  # an epoch
    worst: Load  # component-wise maximum over packs
    memory_bytes: int  # peak of one GPU
    fits: bool
    seconds: float  # an epoch, predicted
    tokens_per_second: float  # real tokens, over all GPUs
    speedup: float  # real tokens per second, over those of the baseline's padded run
    fullest: Mapping[str, float]  # resource -> share of packs in which it is used up most
    idle: float = 0.0  # share of the GPUs' passes that get no pack, since a step has whole packs

    @property
    def dropped_share(self) -> float:
        """Samples that are in no pack, of all."""
        return self.samples_dropped / (self.samples_packed + self.samples_dropped)

    @property
    def name(self) -> str:
        """Its settings in words."""
        return limits_text(self.packing_length, self.limits)

    @property
    def settings(self) -> Mapping[str, int]:
        """The length and the further limits, as a config names them."""
        return {"packing_length": self.packing_length, **self.limits}


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of the recommendation: a setting, what it was, what it becomes and why."""

    parameter: str
    baseline: str  # what the user has set, or does today; empty where neither is known
    packing: str
    reason: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """What may go wrong with the recommended run, and what to do then."""

    sign: str
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another setting worth considering."""

    name: Literal["efficient", "conservative"]
    simulation: int  # position in the study's simulations
    reason: str
    config: Sections


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """What to train with, and why."""

    packing: bool  # False: packing will not help
    verdict: str  # one sentence with numbers
    simulation: int  # position in the study's simulations
    config: Sections  # as in recommended.yaml
    reasons: tuple[Reason, ...]
    alternatives: tuple[Alternative, ...]
    advice: tuple[str, ...]  # learning rate, overlong samples, limits that never bind, risks
    mean_share: float  # mean length / packing length: above 0.7 packing helps little, below 0.5 it helps
    base: Sections = field(default_factory=dict)  # the user's own config, which was changed
    trouble: tuple[Trouble, ...] = ()
    warning: str = ""  # why none of this holds as it is: costs of another family of models
    rule_of_thumb: str  # what the 70 % and 50 % rules say, beside the measured waste

    @property
    def mark(self) -> str:
        """What the chosen packing is called: where padding is recommended, it is only the best one."""
        return "recommended" if self.packing else "best packing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Another setup, to compare its memory with that of the recommended one."""

    name: str
    estimate: MemoryEstimate
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Several changes together, and what comes of them."""

    changes: tuple[str, ...]  # "setting value"
    memory_bytes: int
    seconds: float  # an epoch, predicted
    lost: int  # samples left out beside those that are left out anyway


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Where the memory of a pack with the most of everything goes, and what would change it."""

    gpu: str
    gpu_bytes: int
    usable_bytes: int  # what may be used: a plan that needs more does not fit
    estimate: MemoryEstimate
    beside: tuple[Beside, ...] = ()  # the requested setup, where that does not fit; the padded run
    vision_layer: Mapping[str, int] = field(default_factory=dict)  # bytes that one layer of the encoder keeps, by part
    vision_layers: int = 0
    comfortable: Combination | None = None  # where the recommended setup leaves little room
    worst_bytes: int  # of the heaviest pack itself
    worst_pack: int
    worst_samples: tuple[str, ...]  # ids
    savings: tuple[Saving, ...]
    sentences: tuple[str, ...]  # the worst case in words
    host: HostNeeds


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSample:
    """One sample in the picture of packs."""

    id: str
    source: str
    tokens: int
    vision_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePack:
    """One pack as it will be drawn."""

    number: int
    tokens: int
    samples: tuple[PictureSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The whole result. Every file and every page shows numbers of this value and no others."""

    costs: str  # folder of the cost table
    model: str
    model_type: str
    parameters: int
    gpu: str
    gpus: int
    epochs: int
    setup: TrainingSetup  # of the packed run, as estimated with
    baseline: Baseline  # the padded run that it is compared with; nothing of its step is left open
    dataset: DatasetStats
    padded: tuple[PaddedRun, ...]
    simulations: tuple[Simulation, ...]
    recommendation: Recommendation
    memory: MemoryReport
    balance: tuple[BalanceLine, ...]
    picture: tuple[PicturePack, ...]
    gain: float | None = None  # real tokens/s of the recommended packing, over the best padding with the same kernels
    ledger: Mapping[str, int] = field(default_factory=dict)  # measured and packed: "stage: reason" -> samples
    notes: tuple[str, ...] = ()  # what the estimates rest on: default or fitted coefficients, generic shapes
