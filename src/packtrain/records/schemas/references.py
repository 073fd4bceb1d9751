"""What the data says about a medium -> MediaRef and its limits; and the pool of media that one record brings along."""

from __future__ import annotations

import base64
import binascii
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Media, MediaKind, MediaRef, PartLimits
from packtrain.records.schemas.recognise import MEDIA_ALIASES
from packtrain.records.source import MEDIA_ENDINGS, RawRecord

# By the names of `PartLimits`.
PART_LIMITS: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {name: name for name in ("min_pixels", "max_pixels", "resized_height", "resized_width")},
    "video": {name: name for name in ("min_pixels", "max_pixels", "fps", "num_frames", "max_frames")}
    | {"nframes": "num_frames"},
    "audio": {},
}
# Others, of which no processor here takes one for a single medium.
OTHER_LIMITS = (
    *("total_pixels", "min_frames", "video_start", "video_end", "sample_fps", "max_img_size", "longest_edge"),
    *("shortest_edge", "size", "do_resize", "max_dynamic_patch", "min_dynamic_patch", "max_num", "max_patches"),
)
LIMIT_KEYS = frozenset((*OTHER_LIMITS, *(name for known in PART_LIMITS.values() for name in known)))


def read_limits(part: RawRecord, kind: MediaKind) -> PartLimits | None:
    """The limits that a part of a message, or an item of a media column, gives its medium."""
    if LIMIT_KEYS.isdisjoint(part):
        return None
    limits: dict[str, Any] = {}
    for key in LIMIT_KEYS.intersection(part):
        value = part[key]
        if value is None:
            continue
        name = PART_LIMITS[kind].get(key)
        if name is None:
            known = ", ".join(PART_LIMITS[kind]) or "none"
            raise RecordError(
                "schema", "an unknown limit in a part", f"{key} of {with_article(kind)}; known are {known}"
            )
        whole = isinstance(value, int) or (isinstance(value, float) and (name == "fps" or value.is_integer()))
        if not whole or isinstance(value, bool) or not 0 < value < 1e12 or limits.get(name, value) != value:
            raise RecordError("schema", "a limit in a part is not a usable number", f"{key}: {ascii(value)[:60]}")
        limits[name] = value if name == "fps" else int(value)
    resized = ("resized_height" in limits) + ("resized_width" in limits)
    if resized == 1 or (resized and len(limits) > 2) or {"fps", "num_frames"} <= limits.keys():
        detail = f"{', '.join(sorted(limits))}: resized_height goes only with resized_width, and fps excludes nframes"
        raise RecordError("schema", "limits in a part contradict each other", detail)
    return PartLimits(**limits) if limits else None


def with_article(kind: MediaKind) -> str:
    """The kind with its article."""
    return f"{'a' if kind == 'video' else 'an'} {kind}"


MAX_INLINE_BYTES = 256 * 1024 * 1024
KINDS: tuple[MediaKind, ...] = tuple(MODALITIES)
_PLURAL = {"image": "images", "video": "videos", "audio": "audios"}


def make_ref(kind: MediaKind, item: object) -> MediaRef:
    """The reference in one item of a media column or one field of a typed part."""
    if isinstance(item, str):
        return _from_string(kind, item)
    if isinstance(item, bytes | bytearray | memoryview):
        return MediaRef(name=f"inline {kind}", data=_require_bounded(bytes(item)))
    if isinstance(item, Mapping):
        return _from_mapping(kind, item)
    if isinstance(item, list | tuple) and kind == "video":
        raise RecordError("schema", "a video given as a list of frames is not supported", f"{len(item)} frames")
    raise RecordError("schema", "a media reference has the wrong type", f"{kind}: {type(item).__name__}")


def _from_string(kind: MediaKind, item: str) -> MediaRef:
    if not item:
        raise RecordError("schema", "a media reference is empty", kind)
    if item.startswith("data:"):
        return _from_data_url(item)
    scheme, separator, rest = item.partition("://")
    if separator and scheme.isalnum() and scheme.lower() != "file":
        host = rest.partition("/")[0].rpartition("@")[2]
        raise RecordError("media", "remote media are not fetched", f"{scheme[:16]}://{host[:100]}")
    return MediaRef(name=item, path=item)


