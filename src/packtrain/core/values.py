"""The frozen values that stages exchange: what a record is, what its media are, what it will cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from packtrain.core.errors import ConfigError

MediaKind = Literal["image", "video", "audio"]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRef:
    """Where the bytes of one medium are: a path, the bytes themselves, or a span of an uncompressed archive."""

    name: str  # what the data calls it; for messages and the ledger, never for opening
    path: str | None = None  # relative to the media root, absolute, or file://
    data: bytes | None = None  # from a column, a data URL or a compressed archive
    archive: str | None = None  # an uncompressed tar, together with offset and size
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A span of text inside a message."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLimits:
    """Limits that the data give one medium, as its processor takes them; they go before those of the run."""

    min_pixels: int | None = None  # of a video: of each frame
    max_pixels: int | None = None
    resized_height: int | None = None  # to which it is brought before the processor gets it
    resized_width: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    max_frames: int | None = None

    def given(self) -> dict[str, int | float]:
        """The limits that were set, by name."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def over(self, run: MediaLimits, kind: MediaKind) -> MediaLimits:
        """The limits of a run with these put over them; one way of sampling frames takes the place of the other."""
        own = {name: value for name, value in self.given().items() if not name.startswith("resized_")}
        if kind == "video":
            own = {f"video_{name}" if name.endswith("_pixels") else name: value for name, value in own.items()}
        sampled = "num_frames" in own or "fps" in own
        inherited = {name: v for name, v in run.given().items() if not (sampled and name in ("num_frames", "fps"))}
        return MediaLimits(**{**inherited, **own})  # type: ignore[arg-type]

    def text(self) -> str:
        """The JSON text that tables store."""
        return json.dumps(self.given(), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> PartLimits | None:
        """Parse what `text` returned; None for an empty text."""
        return cls(**json.loads(text)) if text else None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or an audio clip inside a message."""

    kind: MediaKind
    ref: MediaRef
    limits: PartLimits | None = None


Part = Text | Media
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an answer makes."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Fields of a message other than its content."""

    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    reasoning: str | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool's answer: which call it answers
    name: str | None = None  # of a tool's answer: the tool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """Tokens that came as such, never templated. Every one that carries loss is its own label."""

    ids: tuple[int, ...]
    supervised: tuple[tuple[int, int], ...]  # spans that carry loss: the first token, and the one after the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # one of ROLES
    parts: tuple[Part, ...]
    train: bool = True  # an assistant message that must not carry loss says False
    extras: Extras | None = None


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables that a record gives to the chat template, apart from its messages."""

    tools: str = ""  # a JSON list of tool definitions
    kwargs: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One training sample as the user means it, before any processor has seen it.

    `plain` records hold running text in one message, or a prompt and its completion in two, and never pass through a
    chat template. Records of `tokens` have no messages.
    """

    id: str
    origin: str  # file:line or shard:member
    source: str
    messages: tuple[Message, ...]
    plain: bool = False
    objects: int = 0  # annotated objects, where the schema has them
    tokens: TokenIds | None = None
    variables: Variables | None = None

    @property
    def structured(self) -> bool:
        """True if it has tools, reasoning or template variables, which only some chat templates write."""
        return self.variables is not None or any(m.extras is not None or m.role == "tool" for m in self.messages)

    def beside(self) -> Iterator[str]:
        """Its texts other than the contents of its messages."""
        if self.variables is not None:
            yield self.variables.tools
            yield from (text for pair in self.variables.kwargs for text in pair if isinstance(text, str))
        for extras in [message.extras for message in self.messages if message.extras is not None]:
            for call in extras.tool_calls:
                yield from (call.name, call.arguments, call.id or "")
            yield from filter(None, (extras.reasoning, extras.tool_call_id, extras.name))

    def media(self) -> Iterator[Media]:
        """Every medium in the order in which the conversation shows it."""
        return (part for message in self.messages for part in message.parts if isinstance(part, Media))


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaHeader:
    """The header of one medium; nothing here needs a pixel to be decoded.

    width and height are upright, that is after EXIF orientation. Images have frames = 1, fps = seconds = 0.
    """

    kind: MediaKind
    width: int = 0
    height: int = 0
    frames: int = 1
    fps: float = 0.0
    seconds: float = 0.0
    limits: PartLimits | None = None  # from the data, not from the header


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one record will occupy once encoded; computed without decoding pixels."""

    tokens: int  # exactly len(input_ids)
    text_tokens: int  # tokens that are not replaced by embeddings of a medium
    image_tokens: int = 0  # after merging, as the language model sees them
    video_tokens: int = 0
    audio_tokens: int = 0
    images: int = 0
    videos: int = 0
    frames: int = 0  # video frames sampled
    audio_seconds: float = 0.0
    objects: int = 0
    patches: int = 0  # before merging, as the vision encoder sees them
    max_patches_per_image: int = 0  # the largest span that attends to itself inside the vision encoder
    supervised_tokens: int = 0
    tail_tokens: int = 0  # text after the last media token, which may be cut off; all tokens where there are no media
    tail_runs: str = ""  # lengths of the spans of that tail, in turn without and with loss: "31,12,4"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """The settings by which a user bounds what media cost; None leaves the processor's own value."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None  # of each frame
    video_max_pixels: int | None = None
    max_img_size: int | None = None  # longest edge, for families that resize by it
    num_frames: int | None = None
    fps: float | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
                raise ConfigError(f"limit {name}", got=repr(value), expected="a positive number")

    def given(self) -> dict[str, int | float]:
        """The limits that were set, by name."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def over(self, others: MediaLimits) -> MediaLimits:
        """These, and the others where one is not set here."""
        return MediaLimits(**{**others.given(), **self.given()})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One record that did not make it, and why."""

    id: str
    origin: str
    stage: str
    reason: str
    detail: str = ""
    filtered: bool = False  # left out by the user's own choice, so not a failure


@dataclass(frozen=True, slots=True)
class Supervision:
    """Where the loss of one record is taken, apart from its number of tokens."""

    media: tuple[bool, ...] = ()  # is this medium where loss is taken
    ended: bool = True  # does anything that carries loss end in an end token
    shortened: bool = False  # does the chat template leave out what an answer says


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One record with its cost and the headers it was computed from."""

    record_id: str
    origin: str
    source: str
    cost: Cost
    media: tuple[MediaHeader, ...] = field(default=())
    supervision: Supervision = Supervision()
