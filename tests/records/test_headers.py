"""Headers agree with real decoding: the same sizes, and a refusal exactly where decoding fails."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import sys
import tempfile
import threading
import warnings
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

sys.path.append(str(Path(__file__).parents[1] / "faults"))  # damage as files of every kind get it
from damage import mutated

import packtrain
from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaRef
from packtrain.records.images import decode_rgb
from packtrain.records.media import MediaStore

STORE = MediaStore("/")
WIDTH, HEIGHT = 60, 40


def header(data: bytes, kind: Any = "image", store: MediaStore = STORE) -> MediaHeader:
    return store.header(kind, MediaRef(name="x", data=data))


def size(data: bytes) -> tuple[int, int]:
    found = header(data)
    assert (found.kind, found.frames, found.fps, found.seconds) == ("image", 1, 0.0, 0.0)
    return found.width, found.height


def reason(data: bytes, kind: Any = "image", store: MediaStore = STORE) -> str:
    with pytest.raises(RecordError) as caught:
        header(data, kind, store)
    assert caught.value.stage == "media"
    return caught.value.reason


def decoded(data: bytes) -> tuple[int, int] | None:
    """What the training pipeline makes of an image; None where it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decode_rgb(Image.open(io.BytesIO(data))).size
    except Exception:
        return None


def picture(mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encode(format: str, image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, format, **options)
    return file.getvalue()


def exif(orientation: int, thumbnail: bool = False) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010F] = "camera"
    if thumbnail:
        tags[0x9286] = encode("JPEG", picture(size=(16, 16)))  # a JPEG with its own end marker
    return tags


@contextlib.contextmanager
def no_decoding() -> Iterator[None]:
    """Make any decoding of pixels fail loudly, past everything that RecordError could hide."""

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt("pixels were decoded")

    with pytest.MonkeyPatch.context() as patch:
        for owner in (Image.Image, ImageFile.ImageFile, WebPImagePlugin.WebPImageFile, TiffImagePlugin.TiffImageFile):
            patch.setattr(owner, "load", refuse)
        yield


# --- sizes ---------------------------------------------------------------------------------------------------

