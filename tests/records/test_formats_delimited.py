"""CSV and TSV: every row is one entry at its own byte, whatever its values hold; nothing that is unclear is guessed."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest
from format_checks import read_all, read_units, shown, source, values

from packtrain.records.formats import delimited
from packtrain.records.formats.jsonl import NOT_UTF8
from packtrain.records.open import open_sources, recognise

TEXTS = ["plain", "a, b\tc", 'he said "yes"', "two\nlines", "\r\n\n", "é 漢", " padded ", "", '"', "x" * 200_000]


def table(delimiter: str, ends: str = "\n", count: int = 40) -> tuple[list[dict[str, str | None]], str]:
    rows = [
        {"id": str(i), "question": TEXTS[i % 10] or None, "answer": TEXTS[i * 7 % 10] or None} for i in range(count)
    ]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, lineterminator=ends)
    writer.writeheader()
    writer.writerows(rows)
    return rows, file.getvalue()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.gz"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_rows_do_not_depend_on_units(tmp_path: Path, name: str, ends: str, block: int) -> None:
    format = name[2:5]
    rows, text = table("," if format == "csv" else "\t", ends)
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert recognise(str(tmp_path / name)) == format
    spec = open_sources(str(tmp_path / name))[0]
    read = read_units(spec, block=block)
    entries = [entry for _, entries in read for entry in entries]
    assert values(entries) == rows
    assert len({entry.at for entry in entries}) == len(rows)
    assert entries[-1].origin.startswith(f"{name}:")
    assert len(read) == (40 if block == 1 else 2 if len(data) > block else 1)


def test_origins_are_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,a\n\n1,"x\ny"\n2,z')
    entries = read_all(source(tmp_path / "a.csv", "csv"))
    assert shown(entries) == [("a.csv:3", {"q": "1", "a": "x\ny"}), ("a.csv:5", {"q": "2", "a": "z"})]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"q,a\n1,2,3\n4,5\n", [delimited.NOT_CSV, {"q": "4", "a": "5"}]),
        (b'q,a\n"1"x,2\n4,5\n', [delimited.NOT_CSV, {"q": "4", "a": "5"}]),
        (b"q,a\n\xff,2\n4,5\n", [NOT_UTF8, {"q": "4", "a": "5"}]),
        (b'q,a\n4,5\n1,"2\n3,4\n', [{"q": "4", "a": "5"}, delimited.UNCLOSED]),
        (b"q,q\n1,2\n", [delimited.BAD_HEADER]),
        (b"", [delimited.BAD_HEADER]),
        (b"q,a\n", []),
    ],
)
def test_what_is_wrong_is_an_entry(tmp_path: Path, text: bytes, wanted: list[object]) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert [value for _, value in shown(read_all(source(tmp_path / "a.csv", "csv")))] == wanted


def test_a_quote_left_open_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,a\n1,2\n3,"' + "x\n" * 1000)
    entries = read_all(source(tmp_path / "a.csv", "csv"), longest=100)
    assert [value for _, value in shown(entries)] == [{"q": "1", "a": "2"}, delimited.UNCLOSED]
