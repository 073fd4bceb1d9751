"""Bad input from end to end: every broken record is exactly one line of the ledger, and never a crash."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import zstandard
from measuring import chat, chats, command, ledger, write_image, write_lines

from packtrain.app.measure import measure_outcome
from packtrain.core.errors import DataError
from packtrain.measuring.measure_summary import UnreadName
from packtrain.measuring.measurement import MeasureOutcome
from packtrain.records.shards import decompression

GOOD = 40
PLACEHOLDERS = "media placeholders in the text do not match the media"
pytestmark = pytest.mark.timeout(120)  # a reader that waits for a pipe would wait for ever


def shows(image: Any, **columns: Any) -> dict[str, Any]:
    return chat("<image>\nWhat is this?", "A picture.", images=[image], **columns)


def parts(*content: Any) -> dict[str, Any]:
    return chat([*content, {"type": "text", "text": "What is this?"}])  # type: ignore[arg-type]


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is of this size, in 60 bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def video(path: Path, frames: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            picture = np.full((48, 64, 3), number * 20 % 255, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def sound(path: Path) -> None:
    import wave

    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0\0" * 800)


def prepare(root: Path, outside: Path) -> None:
    """The files that the records below refer to."""
    whole = write_image(root / "ok.png", 64, 48).read_bytes()
    write_image(outside / "secret.png")
    (root / "empty.png").write_bytes(b"")
    (root / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "text.png").write_text("this is not a picture")
    (root / "folder.png").mkdir()
    (root / "giga.png").write_bytes(png_header(60_000, 60_000))
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "dangling.png").symlink_to(root / "nowhere.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "inner.png").symlink_to(root / "ok.png")
    os.mkfifo(root / "pipe.png")
    video(root / "ok.mp4", 12)
    with av.open(str(root / "empty.avi"), "w") as container:  # a header that promises a stream, and no frame
        stream = container.add_stream("mpeg4", rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    whole = (root / "ok.mp4").read_bytes()
    (root / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    sound(root / "sound.wav")


# name -> (the line, stage, reason); {outside} is the folder beside the dataset
BAD: dict[str, tuple[Any, str, str]] = {
    "cut json": ('{"id": "x", "messages": [{"role": "user", "con', "read", "not valid JSON"),
    "not json": ("hello", "read", "not valid JSON"),
    "a list": ("[1, 2]", "read", "not a JSON object"),
    "a number": ("7", "read", "not a JSON object"),
    "no columns": ({}, "schema", "unknown schema"),
    "other columns": ({"foo": 1, "bar": "x"}, "schema", "unknown schema"),
    "no messages": ({"messages": []}, "schema", "no messages"),
    "messages of wrong type": ({"messages": "hello"}, "schema", "a column has the wrong type"),
    "a message of wrong type": ({"messages": ["hello"]}, "schema", "a message is not an object"),
    "content of wrong type": (chat(7), "schema", "content has the wrong type"),  # type: ignore[arg-type]
    "no content": (chat(None), "schema", "a message has no content"),  # type: ignore[arg-type]
    "no role": ({"messages": [{"content": "x"}]}, "schema", "a message has no role"),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, "schema", "unknown role"),
    "unknown part": (parts({"type": "hologram", "hologram": "x"}), "schema", "unknown part type"),
    "lone surrogate": (chat("\ud800"), "read", "text holds half a character"),
    "more markers": (chat("<image><image> two", images=["ok.png"]), "schema", "more image markers than images"),
    "fewer markers": (chat("<image> one", images=["ok.png"] * 2), "schema", "fewer image markers than images"),
    "marker without media": (chat("the tag <image> in HTML"), "schema", "more image markers than images"),
    "weight of nothing": (chat("x", weight=0), "loss", "no supervised tokens"),
    "reference of wrong type": (shows(7), "schema", "a media reference has the wrong type"),
    "empty reference": (shows(""), "schema", "a media reference is empty"),
    "missing": (shows("missing.png"), "media", "file not found"),
    "missing folder": (shows("no/such/folder/a.png"), "media", "file not found"),
    "file as folder": (shows("ok.png/a.png"), "media", "file not found"),
    "empty": (shows("empty.png"), "media", "empty file"),
    "truncated": (shows("cut.png"), "media", "truncated image"),
    "not an image": (shows("text.png"), "media", "not a supported image"),
    "a folder": (shows("folder.png"), "media", "not a regular file"),
    "a pipe": (shows("pipe.png"), "media", "not a regular file"),
    "a device": (shows("/dev/zero"), "media", "path outside the media root"),
    "gigapixel": (shows("giga.png"), "media", "image too large"),
    "dots": (shows("../outside/secret.png"), "media", "path outside the media root"),
    "hidden dots": (shows("folder.png/../../outside/secret.png"), "media", "path outside the media root"),
    "link out": (shows("link.png"), "media", "path outside the media root"),
    "absolute": (shows("{outside}/secret.png"), "media", "path outside the media root"),
    "file url": (shows("file://{outside}/secret.png"), "media", "path outside the media root"),
    "dangling link": (shows("dangling.png"), "media", "file not found"),
    "link to itself": (shows("loop.png"), "media", "not a usable path"),
    "zero byte": (shows("a\0b.png"), "media", "not a usable path"),
    "long name": (shows("x" * 5000), "media", "not a usable path"),
    "broken data url": (shows("data:image/png;base64,!!!!"), "media", "broken base64"),
    "data url of text": (shows("data:image/png,hello"), "media", "a data URL is not base64"),
    "data url of no image": (shows("data:image/png;base64,aGVsbG8="), "media", "not a supported image"),
    "http": (shows("http://localhost:9/a.png"), "media", "remote media are not fetched"),
    "s3": (shows("s3://bucket/a.png"), "media", "remote media are not fetched"),
    "video without frames": (parts({"type": "video", "video": "empty.avi"}), "media", "video without frames"),
    "cut video": (parts({"type": "video", "video": "cut.mp4"}), "media", "not a readable video"),
    "image as video": (parts({"type": "video", "video": "text.png"}), "media", "not a readable video"),
    "audio": (parts({"type": "audio", "audio": "sound.wav"}), "family", "audio has no token rule yet"),
    "placeholder in text": (chat("look: <|image_pad|>"), "template", PLACEHOLDERS),
    "placeholder in answer": (chat("hello", "<|video_pad|>"), "template", PLACEHOLDERS),
    "placeholder beside an image": (
        chat("<image> <|image_pad|>", images=["ok.png"]),
        "template",
        PLACEHOLDERS,
    ),
}
# What looks odd and is fine.
ODD = {
    "link inside": shows("inner.png"),
    "dots inside": shows("folder.png/../ok.png"),
    "data url": shows("data:image/png;base64,{png}"),
    "video": parts({"type": "video", "video": "ok.mp4"}),
}


class Place:
    """The dataset of all faults and its measurement."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.root, self.outside, self.out, self.model = folder / "root", folder / "outside", folder / "out", model
        prepare(self.root, self.outside)
        png = base64.b64encode((self.root / "ok.png").read_bytes()).decode()
        lines: list[str] = []
        self.line: dict[str, int] = {}
        good = chats(GOOD, images=("ok.png",))
        for at, (name, record) in enumerate([*((n, b[0]) for n, b in BAD.items()), *ODD.items()]):
            lines.append(json.dumps(good[at % GOOD] | {"id": f"good {at}"}))  # good neighbours, which must not suffer
            text = record if isinstance(record, str) else json.dumps({"id": name, **record})
            lines.append(text.replace("{outside}", str(self.outside)).replace("{png}", png))
            self.line[name] = len(lines)
        self.data = write_lines(self.root / "data.jsonl", lines)
        self.neighbours = len(BAD) + len(ODD)

    def measure(self, out: Path, **options: Any) -> MeasureOutcome:
        given = {"model": str(self.model), "out": out, "workers": 1, "check": 0, "max_failure_rate": 1.0, **options}
        return measure_outcome(self.data, **given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, qwen: Path) -> Place:
    made = Place(tmp_path_factory.mktemp("bad"), qwen)
    made.measure(made.out)
    return made


