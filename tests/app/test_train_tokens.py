"""`packtrain train` tokenizes once: what it says about it, evaluation data, clearing, and the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run
from made_runs_data import write_chats, write_config

from packtrain.app.cache import clear_run
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.config.run_config import load_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, max_steps=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def about_tokens(config: Path, *overrides: str, clear: bool = False) -> list[str]:
    """What a run says before its first step about tokens."""
    run = resolve_run(load_config(config), world_size=1, overrides=overrides, name="run")
    if clear:
        clear_run(run)
    return [line for line in prepare(run).done if "token" in line]


def test_what_is_said(config: Path, tmp_path: Path) -> None:
    assert about_tokens(config) == [], "packs are tokenized as they are read"
    write_chats(tmp_path / "eval.jsonl", 8, seed=1)
    padded = ("data.packing=false", f"data.eval_path={tmp_path / 'eval.jsonl'}")
    made = "tokenized now, no cached tokens fit"
    assert about_tokens(config, *padded) == [f"data: {made}", f"evaluation data: {made}"]
    again = about_tokens(config, *padded)
    assert ["tokens reused" in line for line in again] == [True, True]
    assert len(set(again)) == len({line.partition("(")[2] for line in again}) == 2, "each has its own"
    packed = about_tokens(config, "data.cache_tokens=true")
    assert packed == again[:1], "the same tokens, packed"
    assert about_tokens(config, *padded, "data.cache_tokens=false") == []
    write_chats(tmp_path / "train.jsonl", 41)
    stale = about_tokens(config, *padded)
    assert "data: tokenized again because" in stale[0]
    assert "train.jsonl.size" in stale[0]
    assert stale[1] == again[1]


def test_clearing_what_the_config_made(config: Path, cache: Path) -> None:
    about_tokens(config, "data.packing=false")
    (folder,) = (cache / "tokens").iterdir()
    about_tokens(config, clear=True)
    assert folder.exists(), "the other mode's stay"
    made = about_tokens(config, "data.packing=false", clear=True)
    assert made == ["data: tokenized now, no cached tokens fit"]


def test_a_damaged_cache_is_made_again_and_said(config: Path, cache: Path) -> None:
    about_tokens(config, "data.packing=false")
    (part,) = (cache / "tokens").glob("*/part-*.arrow")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    (said,) = about_tokens(config, "data.packing=false")
    assert said.startswith("data: tokenized again because")
    assert part.name in said
    assert part.read_bytes() == whole


@pytest.mark.full
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_same_weights(run: Run, config: Path, tmp_path: Path, packing: str) -> None:
    found = []
    for cached in ("true", "false"):
        out = f"training.output_dir={tmp_path / cached}"
        assert run("train", config, f"data.packing={packing}", f"data.cache_tokens={cached}", out)[0] == 0
        found.append((tmp_path / cached / "final" / "model.safetensors").read_bytes())
    assert found[0] == found[1]
