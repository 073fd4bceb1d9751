"""The real processor, called as training calls it: the same ids and pixels as a direct call, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Media, MediaLimits, MediaRef, Message, Part, Record, Text
from packtrain.delivery.encode.decode import decode_frames, decode_image
from packtrain.delivery.encode.processor import RealProcessor, load_reference
from packtrain.delivery.encode.unlisted import ProcessorRule
from packtrain.families import tiny
from packtrain.families.encoder import SizedRecord
from packtrain.families.settings import read_settings
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore
from packtrain.records.source import SourceSpec

TURNED = 6  # EXIF: show it turned by a quarter


def request_for(folder: Path, root: Path, **options: Any) -> Request:
    spec = SourceSpec(name="s", path=str(root), format="jsonl", media_root=str(root))
    return Request(specs=(spec,), model=str(folder), **options)


def real_processor(folder: Path, root: Path, **options: Any) -> RealProcessor:
    return RealProcessor(request_for(folder, root, **options), read_settings(folder))


def record(*parts: Part | str, answer: str = "a red circle") -> Record:
    asked = tuple(Text(part) if isinstance(part, str) else part for part in parts)
    messages = (Message(role="user", parts=asked), Message(role="assistant", parts=(Text(answer),)))
    return Record(id="r", origin="here:1", source="s", messages=messages)


def medium(kind: str, name: str) -> Media:
    return Media(kind, MediaRef(name=name, path=name))  # type: ignore[arg-type]


def write_image(path: Path, width: int, height: int, **options: Any) -> Path:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_video(path: Path, frames: int, fps: Fraction | int = 10) -> list[np.ndarray]:
    """A video whose frames get brighter; returns them as a plain decoder gives them."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            pixels = np.full((48, 64, 3), 20 + 200 * number // frames, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


# ---- decoding


def test_an_image_is_upright_and_in_colour(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = TURNED
    write_image(tmp_path / "turned.jpg", 30, 20, exif=exif)
    Image.new("LA", (5, 7), (9, 0)).save(tmp_path / "grey.png")
    store = MediaStore(str(tmp_path))
    turned = decode_image(store, MediaRef(name="turned", path="turned.jpg"))
    assert (turned.size, turned.mode) == ((20, 30), "RGB")
    header = store.header("image", MediaRef(name="turned", path="turned.jpg"))
    assert (header.width, header.height) == turned.size
    assert decode_image(store, MediaRef(name="grey", path="grey.png")).mode == "RGB"


def test_an_image_that_is_cut_off(tmp_path: Path) -> None:
    whole = write_image(tmp_path / "whole.png", 60, 60).read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError, match=r"image cannot be decoded.*half"):
        decode_image(MediaStore(str(tmp_path)), MediaRef(name="half", path="half.png"))


def test_frames_are_those_that_were_asked_for(tmp_path: Path) -> None:
    frames = write_video(tmp_path / "v.mp4", 20)
    store, ref = MediaStore(str(tmp_path)), MediaRef(name="v", path="v.mp4")
    for indices in ([0], [19], [0, 7, 8, 19], [3, 3, 4], list(range(20))):
        found = decode_frames(store, ref, indices)
        assert (found == np.stack([frames[index] for index in indices])).all()
    with pytest.raises(RecordError, match="fewer frames than its header says"):
        decode_frames(store, ref, [3, 20])


def test_a_video_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"not a video at all" * 100)
    with pytest.raises(RecordError, match="video cannot be decoded"):
        decode_frames(MediaStore(str(tmp_path)), MediaRef(name="v", path="v.mp4"), [0])


# ---- the processor


@pytest.mark.contract
@pytest.mark.parametrize("limits", [{}, {"max_pixels": 6272}], ids=str)
def test_images_as_in_a_direct_call(limits: dict[str, int], tmp_path: Path) -> None:
    from transformers import AutoProcessor

    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    write_image(tmp_path / "i.png", 120, 90)
    found = real_processor(folder, tmp_path, limits=MediaLimits(**limits)).outputs(
        record(medium("image", "i.png"), "what?\n"), MediaStore(str(tmp_path))
    )
    content = [{"type": "image", "image": Image.open(tmp_path / "i.png")}, {"type": "text", "text": "what?\n"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]}
    kwargs = {"images_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 6272}}} if limits else {}
    direct = AutoProcessor.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}, answer],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=kwargs,
    )
    assert found["input_ids"] == direct["input_ids"][0].tolist()
    assert found["pixel_values"].equal(direct["pixel_values"])
    assert int(found["image_grid_thw"].prod()) == (24 if limits else 48)