@pytest.mark.parametrize("name", BAD)
def test_one_line_in_the_ledger(place: Place, name: str) -> None:
    _, stage, reason = BAD[name]
    origin = f"data.jsonl:{place.line[name]}"
    lines = [line for line in ledger(place.out) if line["origin"] == origin]
    assert len(lines) == 1
    (line,) = lines
    assert (line["stage"], line["reason"]) == (stage, reason), line["detail"]
    assert line["id"] == (origin if stage == "read" else name)
    assert line["filtered"] is False
    assert set(line) == {"id", "origin", "stage", "reason", "detail", "filtered"}


def test_nothing_is_lost_and_nobody_else_suffers(place: Place) -> None:
    table = place.measure(place.out).table
    counts = table.summary.counts
    assert counts.entries == counts.rows + counts.ledger == place.neighbours * 2
    assert counts.ledger == counts.failed == len(BAD)
    assert {f"good {n}" for n in range(place.neighbours)} | set(ODD) == set(table.column("id").tolist())
    assert sum(counts.reasons.values()) == len(BAD)


def test_allowed_outside_the_root(place: Place, tmp_path: Path) -> None:
    outcome = place.measure(tmp_path / "out", allow_outside_root=True)
    ids = set(outcome.table.column("id").tolist())
    assert {"dots", "hidden dots", "link out", "absolute", "file url"} <= ids
    still = {line["id"]: line["reason"] for line in ledger(tmp_path / "out")}
    assert still["a device"] == still["a pipe"] == "not a regular file"


