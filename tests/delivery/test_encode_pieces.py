"""Pieces of samples, media that were never in a file, and encoders that travel to other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from encoding import QWEN, SHOWN, TEXTS, medium, pricing, record, request_for
from PIL import Image

from packtrain.core.errors import ConfigError, InternalError
from packtrain.core.values import MediaHeader
from packtrain.delivery.encode.decode import decode_frames
from packtrain.delivery.encode.encode import Decoded, SampleEncoder
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample
from packtrain.records.media import MediaStore

Folder = Callable[[str], Path]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "llava_onevision", "gemma3")


def assert_equal(one: EncodedSample, other: EncodedSample) -> None:
    for name in ("input_ids", "labels", "position_ids", "token_kinds"):
        assert getattr(one, name).equal(getattr(other, name)), name
    assert one.media.keys() == other.media.keys()
    assert all(tensor.equal(other.media[name]) for name, tensor in one.media.items())
    assert (one.id, one.row, one.num_images, one.num_videos) == (
        other.id,
        other.row,
        other.num_images,
        other.num_videos,
    )


# ---- pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_the_sample_cut(family: str, media: Path, model: Folder) -> None:
    """For every place where a sample may be cut into two."""
    encoder, store = SampleEncoder(request_for(model(family), media)), MediaStore(str(media))
    shown = record("photo.png", "what?\n", answer="a red circle and a blue one beside it")
    whole = encoder.encode(shown, store)
    media_end = int((whole.token_kinds != TEXT).nonzero()[-1]) + 1
    cuts = range(media_end, len(whole))
    assert len(cuts) > 8
    for cut in cuts:
        first = encoder.encode(shown, store, start=0, tokens=cut)
        second = encoder.encode(shown, store, start=cut, tokens=len(whole) - cut)
        assert torch.cat([first.input_ids, second.input_ids]).equal(whole.input_ids)
        assert first.labels.equal(whole.labels[:cut])
        assert int(second.labels[0]) == IGNORED
        assert second.labels[1:].equal(whole.labels[cut + 1 :])
        assert first.position_ids.equal(whole.position_ids[:, :cut])
        assert second.position_ids.tolist() == [list(range(len(second)))] * (4 if family in QWEN else 1)
        assert first.media.keys() == whole.media.keys()
        assert (first.num_images, second.num_images) == (1, 0)
        assert not second.media
        assert not second.token_kinds.any()


def test_the_last_piece_may_be_left_open(media: Path, model: Folder) -> None:
    encoder, store = SampleEncoder(request_for(model("llama"), media)), MediaStore(str(media))
    whole = encoder.encode(TEXTS["turns"], store)
    rest = encoder.encode(TEXTS["turns"], store, start=5)
    assert rest.input_ids.equal(whole.input_ids[5:])
    assert bool((rest.labels != IGNORED).any())


def test_a_piece_behind_the_first_decodes_nothing(media: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), media)), MediaStore(str(media))
    whole = encoder.encode(SHOWN["images"], store)
    monkeypatch.setattr("packtrain.delivery.encode.encode.decode_image", None)
    assert len(encoder.encode(SHOWN["images"], store, start=len(whole) - 3)) == 3
    with pytest.raises(TypeError):
        encoder.encode(SHOWN["images"], store)


@pytest.mark.parametrize("piece", [(0, 12), (12, -1), (0, 10**6), (5, 0)], ids=str)
def test_a_plan_that_cuts_media_is_our_own_mistake(piece: tuple[int, int], media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model("qwen3_vl"), media))
    with pytest.raises(InternalError, match="r7"):
        encoder.encode(SHOWN["image"], MediaStore(str(media)), start=piece[0], tokens=piece[1])


# ---- synthetic media


@pytest.mark.parametrize("family", FAMILIES)
def test_media_that_were_never_in_a_file(family: str, media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model(family), media))
    from_file = encoder.encode(SHOWN["images"], MediaStore(str(media)))
    names = [shown.ref.name for shown in SHOWN["images"].media()]
    decoded = [Decoded.image(np.asarray(Image.open(media / name)), name) for name in names]
    assert_equal(encoder.assemble(SHOWN["images"], decoded), from_file)


def test_a_synthetic_video(media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model("qwen3_vl"), media))
    header = MediaHeader(kind="video", width=96, height=64, frames=40, fps=8.0, seconds=5.0)
    indices = encoder.frame_indices(header)
    assert 4 < len(indices) < 40
    frames = np.random.default_rng(0).integers(0, 256, (len(indices), 64, 96, 3), dtype=np.uint8)
    shown = record("slow.mkv", "?")
    sample = encoder.assemble(shown, [Decoded(header=header, pixels=frames, indices=indices)])
    cost, _ = pricing(encoder).cost(shown, [header])
    assert len(sample) == cost.tokens
    assert sample.media["pixel_values_videos"].shape[0] == cost.patches


# ---- other processes


def test_an_encoder_travels_as_what_it_was_made_from(media: Path, model: Folder) -> None:
    store = MediaStore(str(media))
    encoder = SampleEncoder(request_for(model("qwen2_5_vl"), media), measured_settings={"model_type": "other"})
    before = encoder.encode(SHOWN["images"], store)
    packed = pickle.dumps(encoder)
    assert len(packed) < 5000, "the processor travels along"
    assert_equal(pickle.loads(packed).encode(SHOWN["images"], store), before)
    pickle.dumps(before)


def test_importing_loads_nothing_that_may_be_missing() -> None:
    code = "import sys, packtrain.delivery.encode.encode; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "packtrain.delivery.encode.pixels" in loaded
    assert not loaded & {"av", "datasets", "torch", "transformers"}


def test_only_videos_need_the_video_library(media: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("av", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails as if it were not installed
    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), media)), MediaStore(str(media))
    assert encoder.encode(TEXTS["turns"], store)
    assert encoder.encode(SHOWN["images"], store).media
    with pytest.raises(ConfigError, match="pip install av"):
        encoder.encode(record("slow.mkv", "?"), store)
    with pytest.raises(ConfigError, match="pip install av"):
        decode_frames(store, medium("slow.mkv").ref, [0])


def test_rows_are_filled_up_with_the_tokenizers_own_token(media: Path, model: Folder) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("qwen3_vl"))
    assert SampleEncoder(request_for(model("qwen3_vl"), media)).pad_id == tokenizer.pad_token_id