SAMPLES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encode("JPEG"),
    "jpeg grey": lambda: encode("JPEG", picture("L")),
    "jpeg cmyk": lambda: encode("JPEG", picture("CMYK")),
    "jpeg progressive": lambda: encode("JPEG", progressive=True),
    "jpeg icc": lambda: encode("JPEG", icc_profile=b"p" * 150_000),
    "jpeg upright exif": lambda: encode("JPEG", exif=exif(1)),
    "jpeg thumbnail": lambda: encode("JPEG", exif=exif(6, thumbnail=True)),
    "jpeg comment": lambda: encode("JPEG", comment=b"c" * 5000),
    "png": lambda: encode("PNG"),
    "png palette": lambda: encode("PNG", picture("P")),
    "png alpha": lambda: encode("PNG", picture("RGBA")),
    "png icc": lambda: encode("PNG", icc_profile=b"p" * 5000),
    "webp": lambda: encode("WEBP"),
    "webp lossless": lambda: encode("WEBP", lossless=True),
    "webp alpha": lambda: encode("WEBP", picture("RGBA")),
    "gif": lambda: encode("GIF"),
    "bmp": lambda: encode("BMP"),
    "bmp odd rows": lambda: encode("BMP", picture(size=(61, 7))),
    "bmp 1 bit": lambda: encode("BMP", picture("1")),
    "tiff": lambda: encode("TIFF"),
    "tiff lzw": lambda: encode("TIFF", compression="tiff_lzw"),
    "tiff jpeg": lambda: encode("TIFF", compression="jpeg"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sizes_are_those_of_decoding_and_mostly_need_none(name: str) -> None:
    data = SAMPLES[name]()
    expected = decoded(data)
    assert expected is not None
    assert size(data) == expected  # and learns once how modes convert
    if not name.startswith(("gif", "tiff")):
        with no_decoding():
            assert size(data) == expected


def test_decoding_is_really_noticed() -> None:
    image = Image.open(io.BytesIO(encode("PNG")))
    with no_decoding(), pytest.raises(KeyboardInterrupt):
        image.convert("L")


XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def oriented(format: str, orientation: int) -> dict[str, bytes]:
    """One image with its orientation written in every place that the format has."""
    xmp = XMP.format(orientation).encode()
    made = {"exif": encode(format, exif=exif(orientation)), "plain": encode(format)}
    if format in ("JPEG", "WEBP"):
        made["xmp"] = encode(format, xmp=xmp)
        made["exif wins"] = encode(format, exif=exif(1), xmp=xmp)
    if format == "TIFF":
        made["xmp"] = encode(format, tiffinfo={700: xmp})
    if format == "PNG":
        texts = PngImagePlugin.PngInfo()
        texts.add_itxt("XML:com.adobe.xmp", xmp.decode())
        made["xmp"] = encode(format, pnginfo=texts)
        raw = exif(orientation).tobytes()
        for place in (False, True):
            profile, chunk = PngImagePlugin.PngInfo(), PngImagePlugin.PngInfo()
            profile.add(
                b"tEXt", f"Raw profile type exif\0\nexif\n{len(raw):8}\n{raw.hex()}\n".encode(), after_idat=place
            )
            chunk.add(b"eXIf", raw[6:] if raw.startswith(b"Exif") else raw, after_idat=place)
            made[f"raw profile, after pixels: {place}"] = _png_with(profile)
            made[f"eXIf, after pixels: {place}"] = _png_with(chunk)
    return made


def _png_with(info: PngImagePlugin.PngInfo) -> bytes:
    """A PNG with chunks of any kind before or after the pixels, written by hand."""
    data = encode("PNG")
    before = b"".join(_chunk(name, body) for name, body, after in info.chunks if not after)
    behind = b"".join(_chunk(name, body) for name, body, after in info.chunks if after)
    return data[:33] + before + data[33:-12] + behind + data[-12:]


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied_as_by_pillow(format: str, orientation: int) -> None:
    turned = (HEIGHT, WIDTH) if orientation in (5, 6, 7, 8) else (WIDTH, HEIGHT)
    for place, data in oriented(format, orientation).items():
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert size(data) == upright.size, place
        if place not in ("plain", "exif wins"):
            assert upright.size == turned, f"{place}: the orientation was really written"


def test_harmless_texts_behind_the_pixels_of_a_png_need_no_decoding() -> None:
    info = PngImagePlugin.PngInfo()
    info.add(b"tEXt", b"date:create\x002020-01-01", after_idat=True)
    data = _png_with(info)
    size(data)
    with no_decoding():
        assert size(data) == (WIDTH, HEIGHT)


def test_a_jpeg_with_several_pictures_is_its_first() -> None:
    data = encode("MPO", save_all=True, append_images=[picture(size=(20, 20))])
    assert size(data) == decoded(data) == (WIDTH, HEIGHT)
    assert Image.open(io.BytesIO(data)).format == "MPO"


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_count_as_their_first_frame(format: str) -> None:
    frames = [picture("L"), ImageOps.invert(picture("L"))]
    data = encode(format, frames[0], save_all=True, append_images=frames[1:])
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 2
    assert size(data) == decoded(data) == (WIDTH, HEIGHT)


# --- faults ----------------------------------------------------------------------------------------------------

CUTS = ["jpeg", "jpeg thumbnail", "jpeg progressive", "png", "png icc"]


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_image_is_refused_exactly_when_it_cannot_be_decoded(name: str) -> None:
    data = SAMPLES[name]()
    points = sorted(random.Random(0).sample(range(1, len(data)), min(300, len(data) - 1)) + list(range(-40, 0)))
    outcomes = {True: 0, False: 0}
    for point in points:
        piece = data[:point]
        expected = decoded(piece)
        outcomes[expected is not None] += 1
        outcome = outcome_of(piece)
        assert (None if isinstance(outcome, str) else outcome) == expected, f"cut at {point} of {len(data)}"
    assert outcomes[False] > 200, "cuts really broke the image"
    assert outcomes[True] > 0 or name.startswith("jpeg"), "a PNG without its last chunk is still a whole picture"


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in CUTS])
def test_other_cuts_never_pass_what_cannot_be_decoded(name: str) -> None:
    data = SAMPLES[name]()
    for point in [*range(1, len(data), max(1, len(data) // 60)), *range(-6, 0)]:
        piece = data[:point]
        outcome = outcome_of(piece)
        assert (None if isinstance(outcome, str) else outcome) == decoded(piece), f"cut at {point} of {len(data)}"


@pytest.mark.parametrize("name", SAMPLES)
def test_half_an_image_is_truncated(name: str) -> None:
    data = SAMPLES[name]()
    broken = name in ("tiff lzw", "tiff jpeg")  # whose directory, at the end, is gone
    assert reason(data[: len(data) // 2]) == ("broken image" if broken else "truncated image")


@pytest.mark.parametrize("padding", [b"\0" * 3, b"\0" * 5000, b"\n", b"x" * 100_000])
@pytest.mark.parametrize("name", ["jpeg", "jpeg thumbnail", "png", "webp", "gif", "bmp", "tiff"])
def test_bytes_behind_an_image_do_no_harm(name: str, padding: bytes) -> None:
    data = SAMPLES[name]() + padding
    assert size(data) == decoded(data)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"hello world, this is text",
        b"%PDF-1.7 ...............",
        b"\0" * 100,
        b"<svg xmlns='a'></svg>",
        b"GIF88a....",
    ],
)
def test_what_is_no_image(data: bytes) -> None:
    assert reason(data) == "not a supported image"


@pytest.mark.parametrize(
    "magic",
    [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x10\0\0\0WEBP", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"II+\0"],
)
def test_junk_behind_a_magic_number_is_refused_quietly(magic: bytes) -> None:
    draw = random.Random(0)
    reasons = {"truncated image", "broken image", "image too large", "image without pixels"}
    refused = 0
    for length in (0, 1, 7, 20, 50, 300, 5000):
        for _ in range(20):
            data = magic + draw.randbytes(length)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                outcome = outcome_of(data)
            refused += outcome in reasons
            # damage inside compressed data is what a header cannot show
            assert outcome in reasons or outcome == decoded(data) or magic.startswith(b"RIFF")
    assert refused > 100


@pytest.mark.parametrize(("seed", "count"), [(0, 40), pytest.param(1, 1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_image_has_the_size_that_decoding_gives(name: str, seed: int, count: int) -> None:
    """Damage inside compressed data is what a header cannot show; else it is refused exactly where decoding fails."""
    whole, refused = SAMPLES[name](), 0
    for number in range(count):
        data = mutated(whole, random.Random(f"{seed} {name} {number}"))
        outcome, expected = outcome_of(data), decoded(data)
        refused += isinstance(outcome, str)
        assert expected is None or outcome == expected, f"damage {number}"
    assert refused > count / 20, "hardly anything was damaged"


def outcome_of(data: bytes) -> tuple[int, int] | str:
    try:
        return size(data)
    except RecordError as error:
        return error.reason


def test_unsupported_images_are_not_tried() -> None:
    for format in ("PPM", "TGA", "ICO", "PCX"):
        assert reason(encode(format)) == "not a supported image"


def _claims(width: int, height: int) -> dict[str, bytes]:
    """Tiny files whose headers promise a huge image."""
    jpeg = encode("JPEG")
    at = jpeg.index(b"\xff\xc0")
    turned = encode("JPEG", exif=exif(6))
    turned_at = turned.index(b"\xff\xc0")
    sizes = struct.pack(">HH", min(height, 65535), min(width, 65535))
    png = encode("PNG")
    head = struct.pack(">II", width, height) + png[24:29]
    gif, bmp = bytearray(encode("GIF")), bytearray(encode("BMP"))
    struct.pack_into("<HH", gif, 6, min(width, 65535), min(height, 65535))
    struct.pack_into("<ii", bmp, 18, width, height)
    canvas = (min(width, 1 << 24) - 1).to_bytes(3, "little") + (min(height, 1 << 24) - 1).to_bytes(3, "little")
    webp = encode("WEBP", exif=exif(6))
    return {
        "jpeg": jpeg[: at + 5] + sizes + jpeg[at + 9 :],
        "jpeg exif": turned[: turned_at + 5] + sizes + turned[turned_at + 9 :],
        "png": png[:8] + _chunk(b"IHDR", head) + png[33:],
        "gif": bytes(gif),
        "bmp": bytes(bmp),
        "webp": webp[:24] + canvas + webp[30:],
        "tiff": _tiff_claiming(width, height),
    }


def _tiff_claiming(width: int, height: int) -> bytes:
    entries = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    entries += [(278, 4, height), (279, 4, 10)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<H", len(entries)) + body + b"\0" * 4


HUGE = _claims(50_000, 50_000)


@pytest.mark.parametrize("name", HUGE)
def test_a_header_that_claims_too_much_is_refused_without_decoding(name: str) -> None:
    with no_decoding(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason(HUGE[name]) == "image too large"


def test_the_limit_is_the_stores() -> None:
    data = encode("JPEG")
    assert header(data, store=MediaStore("/", max_image_pixels=WIDTH * HEIGHT)).width == WIDTH
    assert reason(data, store=MediaStore("/", max_image_pixels=WIDTH * HEIGHT - 1)) == "image too large"


def test_no_warning_leaks_and_filters_stay_as_they_were() -> None:
    broken = encode("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0")  # ends inside its first entry
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert size(broken) == (WIDTH, HEIGHT)
        ImageOps.exif_transpose(Image.open(io.BytesIO(broken)))
    assert len(caught) >= 1, "Pillow itself does warn about this file"
    ours = str(Path(packtrain.__file__).parent)  # the clone itself may be called packtrain too
    assert not [item for item in caught if str(item.filename).startswith(ours)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [size(broken) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert list(warnings.filters) == before


def test_a_png_without_pixels_is_refused() -> None:
    data = encode("PNG")
    bare = data[:33] + data[-12:]
    assert decoded(bare) is None
    assert reason(bare) in ("truncated image", "broken image")


# --- video -----------------------------------------------------------------------------------------------------


def video(format: str = "mp4", codec: str = "mpeg4", frames: int = 12, rate: int = 10, **options: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # an index in front needs a file that can be read again
        path = Path(folder, "video")
        with av.open(str(path), "w", format=format, options=options) as container:
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            noise = np.random.default_rng(0)
            for _ in range(frames):
                array = noise.integers(0, 256, (48, 64, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
            container.mux(stream.encode())
        return path.read_bytes()


def frames_of(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


CONTAINERS = {
    "mp4": {"format": "mp4"},
    "mp4 index first": {"format": "mp4", "movflags": "faststart"},
    "mp4 fragments": {"format": "mp4", "movflags": "frag_keyframe+empty_moov"},
    "mov": {"format": "mov"},
    "mkv": {"format": "matroska"},
    "avi": {"format": "avi"},
    "ts": {"format": "mpegts", "codec": "mpeg2video"},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_video_headers_say_what_decoding_gives(name: str) -> None:
    data = video(**CONTAINERS[name])
    frames = frames_of(data)
    assert len(frames) == 12
    found = header(data, "video")
    assert (found.kind, found.frames, found.fps, found.seconds) == ("video", 12, 10.0, 1.2)
    assert (found.height, found.width) == frames[0].shape[:2] == (48, 64)


def test_a_video_is_read_from_files_and_archives_too(tmp_path: Path) -> None:
    data = video("matroska")
    (tmp_path / "a.mkv").write_bytes(data)
    (tmp_path / "all.tar").write_bytes(b"x" * 1000 + data + b"y" * 1000)
    store = MediaStore(tmp_path)
    archive = MediaRef(name="a", archive=str(tmp_path / "all.tar"), offset=1000, size=len(data))
    for ref in (MediaRef(name="a", path="a.mkv"), archive):
        assert store.header("video", ref) == header(data, "video")


def test_rotation_metadata_are_not_applied_as_pyav_applies_none() -> None:
    data = bytearray(video())
    at = data.index(b"tkhd") + 4 + 40  # the display matrix of the track
    assert struct.unpack_from(">I", data, at)[0] == 0x10000, "the identity stands here"
    struct.pack_into(">9i", data, at, 0, 0x10000, 0, -0x10000, 0, 0, 48 << 16, 0, 0x40000000)
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0))
    assert abs(frame.rotation) == 90, "the file really asks for a rotation"
    found = header(bytes(data), "video")
    assert (found.height, found.width) == frame.to_ndarray(format="rgb24").shape[:2] == (48, 64)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
def test_a_video_without_its_index_is_not_readable(share: float) -> None:
    data = video()
    assert data.index(b"mdat") < data.index(b"moov"), "the index stands behind the frames"
    assert reason(data[: int(len(data) * share)], "video") == "not a readable video"


@pytest.mark.parametrize("share", [0.5, 0.8, 0.99])
def test_a_video_cut_behind_its_index_is_truncated(share: float) -> None:
    data = video(movflags="faststart")
    assert data.index(b"moov") < data.index(b"mdat")
    assert len(frames_of(data)) == 12
    assert reason(data[: int(len(data) * share)], "video") == "truncated video"
    assert reason(data[:-1], "video") == "truncated video"


def test_a_cut_avi_is_truncated() -> None:
    data = video("avi")
    assert reason(data[: data.index(b"idx1") - 2000], "video") == "truncated video"


def test_a_cut_stream_counts_the_frames_that_are_there() -> None:
    data = video("mpegts", "mpeg2video", frames=30)
    piece = data[: len(data) // 2]
    found = header(piece, "video").frames
    assert 0 < found < 30
    assert abs(found - len(frames_of(piece))) <= 1, "the last frame may be incomplete"


@pytest.mark.parametrize("data", [b"text " * 100, b"\0" * 5000, b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n", b"x"])
def test_what_is_no_video(data: bytes) -> None:
    assert reason(data, "video") == "not a readable video"


def test_images_are_no_videos() -> None:
    assert reason(encode("JPEG"), "video") == "not a readable video"


def test_videos_without_frames() -> None:
    assert reason(sound(), "video") == "video without frames"
    data = video("matroska")
    before_frames = data[: data.index(b"\x1f\x43\xb6\x75")]
    assert reason(before_frames, "video") in ("video without frames", "not a readable video")


def test_videos_are_bounded() -> None:
    assert reason(video(), "video", MediaStore("/", max_image_pixels=64 * 48 - 1)) == "video frame too large"
    assert header(video(), "video", MediaStore("/", max_image_pixels=64 * 48)).width == 64
    for format in ("mp4", "matroska"):
        assert reason(video(format), "video", MediaStore("/", max_video_packets=5)) == "video too long"


def picture_bytes(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((WIDTH, HEIGHT), 60).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def with_number(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


def with_two_headers(data: bytes) -> bytes:
    body = b"IHDR" + struct.pack(">II", WIDTH + 1, HEIGHT) + data[24:29]
    return data[:33] + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


IRREGULAR = {
    "webp, chunk too long": lambda: with_number(picture_bytes("WEBP"), 16, 1 << 20),
    "webp, chunk too short": lambda: with_number(picture_bytes("WEBP"), 16, 40),
    "webp, RIFF too short": lambda: with_number(picture_bytes("WEBP"), 4, 60),
    "webp lossless, another version": lambda: with_number(
        (data := picture_bytes("WEBP", lossless=True)), 21, struct.unpack("<I", data[21:25])[0] | 7 << 29
    ),
    "webp, first part too long": lambda: (
        with_number((data := picture_bytes("WEBP")), 20, data[20] | 0xFFFFE0)[:23] + picture_bytes("WEBP")[23:]
    ),
    "jpeg, broken resources": lambda: (
        (data := picture_bytes("JPEG"))[:2]
        + b"\xff\xed\x00\x1fPhotoshop 3.0\x008BIM\x04\x04\x00\x00\x00\x00\xff"
        + data[2:]
    ),
    "jpeg, short JFIF": lambda: b"\xff\xd8\xff\xe0\x00\x07JFIF\x00" + picture_bytes("JPEG")[2:],
    "png, two headers": lambda: with_two_headers(picture_bytes("PNG")),
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular_headers_are_taken_as_the_decoder_takes_them(name: str) -> None:
    data = IRREGULAR[name]()
    found = decoded(data)
    if found is None:
        reason(data)
    else:
        assert size(data) == found


def test_some_irregular_headers_are_refused() -> None:
    assert sum(decoded(make()) is None for make in IRREGULAR.values()) >= 4


def test_a_video_of_an_unknown_codec_is_not_readable() -> None:
    data = video("matroska")
    assert data.count(b"V_MPEG4/ISO/ASP") == 1
    assert reason(data.replace(b"V_MPEG4/ISO/ASP", b"V_ZZZZ4/ZZZ/ZZZ"), "video") == "not a readable video"


def test_without_pyav_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match="pip install av"):
        header(b"anything at all", "video")


# --- audio -----------------------------------------------------------------------------------------------------


def sound(seconds: float = 1.5, rate: int = 8000, channels: int = 2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(channels)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes(b"\1\2" * int(seconds * rate) * channels)
    return file.getvalue()


def coded_sound(format: str, codec: str, seconds: int = 2) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=16000)
        samples = np.random.default_rng(0).integers(-9000, 9000, (1, 16000 * seconds), dtype=np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 16000
        resampler = av.AudioResampler(stream.format, stream.layout, stream.rate, frame_size=stream.frame_size or 1024)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return file.getvalue()


def test_the_length_of_wav_files() -> None:
    found = header(sound(), "audio")
    assert (found.kind, found.seconds) == ("audio", 1.5)
    extra = b"LIST" + struct.pack("<I", 5) + b"hello\0"  # an odd chunk and its padding before the samples
    data = sound()
    assert header(data[:36] + extra + data[36:], "audio").seconds == 1.5


def test_cut_wav_files_are_truncated() -> None:
    data = sound()
    for point in (len(data) - 1, len(data) // 2, 50):
        assert reason(data[:point], "audio") == "truncated audio"


@pytest.mark.parametrize(
    ("format", "codec"), [("flac", "flac"), ("mp4", "aac"), ("mp3", "libmp3lame"), ("wav", "adpcm_ms")]
)
def test_the_length_of_coded_audio(format: str, codec: str) -> None:
    assert header(coded_sound(format, codec), "audio").seconds == pytest.approx(2, abs=0.15)


def test_what_is_no_audio() -> None:
    assert reason(b"text " * 100, "audio") == "not a readable audio"
    assert reason(video(), "audio") == "audio without samples"
    assert reason(sound(seconds=0), "audio") in ("audio without samples", "not a readable audio")