def _from_data_url(item: str) -> MediaRef:
    head, comma, body = item.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RecordError("media", "a data URL is not base64", f"{head[:60]!a}")
    return from_base64(body, name=head[:60])


def from_base64(body: str, name: str) -> MediaRef:
    """A reference to the bytes of strict base64, up to a bounded size."""
    if len(body) > MAX_INLINE_BYTES // 3 * 4 + 4:
        raise RecordError("media", "inline media too large", f"{len(body)} characters of base64")
    try:
        return MediaRef(name=name, data=base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError) as error:
        raise RecordError("media", "broken base64", f"{name!a}: {error}") from None


def _require_bounded(data: bytes) -> bytes:
    if len(data) > MAX_INLINE_BYTES:
        raise RecordError("media", "inline media too large", f"{len(data)} bytes")
    return data


def _from_mapping(kind: MediaKind, item: RawRecord) -> MediaRef:
    """Tables hold {"bytes", "path"}; chat formats {"url"}; audio input and Anthropic's sources {"data"}."""
    data, path = item.get("bytes"), item.get("path")
    if data is not None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise RecordError("schema", "a media reference has the wrong type", f"bytes: {type(data).__name__}")
        return MediaRef(
            name=path if isinstance(path, str) and path else f"inline {kind}", data=_require_bounded(bytes(data))
        )
    for inner in (path, item.get("url")):
        if inner is not None:
            if not isinstance(inner, str):
                raise RecordError("schema", "a media reference has the wrong type", f"{kind}: {type(inner).__name__}")
            return _from_string(kind, inner)
    for inner in (item.get("base64"), item.get("data")):
        if isinstance(inner, str):
            return from_base64(inner, name=f"inline {kind}")
    raise RecordError("schema", "a media reference has the wrong type", f"{kind}: keys {list(item)[:5]!a}")


