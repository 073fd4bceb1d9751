"""Runs that move: another cache, another folder of data and model, and still the same plan, order and losses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import Run
from made_runs_data import write_config

from packtrain.app.cache import clear_run, list_cache
from packtrain.app.train.prepare import Prepared, prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.app.train.resume import check_frozen, check_resumed, other_evaluation
from packtrain.app.train.train import _resolve_run
from packtrain.config.run_config import load_config
from packtrain.core.artifacts import write_json
from packtrain.core.errors import ArtifactError
from packtrain.families import tiny
from packtrain.measuring.table import CostTable
from packtrain.modeling.adapters import frozen_state, set_trainable
from packtrain.modeling.load import build_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.packing.pack_plan import plan_inputs
from packtrain.runs.run_folder import RunFolder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def prepared(config: Path, *overrides: str) -> Prepared:
    return prepare(resolve_run(load_config(config), overrides=("data.cache_tokens=true", *overrides)))


def known_by(found: Prepared) -> dict[str, Any]:
    """What a run's data are known by: in its cost table, its plan, its order, its tokens."""
    plan, tokens = found.dataset.plan, found.dataset.tokens
    assert plan.folder is not None
    assert tokens is not None
    table = CostTable.load(plan.summary.cost_table)
    return {
        "table": (table.folder.name, table.summary.inputs, plan_inputs(table)),
        "plan": (plan.folder.name, plan.fingerprint, found.dataset.schedule.hash),
        "tokens": (tokens.folder.name, tokens.fingerprint),
    }


def test_another_cache_changes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = write_config(home, max_steps=3), {}
    for name in ("one", "two"):
        monkeypatch.setenv("PACKTRAIN_CACHE", str(home / name))
        found[name] = known_by(prepared(config))
        assert next((home / name / "models").glob("tiny-*")), "the model was made there"
    assert found["one"] == found["two"]
    shutil.rmtree(home / "two")
    (home / "one").rename(home / "three")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "three"))
    again = prepared(config)
    assert ["reused" in line for line in again.done] == [True] * 3, again.done
    assert known_by(again) == found["one"]


def test_moved_data_have_the_same_plan_and_a_table_of_their_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    config = write_config(home, max_steps=3)
    before = prepared(config)
    (home / "mount").mkdir()
    shutil.copyfile(home / "train.jsonl", home / "mount" / "train.jsonl")  # without its time
    there = f"data.dataset_path={home / 'mount' / 'train.jsonl'}"
    after = prepared(config, there)
    assert after.dataset.plan.folder == before.dataset.plan.folder
    assert after.dataset.schedule.hash == before.dataset.schedule.hash
    tables = [one.dataset.plan.summary.cost_table for one in (before, after)]
    assert tables[0] != tables[1]
    assert CostTable.load(tables[1]).files[0].file == str(home / "mount" / "train.jsonl")
    (home / "train.jsonl").unlink()
    assert len(after.dataset[0].samples) > 1, "read from where the data are now"
    shutil.rmtree(tables[0])
    assert prepared(config, there).dataset.plan.folder == before.dataset.plan.folder
    noted = json.loads((Path(str(before.dataset.plan.folder)) / "plan.json").read_text())
    assert noted["cost_table"] == tables[1], "the other is gone"


