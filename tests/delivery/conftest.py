"""Fixtures of the tests of packs: media files and tiny models, written once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain.families import tiny


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all media that the shared records show; tests that change one make their own."""
    from encoding import write_media

    return write_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, with small tiles; tests that change it copy it first."""
    from encoding import small_tiles

    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = small_tiles(tiny.write(family, root / family), family)
        return made[family]

    return folder


@pytest.fixture
def data(tmp_path: Path, media: Path) -> Path:
    """Conversations for a model that takes images and videos, beside media of their own."""
    from kept_tokens import write_data

    shutil.copytree(media, tmp_path, dirs_exist_ok=True)
    return write_data(tmp_path / "data.jsonl", "qwen3_vl")
