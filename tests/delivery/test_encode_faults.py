"""What goes wrong with a sample: for good (RecordError), for now (OSError), or because it is not what was planned."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from encoding import headers_of, medium, pricing, record, request_for, write_image, write_video
from PIL import Image

from packtrain.core.errors import DriftError, RecordError
from packtrain.core.values import Media, MediaRef, Record
from packtrain.delivery.encode.decode import decode_frames, decode_image
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import SampleCounts
from packtrain.measuring.request import settings_state
from packtrain.records.media import MediaStore

Folder = Callable[[str], Path]


def expected_of(encoder: SampleEncoder, shown: Record, store: MediaStore, *, headers: bool = False) -> SampleCounts:
    """What the cost table says about a record."""
    found = headers_of(shown, store)
    cost, _ = pricing(encoder).cost(shown, found)
    return SampleCounts(
        tokens=cost.tokens,
        patches=cost.patches,
        supervised_tokens=cost.supervised_tokens,
        images=cost.images,
        videos=cost.videos,
        headers=found if headers else None,
    )


def measured_settings(folder: Path) -> dict[str, Any]:
    """The settings as a cost table keeps them."""
    from packtrain.families.settings import read_settings

    return json.loads(json.dumps(settings_state(read_settings(folder)), default=str))


# ---- drift


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "llava_onevision", "llama"])
def test_nothing_is_said_where_all_is_as_planned(family: str, loss_on: str, media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model(family), media, loss_on=loss_on))
    store = MediaStore(str(media))
    shown = [record("who?")] if family == "llama" else [record("photo.png", "what?"), record("slow.mkv", "?")]
    for one in shown:
        encoder.encode(one, store, expected=expected_of(encoder, one, store, headers=True))


def test_a_changed_setting_is_named(media: Path, model: Folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("qwen3_vl"), tmp_path / "model"))
    before, store = measured_settings(folder), MediaStore(str(media))
    shown = record("large.png", "what?")
    old = SampleEncoder(request_for(folder, media), measured_settings=before)
    expected = expected_of(old, shown, store)
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["size"]["longest_edge"] = 20_000
    path.write_text(json.dumps(config))
    changed = SampleEncoder(request_for(folder, media), measured_settings=before)
    with pytest.raises(DriftError) as caught:
        changed.encode(shown, store, expected=expected)
    said = str(caught.value)
    assert "r7 (data.jsonl:8)" in said
    assert "image_processor.size.longest_edge" in said
    assert "-> 20000" in said
    tokens = len(changed.encode(shown, store))
    assert f"tokens {tokens} found, {expected.tokens} planned" in said
    assert "no setting has changed" not in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said


@pytest.mark.parametrize("known", [True, False])
def test_a_replaced_image_is_named(known: bool, media: Path, model: Folder, tmp_path: Path) -> None:
    write_image(tmp_path / "photo.png", 120, 90)
    write_image(tmp_path / "large.png", 200, 100)
    store, folder = MediaStore(str(tmp_path)), model("qwen3_vl")
    encoder = SampleEncoder(request_for(folder, tmp_path), measured_settings=measured_settings(folder))
    shown = record("photo.png", "and", "large.png", "?")
    expected = expected_of(encoder, shown, store, headers=known)
    encoder.encode(shown, store, expected=expected)
    write_image(tmp_path / "large.png", 400, 300)
    with pytest.raises(DriftError) as caught:
        encoder.encode(shown, store, expected=expected)
    said = str(caught.value)
    assert "no setting has changed since measuring" in said
    assert "patches" in said
    assert "large.png 400x300" in said
    assert ("was 200x100" in said) == known
    assert ("photo.png" in said) == (not known), "only what is known to be the same may be left out"


def test_a_changed_text_is_found(media: Path, model: Folder) -> None:
    encoder, store = SampleEncoder(request_for(model("llama"), media)), MediaStore(str(media))
    expected = expected_of(encoder, record("who?"), store)
    with pytest.raises(DriftError, match=r"tokens \d+ found"):
        encoder.encode(record("who? and why?"), store, expected=expected)
    # the same length, but loss elsewhere
    other = replace(expected, supervised_tokens=expected.supervised_tokens + 1)
    with pytest.raises(DriftError, match=r"found:    supervised_tokens \d+ found, \d+ planned\n"):
        encoder.encode(record("who?"), store, expected=other)


def test_a_processor_that_leaves_the_familys_rule(media: Path, model: Folder) -> None:
    """Pixels that do not belong to the tokens are never handed on."""
    encoder, store = SampleEncoder(request_for(model("internvl"), media)), MediaStore(str(media))
    encoder.encode(record("photo.png"), store)
    processor = encoder._media()
    ((key, known),) = processor._arguments.items()
    processor._arguments[key] = replace(known, images={**known.images, "max_patches": 2})
    with pytest.raises(DriftError, match=r"(?s)pixel_values of photo.png.*shape \(1, 3, .*expected: \(13,\)"):
        encoder.encode(record("photo.png"), store)


# ---- damaged media


def spoil_images(folder: Path) -> dict[str, str]:
    """Images that no attempt will ever decode, and the reason that the ledger counts them under."""
    whole = write_image(folder / "whole.png", 60, 60).read_bytes()
    jpeg = write_image(folder / "whole.jpg", 60, 60).read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "bits.png").write_bytes(whole[:60] + bytes(200) + whole[260:])
    (folder / "words.png").write_bytes(b"not an image at all" * 20)
    (folder / "empty.png").write_bytes(b"")
    (folder / "folder.png").mkdir()
    return {
        "cut.png": "image cannot be decoded",
        "cut.jpg": "image cannot be decoded",
        "bits.png": "image cannot be decoded",
        "words.png": "image cannot be decoded",
        "empty.png": "empty file",
        "gone.png": "file not found",
        "folder.png": "not a regular file",
    }


def test_images_that_never_can_be_decoded(model: Folder, tmp_path: Path) -> None:
    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), tmp_path)), MediaStore(str(tmp_path))
    for name, reason in spoil_images(tmp_path).items():
        with pytest.raises(RecordError) as caught:
            encoder.encode(record(medium(name), "what?"), store)
        assert (caught.value.reason, name in caught.value.detail) == (reason, True)
    encoder.encode(record(medium("whole.png"), "what?"), store)


def test_videos_that_never_can_be_decoded(model: Folder, tmp_path: Path) -> None:
    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), tmp_path)), MediaStore(str(tmp_path))
    whole = write_video(tmp_path / "whole.mp4", 24, 8).read_bytes()
    write_video(tmp_path / "whole.mkv", 24, 8)
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "words.mp4").write_bytes(b"not a video at all" * 100)
    (tmp_path / "empty.mp4").write_bytes(b"")
    for name in ("cut.mp4", "words.mp4", "empty.mp4", "gone.mp4"):
        with pytest.raises(RecordError, match=name):
            encoder.encode(record(medium(name), "what?"), store)
        with pytest.raises(RecordError, match=name):
            decode_frames(store, medium(name).ref, [0, 3])
    encoder.encode(record(medium("whole.mp4"), "what?"), store)
    with pytest.raises(RecordError, match=r"fewer frames than its header says.*whole\.mkv: 1 of 2"):
        decode_frames(store, medium("whole.mkv").ref, [0, 99])


def test_a_video_that_changes_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "v.mkv", 6, 8)
    sizes = iter([(48, 64), (96, 64), (48, 64)])

    class Frame:
        def to_ndarray(self, format: str) -> np.ndarray:
            return np.zeros((*next(sizes), 3), np.uint8)

    class Container(io.BytesIO):
        def decode(self, video: int) -> list[Frame]:
            return [Frame()] * 3

    monkeypatch.setattr("av.open", lambda *args, **kwargs: Container())
    with pytest.raises(RecordError, match=r"video cannot be decoded.*v\.mkv"):
        decode_frames(MediaStore(str(tmp_path)), medium("v.mkv").ref, [0, 1, 2])


def test_postscript_reaches_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow goes by what is in a file, not by its name."""
    text = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "i.png").write_text(text)
    started: list[bool] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: started.append(True))
    with pytest.raises(RecordError, match="image cannot be decoded"):
        decode_image(MediaStore(str(tmp_path)), medium("i.png").ref)
    assert not started


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "i.png", 60, 60)
    with pytest.raises(RecordError, match=r"image too large \(i\.png: 60x60, the limit is 3000 pixels"):
        decode_image(MediaStore(str(tmp_path), max_image_pixels=3000), medium("i.png").ref)
    write_video(tmp_path / "v.mkv", 10, 8)
    monkeypatch.setattr("packtrain.delivery.encode.decode.MAX_DECODED_BYTES", 5 * 64 * 48 * 3)
    store = MediaStore(str(tmp_path))
    assert len(decode_frames(store, medium("v.mkv").ref, range(5))) == 5
    with pytest.raises(RecordError, match="video too large"):
        decode_frames(store, medium("v.mkv").ref, range(6))