@pytest.mark.contract
@pytest.mark.parametrize("limits", [{"num_frames": 4}, {"fps": 3.0}], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_as_when_the_processor_samples_them(family: str, limits: dict[str, Any], tmp_path: Path) -> None:
    """Frames that are sampled first and then decoded give what decoding all and sampling then gives."""
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    folder = tiny.write(family, tmp_path / "model")
    frames = write_video(tmp_path / "v.mkv", 24, 8)
    real = real_processor(folder, tmp_path, limits=MediaLimits(**limits))
    found = real.outputs(record("look ", medium("video", "v.mkv"), "what?"), MediaStore(str(tmp_path)))
    about = VideoMetadata(total_num_frames=24, fps=8.0, duration=3.0, width=64, height=48)
    content = [{"type": "text", "text": "look "}, {"type": "video"}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]}
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": content}, answer], tokenize=False)
    kwargs = {"num_frames": None, "fps": None, **limits, "do_sample_frames": True, "video_metadata": [about]}
    direct = processor(text=[text], videos=[np.stack(frames)], return_tensors="pt", videos_kwargs=kwargs)
    assert found["input_ids"] == direct["input_ids"][0].tolist()
    assert found["video_grid_thw"].tolist() == direct["video_grid_thw"].tolist()
    assert found["video_grid_thw"][0, 0] == (2 if "num_frames" in limits else 4 if family == "qwen2_5_vl" else 5)
    assert found["pixel_values_videos"].equal(direct["pixel_values_videos"])


@pytest.mark.contract
def test_seventeen_frames(tmp_path: Path) -> None:
    """The processor counts in floats and would take one frame behind the last; that one is left out."""
    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    write_video(tmp_path / "v.mp4", 17, 24)
    real = real_processor(folder, tmp_path, limits=MediaLimits(num_frames=14))
    found = real.outputs(record(medium("video", "v.mp4")), MediaStore(str(tmp_path)))
    assert found["video_grid_thw"][0, 0] == 7


@pytest.mark.contract
def test_plain_text_and_the_end_token(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path / "model")
    store = MediaStore(str(tmp_path))
    plain = replace(record("one two"), messages=(Message(role="assistant", parts=(Text("one two"),)),), plain=True)
    without = real_processor(folder, tmp_path, add_eos=False).outputs(plain, store)["input_ids"]
    ended = real_processor(folder, tmp_path, add_eos=True)
    ids = ended.outputs(plain, store)["input_ids"]
    assert ids[:-1] == without
    assert ended.encode(plain, store).tokens == len(ids)
    chat = ended.outputs(record("one"), store)["input_ids"]
    assert chat.count(ids[-1]) == 2, "the template ends both turns with it, and nothing is added"


def unnamed(folder: Path, *kinds: str) -> Path:
    """The model's folder with a config that gives its media ids that no text ever has."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **{f"{kind}_token_id": 10**9 + len(kind) for kind in kinds}}))
    return folder


@pytest.mark.contract
def test_what_stands_behind_the_last_medium(tmp_path: Path) -> None:
    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    write_image(tmp_path / "i.png", 120, 90)
    store, real = MediaStore(str(tmp_path)), real_processor(folder, tmp_path)
    shown = record("first ", medium("image", "i.png"), "then", medium("image", "i.png"), "what?\n")
    ids = real.outputs(shown, store)["input_ids"]
    image = json.loads((folder / "config.json").read_text())["image_token_id"]
    last = [at for at, token in enumerate(ids) if token == image][-1]
    found = real.encode(shown, store)
    assert (found.tokens, found.tokens - (found.tail_tokens or 0)) == (len(ids), last + 1)
    assert len(ids) - last > 5
    text = real.encode(record("who?"), store)
    assert text.tail_tokens == text.tokens
    # Ids that are not found say nothing about where a medium ends; a text still has none.
    unnamed(folder, "image", "video")
    real = real_processor(folder, tmp_path)
    assert real.encode(shown, store).tail_tokens is None
    assert real.encode(record("who?"), store).tail_tokens == text.tokens


@pytest.mark.contract
def test_nothing_may_be_cut_where_the_media_are_not_found(tmp_path: Path) -> None:
    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    write_video(tmp_path / "v.mp4", 16)
    store = MediaStore(str(tmp_path))
    video = medium("video", "v.mp4")
    batch = [
        SizedRecord(record("look ", video, "what?"), (store.header("video", video.ref),)),
        SizedRecord(record("who?"), ()),
    ]
    costs = []
    for named in (True, False):
        rule = ProcessorRule(request_for(folder if named else unnamed(folder, "video"), tmp_path))
        found = rule.compute_costs(batch, store)
        assert not any(isinstance(one, RecordError) for one in found)
        costs.append([one[0] for one in found if not isinstance(one, RecordError)])
    (known, text), (unknown, same) = costs
    assert 0 < known.tail_tokens < known.text_tokens
    assert (unknown.tokens, unknown.tail_tokens) == (known.tokens, 0)
    assert text.tail_tokens == text.tokens
    assert same == text


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    nano = tiny.write("nanovlm", tmp_path / "nano")
    note = load_reference(request_for(nano, tmp_path))
    assert isinstance(note, str)
    assert note.startswith("skipped")


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{}", "a processor that transformers can load"),
        ("config.json", "{}", "the config of a model that transformers can load"),
        ("config.json", '{"model_type": 5}', "the config of a model that transformers can load"),
    ],
)
def test_a_folder_that_transformers_cannot_load(tmp_path: Path, name: str, content: str, words: str) -> None:
    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s){words}.*--check 0"):
        real_processor(folder, tmp_path)
