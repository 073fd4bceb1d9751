"""JSON Lines, plain or compressed: one object per line, and only a newline ends a line.

A plain file is cut into byte ranges that begin at line starts, so that workers read them alone. A compressed file can
only be read from its beginning: its units carry their lines. `parse_object` is for every format that holds JSON.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.records.formats.source_files import Format, in_chunks
from packtrain.records.shards.address import unreadable
from packtrain.records.shards.decompression import file_blocks, file_compression
from packtrain.records.source import Entry, Unit
from packtrain.records.span import Plain, plain_blocks

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


def _depth(value: Any) -> int:
    """Nesting depth of containers, computed without recursion, against which this guards."""
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

# The number of an element in its file, the byte at which it starts, and its text or the fault in its place.
Element = tuple[int, int, bytes | str | RecordError]


class JsonFormat(Format):
    """Files of JSON objects. Where a file can only be read from its beginning, its units hold their elements."""

    block = 1 << 20  # bytes of elements per unit
    longest = LONGEST

    def elements(self, unit: Unit) -> Iterable[Element]:
        """The elements of a unit."""
        return unit.payload  # type: ignore[no-any-return]

    def entries(self, unit: Unit, name: str) -> Iterator[Entry]:
        return (json_entry(f"{name}:{number}", at, raw) for number, at, raw in self.elements(unit))

    def num_entries(self, unit: Unit) -> int:
        """Counted without parsing."""
        return sum(1 for _ in self.elements(unit))

    def loaded_units(self, file: str, elements: Iterable[Element]) -> Iterator[Unit]:
        """Units of about `block` bytes that hold their elements."""
        for chunk in in_chunks(elements, lambda one: 0 if isinstance(one[2], RecordError) else len(one[2]), self.block):
            yield Unit(file=file, first=chunk[0][0], payload=chunk)


class JsonLines(JsonFormat):
    """Reads JSON Lines."""

    def cut(self, file: str) -> Iterator[Unit]:
        """Byte ranges of plain files, lines of compressed ones."""
        if file_compression(file) == "none":
            return self._ranges(file)
        return self.loaded_units(file, self._number_lines(self._lines(file_blocks(file))))

    def elements(self, unit: Unit) -> Iterable[Element]:
        """The lines of a unit that are not blank."""
        return self._number_lines(self._lines_of_range(unit), unit.first) if unit.payload is None else unit.payload

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        blocks = plain_blocks(plain, at, self.longest + 1)
        return json_entry(origin, at, self._bounded_line(next(split_lines(blocks, self.longest), b"")))

    def _number_lines(self, lines: Iterable[tuple[int, bytes | RecordError]], first: int = 1) -> Iterator[Element]:
        for number, (at, line) in enumerate(lines, start=first):
            if isinstance(line, RecordError) or line.removeprefix(BOM).strip(BLANK):
                yield number, at, line

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
                            yield Unit(file=file, start=start, stop=cut, first=first)
                            start, first = cut, line + 1
                    line += block.count(b"\n")
                    offset += len(block)
        except OSError as error:
            raise unreadable(error) from error
        if offset > start:
            yield Unit(file=file, start=start, stop=offset, first=first)

    def _lines_of_range(self, unit: Unit) -> Iterator[tuple[int, bytes | RecordError]]:
        """The lines that start inside a byte range; the last one may reach beyond it."""
        for at, line in self._lines(file_blocks(unit.file, unit.start), unit.start):
            if at >= unit.stop:
                return
            yield at, line
        size = os.path.getsize(unit.file) if os.path.exists(unit.file) else unit.stop
        if size < unit.stop:
            detail = f"it has {size} bytes, and had {unit.stop} when it was opened"
            yield size, RecordError("read", "file has shrunk while it was read", detail)

    def _lines(self, blocks: Iterable[bytes], at: int = 0) -> Iterator[tuple[int, bytes | RecordError]]:
        """The lines from a byte on. At a fault the line it cut is given up for the error that says so."""
        begin, line = at, None
        try:
            for piece in split_lines(blocks, self.longest):
                line = self._bounded_line(piece) if line is None else line  # more of a line that is too long
                at += len(piece)
                if piece.endswith(b"\n"):
                    yield begin, line
                    begin, line = at, None
            if line is not None:
                yield begin, line
        except RecordError as error:
            yield begin, error

    def _bounded_line(self, line: bytes) -> bytes | RecordError:
        """A line without its newline."""
        line = line.removesuffix(b"\n")
        if len(line) > self.longest:
            return RecordError("read", TOO_LONG, f"the line has more than {self.longest:,} bytes")
        return line


def split_lines(blocks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Lines with their newlines; one that is too long comes in pieces, of which the first is too long already."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            yield b"".join([*parts, piece, b"\n"])
            parts, length = [], 0
        parts.append(rest)
        length += len(rest)
        if length > longest:
            yield b"".join(parts)
            parts, length = [], 0
    if length:
        yield b"".join(parts)
