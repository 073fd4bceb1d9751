"""Ranks that have prepared other data than the first are refused before a step, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs_data import write_config

from packtrain.app.train import resume
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.app.train.train import train
from packtrain.config.run_config import load_config
from packtrain.core.errors import ConfigError, DataError
from packtrain.training import agreement


def test_a_rank_with_other_packs_is_named() -> None:
    first = {"schedule": "a", "packs": 19, "tokens": 100}
    resume.require_same([first, dict(first)])
    with pytest.raises(DataError, match="rank 2") as caught:
        resume.require_same([first, first, {**first, "packs": 11}])
    assert "packs 11 instead of 19" in str(caught.value)


def test_the_run_asks_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    prepared = prepare(resolve_run(load_config(write_config(tmp_path)), world_size=1))
    resume.check_same_data(prepared)
    monkeypatch.setattr(agreement, "gather_values", lambda mine: [mine, {**mine, "tokens": mine["tokens"] + 1}])
    with pytest.raises(DataError, match="rank 1"):
        resume.check_same_data(prepared)


def test_several_processes_do_not_clear_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="2 processes"):
        train(write_config(tmp_path), clear_cache=True)
