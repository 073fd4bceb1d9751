"""`packtrain train`: what it says before its first step, the folder that it leaves, stopping, going on, bad input."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from commands import Run, files
from made_runs_data import write_chats, write_config

from packtrain.app.train.from_data import config_from_data
from packtrain.app.train.outcome import ProcessPlace
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.cli.train import _what_is_lost
from packtrain.config.run_config import RunConfig, load_config
from packtrain.families.model_folder import resolve_model
from packtrain.runs.run_folder import Origin, RunFacts, RunFolder, RunOutcome, origin
from packtrain.runs.run_summary import summarise_run
from packtrain.runs.training_run import read_run

FILES = {"run.yaml", "run.json", "metrics.jsonl", "ledger.jsonl", "report.html", "final"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, max_steps=3)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def facts_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def weights_of(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def unframed(table: str) -> str:
    """The text of a table, without its lines and breaks."""
    return " ".join(table.replace("│", " ").split())


class TestBefore:
    def test_a_dry_run_says_everything_and_writes_no_run(self, run: Run, config: Path, tmp_path: Path) -> None:
        code, out, err = run("train", config, "--dry-run", "--batch-stats", 2, "--json")
        assert (code, err) == (0, "")
        said = json.loads(out)
        numbers = said["numbers"]
        assert (numbers["mode"], numbers["samples"], numbers["steps"]) == ("packed", 40, 3)
        assert numbers["packs_per_step"] == round(8 / (40 / numbers["packs"])), "8 samples, in packs"
        assert said["packing_check"]["passed"]
        assert said["course"]["rates"] == {"language": 1e-2}
        assert said["course"]["saves"] == "one, at the end (save_steps: 100)"
        assert any("save_steps 100 is beyond the run's 3 steps" in note for note in said["notes"])
        assert said["model"]["trainable"] == [{"part": "language", "weights": 266_688, "trained": 266_688}]
        assert [len(batches) for batches in said["batches"]] == [2]
        for batch in said["batches"][0]:
            assert batch["fill"] == batch["tokens"] / 192
            assert batch["samples"] > 1, "packed"
        assert said["outcome"]["status"] == "not trained"
        assert not said["model"]["master_weights"], "weights are fp32"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("given", [True, False])
    def test_weights_in_half_precision_have_masters_or_a_note(self, run: Run, config: Path, given: bool) -> None:
        settings = ("model.dtype=bf16", *(() if given else ("training.master_weights=false",)))
        code, out, _ = run("train", config, "--dry-run", "--json", "training.packing_check=false", *settings)
        said = json.loads(out)
        assert (code, said["model"]["dtype"], said["model"]["master_weights"]) == (0, "bfloat16", given)
        assert any("round to zero" in note for note in said["notes"]) != given

    def test_one_of_a_thing_is_said_as_one(self, run: Run, config: Path, tmp_path: Path) -> None:
        """By every command that counts, and the mean length stands beside the longest."""
        one, costs, plan = write_chats(tmp_path / "one.jsonl", 1), tmp_path / "costs", tmp_path / "plan"
        commands: list[tuple[Any, ...]] = [
            ("measure", one, "--model", "tiny:llama", "--out", costs),
            ("pack", costs, "--packing-length", 64, "--out", plan),
            ("inspect", plan, "--blocked"),
            ("train", config, f"data.dataset_path={one}", "training.effective_batch_size=1", "--dry-run"),
            ("cache", "ls"),
        ]
        for command in commands:
            code, out, err = run(*command)
            assert code == 0, err
            out = re.sub(r"[│\s]+", " ", out)
            several = re.findall(
                r"(?<![\d.,])1 (?:probe |random )?(?:packs|samples|tokens|entries|rows|records|steps)\b", out
            )
            assert several == [], command
            if command[0] == "train":
                assert re.search(r"mean length (\d+) tokens, longest \1\b", out)

    def test_tf32_on_a_cpu_is_a_note(self, run: Run, config: Path) -> None:
        code, out, err = run("train", config, "training.tf32=true", "--dry-run", "--json")
        assert code == 0, err
        assert [note for note in json.loads(out)["notes"] if note.startswith("training.tf32 has no effect on a CPU")]

    @pytest.mark.full
    def test_for_people(self, run: Run, config: Path) -> None:
        code, out, _ = run("train", config, "--dry-run")
        assert code == 0
        for words in (
            *("packed training into", "packing check", "passed in ", "samples per pack", "8 requested"),
            *(
                "3 (0.6 epochs of 5 steps)",
                "0.01 (language); linear schedule, no warm-up",
            ),
        ):
            assert words in unframed(out), words
        code, out, _ = run("train", config, "data.packing=false", "--dry-run")
        assert code == 0
        assert "padded training into" in out
        assert "of tokens are padding" in unframed(out)

    @pytest.mark.full
    def test_what_is_reused_and_why_not(self, run: Run, config: Path, tmp_path: Path) -> None:
        def prepared(*more: str) -> str:
            code, out, err = run("train", config, "--dry-run", "--json", *more)
            assert code == 0, err
            return "\n".join(json.loads(out)["prepared"])

        first = prepared()
        assert "data: measured now, no cached table fits" in first
        assert "data: packed" in first
        again = prepared()
        assert "cost table reused" in again
        assert "plan reused" in again
        padded = prepared("data.packing=false")
        assert "cost table reused" in padded, "both modes cost the same"
        assert "data: batches planned" in padded, "and have plans of their own"
        write_chats(tmp_path / "train.jsonl", 41)
        stale = prepared()
        assert "measured again because data." in stale
        assert "train.jsonl.size" in stale

    @pytest.mark.full
    def test_clear_cache_removes_what_the_config_made(self, run: Run, config: Path, tmp_path: Path) -> None:
        for more in ((), ("data.packing=false",)):
            assert run("train", config, "--dry-run", *more)[0] == 0
        _, out, _ = run("cache", "ls", "--json")
        before = {entry["path"] for entry in json.loads(out)["entries"]}
        code, out, _ = run("train", config, "--dry-run", "--clear-cache", "--json")
        said = json.loads(out)
        assert code == 0
        assert any("--clear-cache: " in note and "removed" in note for note in said["notes"])
        assert any("measured now, no cached table fits" in line for line in said["prepared"])
        _, out, _ = run("cache", "ls", "--json")
        after = {entry["path"] for entry in json.loads(out)["entries"]}
        padded = {entry["path"] for entry in json.loads(out)["entries"] if "padded" in entry["about"]}
        assert padded
        assert padded <= before & after, "the other mode's plans stay"


class TestFromData:
    @pytest.fixture
    def data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        monkeypatch.chdir(tmp_path)
        write_chats(tmp_path / "train.jsonl", 40)
        return "--model", "tiny:llama", "--data", "train.jsonl"

    def test_trains_without_a_config_and_goes_on_from_its_folder(
        self, run: Run, data: tuple[str, ...], tmp_path: Path
    ) -> None:
        code, out, err = run("train", *data, "training.max_steps=1", "--json")
        assert code == 0, err
        (folder,) = (tmp_path / "runs").glob("tiny-llama-train-20*")
        said = json.loads(out)
        assert Path(said["folder"]).resolve() == folder
        (chosen,) = (note for note in said["notes"] if "defaults for CPU" in note)
        length = said["numbers"]["packing_length"]
        assert not any("instead of 16" in note for note in said["notes"]), "no warning of its own choice"
        assert said["prepared"][0] == "data: measured now, no cached table fits", "by this command"
        assert f"packing_length {length}, effective_batch_size 16, output_dir runs/" in chosen
        assert said["numbers"]["longest"] <= length < 40 * said["numbers"]["longest"]
        assert run("train", folder)[0] == 2, "a folder is no config"
        code, out, err = run("train", "--resume", folder, "training.max_steps=2", "--json")
        assert code == 0, err
        assert (json.loads(out)["resumed"], json.loads(out)["outcome"]["step"]) == (1, 2)

    @pytest.mark.parametrize(
        ("samples", "long", "chosen"),
        [(40, 1, None), (400, 90, 16), (3, 1, None)],
        ids=["usual", "one is very long", "less than a step"],
    )
    def test_a_step_on_a_cpu_is_the_one_that_is_chosen(
        self, data: tuple[str, ...], tmp_path: Path, samples: int, long: int, chosen: int | None
    ) -> None:
        turns = [{"role": "user", "content": "red " * long * 20}, {"role": "assistant", "content": "blue"}]
        write_chats(tmp_path / "train.jsonl", samples)
        with (tmp_path / "train.jsonl").open("a") as file:
            file.write(json.dumps({"messages": turns}) + "\n")
        named = {"model": {"model_name_or_path": "tiny:llama"}, "data": {"dataset_path": "train.jsonl"}}
        config, measured = config_from_data(RunConfig.of(named, ""), ProcessPlace())
        assert config.data.max_samples_per_pack == chosen
        found = prepare(resolve_run(config), measured=measured)
        assert (found.warnings, found.numbers.too_large) == ((), 0)

    @pytest.mark.parametrize("gpu", [None, "H200"])
    def test_its_padded_baseline_has_the_same_step(
        self, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, gpu: str | None
    ) -> None:
        """The two commands of the README are compared: only packing may differ."""
        monkeypatch.setattr("packtrain.app.train.from_data._gpu", lambda *_: gpu)
        named = {"model": {"model_name_or_path": "tiny:llama"}, "data": {"dataset_path": data[-1]}}
        packed, padded = (
            config_from_data(RunConfig.of({**named, "data": {**named["data"], **packing}}, ""), ProcessPlace())[0]
            for packing in ({"packing": True}, {"packing": False})
        )
        assert packed.training.effective_batch_size == padded.training.effective_batch_size
        assert resolve_run(padded).size.samples == packed.training.effective_batch_size

    def test_plans_for_the_gpu_that_is_there(
        self, run: Run, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("packtrain.app.train.from_data._gpu", lambda *_: "H200")
        plans: list[Any] = []
        monkeypatch.setattr("packtrain.app.train.from_data.plan", _counting(plans))
        for _ in ("made", "found"):
            code, out, err = run("train", *data, "-o", "mine", "training.packs_per_step=2", "--dry-run", "--json")
            assert code == 0, err
            said = json.loads(out)
        assert len(plans) == 1
        (chosen,) = (note for note in said["notes"] if "planned for 1 x H200" in note)
        assert (said["folder"], said["numbers"]["packs_per_step"]) == ("mine", 2)
        assert f"packing_length {said['numbers']['packing_length']}" in chosen
        named = {
            "model": {"model_name_or_path": "tiny:llama"},
            "data": {"dataset_path": "train.jsonl", "plan": "packs"},
        }
        assert config_from_data(RunConfig.of(named, ""), ProcessPlace())[0].data.packing_length is None, (
            "the plan has it"
        )
        code, out, _ = run("cache", "ls", "--json")
        assert [one["about"][:13] for one in json.loads(out)["entries"] if one["kind"] == "studies"] == [
            "tiny:llama on"
        ]

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ((), "CONFIG, or --model and --data"),
            (("--model", "tiny:llama"), "no config, and no --data"),
            (("--resume",), "packtrain train --resume RUN"),
        ],
        ids=["nothing", "no data", "no run"],
    )
    def test_too_little(self, run: Run, given: tuple[str, ...], words: str) -> None:
        code, _, err = run("train", *given)
        assert code == 2
        assert words in " ".join(err.split())


def _counting(calls: list[Any]) -> Any:
    from packtrain.app.plan import plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return plan(*args, **kwargs)

    return counted


class TestRun:
    def test_leaves_its_folder(self, run: Run, config: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        write_chats(tmp_path / "eval.jsonl", 8, seed=1)
        code, out, err = run(
            "train", config, f"data.eval_path={tmp_path / 'eval.jsonl'}", "training.eval_steps=2", "--json"
        )
        assert code == 0, err
        folder, said = tmp_path / "out", json.loads(out)
        assert {path.name for path in folder.iterdir()} >= {*FILES, "checkpoint-3"}
        assert (said["problems"], said["report"]) == ([], str(folder / "report.html"))
        assert (said["outcome"]["status"], said["outcome"]["step"]) == ("complete", 3)
        steps = steps_of(folder)
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert steps[-1]["loss"] < steps[0]["loss"]
        page = summarise_run(read_run(folder))
        assert said["outcome"]["loss"] == page.loss_end == steps[-1]["loss"], "one final loss, that of the page"
        later = sum(step["tokens"] for step in steps[1:]) / sum(step["step_seconds"] for step in steps[1:])
        assert said["outcome"]["tokens_per_second"] == page.tokens_per_second == pytest.approx(later)
        facts = facts_of(folder)
        names = (
            "plan",
            "packs_per_step",
            "seed",
            "balance",
            "world_size",
            "rows_per_batch",
            "model",
            "mode",
            "derived",
        )
        assert all(name in facts for name in (*names, "outcome", "versions", "fingerprints"))
        assert facts["derived"]["steps"] == 3
        assert facts["origin"] == {"seed": 0}, "tiny weights are drawn from it"
        seen = steps[-1]["samples_seen"]
        assert origin(str(folder / "final"), 0) == Origin(
            run=str(folder), weights="final", model="tiny:llama", step=3, samples_seen=seen
        )
        assert origin(str(tmp_path), 0) is None
        assert facts["derived"]["course"]["rates"] == {"language": 1e-2}
        assert facts["command"]
        assert facts["outcome"]["eval_loss"] is not None
        again = load_config(folder / "run.yaml")
        assert again.training.packs_per_step == facts["packs_per_step"]
        assert again.notes == (), "by our own names"
        AutoModelForCausalLM.from_pretrained(folder / "final")
        AutoTokenizer.from_pretrained(folder / "final")
        _, head, card = (folder / "final" / "README.md").read_text().split("---\n", 2)
        assert yaml.safe_load(head)["library_name"] == "transformers"
        for words in (
            *("`tiny:llama`, fine-tuned on `train.jsonl`", "| Evaluation loss |", "transformers 5"),
            *("| Final loss |", "(mean of the last "),
        ):
            assert words in card
        assert str(tmp_path) not in card, "where data lie is nobody's business"
        code, _, err = run("train", config)
        assert code == 2
        assert "which holds a run (complete)" in err
        assert "--resume" not in err, "there is nothing to go on with"
        before = files(folder)
        code, out, err = run("train", "--resume", folder, "--json")
        assert code == 0, err
        assert json.loads(out)["outcome"] == facts["outcome"]
        assert files(folder) == before, "a run that is complete is left as it is"

    @pytest.mark.full
    def test_stopped_and_gone_on_with_is_the_run_that_was_not_stopped(
        self, run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from packtrain.training.callbacks import RunLogger

        more = ("training.max_steps=6", "training.effective_batch_size=6")
        whole, stopped = tmp_path / "whole", tmp_path / "stopped"
        assert run("train", config, *more, f"training.output_dir={whole}")[0] == 0
        on_step = RunLogger.on_step

        def signalling(self: RunLogger, metrics: Any) -> None:
            on_step(self, metrics)
            if metrics.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(RunLogger, "on_step", signalling)
        code, out, err = run("train", config, *more, f"training.output_dir={stopped}")
        assert code == 130, err
        assert "stopping after this step, with a checkpoint; again to stop now and lose the whole run" in err
        assert f"next: packtrain train --resume {stopped}\n" in out
        assert re.search(r", loss [\d.]+ \(mean of the last \d+ samples?\), ", out)
        assert facts_of(stopped)["outcome"]["status"] == "interrupted"
        assert not (stopped / "final").exists()
        monkeypatch.setattr(RunLogger, "on_step", on_step)
        began = "2020-01-01T00:00:00Z"
        (stopped / "run.json").write_text(json.dumps({**facts_of(stopped), "began": began}))
        lines = (stopped / "metrics.jsonl").read_text().replace('"step_seconds": ', '"step_seconds": 100')
        (stopped / "metrics.jsonl").write_text(lines)
        code, out, err = run("train", config, *more, f"training.output_dir={stopped}", "--resume", "--json")
        assert code == 0, err
        assert json.loads(out)["resumed"] == 3, "the step that was under way when the signal came is finished"
        assert [step["step"] for step in steps_of(stopped)] == [1, 2, 3, 4, 5, 6]
        assert [step["loss"] for step in steps_of(stopped)] == [step["loss"] for step in steps_of(whole)]
        assert [step["samples_seen"] for step in steps_of(stopped)] == [s["samples_seen"] for s in steps_of(whole)]
        assert weights_of(stopped) == weights_of(whole)
        assert facts_of(stopped)["began"] == began, "the run, not its last process"
        assert facts_of(stopped)["outcome"]["seconds"] > 3 * 100, "all of its steps"

    @pytest.mark.full
    def test_goes_on_as_it_was_begun(self, run: Run, config: Path, tmp_path: Path) -> None:
        assert run("train", config, "training.save_steps=2")[0] == 0
        packs = facts_of(tmp_path / "out")["packs_per_step"]
        content = yaml.safe_load(config.read_text())
        content["training"]["effective_batch_size"] = 20
        config.write_text(yaml.safe_dump(content))
        code, out, err = run("train", config, "training.max_steps=5", "--resume", "--json")
        assert code == 0, err
        said = json.loads(out)
        assert said["numbers"]["packs_per_step"] == packs
        assert any("effective_batch_size: 8 -> 20" in note and "are ignored" in note for note in said["notes"])
        assert [step["step"] for step in steps_of(tmp_path / "out")] == [1, 2, 3, 4, 5]

    @pytest.mark.full
    def test_nothing_to_go_on_with(self, run: Run, config: Path, tmp_path: Path) -> None:
        code, out, _ = run("train", config, "--resume", "--json")
        said = json.loads(out)
        assert code == 0
        assert any("nothing to resume" in note and "starts from the beginning" in note for note in said["notes"])
        assert said["outcome"]["status"] == "complete"

    @pytest.mark.full
    def test_a_run_whose_checkpoints_are_broken_is_not_begun_anew(self, run: Run, config: Path, tmp_path: Path) -> None:
        assert run("train", config, "training.max_steps=2")[0] == 0
        out = tmp_path / "out"
        metrics = (out / "metrics.jsonl").read_bytes()
        (out / "checkpoint-2" / "optimizer.pt").unlink()
        code, _, err = run("train", config, "training.max_steps=2", "--resume")
        assert code == 1
        assert "optimizer.pt is missing" in " ".join(err.split())
        assert (out / "metrics.jsonl").read_bytes() == metrics
        shutil.rmtree(out / "checkpoint-2")
        code, _, err = run("train", config, "training.max_steps=2", "--resume")
        assert code == 2
        assert "complete and has no checkpoint" in " ".join(err.split())
        assert (out / "metrics.jsonl").read_bytes() == metrics, "what was trained is not trained again over it"

    @pytest.mark.full
    def test_a_damaged_checkpoint_is_passed_over(self, run: Run, config: Path, tmp_path: Path) -> None:
        given = ("training.save_steps=1", "training.effective_batch_size=6", "data.eval_size=0.1")
        whole, out = tmp_path / "whole", tmp_path / "out"
        assert run("train", config, *given, f"training.output_dir={whole}")[0] == 0
        assert run("train", config, *given, "training.max_steps=2")[0] == 0
        damaged = out / "checkpoint-2" / "model.safetensors"
        content = damaged.read_bytes()
        damaged.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
        code, said, err = run("train", config, *given, "training.max_steps=3", "--resume", "--json")
        assert code == 0, err
        assert json.loads(said)["resumed"] == 1
        notes = " ".join(json.loads(said)["notes"])
        assert "skipped" in notes
        assert "checkpoint-2: model.safetensors differs from what was written" in notes
        assert weights_of(out) == weights_of(whole)
        assert (json.loads(said)["numbers"]["held_out"], json.loads(said)["numbers"]["samples"]) == (4, 36)

    @pytest.mark.full
    def test_stopped_early_it_says_so_and_is_not_trained_on(self, run: Run, config: Path, tmp_path: Path) -> None:
        held_out = write_chats(tmp_path / "eval.jsonl", 8)
        given = (f"data.eval_path={held_out}", "training.eval_steps=1", "training.max_steps=5")
        stops = ("training.early_stopping_patience=1", "training.early_stopping_threshold=100")
        for again in ((), ("--resume",)):
            code, out, err = run("train", config, *given, *stops, *again)
            assert code == 0, err
            assert "complete (early stopping: no improvement in 1 evaluation): step 2 of 5" in " ".join(out.split())
            assert [step["step"] for step in steps_of(tmp_path / "out")] == [1, 2]
        assert (tmp_path / "out" / "checkpoint-2").is_dir()

    @pytest.mark.full
    def test_a_trial(self, run: Run, config: Path, tmp_path: Path) -> None:
        code, out, err = run("train", config, "training.max_steps=1", "--max-samples", 10, "--json")
        assert code == 0, err
        said = json.loads(out)
        assert said["numbers"]["samples"] == 10
        assert said["folder"] == str(tmp_path / "out-10-samples")
        assert not (tmp_path / "out").exists()

    @pytest.mark.full
    def test_a_run_that_fails_says_so(
        self, run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from packtrain.core.errors import DataError
        from packtrain.training.trainer import PackedTrainer

        def broken(*_: Any, **__: Any) -> None:
            raise DataError("the data", got="broken")

        monkeypatch.setattr(PackedTrainer, "training_step", broken)
        code, _, err = run("train", config)
        assert code == 1
        assert "broken" in err
        assert facts_of(tmp_path / "out")["outcome"]["status"] == "failed"
        assert "DataError: the data" in facts_of(tmp_path / "out")["outcome"]["detail"]

    @pytest.mark.parametrize(
        ("rate", "given", "code"),
        [
            ("default", (), 1),
            ("all", ("data.max_failure_rate=0.5",), 0),
            ("none", ("data.max_failure_rate=0",), 1),
            ("fail", ("data.max_failure_rate=0.5", "data.on_error=fail"), 1),
        ],
    )
    def test_samples_that_cannot_be_decoded_end_a_small_run_too(
        self, run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: str, given: Any, code: int
    ) -> None:
        """Of 40 samples: 4, or 1 where none may be lost; a run of three steps, and a whole epoch."""
        from packtrain.core.errors import RecordError
        from packtrain.delivery.encode.pack_source import PackSource

        encoded, every = PackSource._encode_sample, 40 if rate == "none" else 10

        def damaged(self: PackSource, number: int, *rest: Any) -> Any:
            if number % every == 0:
                raise RecordError("decode", "image cannot be decoded")
            return encoded(self, number, *rest)

        monkeypatch.setattr(PackSource, "_encode_sample", damaged)
        out = tmp_path / "page" / "mine.html"
        length = "training.max_steps=5" if rate == "default" else "training.num_train_epochs=1"
        settings = (length, "training.packing_check=false", f"report.out={out}", "report.title=Of my own")
        config.write_text(config.read_text().replace("  max_steps: 3\n", ""))
        found, said, err = run("train", config, *settings, *given)
        assert found == code, err
        assert facts_of(tmp_path / "out")["outcome"]["status"] == ("failed" if code else "complete")
        assert (tmp_path / "out" / "final").exists() == (not code)
        assert ("could not be delivered" in err) == bool(code)
        assert "UserWarning" not in err
        assert "Of my own" in out.read_text()
        assert not (tmp_path / "out" / "report.html").exists()
        assert ("(4 more could not be decoded)" in said) == (not code)
        assert facts_of(tmp_path / "out")["outcome"]["undelivered"] > 0

    def test_its_ledger_has_the_entries_of_evaluation(self, run: Run, config: Path, tmp_path: Path) -> None:
        """Of held-out records not again who is in which part."""
        for name in ("train", "eval"):
            with write_chats(tmp_path / f"{name}.jsonl", 20, seed=len(name)).open("a") as more:
                more.write(json.dumps({"id": f"bad-{name}", "messages": [{"role": "user", "content": "no"}]}) + "\n")
        settings = ("training.packing_check=false", "data.max_failure_rate=0.5", "training.max_steps=1")
        code, _, err = run("train", config, *settings, f"data.eval_path={tmp_path / 'eval.jsonl'}", "data.max_packs=1")
        assert code == 0, err
        lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
        assert sum("eval.jsonl" in line["origin"] for line in lines) == 1, "max_packs leaves none out"
        assert sum("train.jsonl" in line["origin"] for line in lines) > 1
        other = f"training.output_dir={tmp_path / 'other'}"
        code, _, err = run("train", config, *settings, "data.eval_size=0.5", other)
        assert code == 0, err
        lines = [json.loads(line) for line in (tmp_path / "other" / "ledger.jsonl").read_text().splitlines()]
        assert len({line["origin"] for line in lines}) == len(lines) == 12

    @pytest.mark.full
    @pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
    def test_adapters(self, run: Run, config: Path, tmp_path: Path, method: str) -> None:
        pytest.importorskip("bitsandbytes" if method == "qlora" else "peft")
        code, out, err = run("train", config, f"model.method={method}", "model.lora_rank=4", "--json")
        assert code == 0, err
        said = json.loads(out)
        assert any("model.merge_adapters=true saves merged weights" in note for note in said["notes"])
        trainable = said["model"]["trainable"][0]
        assert 0 < trainable["trained"] < trainable["weights"] / 4
        assert (tmp_path / "out" / "final" / "adapter_model.safetensors").exists()

    @pytest.mark.full
    def test_two_processes(self, config: Path, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "packtrain.cli", "train"]
        environment = {**os.environ, "PACKTRAIN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, config], capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("packed training into") == 1, "only the first process prints"
        facts = facts_of(tmp_path / "out")
        assert (facts["world_size"], facts["outcome"]["status"]) == (2, "complete")
        assert facts["packs_per_step"] % 2 == 0
        assert [step["step"] for step in steps_of(tmp_path / "out")] == [1, 2, 3]


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server that wants a user, a password and a signature; the whole URL of its chats."""
    content = write_chats(tmp_path / "served.jsonl", 40).read_bytes()
    word = base64.b64encode(b"me:SECRETPASS").decode()

    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = "/chats.jsonl?X-Amz-Signature=SIGSECRET"
            allowed = (self.headers.get("Authorization"), self.path) == (f"Basic {word}", asked)
            self.send_response(200 if allowed else 403)
            self.send_header("Content-Length", str(len(content) if allowed else 0))
            self.send_header("ETag", "one")
            self.end_headers()
            if allowed and self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("PACKTRAIN_URLS", "{}")
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}/chats.jsonl"
        yield f"http://me:SECRETPASS@{place}?X-Amz-Signature=SIGSECRET"
        server.shutdown()