def test_workers_write_the_same_ledger(place: Place, tmp_path: Path) -> None:
    place.measure(tmp_path / "out", workers=2)
    assert (tmp_path / "out" / "ledger.jsonl").read_bytes() == (place.out / "ledger.jsonl").read_bytes()


def test_exit_codes(place: Place, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """Above the failure rate 1 with the reasons, below it 0; the ledger is there in both cases."""
    outside = sum(reason == "path outside the media root" for _, _, reason in BAD.values())
    arguments = ("measure", place.data, "-m", place.model, "-o", tmp_path / "out", "-w", 1, "--check", 0)
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert f"{len(BAD)} of the first {place.neighbours * 2} records are unusable" in err
    assert f"{outside} x media: path outside the media root" in err
    assert "Traceback" not in err
    assert len(ledger(tmp_path / "out")) == len(BAD)
    code, out, err = run(*arguments, "--max-failure-rate", 0.6)
    assert code == 0, err
    assert f"{len(BAD)} skipped" in out


def test_on_error_fail_names_the_first(place: Place, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"read: not valid JSON \(data\.jsonl:2: "):
        place.measure(tmp_path / "out", on_error="fail")


def shard(path: Path, samples: int = 5) -> list[int]:
    """A tar of samples of a picture and a json each; the offsets at which its members begin."""
    picture = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (64, 48)).save(picture, "PNG")
    starts = []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(samples):
            for ending, content in (
                ("png", picture.getvalue()),
                ("json", json.dumps(chat("<image> what?", id=f"s{number}")).encode()),
            ):
                starts.append(archive.fileobj.tell())  # type: ignore[union-attr]
                member = tarfile.TarInfo(f"{number:03}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return starts


@pytest.mark.parametrize(
    ("where", "rows", "key", "reason"),
    [
        (lambda starts: starts[5] + 600, 2, "002", "archive is cut off"),
        (lambda starts: starts[4] + 600, 2, "002", "archive is cut off"),
        (lambda starts: starts[5] + 100, 2, "002", "archive is cut off"),
        (lambda starts: starts[5], 2, "002", "archive has no end mark, its last sample may be incomplete"),
        (lambda starts: starts[6], 2, "002", "archive has no end mark, its last sample may be incomplete"),
    ],
    ids=["inside json", "inside image", "inside a header", "between two members of a sample", "between two samples"],
)
def test_a_cut_shard(
    tmp_path: Path, qwen: Path, where: Callable[[list[int]], int], rows: int, key: str, reason: str
) -> None:
    path = tmp_path / "a.tar"
    starts = shard(path)
    shard(tmp_path / "b.tar")
    path.write_bytes(path.read_bytes()[: where(starts)])
    outcome = measure_outcome(
        str(tmp_path / "{a,b,missing}.tar"),
        model=str(qwen),
        out=tmp_path / "out",
        workers=1,
        check=0,
        max_failure_rate=1.0,
    )
    lines = {line["origin"]: (line["stage"], line["reason"]) for line in ledger(tmp_path / "out")}
    assert lines == {f"a.tar:{key}": ("read", reason), "missing.tar": ("read", "file cannot be read")}
    counts = outcome.table.summary.counts
    assert (counts.rows, counts.entries) == (rows + 5, rows + 7)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda data: data[: len(data) * 2 // 3], id="cut"),
        pytest.param(lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], id="another checksum"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl.gz", "json.gz", "tar.gz", "jsonl.zst"])
def test_what_cannot_be_delivered_is_not_measured(
    tmp_path: Path, qwen: Path, kind: str, harm: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delivery reads a compressed file as a whole, so the records before a fault are failures as well."""
    monkeypatch.setattr("packtrain.records.formats.jsonl.JsonLines.block", 400)  # several units
    records = [{**record, "noise": os.urandom(40).hex()} for record in chats(60)]
    plain = "\n".join(map(json.dumps, records)).encode()
    if kind == "json.gz":
        plain = json.dumps(records).encode()
    if kind == "tar.gz":
        shard(tmp_path / "a.tar", 60)
        plain = (tmp_path / "a.tar").read_bytes()
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if kind.endswith("zst") else gzip.compress
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"bad.{kind}").write_bytes(harm(pack(plain)))
    (tmp_path / "data" / f"good.{kind}").write_bytes(pack(plain))
    options: dict[str, Any] = {"model": str(qwen), "out": tmp_path / "out", "workers": 1, "check": 0}
    table = measure_outcome(tmp_path / "data", **options, max_failure_rate=1.0).table
    counts, lines = table.summary.counts, ledger(tmp_path / "out")
    assert {file.file for file in table.files} == {str(tmp_path / "data" / f"good.{kind}")}
    assert counts.rows == 60
    assert counts.entries == 60 + len(lines)
    assert counts.cut_short == 1
    assert {line["reason"] for line in lines} <= {decompression.SPOILT, decompression.CUT_OFF, decompression.DAMAGED}
    if kind.endswith("gz"):
        assert sum(line["reason"] == decompression.SPOILT for line in lines) > 20
        with pytest.raises(DataError, match=decompression.SPOILT):
            measure_outcome(tmp_path / "data", **{**options, "out": tmp_path / "again"})


def test_a_name_that_is_not_unicode(tmp_path: Path, qwen: Path) -> None:
    """File names are bytes; one that is not UTF-8 must neither crash nor be lost."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = write_lines(folder / os.fsdecode(b"\xff.jsonl"), [*chats(3), {"id": "bad", "messages": []}])
    run = ("measure", path, "-m", qwen, "-o", tmp_path / "out", "-w", 1, "--check", 0, "--max-failure-rate", 0.5)
    code, out, err = command(*run, "--json", log=tmp_path / "log")
    assert code == 0, err
    assert json.loads(out)["counts"]["rows"] == 3
    assert [line["id"] for line in ledger(tmp_path / "out")] == ["bad"]


def test_what_nothing_reads_is_counted_and_said(tmp_path: Path, qwen: Path) -> None:
    records = [record | {"id": f"r{at}"} for at, record in enumerate(chats(4))]
    records[1] |= {"reflection": "hm", "source": "web"}
    records[2] |= {"reflection": "hm", "rating": None}
    records[2]["messages"][0]["name"] = "Ann"
    options: dict[str, Any] = {"model": str(qwen), "workers": 1, "check": 0, "max_failure_rate": 1.0}
    path = write_lines(tmp_path / "data.jsonl", records)
    outcome = measure_outcome(path, out=tmp_path / "out", **options)
    assert outcome.table.summary.unread == {
        "reflection": UnreadName(records=2, example="r1"),
        "messages[].name": UnreadName(records=1, example="r2"),
    }
    assert "reflection (2 records, first r1), messages[].name (1 records, first r2)" in outcome.notes[-1]
    measure_outcome(path, out=tmp_path / "strict", strict_columns=True, **options)
    lines = [(line["id"], line["reason"], line["detail"]) for line in ledger(tmp_path / "strict")]
    reason = "an unused column or key"
    assert lines == [("r1", reason, "reflection"), ("r2", reason, "reflection, messages[].name")]


def test_columns_of_other_names(tmp_path: Path, qwen: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    path = write_lines(tmp_path / "data.jsonl", [{"query": f"{n}?", "response": "yes"} for n in range(3)])
    arguments = ("measure", path, "-m", qwen, "-o", tmp_path / "out", "-w", 1, "--check", 0)
    code, _, err = run(*arguments)
    assert code == 1
    assert "looks like: --columns query=question,response=answer" in err
    code, out, err = run(*arguments, "--columns", "query=question,response=answer")
    assert code == 0, err
    assert "3 measured + 0 skipped" in out
    code, _, err = run(*arguments, "--columns", "query")
    assert code == 2
    assert "NAME_IN_DATA=NAME_HERE" in err


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"tools": [{"name": "zoom", "parameters": {}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "thinking": "m"}]}, ""),
    ],
)
def test_a_template_without_a_place_is_not_the_fault_of_the_data(
    record: dict[str, Any], what: str, tmp_path: Path, qwen: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    path = write_lines(tmp_path / "data.jsonl", [{"messages": chat, **record}] * 3)
    code, _, err = run("measure", path, "-m", qwen, "-o", tmp_path / "out", "-w", 1, "--check", 0)
    assert code == 1
    assert f"use a model whose chat template writes {what or 'reasoning'}, or such a template" in err
