"""Data that cannot be used are named by the key that the user wrote, for training and for evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs_data import write_chats, write_config

from packtrain.app.train.prepare import data_errors_named, prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.config.run_config import RunConfig, load_config, with_overrides
from packtrain.core.errors import ArtifactError, ConfigError, DataError, PacktrainError

LONG = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "word " * 900}]}
BROKEN = {
    "gone.jsonl": (None, "which does not exist"),
    "bad.jsonl": ('{"a": 1\n{"b"\n', "not valid JSON"),
    "empty.jsonl": ("", "an empty dataset"),
    "silent.jsonl": (json.dumps({"messages": LONG["messages"][:1]}) + "\n", "no supervised tokens"),
    "long.jsonl": (json.dumps(LONG) + "\n", "no packs"),
}


@pytest.mark.parametrize(
    ("key", "name"),
    [("dataset_path", "gone.jsonl"), ("dataset_path", "bad.jsonl"), *(("eval_path", name) for name in BROKEN)],
)
def test_the_key_is_named(tmp_path: Path, key: str, name: str) -> None:
    text, words = BROKEN[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    said = (f"data.{key}={tmp_path / name}", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(PacktrainError) as caught:
        prepare(resolve_run(load_config(write_config(tmp_path)), overrides=said))
    assert str(caught.value).startswith(f"data.{key}"), caught.value
    assert words in str(caught.value)
    assert name in str(caught.value)
    assert "--max" not in str(caught.value), "an option of another command"


def test_other_systems_names_are_named(tmp_path: Path) -> None:
    write_chats(tmp_path / "eval.jsonl", 4)
    config = with_overrides(load_config(write_config(tmp_path)), [f"data.val_jsonl={tmp_path / 'gone.jsonl'}"])
    with pytest.raises(ConfigError, match=r"^data\.val_jsonl \(data\.eval_path\)"):
        prepare(resolve_run(config, overrides=[f"data.cache_dir={tmp_path / 'cache'}"]))
    assert not (tmp_path / "cache" / "measure").exists(), "said before anything is measured"


def test_relative_paths_start_here_or_where_the_config_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, names in ((here, ("both.jsonl",)), (there, ("both.jsonl", "data/only.jsonl"))):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
    config = there / "run.yaml"
    config.write_text("data: {dataset_path: both.jsonl, eval_path: data/only.jsonl, chat_template: gone.jinja}")
    monkeypatch.chdir(here)
    found = load_config("../there/run.yaml").data
    assert (found.dataset_path, found.eval_path) == ("both.jsonl", str(there / "data/only.jsonl"))
    assert found.chat_template == "gone.jinja", "what is nowhere is named as it was written"


def test_what_is_not_about_the_data_stays_as_it_is() -> None:
    for error in (ConfigError("model 'x'", got="no folder"), ArtifactError("plan.json", got="half of it")):
        with pytest.raises(PacktrainError) as caught, data_errors_named(RunConfig(), "eval_path", "x.jsonl"):
            raise error
        assert caught.value is error
    found = pytest.raises(DataError, match=r"^data\.eval_path x\.jsonl: nothing left")
    with found, data_errors_named(RunConfig(), "eval_path", "x.jsonl"):
        raise DataError("nothing left")