def test_clearing_what_moved_data_made_clears_the_plan_they_share(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    config = write_config(home, max_steps=3)
    before = prepared(config)
    (home / "mount").mkdir()
    there = f"data.dataset_path={shutil.copy2(home / 'train.jsonl', home / 'mount')}"
    prepared(config, there)
    clear_run(resolve_run(load_config(config), overrides=(there,)))
    assert Path(before.dataset.plan.summary.cost_table).is_dir(), "of other data"
    assert not Path(str(before.dataset.plan.folder)).exists()


def test_what_an_older_version_made_is_named_and_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    config = write_config(home, max_steps=3)
    before = known_by(prepared(config))
    for kind, name in (("measure", "measure.json"), ("tokens", "tokens.json"), ("plans", "plan.json")):
        for path in (home / "cache" / kind).glob(f"*/{name}"):
            content = json.loads(path.read_text())
            path.write_text(json.dumps({**content, "version": content["version"] - 1}))
    entries = list_cache(home / "cache", ("measure", "plans", "tokens"))
    assert len(entries) >= 3
    assert all("made by an older version of packtrain" in entry.stale[0] for entry in entries)
    shutil.rmtree(home / "cache" / "plans")  # those of an older version have other names
    again = prepared(config)
    assert known_by(again) == before
    assert ["again because" in line and "older version" in line for line in again.done] == [True, False, True]


def test_rows_of_tables_move_by_content(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    config, found = write_config(home, max_steps=3), set()
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), home / "rows.parquet")
    for name, time in (("here", 1), ("there", 2)):
        (home / name).mkdir()
        data = shutil.copyfile(home / "rows.parquet", home / name / "rows.parquet")
        os.utime(data, ns=(time, time))
        found.add(prepared(config, f"data.dataset_path={data}").dataset.schedule.hash)
    assert len(found) == 1


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run interrupted after so many steps."""
    from packtrain.training.callbacks import RunLogger

    on_step = RunLogger.on_step

    def signalling(self: RunLogger, metrics: Any) -> None:
        on_step(self, metrics)
        if metrics.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunLogger, "on_step", signalling)


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


@pytest.mark.full
@pytest.mark.parametrize("packing", [True, False])
def test_a_run_goes_on_elsewhere(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch, packing: bool) -> None:
    config = write_config(home, max_steps=6)
    model = tiny.write("llama", home / "model")
    build_model(model).save_pretrained(model)
    content = yaml.safe_load(config.read_text())
    content["model"]["model_name_or_path"] = str(model)
    content["data"]["packing"] = packing
    config.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    whole = home.parent / "whole"
    assert run("train", config, f"training.output_dir={whole}")[0] == 0
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        assert run("train", config)[0] == 130

    there = home.parent / "there"
    for name in ("out", "model"):
        shutil.copytree(home / name, there / name, copy_function=shutil.copyfile)
    shutil.copyfile(home / "train.jsonl", there / "train.jsonl")
    shutil.rmtree(home)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(there / "cache"))
    moved = (f"data.dataset_path={there / 'train.jsonl'}", f"model.model_name_or_path={there / 'model'}")
    code, out, err = run("train", there / "out" / "run.yaml", *moved, "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["resumed"] == 3, "the step that was under way when the signal came is finished"
    assert losses(there / "out") == losses(whole)
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (there / "out", whole)]
    assert weights[0] == weights[1]
    assert not home.exists(), "nothing is written where the run was begun"

    text = (there / "train.jsonl").read_text()
    (there / "train.jsonl").write_text(text.replace("river", "stone", 1))
    code, _, err = run("train", there / "out" / "run.yaml", *moved, "training.max_steps=7", "--resume")
    assert (code, "measured.content: " in err, "train.jsonl.size" in err) == (1, True, False), err
    (there / "train.jsonl").write_text(text)
    template = there / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# edited #}")
    code, _, err = run("train", there / "out" / "run.yaml", *moved, "training.max_steps=7", "--resume")
    assert (code, "measured.settings" in err) == (1, True), err


def begun(folder: Path, **facts: Any) -> RunFolder:
    """A folder that says that a run was begun in it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", "run", 1, facts)
    return RunFolder(folder)


def test_adapters_do_not_go_on_beside_other_weights(tmp_path: Path) -> None:
    """Folders and names are not compared, and configs of fine-tuned models are those of their bases."""
    folder = tiny.write("llama", tmp_path / "model")
    states = {}
    for name, seed in (("base", 0), ("again", 0), ("tuned", 1)):
        model = build_model(folder, seed)
        states[name] = frozen_state(set_trainable(model, ModelSettings(name="llama", method="lora")))
    run = begun(tmp_path / "out", frozen=states["base"])
    check_frozen(run, states["again"])
    check_frozen(run, {"bfloat16": "loaded in another precision"})
    with pytest.raises(ArtifactError, match="adapters of another model"):
        check_frozen(run, states["tuned"])
    assert frozen_state(model.to("meta")) == {}, "as on a rank that is sent its weights later"


def test_other_evaluation_data_are_said(tmp_path: Path) -> None:
    folder = begun(tmp_path / "out", evaluated={"files": {"eval.jsonl": 3}})
    assert other_evaluation(folder, {"files": {"eval.jsonl": 3}}) == ()
    assert other_evaluation(folder, None) == ()
    (told,) = other_evaluation(folder, {"files": {"eval.jsonl": 4}})
    assert "do not compare" in told
    assert "eval.jsonl" in told
    assert other_evaluation(begun(tmp_path / "without"), {"files": {}}) == ()


def test_a_run_of_an_older_version_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="started by an older version of packtrain"):
        check_resumed(begun(tmp_path / "out"), {})


@pytest.mark.parametrize(
    ("overrides", "samples", "expected"),
    [((), None, "copy"), (("output_dir=other",), None, "other"), ((), 5, "out-5-samples"), ((), 7, "copy")],
)
def test_which_run_a_config_of_its_own_resumes(
    home: Path, overrides: tuple[str, ...], samples: int | None, expected: str
) -> None:
    config = write_config(home, max_steps=2)
    content = yaml.safe_load(config.read_text())
    if samples == 7:  # the config of a trial
        content["data"]["max_samples"] = 7
    run = begun(home / "copy")
    (run.path / "run.yaml").write_text(yaml.safe_dump(content))
    found = _resolve_run(run.path / "run.yaml", overrides, 1, resume=True, max_samples=samples)
    assert found.folder.name == expected
