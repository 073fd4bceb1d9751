"""JSON Lines: no line is lost, none is read twice, and each is called by its own number."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard
from format_checks import read_all, read_units, reader, shown, source, values
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import ConfigError, RecordError
from packtrain.records.formats import jsonl
from packtrain.records.shards import address, decompression

PACKERS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}


def write(folder: Path, data: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def rows(number: int) -> list[dict[str, object]]:
    return [{"i": i, "text": f"line {i} é \u2028 x"} for i in range(number)]


def lines(records: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.txt"])
def test_round_trip_whatever_the_file_is_called(tmp_path: Path, packer: str, name: str) -> None:
    path = write(tmp_path, PACKERS[packer](lines(rows(100))), name)
    read = read_units(source(path, "jsonl"), block=512)
    assert len(read) > 3, "the file was not cut, so nothing was tested"
    entries = [entry for _, entries in read for entry in entries]
    assert values(entries) == rows(100)
    assert [entry.origin for entry in entries] == [f"{name}:{i + 1}" for i in range(100)]


# Characters that some readers take for the end of a line; JSON allows all but the control characters inside a string.
TEXT = st.text(
    st.sampled_from('ab"\\{}[], \u2028\u2029\x85\u00e9\U0001f600') | st.characters(exclude_categories=["Cs"])
)
LINE = st.one_of(
    TEXT.map(lambda text: json.dumps({"t": text}, ensure_ascii=False).encode()),
    TEXT.map(lambda text: json.dumps({"t": text}).encode() + b"\r"),
    st.sampled_from([b"", b" ", b"\r", b"\t ", b"\x0b", b"\x1c", b"{", b"[1]", b"\xff", b'{"a": NaN}', b"null"]),
    st.binary(max_size=8).filter(lambda line: b"\n" not in line),
)


@settings(max_examples=60, deadline=None)
@given(content=st.lists(LINE, max_size=30), ending=st.booleans(), block=st.integers(1, 200))
def test_entries_do_not_depend_on_where_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], ending: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    data = b"\n".join(content) + (b"\n" if ending else b"")
    # A reader without units, blocks or streams is the measure.
    expected = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n"):
            try:
                value = json.loads(line.decode("utf-8-sig"))
                expected.append((f"data.jsonl:{number}", repr(value) if isinstance(value, dict) else "error"))
            except ValueError:
                expected.append((f"data.jsonl:{number}", "error"))
    if decompression.detect_compression(data) != "none":
        return
    for packer in PACKERS.values():
        entries = read_all(source(write(folder, packer(data)), "jsonl"), block=block)
        assert [(e.origin, "error" if e.error else repr(e.value)) for e in entries] == expected


def test_a_unit_owns_the_lines_that_start_in_it(tmp_path: Path) -> None:
    path = write(tmp_path, lines(rows(50)))
    data = path.read_bytes()
    units = list(reader("jsonl", block=64).units(source(path, "jsonl")))
    assert len(units) > 5
    assert [units[0].start, units[-1].stop] == [0, len(data)]
    assert [unit.stop for unit in units[:-1]] == [unit.start for unit in units[1:]]
    for unit in units:
        assert unit.start == 0 or data[unit.start - 1 : unit.start] == b"\n"
        assert unit.first == data[: unit.start].count(b"\n") + 1


FAULTS = {
    b'{"a": 1': jsonl.NOT_JSON,
    b'{"a": "\xff"}': jsonl.NOT_UTF8,
    b"[1, 2]": jsonl.NOT_OBJECT,
    b'[{"role": "user"}, {"messages": []}]': jsonl.PACKED,
    b'"text"': jsonl.NOT_OBJECT,
    b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}": jsonl.TOO_DEEP,
    b'{"a":' + b"[" * 300 + b"]" * 300 + b"}": jsonl.TOO_DEEP,
    b'{"a": "\\ud800"}': jsonl.LONE_SURROGATE,
    b'{"a": ' + b"9" * 5000 + b"}": jsonl.NOT_JSON,
    b'{"a": "\x0b"}': jsonl.NOT_JSON,
    b'{"a": "' + b"x" * 30000 + b'"}': jsonl.TOO_LONG,
}


@pytest.mark.parametrize("packer", PACKERS)
def test_each_fault_is_one_entry_and_the_rest_is_read(tmp_path: Path, packer: str) -> None:
    good = b'{"good": true}'
    data = b"\n".join(part for line in FAULTS for part in (good, line)) + b"\n" + good
    entries = read_all(source(write(tmp_path, PACKERS[packer](data)), "jsonl"), block=100, longest=20000)
    assert len(entries) == 2 * len(FAULTS) + 1
    assert all(entry.value == {"good": True} for entry in entries[::2])
    assert shown(entries[1::2]) == [(f"data.jsonl:{2 * i + 2}", reason) for i, reason in enumerate(FAULTS.values())]


def test_what_python_accepts_is_accepted(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": NaN}\r\n\r\n{"a": -Infinity}\n{"a": 1, "a": 2}\n{"a": "\\ud83d\\ude00"}'
    entries = read_all(source(write(tmp_path, data), "jsonl"))
    assert [str(value) for value in values(entries)] == ["{'a': nan}", "{'a': -inf}", "{'a': 2}", "{'a': '😀'}"]
    assert [entry.origin for entry in entries] == [f"data.jsonl:{n}" for n in (1, 3, 4, 5)]


def test_the_longest_line_that_fits_is_read_alike_plain_and_compressed(tmp_path: Path) -> None:
    line = b'{"a": "xxx"}'
    for longest, fits in ((len(line), True), (len(line) - 1, False)):
        for packer in PACKERS.values():
            for data in (line, line + b"\n" + line + b"\n"):
                entries = read_all(source(write(tmp_path, packer(data)), "jsonl"), longest=longest)
                assert [entry.error is None for entry in entries] == [fits] * (data.count(b"\n") or 1)


def test_files_without_lines_have_no_entries(tmp_path: Path) -> None:
    for data in (b"", b"\n\n \r\n", b"\xef\xbb\xbf"):
        for packer in PACKERS.values():
            assert read_all(source(write(tmp_path, packer(data)), "jsonl")) == []


def test_several_members_and_frames(tmp_path: Path) -> None:
    halves = lines(rows(10)), lines(rows(20)[10:])
    for name in ("gzip", "zstd"):
        data = b"".join(PACKERS[name](half) for half in halves)
        assert values(read_all(source(write(tmp_path, data), "jsonl"))) == rows(20)
    padded = gzip.compress(halves[0]) + b"\0" * 700
    assert values(read_all(source(write(tmp_path, padded), "jsonl"))) == rows(10)


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_a_cut_stream_delivers_what_was_before_the_cut(tmp_path: Path, packer: str) -> None:
    data = PACKERS[packer](lines([{"x": os.urandom(60).hex()} for _ in range(4000)]))
    whole = values(read_all(source(write(tmp_path, data), "jsonl")))
    for keep in (len(data) - 1, len(data) // 2, 10):
        entries = read_all(source(write(tmp_path, data[:keep]), "jsonl"))
        assert entries[-1].error
        assert entries[-1].error.reason == decompression.CUT_OFF
        assert values(entries[:-1]) == whole[: len(entries) - 1]
        assert entries[-1].origin == f"data.jsonl:{len(entries)}"
        if keep == len(data) // 2:
            assert len(entries) > 1000, "a cut in the middle must not lose the first half"


def test_damage_in_gzip_loses_nothing_before_it(tmp_path: Path) -> None:
    first, second = lines(rows(500)), lines(rows(900)[500:])
    data = bytearray(gzip.compress(first) + gzip.compress(second))
    place = len(gzip.compress(first)) + 12
    data[place : place + 4] = b"\xff\xff\xff\xff"
    entries = read_all(source(write(tmp_path, bytes(data)), "jsonl"))
    assert values(entries[:500]) == rows(500)
    assert [entry.error.reason for entry in entries if entry.error] == [decompression.DAMAGED]
    trailing = read_all(source(write(tmp_path, gzip.compress(first) + b"garbage"), "jsonl"))
    assert values(trailing[:-1]) == rows(500)
    assert trailing[-1].error


def test_damage_inside_a_gzip_member_loses_no_line_before_it(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(lines(rows(500))) + packer.flush(zlib.Z_FULL_FLUSH) + b"\xff" * 40
    with pytest.raises(zlib.error):  # zlib itself gives nothing at all
        zlib.decompressobj(wbits=31).decompress(data)
    entries = read_all(source(write(tmp_path, data), "jsonl"))
    assert values(entries[:-1]) == rows(500)
    assert entries[-1].error
    assert entries[-1].error.reason == decompression.DAMAGED


def test_small_blocks_lose_no_byte_of_a_cut_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress(b'{"a": 1}\n' * 2000)
    monkeypatch.setattr(decompression, "BLOCK", 7)
    for keep in range(12, len(data)):
        path = write(tmp_path, data[:keep])
        read: list[bytes] = []
        with pytest.raises(RecordError, match=decompression.CUT_OFF):
            read.extend(decompression.file_blocks(str(path)))
        assert max(map(len, read), default=0) <= 7
        assert b"".join(read) == zlib.decompressobj(wbits=31).decompress(data[:keep])


def test_damage_in_zstd_is_said(tmp_path: Path) -> None:
    frames = PACKERS["zstd"](lines(rows(500)))
    entries = read_all(source(write(tmp_path, frames + b"\x28\xb5\x2f\xfd" + b"\xff" * 40), "jsonl"))
    assert values(entries[:-1]) == rows(500)
    assert entries[-1].error
    assert entries[-1].error.reason == decompression.DAMAGED


def test_zstandard_missing_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        read_all(source(write(tmp_path, PACKERS["zstd"](b"{}")), "jsonl"))


def test_a_file_that_cannot_be_read_is_one_entry(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, lines(rows(3)), "b.jsonl")
    os.mkfifo(folder / "a.jsonl")  # opening it would wait for ever
    (folder / "c.jsonl").symlink_to(write(tmp_path, lines(rows(3)), "outside.jsonl"))
    entries = read_all(source(folder, "jsonl"))
    assert [entry.origin for entry in entries] == ["a.jsonl", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3", "c.jsonl"]
    assert [bool(entry.error) for entry in entries] == [True, False, False, False, True]
    assert shown(read_all(source(tmp_path / "none.jsonl", "jsonl"))) == [("none.jsonl", address.CANNOT_OPEN)]


def test_a_file_that_shrinks_is_not_a_silent_loss(tmp_path: Path) -> None:
    path = write(tmp_path, lines(rows(100)))
    spec, made = source(path, "jsonl"), reader("jsonl", block=1000)
    units = list(made.units(spec))
    path.write_bytes(path.read_bytes()[: units[1].start + 10])
    assert [entry.error is None for entry in made.read(spec, units[2])] == [False]


@pytest.mark.parametrize("packer", PACKERS)
def test_memory_stays_flat(tmp_path: Path, packer: str) -> None:
    path = write(tmp_path, PACKERS[packer](lines([{"i": i, "text": "x" * 4000} for i in range(10_000)])))
    spec, made = source(path, "jsonl"), reader("jsonl")
    tracemalloc.start()
    try:
        number = sum(1 for unit in made.units(spec) for _ in made.read(spec, unit))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert number == 10_000
    assert peak < 16 << 20


def test_a_line_without_end_is_passed_over_without_being_held(tmp_path: Path) -> None:
    data = b'{"a": 1}\n' + b"x" * (40 << 20) + b'\n{"a": 2}\n'
    for packer in PACKERS.values():
        spec, made = source(write(tmp_path, packer(data)), "jsonl"), reader("jsonl", longest=1 << 20)
        tracemalloc.start()
        try:
            entries = [entry for unit in made.units(spec) for entry in made.read(spec, unit)]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert [(e.origin, e.error is None) for e in entries] == [
            ("data.jsonl:1", True),
            ("data.jsonl:2", False),
            ("data.jsonl:3", True),
        ]
        assert peak < 16 << 20
    assert jsonl.JsonLines.longest == 64 << 20
