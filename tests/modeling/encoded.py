"""Samples of every family for tests with tiny models, encoded as training encodes them, from synthetic pixels."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packtrain.core.values import Media, MediaHeader, MediaRef, Message, Part, Record, Text
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encode import Decoded, SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.families.model_folder import resolve_model
from packtrain.measuring.request import Request
from packtrain.modeling.load import build_model
from packtrain.records.source import SourceSpec

sys.path.append(str(Path(__file__).parents[1] / "measuring"))  # small encoders, as the tests of measuring make them
from conversations import TILED, shrink

VISION = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"),
    *("llava", "llava_next", "llava_onevision", "internvl", "gemma3"),
)
TEXT_ONLY = ("llama", "qwen2", "qwen3", "smollm3", "mistral", "gemma3_text")
WITH_VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl")
PAD_ID = 0


@cache
def folder(family: str) -> Path:
    made = resolve_model(f"tiny:{family}", Path(mkdtemp(prefix="tiny-models-")))
    return shrink(made, 8) if family in TILED else made


@cache
def _built(family: str) -> Any:
    return build_model(folder(family))


def fresh_model(family: str) -> Any:
    """A copy, because tests switch attention, modes and hooks."""
    return copy.deepcopy(_built(family))


@cache
def encoder(family: str) -> SampleEncoder:
    spec = SourceSpec(name="s", path=".", format="jsonl", media_root=".")
    return SampleEncoder(Request(specs=(spec,), model=str(folder(family))))


def contract(family: str) -> Any:
    return encoder(family).contract


def sample(family: str, *kinds: str, words: int = 9, seed: int = 0) -> EncodedSample:
    """A conversation that shows media of these kinds; other seeds have other words and pixels."""
    rng = np.random.default_rng([seed, words, len(kinds)])
    text = " ".join("abcdefghijklmnop"[i] for i in rng.integers(0, 16, words))
    asked: list[Part] = [Media(kind, MediaRef(name=kind)) for kind in kinds]  # type: ignore[arg-type]
    messages = (
        Message(role="user", parts=(*asked, Text(text))),
        Message(role="assistant", parts=(Text(text[::-1]),)),
    )
    record = Record(id=f"{'-'.join(kinds) or 'text'}-{seed}", origin="here:1", source="s", messages=messages)
    return encoder(family).assemble(record, [_pixels(family, kind, rng) for kind in kinds])


def _pixels(family: str, kind: str, rng: np.random.Generator) -> Decoded:
    height, width = int(rng.integers(56, 100)), int(rng.integers(56, 100))
    if kind == "image":
        return Decoded.image(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    header = MediaHeader(kind="video", width=width, height=height, frames=8, fps=4.0, seconds=2.0)
    indices = encoder(family).frame_indices(header)
    frames = rng.integers(0, 256, (len(indices), height, width, 3), dtype=np.uint8)
    return Decoded(header=header, pixels=frames, indices=indices)


@cache
def samples(family: str) -> tuple[EncodedSample, ...]:
    """Text, one image, several images, video: what the family takes."""
    found = [sample(family, words=5)]
    if family in VISION:
        found += [sample(family, "image", seed=1), sample(family, seed=2), sample(family, "image", "image", seed=3)]
    if family in WITH_VIDEO:
        found.append(sample(family, "video", seed=4))
    return (*found, sample(family, words=14, seed=5))


def row(*members: EncodedSample, pack: int = 0) -> PackedRow:
    return PackedRow(key=PackKey(0, pack), samples=members)


def packed(family: str, *members: EncodedSample, **options: Any) -> Any:
    return PackCollator(contract(family), pad_id=PAD_ID, **options)([row(*members)])


def logits(model: Any, batch: Any) -> Tensor:
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    return model(**arguments).logits


def cut(logits: Tensor, members: tuple[EncodedSample, ...]) -> list[Tensor]:
    """The span of each sample in a packed row."""
    return list(logits[0, : sum(map(len, members))].split([len(member) for member in members]))


def alone(family: str, model: Any, members: tuple[EncodedSample, ...]) -> list[Tensor]:
    """Every sample by itself, one after the other."""
    return [logits(model, packed(family, member))[0, : len(member)] for member in members]


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert len(found) == len(wanted) > 0
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model: Any, batch: Any) -> Tensor:
    """Summed over tokens, so that it does not depend on how samples are put into batches."""
    scores = logits(model, batch)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(scores.float(), batch["labels"][:, 1:].flatten(), reduction="sum")
