"""JSON lists: streamed element by element, and what comes before a fault is delivered wherever the text is cut."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from format_checks import read_all, read_units, reader, shown, source, values
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.records.formats import json_array, jsonl
from packtrain.records.shards import decompression

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=12)


def write(folder: Path, data: bytes | str, name: str = "data.json") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@settings(max_examples=60, deadline=None)
@given(
    records=OBJECTS,
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
    wrapped=st.booleans(),
    cut=st.integers(1, 40),
    block=st.integers(1, 300),
)
def test_elements_do_not_depend_on_where_the_text_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, object]],
    indent: int | None,
    ascii: bool,
    wrapped: bool,
    cut: int,
    block: int,
) -> None:
    document = {"info": {"list": [1, [2]]}, "ids": [1, 2], "data": records, "end": None} if wrapped else records
    path = write(tmp_path_factory.mktemp("json"), json.dumps(document, indent=indent, ensure_ascii=ascii))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompression, "BLOCK", cut)
        entries = read_all(source(path, "json"), block=block)
    assert values(entries) == records
    assert [entry.origin for entry in entries] == [f"data.json:{i + 1}" for i in range(len(records))]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_round_trip_in_several_units(tmp_path: Path, pack: object) -> None:
    records = [{"i": i} for i in range(500)]
    path = write(tmp_path, pack(json.dumps(records).encode()))  # type: ignore[operator]
    read = read_units(source(path, "json"), block=1000)
    assert len(read) > 5
    assert values([entry for _, entries in read for entry in entries]) == records


GOOD = '{"a": 1}'
CASES = {
    "[" + GOOD + ', {"b": }, {"c": 2}]': [(1, None), (2, json_array.BROKEN_REST)],
    "[" + GOOD + " " + GOOD + "]": [(1, None), (2, json_array.BROKEN_REST)],
    "[" + GOOD + ",]": [(1, None), (2, json_array.BROKEN_REST)],
    "[" + GOOD + ", tru]": [(1, None), (2, json_array.BROKEN_REST)],
    "[" + GOOD: [(1, None), (2, json_array.CUT_OFF)],
    "[" + GOOD + ",": [(1, None), (2, json_array.CUT_OFF)],
    "[" + GOOD + ', {"b": "te': [(1, None), (2, json_array.CUT_OFF)],
    "[" + GOOD + "] x": [(1, None), (2, json_array.AFTER_END)],
    "[" + GOOD + "]" + "[" + GOOD + "]": [(1, None), (2, json_array.AFTER_END)],
    "[12345, " + GOOD + ', "x"]': [(1, jsonl.NOT_OBJECT), (2, None), (3, jsonl.NOT_OBJECT)],
    "[" + GOOD + ", " + "[" * 5000 + "]" * 5000 + "]": [(1, None), (2, jsonl.TOO_DEEP)],
    "[" + GOOD + ', {"b": "' + "x" * 300 + '"}]': [(1, None), (2, jsonl.TOO_LONG)],
    '{"data": [' + GOOD + ', {"b"': [(1, None), (2, json_array.CUT_OFF)],
    '{"a": [{}], "b": [{}]}': [(None, json_array.SEVERAL_LISTS)],
    '{"a": 1}': [(None, json_array.NOT_A_LIST)],
    '{"a": [1]}': [(None, json_array.NOT_A_LIST)],
    "12": [(None, json_array.NOT_A_LIST)],
    "": [(None, json_array.NOT_A_LIST)],
    " \n [] \n ": [],
    '{"data": []}': [],
    "\ufeff[" + GOOD + "]": [(1, None)],
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: repr(text[:40]))
@pytest.mark.parametrize("cut", [1, 5, decompression.BLOCK])
def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cut: int) -> None:
    monkeypatch.setattr(decompression, "BLOCK", cut)
    path = write(tmp_path, text)
    # Deep nesting needs a long text, so the limit is only small where the case is about it.
    entries = read_all(source(path, "json"), longest=200 if "x" * 300 in text else 1 << 20)
    expected = [("data.json" if n is None else f"data.json:{n}", reason) for n, reason in CASES[text]]
    assert [(e.origin, e.error.reason if e.error else None) for e in entries] == expected


@pytest.mark.parametrize("cut", [1, 3, decompression.BLOCK])
def test_broken_text_and_broken_streams_keep_what_is_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr(decompression, "BLOCK", cut)
    path = write(tmp_path, b'[{"a": 1}, {"b": "\xff"}, {"c": 3}]')
    assert shown(read_all(source(path, "json"))) == [("data.json:1", {"a": 1}), ("data.json:2", jsonl.NOT_UTF8)]
    whole = gzip.compress(b'[{"a": 1}, {"b": 2}]')
    for keep, number in ((-4, 2), (-9, 1)):
        entries = read_all(source(write(tmp_path, whole[:keep]), "json"))
        assert [entry.error.reason if entry.error else "" for entry in entries][-1] == decompression.CUT_OFF
        assert values(entries[:-1]) == [{"a": 1}, {"b": 2}][: len(entries) - 1]
        assert len(entries) - 1 >= number


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_memory_stays_flat(tmp_path: Path, wrap: bool, pack: object) -> None:
    element = json.dumps({"text": "x" * 4000})
    text = "[" + ",\n".join([element] * 10_000) + "]"
    path = write(tmp_path, pack((f'{{"data": {text}}}' if wrap else text).encode()))  # type: ignore[operator]
    del text
    spec, made = source(path, "json"), reader("json")
    tracemalloc.start()
    try:
        number = sum(1 for unit in made.units(spec) for _ in made.read(spec, unit))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert number == 10_000
    assert peak < 16 << 20
