"""What differs between model families, as values: one `Family` for each model type, in the `__init__` of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.shape import Composition, Config, Decoder

if TYPE_CHECKING:
    from packtrain.families.tiny import TinySpec


ProcessorKwargs = dict[str, Any]  # arguments of a processor's call


@dataclass(frozen=True, slots=True)
class Run:
    """`count` copies of one special token, each replaced by an embedding of a medium.

    A run is written once into the text that is tokenized and counted `count` times: special tokens never merge with
    each other, so this is exact and saves tokenizing thousands of them.
    """

    token: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """What the processor puts in place of one medium's placeholder, and what the vision encoder gets for it."""

    pieces: tuple[str | Run, ...]
    patches: int
    max_patches: int  # the largest span of patches that attends to itself (an image, a tile, a frame pair)
    frames: int = 0  # video frames that were sampled
    tiles: int = 1

    @property
    def media_tokens(self) -> int:
        """Tokens that will be replaced by embeddings."""
        return sum(piece.count for piece in self.pieces if isinstance(piece, Run))


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings:
    """A model folder's processor files as plain values; read by `families.settings`, no torch involved."""

    folder: str
    tokenizer_folder: str | None = None  # where a finished tokenizer has been saved, if not in the model's folder
    model_type: str  # transformers' model type, or "text" where there is no image processor
    processor: Config = field(default_factory=dict)  # processor_config.json without its nested parts
    image: Config = field(default_factory=dict)
    video: Config = field(default_factory=dict)
    config: Config = field(default_factory=dict)  # the model's config.json, {} where there is none
    tokenizer_config: Config = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, image_token, ... by name
    chat_template: str | None = None
    tool_template: str | None = None  # used instead where a record has tools: `tool_use` of a tokenizer with several
    own_template: bool = False  # that one is the user's, not the model's
    template_date: str | None = None  # YYYY-MM-DD, what the template writes as today

    @property
    def templates(self) -> str:
        """All that its chat templates say."""
        return "".join(filter(None, (self.chat_template, self.tool_template)))


class Rule:
    """The few verbs in which families differ. One instance per (settings, limits); it must pickle and stay light."""

    name: ClassVar[str]  # transformers' model type
    limit_names: ClassVar[tuple[str, ...]] = ()  # of the limits that it has a setting for; others are refused
    # How its chat template is used, where that differs from the rest.
    string_content: ClassVar[bool | None] = None  # as one string, not as typed parts; None: only for text models
    media_first: ClassVar[bool] = False  # all media come before the first user text
    video_chat_template: ClassVar[str | None] = None  # used instead of the folder's own as soon as there is a video
    placeholders: Mapping[MediaKind, str]  # what the chat template writes for one medium of each supported kind

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        _refuse_limits(self.name, limits, self.limit_names)
        self.limits, self.placeholders = limits, {}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """The expansion of a sample's `number`-th image. Raises RecordError for a size that the processor refuses."""
        raise RecordError("family", f"{self.name} takes no image")

    def video(self, header: MediaHeader) -> Expansion:
        """The expansion of one video, frames sampled as in training. Raises RecordError where it is refused."""
        raise RecordError("family", f"{self.name} takes no video")

    def check_sample(self, headers: Sequence[MediaHeader], expansions: Sequence[Expansion]) -> None:
        """Raise RecordError for media that the processor does not take together."""

    def presized(self, height: int, width: int) -> tuple[int, int] | None:
        """The sides that a `resized_height` and `resized_width` in the data stand for; None where they mean nothing."""
        return None

    def processor_kwargs(self) -> ProcessorKwargs:
        """Arguments that make the real processor apply the same limits (`images_kwargs`, `videos_kwargs`)."""
        return {}


class TextOnly(Rule):
    """Any decoder-only text model; a record with media is refused."""

    name: ClassVar[str] = "text"


class NoRule(Exception):
    """These settings leave what a family's rule covers; the processor itself has to be run to know the cost."""


