"""What the tests of cached tokens share: conversations of every kind, datasets of them, batches that must be equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoding import IMAGE_FAMILIES, VIDEO_FAMILIES

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.delivery.encode.token_cache import TokenProgress

Folder = Callable[[str], Path]
SAMPLES = 14


def turn(role: str, *parts: str, **more: Any) -> dict[str, Any]:
    """One message of texts and media files."""
    kinds = {".png": "image", ".mkv": "video"}
    found = [
        {"type": kind, kind: part} if (kind := kinds.get(Path(part).suffix, "")) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": found, **more}


def records(family: str) -> Iterator[list[dict[str, Any]]]:
    """Conversations of every kind that a family takes: what it is shown, what is not learned, who it is to be."""
    shown = [("photo.png",), ("large.png", "tall.png")] if family in IMAGE_FAMILIES else []
    shown += [("slow.mkv",)] if family in VIDEO_FAMILIES else []
    system = (
        [] if family in ("gemma3", "gemma3_text", "llava", "llava_next") else [turn("system", "Be brief, naïve 🙂.")]
    )
    for number in range(SAMPLES):
        media = shown[number % 5] if number % 5 < len(shown) else ()
        words = " ".join(f"w{place}" for place in range(1 + number * number % 11))
        first = [turn("user", *media, f"what is {number}?"), turn("assistant", f"silent {words}", train=False)]
        asked = [*(first if number % 2 else []), turn("user", f"and {words}?" if number % 2 else words, *media[:0])]
        if not number % 2 and media:
            asked = [turn("user", *media, words)]
        yield [*(system if number % 3 else []), *asked, turn("assistant", f"learned {words} 北京")]


def write_data(path: Path, family: str) -> Path:
    lines = [json.dumps({"id": f"r{number}", "messages": one}) for number, one in enumerate(records(family))]
    path.write_text("\n".join(lines) + "\n")
    return path


def config(data: Path, model: Path, **settings: Any) -> DatasetConfig:
    usual: dict[str, Any] = {
        "dataset_path": str(data),
        "model": str(model),
        "packing": False,
        "packing_length": 4096,
        "rows_per_batch": 3,
        "packs_per_step": 6,
        "workers": 1,
        "check": 0,
        "cache_dir": str(data.parent / "cache"),
    }
    return DatasetConfig(**{**usual, **settings})


def packed(**settings: Any) -> dict[str, Any]:
    return {"packing": True, "rows_per_batch": 1, "packs_per_step": 2, **settings}


def built(given: DatasetConfig, kind: type[Any] = MultiModalDataset) -> Any:
    dataset = kind(given)
    dataset.build()
    return dataset


def told(given: DatasetConfig) -> list[TokenProgress]:
    """What building says about tokens."""
    seen: list[TokenProgress] = []
    MultiModalDataset(given).build(lambda state: seen.append(state) if isinstance(state, TokenProgress) else None)
    return seen


def assert_same(left: Any, right: Any) -> int:
    count = 0
    for one, other in zip(left, right, strict=True):
        assert one.info == other.info
        assert list(one) == list(other)
        for name, value in one.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name
            assert not isinstance(value, torch.Tensor) or value.dtype == other[name].dtype
        count += 1
    return count


def no_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a sample that is not in the cache fails."""
    monkeypatch.setattr(SampleTokens, "of", lambda *_: pytest.fail("tokenized again"))


def folder_of(dataset: Any) -> Path:
    assert dataset.tokens is not None
    return Path(dataset.tokens.folder)
