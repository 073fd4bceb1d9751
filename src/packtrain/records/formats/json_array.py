"""A JSON file that holds one list of objects, or one object around such a list; streamed, never loaded whole.

Such a file has no line structure, so it is read from its beginning and its units carry the texts of their elements.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from packtrain.core.errors import RecordError
from packtrain.records.formats.jsonl import (
    NOT_JSON,
    NOT_UTF8,
    TOO_DEEP,
    TOO_LONG,
    JsonFormat,
    json_entry,
)
from packtrain.records.shards.decompression import file_blocks
from packtrain.records.source import Entry, Unit
from packtrain.records.span import Plain, plain_blocks

NOT_A_LIST = "file has no list of objects"
SEVERAL_LISTS = "file holds several lists of objects"
BROKEN_REST = "broken JSON, the rest of the file cannot be read"
CUT_OFF = "file ends inside its list, the rest is missing"
AFTER_END = "data after the end of the list"

SPACE = " \t\r\n"
NEAR_END = 16  # characters; longer than the longest literal that a window's end may cut
BOM = "\ufeff"


class JsonArray(JsonFormat):
    """Reads the elements of a JSON list."""

    def cut(self, file: str) -> Iterator[Unit]:
        """Spans of elements, made while the file is read."""
        elements = self._elements(file, self._key_of_list(file))
        return self.loaded_units(file, ((number, at, text) for number, (at, text) in enumerate(elements, start=1)))

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        return json_entry(origin, at, _Window(plain_blocks(plain, at), self.longest).value())

    def _elements(self, file: str, key: str | None) -> Iterator[tuple[int, str | RecordError]]:
        """The texts of the elements of the list at the top, or under `key`; at a fault one error, then nothing."""
        blocks = file_blocks(file)
        window = _Window(blocks, self.longest)
        try:
            if key is None:
                yield from window.elements()
            else:
                for name in window.object_keys():
                    if name == key:
                        yield from window.elements()
                    else:
                        window.skip()
            if window.peek():
                yield -1, RecordError("read", AFTER_END, window.place())
        except RecordError as error:
            yield -1, error
        try:
            for _ in blocks:  # a fault in the stream counts even after one in its content
                pass
        except RecordError as error:
            yield -1, error

    def _key_of_list(self, file: str) -> str | None:
        """The key of the list; None where the file itself is the list.

        An object is read twice: only at its end is it known that it holds one list and not two. A fault on the way is
        left to the second reading where a list was found before it.
        """
        window = _Window(file_blocks(file), self.longest)
        opening = window.peek()
        if opening == "[":
            return None
        if opening != "{":
            raise RecordError("read", NOT_A_LIST, f"it begins with {opening!r}" if opening else "it is empty")
        filled: list[str] = []
        empty: list[str] = []
        try:
            for key in window.object_keys():
                if window.peek() != "[":
                    window.skip()
                    continue
                first = next(elements := window.elements(), None)
                for _ in elements:
                    pass
                if first is None or first[1].startswith("{"):
                    (empty if first is None else filled).append(key)
        except RecordError:
            if not (filled or window.in_objects):
                raise
            if window.in_objects:
                filled.append(window.key)
        if len(filled) > 1:
            raise RecordError("read", SEVERAL_LISTS, "under the keys " + ", ".join(map(repr, filled)))
        if not (filled or empty):
            raise RecordError("read", NOT_A_LIST, "an object without a list of objects")
        return (filled or empty)[0]


class _Window:
    """A span of a file's text that slides forward; values are decoded inside it and then forgotten."""

    def __init__(self, blocks: Iterator[bytes], longest: int) -> None:
        self.key = ""  # under which `elements` or `skip` is to read
        self.in_objects = False  # inside a list whose first element was an object
        self._blocks = blocks
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._begun = False  # has a character been decoded?
        self._scan = json.JSONDecoder().raw_decode
        self._longest = longest
        self._text, self._at, self._forgotten, self._lines = "", 0, 0, 0  # characters and lines before the window
        self._bytes, self._counted = 0, 0  # bytes of the file before the text's character `_counted`
        self._ended = False
        self._fault: RecordError | None = None

    def byte(self) -> int:
        """Bytes of the file before the current place."""
        passed = self._text[self._counted : self._at]
        self._bytes += len(passed) if passed.isascii() else len(passed.encode())
        self._counted = self._at
        return self._bytes

    def peek(self) -> str:
        """The next character that is not white space, not taken; "" at the end of the file."""
        while True:
            rest = self._text[self._at : self._at + 64].lstrip(SPACE)
            if rest:
                self._at = self._text.index(rest[0], self._at)
                return rest[0]
            self._at = min(self._at + 64, len(self._text))
            if self._at == len(self._text):
                if self._fault:
                    raise self._fault
                if self._ended:
                    return ""
                self._more()

    def object_keys(self) -> Iterator[str]:
        """The keys of an object; the caller takes each value before asking for the next key."""
        self._take("{")
        if self.peek() == "}":
            self._take("}")
            return
        while True:
            self.key = json.loads(self.value()) if self.peek() == '"' else self._unexpected("a key")
            self._take(":")
            yield self.key
            if self.peek() == "}":
                self._take("}")
                return
            self._take(",")

    def elements(self) -> Iterator[tuple[int, str]]:
        """The elements of a list: the byte at which each starts, and its text."""
        self._take("[")
        if self.peek() == "]":
            self._take("]")
            return
        self.in_objects = self.peek() == "{"
        while True:
            self.peek()
            yield self.byte(), self.value()
            if self.peek() == "]":
                self.in_objects = False
                self._take("]")
                return
            self._take(",")

    def skip(self) -> None:
        """Pass over a value; a long list element by element."""
        if self.peek() == "[":
            for _ in self.elements():
                pass
            self.in_objects = False
        else:
            self.value()

    def value(self) -> str:
        """The text of the next value."""
        self.peek()
        while True:
            end = self._end_of_value()
            if (len(self._text) if end is None else end) - self._at > self._longest:
                raise RecordError("read", TOO_LONG, f"{self.place()}: more than {self._longest:,} characters")
            # A number may go on in the next block; anything else has shown its end.
            if end is not None and (end < len(self._text) or self._ended):
                text, self._at = self._text[self._at : end], end
                return text
            self._more()

    def _end_of_value(self) -> int | None:
        """End of the value at the current place; None if the window ends first and the file goes on."""
        try:
            return self._scan(self._text, self._at)[1]
        except RecursionError as error:
            raise RecordError("read", TOO_DEEP, f"{self.place()}: the rest of the file cannot be read") from error
        except json.JSONDecodeError as error:
            unfinished = error.pos >= len(self._text) - NEAR_END or error.msg.startswith("Unterminated string")
            if unfinished and not self._ended:
                return None
            if unfinished and self._fault:
                raise self._fault from error
            if error.pos >= len(self._text.rstrip(SPACE)) or error.msg.startswith("Unterminated string"):
                raise self._cut_off() from error
            detail = f"{self.place()}: {error.msg} {self.place(error.pos)}"
            raise RecordError("read", BROKEN_REST, detail) from error
        except ValueError as error:  # a whole number of more than 4,300 digits
            raise RecordError("read", NOT_JSON, f"{self.place()}: {error}; the rest cannot be read") from error

    def _take(self, expected: str) -> None:
        """Pass over one mark of JSON's grammar."""
        if self.peek() != expected:
            self._unexpected(repr(expected))
        self._at += 1

    def _unexpected(self, expected: str) -> str:
        char = self.peek()
        if not char:
            raise self._cut_off()
        raise RecordError("read", BROKEN_REST, f"{self.place()}: {char!r} instead of {expected}")

    def _cut_off(self) -> RecordError:
        return RecordError("read", CUT_OFF, self.place())

    def place(self, at: int | None = None) -> str:
        """Describe the place in the file of a window position, by default the current one."""
        at = self._at if at is None else at
        return f"at line {self._lines + self._text.count(chr(10), 0, at) + 1}, character {self._forgotten + at + 1}"

    def _more(self) -> None:
        """Read on: as much as is held already, so that a long value is not scanned again for every block.

        The text before a fault is kept; the fault is raised when the text before it is used up.
        """
        self.byte()
        self._lines += self._text.count("\n", 0, self._at)
        parts = [self._text[self._at :]]
        self._forgotten, self._at, self._counted = self._forgotten + self._at, 0, 0
        wanted = max(1, len(parts[0]))
        while wanted > 0 and not self._ended:
            try:
                block = next(self._blocks, None)
                self._ended = block is None
                parts.append(self._without_bom(self._decode.decode(block or b"", final=self._ended)))
            except UnicodeDecodeError as error:
                parts.append(self._without_bom(str(error.object[: error.start], "utf-8")))
                detail = f"after character {self._forgotten + sum(map(len, parts))}: the rest cannot be read"
                self._fault = RecordError("read", NOT_UTF8, detail)
            except RecordError as error:
                self._fault = error
            self._ended = self._ended or self._fault is not None
            wanted -= len(parts[-1])
        self._text = "".join(parts)

    def _without_bom(self, text: str) -> str:
        """A byte order mark is no text, and only the first character of a file can be one."""
        if self._begun or not text:
            return text
        self._begun = True
        if not text.startswith(BOM):
            return text
        self._bytes = len(BOM.encode())
        return text[1:]
