"""An append-only file of finished units: what survives a crash, and from which the next run continues.

    header   {"kind": "measure-journal", "version": 6, "inputs": ...}\\n
    record   length (8 bytes) | crc32 (4 bytes) | JSON line with counts and blob sizes | costs | media | ledger

A record cut off by a crash is recognised by its length or checksum and dropped; everything before it counts. While
the file is open it is locked, so that two runs never write into one.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from packtrain.core.artifacts import lock, open_own, room_for
from packtrain.core.errors import PacktrainError
from packtrain.core.fingerprint import differences
from packtrain.measuring.measure_summary import JsonObject
from packtrain.records.open import spoils_file

_KIND, _VERSION = "measure-journal", 7
_FRAME = struct.Struct("<QI")
_SYNC_SECONDS = 1.0  # a crash costs at most this much work


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """The measured rows of one unit, ready to be stored."""

    number: int
    source: int  # number of the source in the request
    file: str  # in which all its entries stand
    entries: int
    rows: int
    failed: int
    without_end: int = 0  # rows in which nothing that carries loss ends in an end token
    shortened: int = 0  # rows with an answer of which the chat template leaves something out
    unread: dict[str, list[Any]] = field(default_factory=dict)  # by name: records with it, and the id of the first
    schemas: dict[str, int] = field(default_factory=dict)  # what records were read as
    reasons: dict[str, int]  # of the failures, to say why a run was stopped
    costs: bytes
    media: bytes
    ledger: bytes  # JSON lines


_BLOBS = ("costs", "media", "ledger")  # of a unit, after its JSON line


class Journal:
    """Finished units on disk. Open it with `Journal.open`; it holds only offsets in memory."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._offsets: dict[int, int] = {}
        self.spoilt: set[tuple[int, str]] = set()  # source and name of files that cannot be delivered
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: Path, inputs: JsonObject) -> tuple[Journal, list[str]]:
        """The journal at `path`, and why an existing one could not be continued (empty if it could)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b"))
        _lock(journal._stream, path)
        line = journal._stream.readline()
        stale = _why_stale(line, inputs) if line else []
        if stale or not line:
            journal._stream.seek(0)
            journal._stream.truncate()
            head = {"kind": _KIND, "version": _VERSION, "inputs": inputs}
            journal._stream.write(json.dumps(head, sort_keys=True, default=str).encode() + b"\n")
            journal.sync()
        journal._scan()
        return journal, stale

    def __contains__(self, number: int) -> bool:
        return number in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, result: UnitResult) -> None:
        """Store one finished unit."""
        head = {field.name: getattr(result, field.name) for field in fields(result) if field.name not in _BLOBS}
        head["sizes"] = [len(result.costs), len(result.media), len(result.ledger)]
        body = json.dumps(head).encode() + b"\n" + result.costs + result.media + result.ledger
        with room_for(self._path):
            offset = self._stream.seek(0, os.SEEK_END)
            self._stream.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self._note(head, offset)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        with room_for(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._synced = time.monotonic()

    def read(self, number: int) -> UnitResult:
        """One stored unit."""
        self._stream.flush()
        self._stream.seek(self._offsets[number])
        length, _ = _FRAME.unpack(self._stream.read(_FRAME.size))
        return _parse(self._stream.read(length))

    def in_order(self) -> Iterator[UnitResult]:
        """All stored units by number."""
        return (self.read(number) for number in sorted(self._offsets))

    def close(self) -> None:
        """Flush and let go of the file."""
        if not self._stream.closed:
            self.sync()
            self._stream.close()

    def remove(self) -> None:
        """Close and delete: the result has been written elsewhere."""
        self._stream.close()
        self._path.unlink(missing_ok=True)

    def _note(self, head: JsonObject, offset: int) -> None:
        self._offsets[head["number"]] = offset
        if spoils_file(head["reasons"]):
            self.spoilt.add((head["source"], head["file"]))

    def _scan(self) -> None:
        """Find the complete records and cut off what a crash left after them."""
        size = self._stream.seek(0, os.SEEK_END)
        self._stream.seek(0)
        self._stream.readline()
        end = self._stream.tell()
        while end + _FRAME.size <= size:
            self._stream.seek(end)
            length, checksum = _FRAME.unpack(self._stream.read(_FRAME.size))
            if length == 0 or end + _FRAME.size + length > size:  # a power cut may leave zeros there
                break
            body = self._stream.read(length)
            if zlib.crc32(body) != checksum:
                break
            self._note(json.loads(body[: body.index(b"\n")]), end)
            end += _FRAME.size + length
        self._stream.truncate(end)


def _parse(body: bytes) -> UnitResult:
    line = body.index(b"\n") + 1
    head = json.loads(body[:line])
    costs, media, _ = head.pop("sizes")
    return UnitResult(
        **head,
        costs=body[line : line + costs],
        media=body[line + costs : line + costs + media],
        ledger=body[line + costs + media :],
    )


def _lock(stream: BinaryIO, path: Path) -> None:
    """Keep other runs out; the lock ends with this process, however that ends."""
    try:
        lock(stream.fileno(), wait=False)
    except BlockingIOError:
        stream.close()
        raise PacktrainError(
            str(path.parent),
            got="another run is measuring into this folder",
            fix="wait for it, or use another --out",
        ) from None


def _why_stale(line: bytes, inputs: JsonObject) -> list[str]:
    try:
        if not line.endswith(b"\n"):
            raise ValueError("cut off")
        head = json.loads(line)
        if (head["kind"], head["version"]) != (_KIND, _VERSION):
            return [f"journal format {head['version']} -> {_VERSION}"]
        return differences(head["inputs"], json.loads(json.dumps(inputs, default=str)))
    except (ValueError, KeyError, TypeError):
        return ["the journal is not readable"]
