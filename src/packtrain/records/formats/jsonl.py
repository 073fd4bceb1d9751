"""JSON Lines, plain or compressed: one object per line, and only a newline ends a line.

A plain file is cut into byte ranges that begin at line starts, so that workers read them alone. A compressed file can
only be read from its beginning: its units carry their lines. `parse_object` is for every format that holds JSON.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from packtrain.core.errors import RecordError
from packtrain.records.formats.source_files import failed_entry, gathered, shown_name, units_of_files
from packtrain.records.shards.address import unreadable
from packtrain.records.shards.decompression import file_blocks, file_compression
from packtrain.records.source import Entry, SourceSpec, Unit
from packtrain.records.span import Plain

LONGEST = 64 << 20  # bytes of one object; more is a broken file rather than a record
DEEPEST = 200  # the interpreter's own limit depends on who calls, so that results would differ between workers

TOO_LONG = "record is too long"
NOT_UTF8 = "text is not UTF-8"
NOT_JSON = "not valid JSON"
NOT_OBJECT = "not a JSON object"
PACKED = "a list of records instead of one"
TOO_DEEP = "JSON is nested too deeply"
LONE_SURROGATE = "text holds half a character"

_OF_TURNS = ("role", "from")
BOM = b"\xef\xbb\xbf"


def parse_object(raw: bytes | str) -> dict[str, object]:
    """The object that `raw` holds; a list of turns is a chat without anything else.

    NaN, Infinity and repeated keys are accepted as Python's json does.
    """
    try:
        text = raw if isinstance(raw, str) else str(raw.removeprefix(BOM), "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("read", NOT_UTF8, f"byte {error.start + 1} is {raw[error.start]:#04x}") from error  # type: ignore[str-bytes-safe]
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise RecordError("read", TOO_DEEP, f"more than {DEEPEST} levels") from error
    except json.JSONDecodeError as error:
        raise RecordError("read", NOT_JSON, f"{error.msg} at character {error.pos + 1}") from error
    except ValueError as error:  # a whole number of more than 4,300 digits
        raise RecordError("read", NOT_JSON, str(error)) from error
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        if not all(any(key in one for key in _OF_TURNS) for one in value):
            detail = f"{len(value)} of them: write each as its own record; packtrain packs them"
            raise RecordError("read", PACKED, detail)
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RecordError("read", NOT_OBJECT, f"a value of type {type(value).__name__}")
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise RecordError("read", TOO_DEEP, f"more than {DEEPEST} levels")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(value)
    return value


def json_entry(origin: str, at: int, raw: bytes | str | RecordError) -> Entry:
    """The text of an object, or the fault in its place, as an entry."""
    if isinstance(raw, RecordError):
        return Entry(origin=origin, error=raw, at=at)
    check = zlib.crc32(raw.encode() if isinstance(raw, str) else raw)
    try:
        return Entry(origin=origin, value=parse_object(raw), at=at, check=check)
    except RecordError as error:
        return Entry(origin=origin, error=error, at=at, check=check)


def size_of(item: tuple[int, bytes | str | RecordError]) -> int:
    """About how many bytes a place and the text that stands there take."""
    return 0 if isinstance(item[1], RecordError) else len(item[1])


def _depth(value: Any) -> int:
    """How many containers stand inside each other; without recursion, for that is what this guards against."""
    level, depth = [value], 0
    while level:
        depth += 1
        inner: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            inner.extend(member for member in members if isinstance(member, dict | list))
        level = inner
    return depth


def _refuse_lone_surrogates(value: dict[str, object]) -> None:
    """JSON can write half a character, which no tokenizer and no file takes: say so here, where it is."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError("read", LONE_SURROGATE, "an unpaired \\ud800-\\udfff escape") from error


BLANK = b" \t\r\n"  # what JSON calls white space; anything else on a line is content
SKIPPING = 1 << 16  # bytes read at once while passing over a line that is too long
FIRST_LOOK = 1 << 14  # bytes read at first to find the end of one line; then twice as many, and so on

Line = tuple[int, bytes | RecordError]  # the byte at which it starts; a fault stands where its line would