def test_an_audio_clip(media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model("qwen3_vl"), media))
    with pytest.raises(RecordError, match="takes no audio"):
        encoder.encode(record(Media("audio", MediaRef(name="a.wav", path="a.wav"))), MediaStore(str(media)))


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    """Black on nothing is how diagrams are often saved; without the white nothing can be seen."""
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.putpixel((3, 3), (0, 0, 0, 255))
    clear.save(tmp_path / "rgba.png")
    clear.convert("LA").save(tmp_path / "la.png")
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 0, 0, 0])
    palette.putpixel((3, 3), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    for name in ("rgba.png", "la.png", "p.png"):
        image = decode_image(MediaStore(str(tmp_path)), medium(name).ref)
        assert image.mode == "RGB"
        assert (image.getpixel((0, 0)), image.getpixel((3, 3))) == ((255, 255, 255), (0, 0, 0)), name


RAMP = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
COLOURS = np.stack([RAMP, RAMP.T, RAMP[::-1]], -1)


def deep_png(values: Any, colour: int, clear: bytes = b"") -> bytes:
    """A 16-bit PNG; Pillow cannot write those in colour."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0))
    shown = (chunk(b"tRNS", clear) if clear else b"") + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + shown


def deep_tiff(values: Any, photometric: int = 1, *, planar: bool = False, order: str = "<") -> bytes:
    """An uncompressed 16-bit TIFF."""
    channels = 1 if values.ndim == 2 else values.shape[2]
    data = (np.moveaxis(values, -1, 0) if planar else values).astype(order + "u2").tobytes()
    strips = channels if planar else 1
    table: dict[int, list[int]] = {256: [values.shape[1]], 257: [values.shape[0]], 258: [16] * channels, 259: [1]}
    table |= {262: [photometric], 273: [8 + at * len(data) // strips for at in range(strips)], 277: [channels]}
    table |= {278: [values.shape[0]], 279: [len(data) // strips] * strips, 284: [1 + planar]}
    start = 8 + len(data)
    out, behind = struct.pack(order + "H", len(table)), b""
    for tag, numbers in table.items():
        field = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            field, behind = struct.pack(order + "I", start + 6 + 12 * len(table) + len(behind)), behind + field
        out += struct.pack(order + "HHI", tag, 4, len(numbers)) + field
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "I", start) + data + out + bytes(4) + behind


def written(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


# name -> the file, and the 8-bit values that belong to it
DEEP: dict[str, tuple[bytes, Any]] = {
    "grey png": (deep_png(RAMP, 0), np.round(RAMP / 257)),
    "grey png, white is clear": (deep_png(RAMP, 0, b"\xff\xff"), np.round(RAMP / 257)),
    "grey png, black is clear": (deep_png(RAMP, 0, b"\0\0"), np.where(RAMP == 0, 255, np.round(RAMP / 257))),
    "colour png": (deep_png(COLOURS, 2), COLOURS >> 8),
    "opaque png": (deep_png(np.dstack([COLOURS, np.full_like(RAMP, 65535)]), 6), COLOURS >> 8),
    "clear png": (deep_png(np.dstack([COLOURS, np.zeros_like(RAMP)]), 6), np.full((8, 8), 255)),
    "grey tiff": (deep_tiff(RAMP), np.round(RAMP / 257)),
    "grey tiff, other order": (deep_tiff(RAMP, order=">"), np.round(RAMP / 257)),
    "grey tiff, white is zero": (deep_tiff(RAMP, 0), 255 - np.round(RAMP / 257)),
    "colour tiff": (deep_tiff(COLOURS, 2), COLOURS >> 8),
}
NO_EIGHT_BITS: dict[str, bytes] = {
    "float tiff": written(Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)), "TIFF"),
    "32-bit tiff": written(Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8) * 10**7), "TIFF"),
    "12 bits in a 16-bit png": deep_png(RAMP // 16, 0),
    "12 bits in a 16-bit colour png": deep_png(COLOURS // 16, 2),
    "planar tiff": deep_tiff(COLOURS, 2, planar=True),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_images_are_scaled_to_eight_bits(name: str) -> None:
    data, expected = DEEP[name]
    ref = MediaRef(name="deep", data=data)
    shown = np.asarray(decode_image(MediaStore("/"), ref)).astype(int)
    assert shown.shape == (8, 8, 3)
    np.testing.assert_array_equal(shown, expected if expected.ndim == 3 else np.dstack([expected] * 3))
    assert MediaStore("/").header("image", ref).width == 8


@pytest.mark.parametrize("name", NO_EIGHT_BITS)
def test_images_without_an_8_bit_form_are_refused_when_measured_and_when_decoded(name: str) -> None:
    ref = MediaRef(name="deep", data=NO_EIGHT_BITS[name])
    with pytest.raises(RecordError, match="no 8-bit form") as decoding:
        decode_image(MediaStore("/"), ref)
    with pytest.raises(RecordError, match="no 8-bit form") as measuring:
        MediaStore("/").header("image", ref)
    assert (decoding.value.stage, measuring.value.stage) == ("decode", "media")


@pytest.mark.contract
def test_transparency_as_the_newest_processors_show_it(model: Folder, tmp_path: Path) -> None:
    import transformers
    from packaging.version import Version
    from transformers import AutoProcessor

    if Version(transformers.__version__) < Version("5.22"):
        pytest.skip("older processors drop the transparency and show what is below it")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 4), dtype=np.uint8)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "clear.png")
    sample = SampleEncoder(request_for(model("qwen3_vl"), tmp_path)).encode(
        record(medium("clear.png")), MediaStore(str(tmp_path))
    )
    processor = AutoProcessor.from_pretrained(model("qwen3_vl")).image_processor
    direct = processor(Image.open(tmp_path / "clear.png"), return_tensors="pt")
    assert sample.media["pixel_values"].equal(direct["pixel_values"])


# ---- the machine's faults


class Failing(io.RawIOBase):
    """A file whose disk fails after some bytes."""

    def __init__(self, inner: BinaryIO, after: int, code: int) -> None:
        self._inner, self._left, self._code = inner, after, code

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise OSError(self._code, os.strerror(self._code))
        piece = self._inner.read(min(len(buffer), self._left))
        self._left -= len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class FailingStore(MediaStore):
    """Media on a disk that fails, `times` times, after so many bytes of each file."""

    def __init__(self, root: Path, *, after: int, code: int, times: int = 10**6) -> None:
        super().__init__(str(root))
        self.after, self.code, self.times = after, code, times

    def open(self, ref: MediaRef) -> BinaryIO:
        stream = super().open(ref)
        if self.times <= 0:
            return stream
        self.times -= 1
        return io.BufferedReader(Failing(stream, self.after, self.code), 512)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.ECONNRESET])
@pytest.mark.parametrize("name", ["photo.png", "photo.jpg", "slow.mkv"])
@pytest.mark.parametrize("after", [0, 1024])
def test_a_disk_that_fails_while_reading(after: int, name: str, code: int, tmp_path: Path) -> None:
    make = write_video if name.endswith("mkv") else write_image
    make(tmp_path / name, *((24, 8) if name.endswith("mkv") else (120, 90)))
    assert (tmp_path / name).stat().st_size > 2048
    store, ref = FailingStore(tmp_path, after=after, code=code, times=1), medium(name).ref

    def decode() -> Any:
        return decode_frames(store, ref, range(24)) if name.endswith("mkv") else decode_image(store, ref)

    with pytest.raises(OSError, match=r".") as caught:
        decode()
    assert caught.value.errno == code
    decode()  # and then it works


@pytest.mark.parametrize("name", ["photo.png", "slow.mkv"])
def test_a_disk_that_fails_while_opening(
    name: str, media: Path, model: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), media)), MediaStore(str(media))
    shown, opened = record(name, "what?"), os.open
    encoder.encode(shown, store)
    for code, kind in ((errno.EIO, OSError), (errno.ESTALE, OSError), (errno.EMFILE, OSError), (errno.EACCES, None)):

        def failing(path: Any, *args: Any, code: int = code) -> int:
            if str(path).endswith(name):
                raise OSError(code, os.strerror(code), path)
            return opened(path, *args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing)
            with pytest.raises(kind or RecordError) as caught:
                encoder.encode(shown, store)
        assert kind is None or caught.value.errno == code  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone.png", "file not found"), ("words.png", "image cannot be decoded"), ("empty.png", "empty file")],
)
def test_a_second_attempt_is_judged_by_itself(name: str, reason: str, tmp_path: Path) -> None:
    """A missing or damaged file stays one, also where it is met while the disk's failure is being handled."""
    spoil_images(tmp_path)
    try:
        decode_image(FailingStore(tmp_path, after=0, code=errno.EIO), medium("whole.png").ref)
    except OSError:
        with pytest.raises(RecordError, match=reason):
            decode_image(MediaStore(str(tmp_path)), medium(name).ref)
    else:
        pytest.fail("the disk did not fail")


def test_no_memory_is_no_fault_of_the_record(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any, **options: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Image, "open", none_left)
    with pytest.raises(MemoryError):
        decode_image(MediaStore(str(media)), medium("photo.png").ref)