def _refuse_limits(family: str, limits: MediaLimits, supported: tuple[str, ...]) -> None:
    """Refuse limits that a family has no setting for, rather than ignoring them."""
    for name in limits.given():
        if name not in supported:
            raise ConfigError(
                f"limit {name}",
                got=f"{name} for model family {family!r}",
                expected="one of " + ", ".join(supported) if supported else "no limits: this family's sizes are fixed",
                fix="leave it out, or use another family",
            )


Join = Literal["rows", "padded", "images", "tiles", "columns", "text", "samples"]
# rows     along dimension 0, as they are
# padded   along dimension 0 after padding all others with zeros
# images   (1, images, ...) along dimension 1; what is larger pads the other with zeros
# tiles    along dimension 0 after padding dimension 1, the tiles of an image, with zeros
# columns  along the last dimension
# text     (1, tokens, ...) along the text
# samples  (1, ...) for each sample, which no packed row can hold; padded rows are stacked


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchContract:
    """What a packed row of one family looks like."""

    model_type: str = ""  # filled in by `contract_for`
    # (1, tokens), or (4, 1, tokens) with M-RoPE; own: the model computes them, as for padded rows it can.
    positions: Literal["restart", "mrope", "own"] = "restart"
    media: Mapping[str, Join] = field(default_factory=dict)  # media tensors and how they are joined
    token_types: str | None = None  # the argument that takes kinds of tokens, where the model needs one
    per_sample_images: str | None = None  # the argument that takes the number of images of each sample
    refused_backends: Mapping[str, str] = field(default_factory=dict)  # backend -> why
    text_order: bool = False  # tiles of images and frames of videos are one tensor, in the order of the text
    given_masks: bool = False  # the model makes its masks without positions, and takes finished ones
    # Tokens beyond which a sample must be alone in its row: the model then chooses other rotary frequencies for all.
    longest_together: int | None = None
    longest_row: int | None = None  # positions of a row, padding included, where the model has no room for more
    # How its media are joined was read off its processor: packs are trained only where the packing check has passed.
    unlisted: bool = False
    small_media: Mapping[str, np.ndarray] = field(default_factory=dict)  # of an unlisted model, for ranks without media


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """What a model calls its parts where those are none of the usual names: attributes of the inner model."""

    language: str = ""
    vision: str = ""
    projector: str = ""


SmallImage = Callable[[Any], Mapping[str, np.ndarray]]  # the model's config -> the arguments of get_image_features


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that packtrain has to know of one model type; each part may be left out, and then its stage refuses it.

    rule         exact token costs. None: the processor is run for every record; a text model needs neither.
    contract     how samples are joined into a packed row. None: fine for text models, refused for those with media.
    shape        sizes and parameters, for predictions. None: read by the usual keys of a config, with a note.
    small_image  the least that the vision encoder takes, for ranks without media. Needed where media are trained.
    tiny         a small random model, as `tiny:MODEL_TYPE`.
    modules      what its submodules are called. Needed where those are none of the usual names.
    """

    model_type: str
    rule: type[Rule] | None = None
    contract: BatchContract | None = None
    refused: str = ""  # why its samples cannot be packed
    causal: bool = True  # False: it cannot be trained on padded rows either
    processors: tuple[str, ...] = ()  # classes of processors by which folders without a config.json are known
    image_processors: tuple[str, ...] = ()  # and of image processors that no other family has
    shape: Composition | Decoder | None = None
    small_image: SmallImage | None = None
    # "module:function" that computes on the host what the encoder would ask the GPU for (encoder, sizes) -> arguments.
    # It is imported with torch, when a model is there.
    image_sizes: str | None = None
    tiny: TinySpec | None = None
    modules: ModuleNames = field(default_factory=ModuleNames)
    published: Mapping[str, Config] = field(default_factory=dict)  # configs of real sizes, by name
    in_transformers: bool = True
