"""Annotated objects -> a chat: an image, a question, and the objects in order as the answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import Message, Text
from packtrain.records.schemas.chat import ConvertedRecord, checked_text
from packtrain.records.schemas.recognise import OWN_FUNCTION
from packtrain.records.schemas.references import MediaPool
from packtrain.records.source import RawRecord

if TYPE_CHECKING:
    from jinja2 import Template

    from packtrain.records.schemas.converters import SchemaOptions

DEFAULT_PROMPT = "List every object in the image, one per line, with its description and its position."
_JSON = json.JSONEncoder(ensure_ascii=False)
NORM_SCALES: Mapping[str, int] = {"norm100": 100, "norm1000": 1000}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotatedObject:
    """One object. A bbox_2d is x1, y1, x2, y2; a poly x1, y1, x2, y2, x3, y3, ..."""

    desc: str
    shape: Literal["bbox_2d", "poly"]
    points: tuple[float, ...]  # x and y in turn


def objects_schema(value: RawRecord, pool: MediaPool | None, options: SchemaOptions, record_id: str) -> ConvertedRecord:
    """`images` and `objects` (with `width` and `height` where coordinates are normalised)."""
    raw = value["objects"]
    if not isinstance(raw, list | tuple):
        detail = f"objects: {type(raw).__name__}, not a list of desc and bbox_2d or poly; {OWN_FUNCTION}"
        raise RecordError("schema", "a column has the wrong type", detail)
    if not raw:
        raise RecordError("schema", "no objects")
    if pool is None or not pool.left():
        raise RecordError("schema", "objects without an image")
    objects = order_objects([_read_object(item) for item in raw], options.object_ordering, options.seed, record_id)
    scale = NORM_SCALES.get(options.emit_norm)
    if scale is not None:
        size = _positive(value.get("width"), "width"), _positive(value.get("height"), "height")
        objects = [_normalize(item, size, scale) for item in objects]
    answer = render_objects(objects, options.object_template)
    prompt = DEFAULT_PROMPT if options.object_prompt is None else options.object_prompt
    question = (*pool.take_rest(), *((Text(prompt),) if prompt else ()))
    return ConvertedRecord(
        (Message(role="user", parts=question), Message(role="assistant", parts=(Text(checked_text(answer)),))),
        objects=len(objects),
    )


def _read_object(item: object) -> AnnotatedObject:
    if not isinstance(item, Mapping):
        raise RecordError("schema", "an object is not a mapping", type(item).__name__)
    desc, bbox, poly = item.get("desc"), item.get("bbox_2d"), item.get("poly")
    if not isinstance(desc, str) or not desc.strip():
        raise RecordError("schema", "an object has no description", type(desc).__name__)
    if (bbox is None) == (poly is None):
        raise RecordError("schema", "an object needs either bbox_2d or poly", f"{desc[:40]!a}")
    numbers = _numbers(bbox if poly is None else poly, desc)
    if poly is None and len(numbers) != 4:
        raise RecordError("schema", "bbox_2d needs four numbers", f"{len(numbers)} for {desc[:40]!a}")
    if poly is not None and (len(numbers) < 6 or len(numbers) % 2):
        raise RecordError("schema", "poly needs an even count of at least six numbers", f"{len(numbers)}")
    return AnnotatedObject(desc=desc, shape="bbox_2d" if poly is None else "poly", points=numbers)


def _numbers(items: object, desc: str) -> tuple[float, ...]:
    if not isinstance(items, list | tuple):
        raise RecordError("schema", "coordinates are not a list of numbers", f"{desc[:40]!a}: {type(items).__name__}")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not -1e9 < item < 1e9:
            raise RecordError("schema", "coordinates are not a list of numbers", f"{desc[:40]!a}: {ascii(item)[:40]}")
    return tuple(items)


def _positive(item: object, name: str) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 < item < 1e9:
        raise RecordError("schema", "normalising needs width and height", f"{name}: {ascii(item)[:40]}")
    return item


def order_objects(objects: list[AnnotatedObject], ordering: str, seed: int, record_id: str) -> list[AnnotatedObject]:
    """Top to bottom, then left to right by the top left corner; or at random by (seed, record); or untouched."""
    if ordering == "sorted":
        return sorted(objects, key=lambda item: (min(item.points[1::2]), min(item.points[::2])))
    if ordering == "random":
        return [objects[i] for i in stream(seed, "objects", record_id).permutation(len(objects))]
    return objects


def _normalize(item: AnnotatedObject, size: tuple[float, float], scale: int) -> AnnotatedObject:
    """Whole numbers from 0 to scale; what lies outside the image is put on its edge."""
    points = tuple(min(max(round(x / size[i % 2] * scale), 0), scale) for i, x in enumerate(item.points))
    return replace(item, points=points)


def render_objects(objects: list[AnnotatedObject], template: str | None) -> str:
    """The answer's text: by default one line of JSON per object, else the user's template over `objects`.

    >>> cup = AnnotatedObject(desc="a cup", shape="bbox_2d", points=(1, 2, 30, 40))
    >>> render_objects([cup], None)
    '{"desc": "a cup", "bbox_2d": [1, 2, 30, 40]}'
    >>> render_objects([cup], "{{ objects[0].desc }}!")
    'a cup!'
    """
    plain = [{"desc": item.desc, item.shape: list(item.points)} for item in objects]
    if template is None:
        return "\n".join(map(_JSON.encode, plain))
    try:
        return compile_template(template).render(objects=plain)
    except Exception as error:  # a template can fail in any way that Python can
        raise RecordError("schema", "the object template failed", f"{type(error).__name__}: {error}"[:200]) from None


@functools.lru_cache(maxsize=8)
def compile_template(template: str) -> Template:
    """A user's template in a sandbox; an unknown name in it is an error, not an empty string."""
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)
    except (TemplateError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            "data.object_template",
            got=f"{type(error).__name__}: {error}",
            expected="a jinja2 template over `objects`, each with desc and bbox_2d or poly",
            fix="leave it out for one line of JSON per object",
        ) from None
