"""WebDataset shards: wherever an archive is cut or damaged, every sample before is delivered and the loss is said."""

from __future__ import annotations

import gzip
import io
import random
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard
from format_checks import read_all, reader, shown, source, values
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "faults"))  # damage as files of every kind get it
from damage import mutated

from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaRef
from packtrain.records.formats import jsonl, tar_shards
from packtrain.records.formats import source_files as files
from packtrain.records.shards import address, decompression

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
PACKERS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}


def tar(
    parts: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT, kinds: dict[str, bytes] | None = None
) -> bytes:
    """An archive of these members; `kinds` makes some of them links, folders or devices."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, data in parts:
            info = tarfile.TarInfo(name)
            info.type = (kinds or {}).get(name, tarfile.REGTYPE)
            info.linkname = "elsewhere" if info.issym() or info.islnk() else ""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(folder: Path, data: bytes, name: str = "s.tar") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def content(ref: MediaRef) -> bytes:
    """The bytes that a reference stands for."""
    if ref.data is not None:
        return ref.data
    assert ref.archive
    with open(ref.archive, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.size)


def samples(number: int) -> list[tuple[str, bytes]]:
    return [
        part for i in range(number) for part in ((f"d/{i}.jpg", b"J%d" % i * 200), (f"d/{i}.json", b'{"i": %d}' % i))
    ]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("format", FORMATS)
def test_round_trip(tmp_path: Path, packer: str, format: int) -> None:
    entries = read_all(source(write(tmp_path, PACKERS[packer](tar(samples(5), format))), "webdataset"))
    assert values(entries) == [{"i": i} for i in range(5)]
    assert [entry.origin for entry in entries] == [f"s.tar:d/{i}" for i in range(5)]
    for i, entry in enumerate(entries):
        assert list(entry.media) == ["jpg"]
        assert content(entry.media["jpg"]) == b"J%d" % i * 200
        assert (entry.media["jpg"].data is None) == (packer == "plain"), "a plain archive is not loaded"


def test_names_too_long_for_the_header(tmp_path: Path) -> None:
    key = "deep/" * 60 + "é" * 100
    for format in FORMATS[1:]:
        entries = read_all(
            source(write(tmp_path, tar([(key + ".PNG", b"p"), (key + ".json", b"{}")], format)), "webdataset")
        )
        assert shown(entries) == [("s.tar:" + key, {})]
        assert content(entries[0].media["png"]) == b"p"


@pytest.mark.parametrize("packer", ["plain", "zstd"])
def test_every_cut_loses_only_what_it_must_and_says_so(tmp_path: Path, packer: str) -> None:
    parts, sound = samples(4), 0
    data = tar(parts)
    used = 2048 * 4  # a header and a block for each of two members
    assert data[used : used + 1024] == bytes(1024)
    assert data[used - 1024 : used] != bytes(1024)
    whole = values(read_all(source(write(tmp_path, data), "webdataset")))
    for length in [*range(0, used + 1, 256), *(n * 512 + 1 for n in range(used // 512))]:
        entries = read_all(source(write(tmp_path, PACKERS[packer](data[:length])), "webdataset"))
        assert entries, f"cut at {length}: silence"
        assert entries[-1].error, f"cut at {length}: the last sample is trusted"
        assert [entry.error is None for entry in entries[:-1]] == [True] * (len(entries) - 1)
        assert values(entries[:-1]) == whole[: len(entries) - 1]
        # Every sample is complete whose successor has begun with a whole header; it must not be given up.
        begun = [i for i in range(4) if length >= i * 2048 + 512]
        assert len(entries) == max(1, len(begun)), f"cut at {length}"
        sound += len(entries) - 1
    assert sound > 50


def test_the_reason_tells_the_kinds_of_cut_apart(tmp_path: Path) -> None:
    data = tar(samples(3))
    for length, reason in (
        (2048 + 1024, tar_shards.NO_END),  # between two members of one sample
        (2048 * 2, tar_shards.NO_END),  # between two samples
        (2048 * 3, tar_shards.NO_END),  # nothing is missing but the mark, and nobody can know
        (2048 + 600, tar_shards.CUT_OFF),  # inside a member
        (2048 + 100, tar_shards.CUT_OFF),  # inside a header
    ):
        entries = read_all(source(write(tmp_path, data[:length]), "webdataset"))
        assert entries[-1].error
        assert entries[-1].error.reason == reason
        assert entries[-1].origin.startswith("s.tar:d/")
    assert values(read_all(source(write(tmp_path, data[: 2048 * 3 + 512]), "webdataset"))) == [
        {"i": i} for i in range(3)
    ]


def test_damage(tmp_path: Path) -> None:
    data = bytearray(tar(samples(3)))
    data[2048 * 2 + 20] ^= 1
    entries = read_all(source(write(tmp_path, bytes(data)), "webdataset"))
    assert shown(entries) == [("s.tar:d/0", {"i": 0}), ("s.tar:d/1", tar_shards.DAMAGED)]
    joined = read_all(source(write(tmp_path, tar(samples(2)) + tar(samples(2))), "webdataset"))
    assert shown(joined)[2:] == [("s.tar", tar_shards.AFTER_END)]
    assert values(joined[:2]) == [{"i": 0}, {"i": 1}]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 4096 + 1024), byte=st.integers(0, 255))
def test_no_byte_can_crash_it(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int) -> None:
    data = bytearray(tar([*samples(2), ("x" * 150 + ".json", b"{}")], tarfile.PAX_FORMAT))
    data[place] = byte
    assert read_all(source(write(tmp_path_factory.mktemp("fuzz"), bytes(data)), "webdataset"))


@pytest.mark.parametrize(("seed", "count"), [(0, 60), pytest.param(1, 1000, marks=pytest.mark.full)])
def test_no_damage_can_crash_it(tmp_path: Path, seed: int, count: int) -> None:
    whole, broken = tar([*samples(2), ("x" * 150 + ".json", b"{}")], tarfile.PAX_FORMAT), 0
    for number in range(count):
        entries = read_all(source(write(tmp_path, mutated(whole, random.Random(f"{seed} {number}"))), "webdataset"))
        broken += any(entry.error is not None for entry in entries)
    assert broken > count / 10, "hardly anything was damaged"


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_broken_streams(tmp_path: Path, packer: str) -> None:
    import os

    parts = [part for i in range(50) for part in ((f"{i}.png", os.urandom(9000)), (f"{i}.json", b'{"i": %d}' % i))]
    data = PACKERS[packer](tar(parts))
    entries = read_all(source(write(tmp_path, data[: len(data) // 2]), "webdataset"))
    assert 10 < len(entries) < 40
    assert values(entries[:-1]) == [{"i": i} for i in range(len(entries) - 1)]
    assert entries[-1].error
    assert entries[-1].error.reason == decompression.CUT_OFF
    assert entries[-1].origin == f"s.tar:{len(entries) - 1}"


def test_what_is_no_archive_is_one_entry(tmp_path: Path) -> None:
    for data, reason in (
        (b"junk" * 1000, tar_shards.NOT_TAR),
        (b"junk", tar_shards.NOT_TAR),
        (b"", tar_shards.CUT_OFF),
        (gzip.compress(b"junk" * 1000), tar_shards.NOT_TAR),
    ):
        assert shown(read_all(source(write(tmp_path, data), "webdataset"))) == [("s.tar", reason)]
    assert shown(read_all(source(tmp_path / "none.tar", "webdataset"))) == [("none.tar", address.CANNOT_OPEN)]
    for packer in PACKERS.values():
        assert read_all(source(write(tmp_path, packer(tar([]))), "webdataset")) == []


def test_faults_of_one_sample_stay_with_it(tmp_path: Path) -> None:
    parts = [
        ("a.jpg", b""), ("a.json", b"{}"),
        ("b.json", b"[]"),
        ("c.txt", b"\xff"),
        ("d.jpg", b"1"), ("d.jpg", b"2"),
        ("README", b"x"),
        ("e.mp4", b""),
        ("f.txt", b"fine"),
        ("g.json", b'{"x": "' + b"x" * 5000 + b'"}'), ("g.jpg", b"1"),
        ("h.txt", b"one"), ("h.text", b"two"),
        ("i.jpg", b""),
        ("j.txt", b"fine"),
        ("k.json", b'[{"role": "user", "content": "x"}]'), ("k.jpg", b"1"),
        ("l.json", b'[{"messages": []}, {"messages": []}]'), ("l.jpg", b"1"),
    ]  # fmt: skip
    kinds = {"a.jpg": tarfile.SYMTYPE, "e.mp4": tarfile.CHRTYPE, "i.jpg": tarfile.LNKTYPE}
    expected = [
        ("a", tar_shards.LINK),
        ("b", jsonl.NOT_OBJECT),
        ("c", jsonl.NOT_UTF8),
        ("d", tar_shards.DUPLICATE),
        ("README", tar_shards.NO_EXTENSION),
        ("e", tar_shards.SPECIAL),
        ("f", {"text": "fine"}),
        ("g", jsonl.TOO_LONG),
        ("h", tar_shards.DUPLICATE),
        ("i", tar_shards.LINK),
        ("j", {"text": "fine"}),
        ("k", {"messages": [{"role": "user", "content": "x"}]}),
        ("l", jsonl.PACKED),
    ]
    for packer in PACKERS.values():
        entries = read_all(source(write(tmp_path, packer(tar(parts, kinds=kinds))), "webdataset"), longest=4096)
        assert shown(entries) == [("s.tar:" + key, value) for key, value in expected]


def test_values_and_media_of_a_sample(tmp_path: Path) -> None:
    parts = [
        ("x.v1/a.0.png", b"0"), ("x.v1/a.1.JPEG", b"1"), ("x.v1/a.txt", b"hello"), ("x.v1/a.cls", b"3\n"),
        ("x.v1/b.txt", b"another"), ("x.v1/b.json", b'{"text": "kept"}'), ("x.v1/b.npy", b"?"),
        ("x.v1/c.mp4", b"v"), ("x.v1/c.wav", b"w"),
        ("x.v1/._c.json", b"of the system"), ("__meta__.json", b"of the shard"), ("x.v1/folder", b""),
        ("x.v1/d.caption", b"\xef\xbb\xbfcap"),
        ("x.v1/e.txt", b"cap"), ("x.v1/e.json", b'{"width": 3}'),
    ]  # fmt: skip
    path = write(tmp_path, tar(parts, kinds={"x.v1/folder": tarfile.DIRTYPE}))
    entries = read_all(source(path, "webdataset"))
    assert [(e.origin, e.value, list(e.media)) for e in entries] == [
        ("s.tar:x.v1/a", {"text": "hello", "cls": "3"}, ["0.png", "1.jpeg"]),
        ("s.tar:x.v1/b", {"npy": "1 bytes", "text": "kept", "txt": "another"}, []),
        ("s.tar:x.v1/c", {}, ["mp4", "wav"]),
        ("s.tar:x.v1/d", {"caption": "cap"}, []),
        ("s.tar:x.v1/e", {"width": 3, "text": "cap"}, []),
    ]
    assert content(entries[0].media["1.jpeg"]) == b"1"


def test_media_are_bounded_only_where_they_must_be_held(tmp_path: Path) -> None:
    parts = [
        ("a.mp4", b"x" * 3000),
        ("a.json", b"{}"),
        ("b.0.png", b"x" * 1500),
        ("b.1.png", b"x" * 1500),
        ("c.png", b"x"),
    ]
    plain = read_all(source(write(tmp_path, tar(parts)), "webdataset"), largest=2000)
    assert values(plain) == [{}, {}, {}]
    packed = read_all(source(write(tmp_path, gzip.compress(tar(parts))), "webdataset"), largest=2000)
    reason = tar_shards.MEDIA_TOO_LARGE
    assert shown(packed) == [("s.tar:a", reason), ("s.tar:b", reason), ("s.tar:c", {})]
    assert tar_shards.TarShards.largest == 256 << 20


def test_a_missing_shard_of_a_pattern_is_noticed(tmp_path: Path) -> None:
    for number in (0, 2):
        write(tmp_path, tar([(f"{number}.txt", b"x")]), f"shard-{number:03d}.tar")
    entries = read_all(source(tmp_path / "shard-{000..002}.tar", "webdataset"))
    assert [(e.origin, e.error is None) for e in entries] == [
        ("shard-000.tar:0", True),
        ("shard-001.tar", False),
        ("shard-002.tar:2", True),
    ]
    assert [unit.file for unit in reader("webdataset").units(source(tmp_path / "shard-*.tar", "webdataset"))] == [
        str(tmp_path / "shard-000.tar"),
        str(tmp_path / "shard-002.tar"),
    ]


def test_braces() -> None:
    assert files.expand_braces("a-{8..11}") == ["a-8", "a-9", "a-10", "a-11"]
    assert files.expand_braces("a-{008..011}.tar")[1:3] == ["a-009.tar", "a-010.tar"]
    assert files.expand_braces("{x,y}/{1..2}") == ["x/1", "x/2", "y/1", "y/2"]
    assert files.expand_braces("plain") == ["plain"]
    assert files.expand_braces("odd{one}{") == ["odd{one}{"]
    assert len(files.expand_braces("{000001..999999}")) == 999_999
    for pattern in ("{0..1000000}", "{0..999}{0..999}{0..9}", "{0..99999999999999999999}"):
        with pytest.raises(ConfigError, match="at most"):
            files.expand_braces(pattern)
