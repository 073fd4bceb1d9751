"""The journal: what was appended is there again, whatever a crash left behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.core.artifacts import DiskFull
from packtrain.core.errors import PacktrainError
from packtrain.measuring.journal import Journal, UnitResult

INPUTS: dict[str, object] = {"packtrain": "0", "request": {"seed": 0, "model": "m"}}


def result(number: int) -> UnitResult:
    """A unit whose parts are all different, with bytes that look like the journal's own marks."""
    return UnitResult(
        number=number,
        source=number % 2,
        file=f"data/é-{number}.jsonl",
        entries=10 + number,
        rows=7,
        failed=2,
        reasons={"read: not valid JSON": 2},
        costs=bytes(range(256)) * (number + 1),
        media=b"\n\n{}\0\0" * number,
        ledger=f'{{"id": "é{number}"}}\n'.encode(),
    )


def written(path: Path, *numbers: int) -> list[int]:
    """A journal of these units; the sizes of the file before each and after all of them."""
    journal, stale = Journal.open(path, INPUTS)
    assert stale == []
    sizes = []
    for number in numbers:
        journal.sync()
        sizes.append(path.stat().st_size)
        journal.append(result(number))
    journal.close()
    return [*sizes, path.stat().st_size]


def content(path: Path) -> list[UnitResult]:
    journal, stale = Journal.open(path, INPUTS)
    assert stale == []
    found = list(journal.in_order())
    assert len(journal) == len(found)
    journal.close()
    return found


def test_units_come_back_whole_and_by_number(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal"
    written(path, 5, 0, 3)
    assert content(path) == [result(0), result(3), result(5)]
    journal, _ = Journal.open(path, INPUTS)
    assert [number in journal for number in range(6)] == [True, False, False, True, False, True]
    assert journal.read(3) == result(3)
    journal.append(result(1))  # after a read, which moved the file's position
    assert journal.read(0) == result(0)
    journal.append(result(2))
    journal.close()
    assert content(path) == [result(n) for n in (0, 1, 2, 3, 5)]


def test_cut_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    *_, last, size = written(path, 0, 1, 2)
    whole = path.read_bytes()
    assert size - last > 500
    for cut in range(last, size):
        path.write_bytes(whole[:cut])
        assert content(path) == [result(0), result(1)], f"cut at byte {cut}"
        assert path.stat().st_size == last, "the rest of the cut record is still there"
    assert written(path, 2)[-1] == size
    assert path.read_bytes() == whole, "a continued journal differs from one that was never cut"


def test_cut_anywhere_keeps_the_complete_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    sizes = written(path, 0, 1, 2)
    whole = path.read_bytes()
    for cut in range(sizes[0], len(whole), 37):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in sizes[1:])
        assert content(path) == [result(number) for number in range(complete)]


def test_a_flipped_byte_drops_its_record_and_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    sizes = written(path, 0, 1, 2)
    whole = path.read_bytes()
    for position in range(sizes[1], sizes[2]):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        assert content(path) == [result(0)], f"byte {position} of record 1"


@pytest.mark.parametrize("tail", [b"\0" * 12, b"\0" * 5000, b"\xff" * 5000], ids=["frame", "zeros", "ones"])
def test_a_tail_that_a_power_cut_filled(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "journal"
    size = written(path, 0, 1)[-1]
    with path.open("ab") as stream:
        stream.write(tail)
    assert content(path) == [result(0), result(1)]
    assert path.stat().st_size == size


def test_other_inputs_are_named_and_start_afresh(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, 0, 1)
    journal, stale = Journal.open(path, {**INPUTS, "request": {"seed": 1, "model": "m"}})
    assert stale == ["request.seed: 0 -> 1"]
    assert len(journal) == 0
    journal.append(result(4))
    journal.close()
    journal, stale = Journal.open(path, {**INPUTS, "request": {"seed": 1, "model": "m"}})
    assert (stale, list(journal.in_order())) == ([], [result(4)])
    journal.close()


def test_a_head_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    head = written(path, 0)[0]
    whole = path.read_bytes()
    for cut in range(1, head):
        path.write_bytes(whole[:cut])
        journal, stale = Journal.open(path, INPUTS)
        assert stale == ["the journal is not readable"], f"a head of {cut} bytes"
        assert len(journal) == 0
        journal.close()
    for version in (3, 99):  # a head of version 3 compares the folders of model and data
        other = json.loads(whole[:head]) | {"version": version}
        path.write_bytes(json.dumps(other).encode() + b"\n" + whole[head:])
        journal, stale = Journal.open(path, INPUTS)
        assert stale == [f"journal format {version} -> 7"]
        assert len(journal) == 0
        journal.close()


def test_what_is_synced_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    program = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_journal import INPUTS, result; from packtrain.measuring.journal import Journal\n"
        "journal, _ = Journal.open(Path(sys.argv[1]), INPUTS)\n"
        "for number in range(4): journal.append(result(number))\n"
        "journal.sync(); journal.append(result(4)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path), str(Path(__file__).parent)], check=False)
    assert ended.returncode == -9
    assert content(path)[:4] == [result(number) for number in range(4)]


def test_two_runs_cannot_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path, INPUTS)
    journal.append(result(0))
    journal.sync()
    before = path.read_bytes()
    with pytest.raises(PacktrainError, match="another run is measuring into this folder"):
        Journal.open(path, {**INPUTS, "packtrain": "other"})
    assert path.read_bytes() == before
    journal.close()
    assert content(path) == [result(0)]


def test_it_holds_offsets_only(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path / "journal", INPUTS)
    for number in range(50):
        journal.append(result(number))
    assert all(isinstance(offset, int) for offset in journal._offsets.values())
    journal.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_names_the_journal(tmp_path: Path) -> None:
    with open("/dev/full", "r+b", buffering=0) as stream:
        journal = Journal(tmp_path / "journal", stream)  # type: ignore[arg-type]
        with pytest.raises(DiskFull, match=r"(?s)journal\n.*No space left.*free some space"):
            journal.append(result(0))
