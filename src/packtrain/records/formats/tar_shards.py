"""WebDataset shards: members of a tar archive that stand together and share a name up to its first dot are a sample.

What cannot be trusted is not delivered: where an archive ends without its end mark, its last sample may lack members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaRef
from packtrain.records.formats.json_object import BOM, LONGEST, NOT_UTF8, TOO_LONG, parse_object
from packtrain.records.formats.source_files import failed_entry, failed_unit, shown_name, source_files
from packtrain.records.formats.tar_members import Member, Members, PlacedBytes, open_members
from packtrain.records.shards.plain import Plain
from packtrain.records.source import MEDIA_ENDINGS, Entry, SourceSpec, Unit

LINK = "link in archive"
SPECIAL = "special file in archive"
DUPLICATE = "two members with the same extension"
NO_EXTENSION = "member has no extension"
MEDIA_TOO_LARGE = "media member is too large"
NO_SAMPLE = "no sample there"

TEXT_KEYS = {"txt": "text", "text": "text", "caption": "caption", "cls": "cls"}
LINK_TYPES = (b"1", b"2")


class TarShards:
    """Reads WebDataset shards; a unit is one shard."""

    longest = LONGEST  # bytes of a json or text member
    largest = 256 << 20  # bytes of a media member that has to be held in memory, and of a whole sample of them

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """One unit for each shard."""
        for file, fault in source_files(spec):
            yield failed_unit(file, fault) if fault else Unit(number=0, source=0, file=file)

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        """One entry for each sample. At a fault the sample that it may have hurt becomes the entry that says so."""
        if failed := failed_entry(spec, unit):
            yield failed
            return
        name = shown_name(spec, unit.file)
        try:
            with open_members(unit.file) as (members, plain):
                for found in self._samples(members, unit.file if plain else None):
                    if isinstance(found, _Sample):
                        yield found.entry(f"{name}:{found.key}")
                    else:
                        yield Entry(origin=f"{name}:{found[0]}" if found[0] else name, error=found[1])
                if not plain:
                    members.pass_all()
        except RecordError as error:
            yield Entry(origin=name, error=error)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The sample whose first header stands at a byte; media stay where they are, or are held within bounds."""
        for found in self._samples(Members(PlacedBytes(plain, at)), plain.path):
            return found.entry(origin) if isinstance(found, _Sample) else Entry(origin=origin, error=found[1], at=at)
        return Entry(origin=origin, error=RecordError("read", NO_SAMPLE, f"at byte {at}"), at=at)

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
            if sample and members.ended:  # a fault behind the end mark hurts no sample
                yield sample
            yield sample.key if sample and not members.ended else "", error

    def _add(self, sample: _Sample, extension: str, member: Member, members: Members) -> None:
        """Take one member into its sample; its content is read only where it is needed and in bounds."""
        if (problem := self._problem(sample, extension, member)) and sample.problem is None:
            sample.problem = problem
        kind = extension.rpartition(".")[2]
        media = kind in MEDIA_ENDINGS
        wanted = extension == "json" or extension in TEXT_KEYS or (media and sample.archive is None)
        data = members.read(member) if wanted and not sample.problem else b""
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
        elif wanted:
            sample.texts[extension] = data
        elif not media:
            sample.others[extension] = f"{member.size:,} bytes"

    def _problem(self, sample: _Sample, extension: str, member: Member) -> RecordError | None:
        """Why a member spoils its sample; None where it does not."""
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
        self.at = at  # where its first header stands
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
