"""WebDataset shards: members of a tar archive that follow each other and share a name up to its first dot are a sample.

The standard reader ends silently at what it cannot read; here every irregularity is an error. What cannot be trusted is
not delivered: where an archive ends without its end mark, its last sample may lack members. A plain archive is passed
over with seeks, so that only the headers and the members that are asked for are read.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaRef
from packtrain.records.formats.jsonl import BOM, LONGEST, NOT_UTF8, TOO_LONG, parse_object
from packtrain.records.formats.source_files import Format
from packtrain.records.shards.address import unreadable
from packtrain.records.shards.decompression import file_blocks, file_compression
from packtrain.records.source import MEDIA_ENDINGS, Entry, Unit
from packtrain.records.span import Plain, Span

BLOCK = tarfile.BLOCKSIZE
UNDECODABLE = "backslashreplace"  # names must stay different, and be writable as text
MAX_HEADER = 1 << 20  # bytes of a long name or of a pax header
AHEAD = 1 << 14  # bytes read at once from a place: headers and texts are small and lie together

NOT_TAR = "not a tar archive"
CUT_OFF = "archive is cut off"
NO_END = "archive has no end mark, its last sample may be incomplete"
DAMAGED = "archive is damaged"
AFTER_END = "data after the end of the archive"


LINK = "link in archive"
SPECIAL = "special file in archive"
DUPLICATE = "two members with the same extension"
NO_EXTENSION = "member has no extension"
MEDIA_TOO_LARGE = "media member is too large"
NO_SAMPLE = "no sample there"

TEXT_KEYS = {"txt": "text", "text": "text", "caption": "caption", "cls": "cls"}
LINK_TYPES = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_WITHOUT_CONTENT = (*LINK_TYPES, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


class LocalFile(Span):
    """An open file, of which what cannot be read is a record error."""

    __slots__ = ()

    def read_at(self, position: int, length: int) -> bytes:
        try:
            return super().read_at(position, length)
        except OSError as error:
            raise unreadable(error) from error


class StreamedBytes:
    """A compressed file, decompressed as it is read. Raises RecordError where its stream is broken."""

    def __init__(self, path: str) -> None:
        self._blocks = file_blocks(path)
        self._block, self._at, self._before = b"", 0, 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, or fewer at the end."""
        return b"".join(self._pieces(size))

    def skip(self, size: int) -> int:
        """Pass over bytes; how many there were."""
        return sum(len(piece) for piece in self._pieces(size))

    def tell(self) -> int:
        """Position in the decompressed archive."""
        return self._before + self._at

    def _pieces(self, size: int) -> Iterator[bytes]:
        while size > 0:
            if self._at == len(self._block):
                self._before += self._at
                self._block, self._at = next(self._blocks, b""), 0
                if not self._block:
                    return
            piece = self._block[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece


class PlacedBytes:
    """An archive from one place on; what is passed over is not read. Its `size` is known where all of it is read."""

    def __init__(self, plain: Plain, at: int, size: int | None = None) -> None:
        self._plain, self._at, self._size = plain, at, size
        self._held, self._start = b"", at  # bytes read ahead, and where they begin

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, or fewer at the end."""
        begin = self._at - self._start
        if begin + size > len(self._held):
            self._held, self._start, begin = self._plain.read_at(self._at, max(size, AHEAD)), self._at, 0
        data = self._held[begin : begin + size]
        self._at += len(data)
        return data

    def skip(self, size: int) -> int:
        """Pass over bytes; how many there were, or of an archive of unknown size would have been."""
        passed = size if self._size is None else min(size, self._size - self._at)
        self._at += passed
        return passed

    def tell(self) -> int:
        """Position in the decompressed archive."""
        return self._at


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One file, folder or link in an archive. Its name is a label; nothing is ever opened or written under it."""

    name: str
    kind: bytes  # tar's type flag
    header: int  # where its first header begins: before its own there may be one for a long name
    offset: int  # of the content
    size: int
    sparse: bool

    @property
    def is_file(self) -> bool:
        """Does it hold plain content?"""
        return self.kind in tarfile.REGULAR_TYPES and not self.sparse

    @property
    def is_folder(self) -> bool:
        """Is it a folder, or a label of the archive, and so nothing to read?"""
        return self.kind in (tarfile.DIRTYPE, b"V", b"D") or (self.kind == tarfile.AREGTYPE and self.name.endswith("/"))


class Members:
    """Walks through an archive. Between two members, `read` gives the content of the one at hand."""

    def __init__(self, source: PlacedBytes | StreamedBytes) -> None:
        self._source = source
        self._left = 0  # bytes up to the next header that have not been passed
        self.ended = False  # has the end mark been seen, so that every member is known to be complete?

    def __iter__(self) -> Iterator[Member]:
        """The members up to the end mark. Raises RecordError at the first irregularity."""
        first = True
        while True:
            member = self._next(first)
            if member is None:
                return
            first = False
            self._left = -(-member.size // BLOCK) * BLOCK
            yield member
            self._pass_rest(member.name)

    def pass_all(self) -> None:
        """Go to the end of the file, whatever is there. Raises RecordError where its stream is broken."""
        self._source.skip(1 << 62)

    def read(self, member: Member) -> bytes:
        """The content of the member at hand."""
        data = self._source.read(member.size)
        if len(data) < member.size:
            raise RecordError("read", CUT_OFF, f"inside {member.name!r}")
        self._left -= len(data)
        return data

    def _pass_rest(self, name: str) -> None:
        """Go to the next header. This is also what notices that a content which nobody read is not all there."""
        if self._source.skip(self._left) < self._left:
            raise RecordError("read", CUT_OFF, f"inside {name!r}")

    def _next(self, first: bool) -> Member | None:
        """The next member with what its extra headers say; None after the end mark."""
        extra: dict[str, str] = {}
        begin = self._source.tell()
        while True:
            block = self._source.read(BLOCK)
            if len(block) < BLOCK:
                raise self._end_missing(block, first, bool(extra))
            if not block.strip(b"\0"):
                if extra:
                    raise RecordError("read", DAMAGED, "a header that belongs to no member")
                self._check_end()
                return None
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", UNDECODABLE)
            except tarfile.HeaderError as error:
                reason = NOT_TAR if first and not extra else DAMAGED
                raise RecordError("read", reason, f"at byte {self._source.tell() - BLOCK}: {error}") from error
            if header.size < 0:
                raise RecordError("read", DAMAGED, f"{header.name!r} has a size of {header.size}")
            if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extra |= _pax_fields(self._content(header))
            elif header.type == tarfile.XGLTYPE:
                self._take_global(_pax_fields(self._content(header)))
            elif header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                name = self._content(header).split(b"\0", 1)[0].decode("utf-8", UNDECODABLE)
                extra |= {"path": name} if header.type == tarfile.GNUTYPE_LONGNAME else {"linkpath": name}
            else:
                return self._member(header, block, extra, begin)

    def _take_global(self, fields: dict[str, str]) -> None:
        """A header for all members that follow. It may not change where or what they are: single ones are read too."""
        if changing := [key for key in fields if key in ("path", "size") or key.startswith("GNU.sparse.")]:
            raise RecordError("read", DAMAGED, f"a global header that sets {changing[0]!r} for every member")

    def _member(self, header: tarfile.TarInfo, block: bytes, fields: dict[str, str], begin: int) -> Member:
        sparse = header.type == tarfile.GNUTYPE_SPARSE
        more = sparse and block[482] != 0  # an old GNU sparse map may go on in further blocks
        while more:
            extension = self._source.read(BLOCK)
            if len(extension) < BLOCK:
                raise RecordError("read", CUT_OFF, f"inside {header.name!r}")
            more = extension[504] != 0
        size = fields.get("size", str(header.size))
        if not (size.isascii() and size.isdigit() and len(size) < 20):
            raise RecordError("read", DAMAGED, f"{header.name!r} has a size of {size[:40]!r}")
        kind = header.type
        return Member(
            name=fields.get("GNU.sparse.name", fields.get("path", header.name)),
            kind=kind,
            header=begin,
            offset=self._source.tell(),
            # Only files have content; the size field of a link or a folder counts for nothing.
            size=0 if kind in _WITHOUT_CONTENT else int(size),
            sparse=sparse or any(key.startswith("GNU.sparse.") for key in fields),
        )

    def _content(self, header: tarfile.TarInfo) -> bytes:
        """The content of an extra header."""
        if header.size > MAX_HEADER:
            raise RecordError("read", DAMAGED, f"a header of {header.size:,} bytes")
        padded = -(-header.size // BLOCK) * BLOCK
        data = self._source.read(padded)
        if len(data) < padded:
            raise RecordError("read", CUT_OFF, "inside a header")
        return data[: header.size]

    def _end_missing(self, block: bytes, first: bool, inside: bool) -> RecordError:
        if block or inside:
            return RecordError("read", NOT_TAR if first and not inside else CUT_OFF, "inside a header")
        if first:
            return RecordError("read", CUT_OFF, "the file is empty")
        return RecordError("read", NO_END, f"it ends at byte {self._source.tell()} without two blocks of zeros")

    def _check_end(self) -> None:
        """After the end mark there may be nothing but zeros: archives put one after the other would lose the rest."""
        self.ended = True
        while data := self._source.read(1 << 16):
            if data.strip(b"\0"):
                detail = "archives joined with `cat` must be joined with `tar --concatenate`"
                raise RecordError("read", AFTER_END, detail)


def _pax_fields(data: bytes) -> dict[str, str]:
    """The records `length key=value` of a pax header."""
    fields: dict[str, str] = {}
    while data.strip(b"\0"):
        length, space, _ = data.partition(b" ")
        if not (space and length.isdigit() and len(length) < 8 and len(length) < int(length) <= len(data)):
            raise RecordError("read", DAMAGED, "a pax header that is not made of length key=value")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        fields[key.decode("utf-8", UNDECODABLE)] = value.decode("utf-8", UNDECODABLE)
        data = data[int(length) :]
    return fields


@contextmanager
def open_members(path: str) -> Iterator[tuple[Members, bool]]:
    """An archive's members, and whether it is plain, so that offsets are places in the file itself.

    Raises RecordError where the file cannot be read.
    """
    if file_compression(path) != "none":
        yield Members(StreamedBytes(path)), False
        return
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield Members(PlacedBytes(LocalFile(fd=file.fileno(), size=size), 0, size)), True
    except OSError as error:
        raise unreadable(error) from error


class TarShards(Format):
    """Reads WebDataset shards; a unit is one shard."""

    longest = LONGEST  # bytes of a json or text member
    largest = 256 << 20  # bytes of a media member that has to be held in memory, and of a whole sample of them

    def cut(self, file: str) -> Iterator[Unit]:
        yield Unit(file=file)

    def entries(self, unit: Unit, name: str) -> Iterator[Entry]:
        """One entry for each sample. At a fault the sample that it may have hurt becomes the entry that says so."""
        try:
            with open_members(unit.file) as (members, plain):
                for sample in self._samples(members, unit.file if plain else None):
                    if isinstance(sample, _Sample):
                        yield sample.entry(f"{name}:{sample.key}")
                    else:
                        yield Entry(origin=f"{name}:{sample[0]}" if sample[0] else name, error=sample[1])
                if not plain:
                    members.pass_all()
        except RecordError as error:
            yield Entry(origin=name, error=error)

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The sample whose first header begins at a byte; media stay where they are, or are held within bounds."""
        for sample in self._samples(Members(PlacedBytes(plain, at)), plain.path):
            if isinstance(sample, _Sample):
                return sample.entry(origin)
            raise sample[1]
        raise RecordError("read", NO_SAMPLE, f"at byte {at}")

    def _samples(self, members: Members, archive: str | None) -> Iterator[_Sample | tuple[str, RecordError]]:
        """The samples, and at a fault the key of the sample that it may have hurt."""
        sample: _Sample | None = None
        try:
            for member in members:
                key, extension = split_name(member.name)
                if member.is_folder or _is_unnamed(key):
                    continue
                if sample is None or key != sample.key:
                    if sample:
                        yield sample
                    sample = _Sample(key, archive, member.header)
                self._add(sample, extension, member, members)
            if sample:
                yield sample
        except RecordError as error:
            if sample and members.ended:  # a fault after the end mark hurts no sample
                yield sample
            yield sample.key if sample and not members.ended else "", error

    def _add(self, sample: _Sample, extension: str, member: Member, members: Members) -> None:
        """Take one member into its sample; its content is read only where it is needed and in bounds."""
        if (problem := self._problem(sample, extension, member)) and sample.problem is None:
            sample.problem = problem
        kind = extension.rpartition(".")[2]
        media = kind in MEDIA_ENDINGS
        needed = extension == "json" or extension in TEXT_KEYS or (media and sample.archive is None)
        data = members.read(member) if needed and not sample.problem else b""
        sample.extensions.add(extension)
        if sample.problem:
            sample.media.clear()  # so that a broken sample holds no memory
        elif media and sample.archive is None:
            sample.media[extension] = MediaRef(name=member.name, data=data)
            sample.held += len(data)
        elif media:
            sample.media[extension] = MediaRef(
                name=member.name, archive=sample.archive, offset=member.offset, size=member.size
            )
        elif needed:
            sample.texts[extension] = data
        elif not media:
            sample.others[extension] = f"{member.size:,} bytes"

    def _problem(self, sample: _Sample, extension: str, member: Member) -> RecordError | None:
        """The reason why a member spoils its sample; None if it does not."""
        where = repr(member.name)
        if not member.is_file:
            return RecordError("read", LINK if member.kind in LINK_TYPES else SPECIAL, where)
        if not extension:
            return RecordError("read", NO_EXTENSION, where)
        if extension in sample.extensions:
            return RecordError("read", DUPLICATE, where)
        if (extension == "json" or extension in TEXT_KEYS) and member.size > self.longest:
            return RecordError("read", TOO_LONG, f"{where} has {member.size:,} bytes")
        media = extension.rpartition(".")[2] in MEDIA_ENDINGS
        if media and sample.archive is None and sample.held + member.size > self.largest:
            detail = f"{where} has {member.size:,} bytes; in an uncompressed tar it would not be copied"
            return RecordError("read", MEDIA_TOO_LARGE, detail)
        return None


class _Sample:
    """The members of one sample, gathered while they pass."""

    def __init__(self, key: str, archive: str | None, at: int) -> None:
        self.key = key
        self.at = at  # where its first header begins
        self.archive = archive  # the plain archive in which media can stay
        self.extensions: set[str] = set()
        self.texts: dict[str, bytes] = {}
        self.media: dict[str, MediaRef] = {}
        self.others: dict[str, str] = {}  # members of which nothing is read
        self.held = 0  # bytes of media
        self.problem: RecordError | None = None

    def entry(self, origin: str) -> Entry:
        """The sample as an entry."""
        check = zlib.crc32(b"".join(self.texts.values())) if self.texts else 0
        try:
            if self.problem:
                raise self.problem
            value = {**self.others, **(parse_object(self.texts["json"]) if "json" in self.texts else {})}
            for key, text in self._texts().items():  # under another name where JSON says something else
                value[key if value.setdefault(key, text) == text else "txt"] = text
            return Entry(origin=origin, value=value, media=self.media, at=self.at, check=check)
        except RecordError as error:
            return Entry(origin=origin, error=error, at=self.at, check=check)

    def _texts(self) -> dict[str, object]:
        """The text members under the names that schemas know."""
        value: dict[str, object] = {}
        for extension, data in self.texts.items():
            if extension == "json":
                continue
            try:
                text = str(data.removeprefix(BOM), "utf-8")
            except UnicodeDecodeError as error:
                detail = f"byte {error.start + 1} of the {extension} member is {data[error.start]:#04x}"
                raise RecordError("read", NOT_UTF8, detail) from error
            key = TEXT_KEYS[extension]
            if key in value:
                raise RecordError("read", DUPLICATE, "txt and text")
            value[key] = text.strip() if extension == "cls" else text
        return value


def split_name(name: str) -> tuple[str, str]:
    """The key and the extension of a member: parted at the first dot of the last part of its name.

    >>> split_name("train/img.01/0007.0.PNG")
    ('train/img.01/0007', '0.png')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _is_unnamed(key: str) -> bool:
    """Is this member no part of a sample: a hidden file of the system, or metadata of the shard (`__name__`)?"""
    base = key.rpartition("/")[2]
    return not base or (base.startswith("__") and base.endswith("__"))