class MediaPool:
    """The media of one record that its messages ask for one after another, and the count of what was asked.

    Columns (`images: [...]`) come first, then media that travel beside the record in a tar shard. Asking for more than
    there is, or for less, is found at the end, when both numbers are known.
    """

    __slots__ = ("_attached", "_columns", "_free", "_names", "_short", "_taken", "asked", "given")

    def __init__(self, columns: Mapping[MediaKind, list[object]], attached: Mapping[str, MediaRef]) -> None:
        self._attached = {key: (attached_kind(key, ref), ref) for key, ref in attached.items()}
        # By kind, and by kind and extension: those that nobody has asked for, in their order.
        self._free: dict[tuple[MediaKind | None, str | None], OrderedDict[str, None]] = {}
        self._names: tuple[dict[tuple[MediaKind | None, str], str], ...] = ({}, {})  # whole, and last components
        for key, (its_kind, ref) in self._attached.items():
            for place in ((its_kind, None), (its_kind, _extension(key))):
                self._free.setdefault(place, OrderedDict())[key] = None
            for names, name in zip(self._names, (ref.name, os.path.basename(ref.name)), strict=True):
                names.setdefault((its_kind, key), key)
                names.setdefault((its_kind, name), key)
        self._columns: dict[MediaKind, list[Media]] = {
            kind: [self._medium(kind, item) for item in items] for kind, items in columns.items()
        }
        self._taken: dict[MediaKind, int] = dict.fromkeys(KINDS, 0)
        self._short: dict[MediaKind, int] = {}  # how often there was none left
        self.asked: dict[MediaKind, int] = dict.fromkeys(KINDS, 0)  # markers and parts without a reference
        self.given = frozenset(self._columns) | {kind for kind, _ in self._attached.values() if kind is not None}

    def resolve(self, kind: MediaKind, item: object) -> MediaRef:
        """One reference in the data: an attached medium of that name, type or turn, else what it says itself."""
        if self._attached:
            key = self._match(kind, item)
            if key is not None:
                return self._use(key)
        return make_ref(kind, item)

    def _medium(self, kind: MediaKind, item: object) -> Media:
        return Media(kind, self.resolve(kind, item), read_limits(item, kind) if isinstance(item, Mapping) else None)

    def _match(self, kind: MediaKind, item: object) -> str | None:
        """Name first (whole, then its last component), then extension, then the next of its kind.

        A reference with bytes of its own is used as it is; one medium may be shown several times by name.
        """
        name = item.get("path") or item.get("url") if isinstance(item, Mapping) and not item.get("bytes") else item
        if not isinstance(name, str) or not name or name.startswith("data:"):
            return None
        base = os.path.basename(name)
        for names, wanted in zip(self._names, (name, base), strict=True):
            if (kind, wanted) in names:
                return names[kind, wanted]
        free = self._free.get((kind, _extension(base))) or self._free.get((kind, None))
        return next(iter(free), None) if free else None

    def _use(self, key: str) -> MediaRef:
        kind, ref = self._attached[key]
        for place in ((kind, None), (kind, _extension(key))):
            self._free[place].pop(key, None)
        return ref

    def take(self, kind: MediaKind) -> Media | None:
        """The next medium of a kind, or None when there is none left; the shortage is reported by `close`."""
        self.asked[kind] += 1
        column = self._columns.get(kind, [])
        position = self._taken[kind]
        if position < len(column):
            self._taken[kind] = position + 1
            return column[position]
        if free := self._free.get((kind, None)):
            return Media(kind, self._use(next(iter(free))))
        self._short[kind] = self._short.get(kind, 0) + 1
        return None

    def left(self) -> list[tuple[MediaKind, int]]:
        """Number of media of each kind that no message has used."""
        columns, attached = self._columns, self._free
        counts = {
            kind: len(columns.get(kind, ())) - self._taken[kind] + len(attached.get((kind, None), ())) for kind in KINDS
        }
        return [(kind, number) for kind, number in counts.items() if number]

    def take_rest(self) -> list[Media]:
        """Everything that is left, images first."""
        return [medium for kind, number in self.left() for _ in range(number) if (medium := self.take(kind))]

    def close(self) -> None:
        """Check that the messages showed exactly the media of the record."""
        for kind, number in self.left():
            asked = self.asked[kind]
            raise RecordError("schema", f"fewer {kind} markers than {_PLURAL[kind]}", f"{asked} for {asked + number}")
        for kind, number in self._short.items():
            asked = self.asked[kind]
            raise RecordError("schema", f"more {kind} markers than {_PLURAL[kind]}", f"{asked} for {asked - number}")


def _extension(name: str) -> str:
    """The text after the last dot; the whole name if there is none."""
    return name.rpartition(".")[2].lower()


def attached_kind(key: str, ref: MediaRef) -> MediaKind | None:
    """The kind of a medium in a tar shard, by the extension of its key or its name."""
    return MEDIA_ENDINGS.get(_extension(key)) or MEDIA_ENDINGS.get(_extension(ref.name))


def gather(
    value: RawRecord, columns: tuple[tuple[str, MediaKind], ...], attached: Mapping[str, MediaRef]
) -> MediaPool | None:
    """The pool of a record, or None for a record without any medium outside its messages."""
    items: dict[MediaKind, list[object]] = {}
    named: dict[MediaKind, str] = {}
    beside = {attached_kind(key, ref) for key, ref in attached.items()}
    for column, kind in columns:
        item = value[column]
        if item is None or item == "":  # as tables and lines of text beside images have it
            continue
        alias = column in MEDIA_ALIASES
        if alias and (kind in beside or (kind in named and named[kind] not in MEDIA_ALIASES)):
            continue
        if kind in named:
            raise RecordError("schema", "two columns for the same kind of media", f"{column} and {named[kind]}")
        named[kind] = column
        items[kind] = list(item) if isinstance(item, list | tuple) else [item]
    return MediaPool(items, attached) if any(items.values()) or attached else None