def test_secrets_are_written_and_said_nowhere(
    run: Run, config: Path, tmp_path: Path, guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    config.write_text(config.read_text().replace(str(tmp_path / "train.jsonl"), guarded))
    assert guarded in config.read_text()
    given = ("training.max_steps=1", "training.save_steps=1", "training.hub_token=hf_SECRET")
    said = run("train", config, *given)
    assert said[0] == 0, said
    kept = [tmp_path / "out", tmp_path / "cache"]
    files = [path for folder in kept for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"run.yaml", "run.json", "report.html", "plan.json", "measure.json"}
    assert [path for path in files if b"SECRET" in path.read_bytes()] == []
    monkeypatch.setenv("PACKTRAIN_URLS", "{}")
    own = run("train", tmp_path / "out" / "run.yaml", "--resume")
    assert own[0] == 2
    assert "data.dataset_path=URL" in own[2]
    again = run("train", config, "training.max_steps=2", *given[1:], "--resume", "--json")
    assert again[0] == 0, again
    assert json.loads(again[1])["resumed"] == 1
    refused = run("train", config, "data.dataset_path=" + guarded.replace("chats", "gone-{1..3}"), "--dry-run")
    assert refused[0] != 0
    assert "SECRET" not in "".join(map(str, (*said, *own, *again, *refused)))


class TestBadInput:
    def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_measured(
        self, run: Run, config: Path, tmp_path: Path
    ) -> None:
        model = tmp_path / "experts"
        shutil.copytree(resolve_model("tiny:llama", tmp_path / "models"), model)
        code, _, err = run("train", config, f"model={model}")
        assert (code, "no weights" in err) == (2, True)
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**settings, "output_router_logits": True}))
        for packing in ("true", "false"):
            code, _, err = run("train", config, f"model={model}", f"data.packing={packing}")
            assert (code, "output_router_logits: false" in err) == (2, True)
        assert not list((tmp_path / "cache").rglob("costs.parquet"))

    @pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "run.json", "checkpoint-1/optimizer_0"])
    def test_links_in_a_run_folder_are_not_written_through(
        self, run: Run, config: Path, tmp_path: Path, name: str
    ) -> None:
        victim, link = tmp_path / "victim", tmp_path / "out" / name
        victim.write_text("kept")
        link.parent.mkdir(parents=True)
        link.symlink_to(os.path.relpath(victim, link.parent))
        code, _, err = run("train", config, "--resume")
        assert code == 1
        assert f"{link}" in err.replace("\n", "")
        assert "a link to" in err
        assert victim.read_text() == "kept"

    @pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex"])
    def test_attention_that_needs_a_gpu_is_refused_before_anything_is_measured(
        self, run: Run, config: Path, tmp_path: Path, attention: str
    ) -> None:
        from_data = ("--model", "tiny:llama", "--data", tmp_path / "train.jsonl", "training.use_cpu=true")
        for given in ((config,), (config, "--dry-run"), from_data):
            code, _, err = run("train", *given, f"training.attn_implementation={attention}")
            assert code == 2
            assert f"error: training.attn_implementation found: {attention} on a CPU" in " ".join(err.split())
            assert "training.attn_implementation: sdpa" in err
            assert "measuring" not in err

    @pytest.mark.parametrize(
        ("given", "code", "words"),
        [
            (("training.learning_rat=1",), 2, "did you mean 'learning_rate'?"),
            (("model=nowhere/at/all",), 2, "no folder of that name"),
            (("data.dataset_path=nowhere.jsonl",), 2, "nowhere.jsonl"),
            (("data.packing_length=4",), 1, "no packs"),
            (("data.max_sample_length=1",), 1, "no usable record"),
            (("training.lr_scheduler_type=cosin",), 2, "cosin"),
            (("data.chat_template=chatml", "training.torch_compile=true"), 2, "cannot be given by name"),
            (("data.chat_template=chatml", "training.torch_compile=true"), 2, "which compiles its layers"),
            (("training.attn_implementation=flash_attention_9",), 2, "flash_attention_2"),
            (("model.train_vision=true",), 2, "llama has no vision encoder"),
            (("--output-dir", "{config}/run", "--dry-run"), 2, "run.yaml is a file"),
            (
                ("--output-dir", "/proc/run", "--dry-run"),
                2,
                "error: training.output_dir found: /proc/run: /proc cannot",
            ),
            (("data.cache_dir={config}/cache", "--dry-run"), 2, "error: data.cache_dir found: "),
            (("data.cache_dir=/proc/cache", "--dry-run"), 2, "error: data.cache_dir found: /proc/cache: "),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_is_said(
        self, run: Run, config: Path, tmp_path: Path, given: tuple[str, ...], code: int, words: str
    ) -> None:
        found, _, err = run("train", config, *(one.format(config=config) for one in given))
        assert found == code, err
        assert words in " ".join(err.split())
        assert not (tmp_path / "out" / "run.json").exists()

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("nowhere.yaml",), "expected: a YAML file"),
            (("folder",), "expected: a YAML file"),
            (("report",), "packtrain train report/recommended.yaml"),
            (("--resume", "nowhere"), "nowhere found: nothing is there expected: the folder of a run"),
            (("--resume", "folder"), "folder found: a folder without run.json expected: the folder of a run"),
            (("--resume", "nowhere.yaml"), "expected: a YAML file"),
            (("rum.yaml",), "did you mean 'run.yaml'?"),
            (("data.jsonl",), "packtrain train --model MODEL --data data.jsonl"),
            (
                ("model=tiny:llama", "data=data.jsonl"),
                "found: data: str instead of a section. Set data.dataset_path, or",
            ),
            (("training.learnig_rate=1",), "error: command line found: training.learnig_rate: unknown key. did you"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_no_config(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], words: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "recommended.yaml").touch()
        (tmp_path / "run.yaml").touch()
        (tmp_path / "data.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
        code, _, err = run("train", *given)
        assert code == 2
        assert words in " ".join(err.split())

    def test_a_folder_with_something_else(self, run: Run, config: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        code, _, err = run("train", config)
        assert code == 2
        assert "thesis.tex" in err
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]

    def test_two_runs_in_one_folder(self, tmp_path: Path) -> None:
        from packtrain.core.errors import ConfigError

        folder = RunFolder(tmp_path / "out")
        with folder.alone(), pytest.raises(ConfigError, match="another process is training"), folder.alone():
            pass
        with folder.alone():  # given back
            folder.check(resume=False)
        folder.begin({"training": {"run_name": "1e5"}}, RunFacts(outcome=RunOutcome(status="running")))
        assert load_config(folder.path / "run.yaml").training.run_name == "1e5"
        with folder.alone(), pytest.raises(ConfigError, match=r"(?s)another process is training.*wait until"):
            folder.check(resume=False)
        with pytest.raises(ConfigError, match=r"(?s)stopped in the middle.*packtrain train --resume") as caught:
            folder.check(resume=False)
        assert "delete" not in str(caught.value)

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        from packtrain.core.errors import ConfigError

        (tmp_path / "file").touch()
        inside = RunFolder(tmp_path / "file" / "out")
        with pytest.raises(ConfigError, match=r"(?s)training\.output_dir\n.*Not a directory"), inside.alone():
            pass
        with pytest.raises(ConfigError, match=r"(?s)training\.output_dir\n.*cannot be written.*another output_dir"):
            RunFolder(Path("/proc/new/out")).check(resume=False)  # nothing else is closed to root

    def test_stopped_at_once(self, run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where libraries are left in the middle of a step, Python does not take them down: they may crash."""
        ended: list[str] = []

        def stopped(*_: Any, ready: Any, **__: Any) -> None:
            ready(SimpleNamespace(run=SimpleNamespace(folder=tmp_path)))
            raise KeyboardInterrupt

        monkeypatch.setattr("packtrain.app.train.train.train", stopped)
        monkeypatch.setattr(
            "packtrain.delivery.trainers.watch.end_process", lambda said, *, code: ended.append(f"{said} {code}")
        )
        run("train", config, "--json")
        assert len(ended) == 1
        assert "interrupted; there is no checkpoint" in ended[0]
        assert ended[0].endswith(" 130")
        assert "nothing was trained yet" in _what_is_lost([])


@pytest.fixture(autouse=True)
def _no_signals_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
