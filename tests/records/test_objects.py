"""Annotated objects: their order, their coordinates and their text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import RecordError
from packtrain.core.values import Record, Text
from packtrain.records.schemas import SchemaOptions, to_record
from packtrain.records.source import Entry


def convert(objects: Any, record_id: str = "r1", size: tuple[Any, Any] = (200, 100), **options: Any) -> Record:
    value = {"id": record_id, "images": ["a.jpg"], "objects": objects, "width": size[0], "height": size[1]}
    return to_record(Entry(origin="o", value=value), source="s", options=SchemaOptions(**options))


def lines(record: Record) -> list[dict[str, Any]]:
    (part,) = record.messages[-1].parts
    assert isinstance(part, Text)
    return [json.loads(line) for line in part.text.splitlines()]


def box(name: str, *numbers: float) -> dict[str, Any]:
    return {"desc": name, "bbox_2d": list(numbers)}


coordinates = st.integers(0, 200)
boxes = st.tuples(coordinates, coordinates, coordinates, coordinates).map(lambda n: {"bbox_2d": list(n)})
polygons = st.lists(st.tuples(coordinates, coordinates), min_size=3, max_size=6).map(
    lambda points: {"poly": [n for point in points for n in point]}
)
object_lists = st.lists(boxes | polygons, min_size=1, max_size=12).map(
    lambda items: [{"desc": f"thing {i}", **item} for i, item in enumerate(items)]
)


@given(object_lists, st.sampled_from(["sorted", "random", "as_is"]))
@settings(max_examples=100, deadline=None)
def test_every_object_is_written_once_and_in_order(objects: list[dict[str, Any]], ordering: str) -> None:
    record = convert(objects, object_ordering=ordering)
    written = lines(record)
    assert record.objects == len(objects)
    assert sorted(written, key=str) == sorted(objects, key=str)
    if ordering == "as_is":
        assert written == objects
    if ordering == "sorted":
        points = [item.get("bbox_2d") or item["poly"] for item in written]
        corners = [(min(p[1::2]), min(p[::2])) for p in points]
        assert corners == sorted(corners)


def test_sorted_reads_from_top_to_bottom_then_left_to_right() -> None:
    objects = [box("low", 0, 50, 10, 60), box("right", 90, 5, 99, 9), box("left", 10, 5, 20, 70)]
    objects.append({"desc": "top", "poly": [80, 90, 70, 1, 60, 90]})
    assert [item["desc"] for item in lines(convert(objects))] == ["top", "left", "right", "low"]


def test_random_order_depends_on_seed_and_record_alone() -> None:
    objects = [box(str(i), i, i, i, i) for i in range(20)]

    def order(record_id: str, seed: int) -> list[str]:
        return [item["desc"] for item in lines(convert(objects, record_id, object_ordering="random", seed=seed))]

    assert order("a", 0) == order("a", 0)
    assert len({tuple(order(record_id, seed)) for record_id in "abc" for seed in range(3)}) == 9


def test_random_order_is_the_same_in_another_process() -> None:
    objects = [box(str(i), i, i, i, i) for i in range(20)]
    here = [item["desc"] for item in lines(convert(objects, object_ordering="random", seed=5))]
    program = (
        "import json;from packtrain.records.schemas import *;from packtrain.records.source import Entry;"
        "o=[{'desc':str(i),'bbox_2d':[i,i,i,i]} for i in range(20)];"
        "r=to_record(Entry(origin='o',value={'id':'r1','images':['a'],'objects':o}),source='s',"
        "options=SchemaOptions(object_ordering='random',seed=5));"
        "print(json.dumps([json.loads(l)['desc'] for l in r.messages[-1].parts[0].text.splitlines()]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout) == here
    assert here != sorted(here, key=int), "a random order was really drawn"


@pytest.mark.parametrize(
    ("norm", "expected"),
    [("none", [20, 25, 100, 250]), ("norm100", [10, 25, 50, 100]), ("norm1000", [100, 250, 500, 1000])],
)
def test_coordinates_as_they_are_or_normalised_inside_the_image(norm: str, expected: list[int]) -> None:
    assert lines(convert([box("a", 20, 25, 100, 250)], emit_norm=norm))[0]["bbox_2d"] == expected


def test_the_size_is_needed_only_to_normalise() -> None:
    assert convert([box("a", 1, 2, 3, 4)], size=(None, None)).objects == 1
    with pytest.raises(RecordError, match="normalising needs width and height"):
        convert([box("a", 1, 2, 3, 4)], size=(None, 10), emit_norm="norm1000")


def test_the_image_and_the_prompt_stand_in_the_user_message() -> None:
    record = convert([box("a", 1, 2, 3, 4)], object_prompt="What is there?")
    assert record.messages[0].role == "user"
    assert [type(part).__name__ for part in record.messages[0].parts] == ["Media", "Text"]
    assert record.messages[0].parts[1] == Text("What is there?")
    assert len(convert([box("a", 1, 2, 3, 4)], object_prompt="").messages[0].parts) == 1


def test_the_template_is_the_users() -> None:
    template = "{% for o in objects %}{{ o.desc }}@{{ o.bbox_2d | join('/') }};{% endfor %}"
    record = convert([box("b", 5, 6, 7, 8), box("a", 1, 2, 3, 4)], object_template=template)
    assert record.messages[1].parts == (Text("a@1/2/3/4;b@5/6/7/8;"),)


@pytest.mark.parametrize("template", ["{{ objekts }}", "{{ objects[0].descr }}", "{{ objects.__class__.__mro__ }}"])
def test_a_template_cannot_reach_out_or_misspell(template: str) -> None:
    with pytest.raises(RecordError, match="the object template failed"):
        convert([box("a", 1, 2, 3, 4)], object_template=template)


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([], "no objects"),
        ("cat", "a column has the wrong type"),
        ([5], "an object is not a mapping"),
        ([{"bbox_2d": [1, 2, 3, 4]}], "an object has no description"),
        ([{"desc": " ", "bbox_2d": [1, 2, 3, 4]}], "an object has no description"),
        ([{"desc": "a"}], "an object needs either bbox_2d or poly"),
        (
            [{"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": [1, 2, 3, 4, 5, 6]}],
            "an object needs either bbox_2d or poly",
        ),
        ([box("a", 1, 2, 3)], "bbox_2d needs four numbers"),
        ([{"desc": "a", "poly": [1, 2, 3, 4]}], "poly needs an even count of at least six numbers"),
        ([{"desc": "a", "poly": [1, 2, 3, 4, 5, 6, 7]}], "poly needs an even count of at least six numbers"),
        ([{"desc": "a", "bbox_2d": "1234"}], "coordinates are not a list of numbers"),
        ([{"desc": "a", "bbox_2d": [1, 2, 3, "4"]}], "coordinates are not a list of numbers"),
        ([{"desc": "a", "bbox_2d": [1, 2, 3, True]}], "coordinates are not a list of numbers"),
        ([box("a", 1, 2, 3, float("nan"))], "coordinates are not a list of numbers"),
        ([box("a", 1, 2, 3, float("inf"))], "coordinates are not a list of numbers"),
    ],
)
def test_each_mistake_has_its_reason(objects: Any, expected: str) -> None:
    with pytest.raises(RecordError) as caught:
        convert(objects)
    assert (caught.value.stage, caught.value.reason) == ("schema", expected)


def test_objects_need_an_image() -> None:
    value = {"images": [], "objects": [box("a", 1, 2, 3, 4)]}
    with pytest.raises(RecordError, match="objects without an image"):
        to_record(Entry(origin="o", value=value), source="s", options=SchemaOptions())