class JsonLines:
    """Reads JSON Lines."""

    block = 1 << 20  # bytes of lines per unit
    longest = LONGEST

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """Byte ranges of plain files, lines of compressed ones."""
        return units_of_files(
            spec, lambda file: self._ranges(file) if file_compression(file) == "none" else self._spans(file)
        )

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        """One entry for each line that is not blank."""
        if failed := failed_entry(spec, unit):
            yield failed
            return
        name = shown_name(spec, unit.file)
        for number, (at, line) in self._lines(unit):
            yield json_entry(f"{name}:{number}", at, line)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The line that starts at a byte."""
        return json_entry(origin, at, self._line_at(plain, at))

    def count(self, spec: SourceSpec, unit: Unit) -> int:
        """How many entries `read` yields; nothing is parsed."""
        return 1 if isinstance(unit.payload, RecordError) else sum(1 for _ in self._lines(unit))

    def _lines(self, unit: Unit) -> Iterator[tuple[int, Line]]:
        """The lines of a unit that are not blank, with their numbers."""
        lines: Iterable[Line] = self._lines_of_range(unit) if unit.payload is None else unit.payload
        for number, (at, line) in enumerate(lines, start=unit.first):
            if isinstance(line, RecordError) or line.removeprefix(BOM).strip(BLANK):
                yield number, (at, line)

    def _line_at(self, plain: Plain, at: int) -> bytes | RecordError:
        """One line without its newline; no more than the longest allowed is read."""
        pieces: list[bytes] = []
        length, look = 0, FIRST_LOOK
        while length <= self.longest:
            wanted = min(look, self.longest + 1 - length)
            piece = plain.read_at(at + length, wanted)
            line, newline, _ = piece.partition(b"\n")
            pieces.append(line)
            length += len(line)
            if newline or len(piece) < wanted:
                return b"".join(pieces)
            look *= 2
        return self._too_long()

    def _ranges(self, file: str) -> Iterator[Unit]:
        """Cut a plain file at the first line start in each block: a unit owns the lines that start inside it."""
        start, first, offset, line = 0, 1, 0, 1  # `line` is the number of the line that holds byte `offset`
        try:
            with open(file, "rb") as handle:
                while block := handle.read(self.block):
                    newline = block.find(b"\n")
                    if newline >= 0:
                        cut = offset + newline + 1
                        if cut - start >= self.block:
                            yield Unit(number=0, source=0, file=file, start=start, stop=cut, first=first)
                            start, first = cut, line + 1
                    line += block.count(b"\n")
                    offset += len(block)
        except OSError as error:
            raise unreadable(error) from error
        if offset > start:
            yield Unit(number=0, source=0, file=file, start=start, stop=offset, first=first)

    def _lines_of_range(self, unit: Unit) -> Iterator[Line]:
        """The lines that start inside a byte range; the last one may reach beyond it."""
        position = unit.start
        try:
            with open(unit.file, "rb") as handle:
                handle.seek(unit.start)
                while position < unit.stop:
                    line = handle.readline(self.longest + 1)
                    if not line:
                        size = os.fstat(handle.fileno()).st_size
                        detail = f"it has {size} bytes, and had {unit.stop} when it was opened"
                        yield position, RecordError("read", "file has shrunk while it was read", detail)
                        return
                    at, position = position, position + len(line)
                    if len(line) > self.longest and not line.endswith(b"\n"):
                        position += _skip_line(handle)
                        yield at, self._too_long()
                    else:
                        yield at, line.removesuffix(b"\n")
        except OSError as error:
            yield position, unreadable(error)

    def _spans(self, file: str) -> Iterator[Unit]:
        """Units of about `block` bytes of lines, made while decompressing."""
        first = 1
        for lines in gathered(self._lines_of_stream(file), size_of, self.block):
            yield Unit(number=0, source=0, file=file, first=first, payload=lines)
            first += len(lines)

    def _lines_of_stream(self, file: str) -> Iterator[Line]:
        """The lines of a compressed file. At a fault the line it cut is given up for the error that says so."""
        parts: list[bytes] = []  # of the line that is not complete yet; empty once it is known to be too long
        at, length = 0, 0
        try:
            for block in file_blocks(file):
                *ended, rest = block.split(b"\n")
                for piece in ended:
                    length += len(piece)
                    yield at, self._too_long() if length > self.longest else b"".join([*parts, piece])
                    at, parts, length = at + length + 1, [], 0
                length += len(rest)
                parts = [*parts, rest] if length <= self.longest else []
        except RecordError as error:
            yield at, error
            return
        if length:
            yield at, self._too_long() if length > self.longest else b"".join(parts)

    def _too_long(self) -> RecordError:
        return RecordError("read", TOO_LONG, f"the line has more than {self.longest:,} bytes")


def _skip_line(handle: BinaryIO) -> int:
    """Pass over the rest of a line without keeping it; how many bytes that was."""
    skipped = 0
    while piece := handle.readline(SKIPPING):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
