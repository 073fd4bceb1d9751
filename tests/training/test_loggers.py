"""What loggers are told through `report_to`: the numbers of metrics.jsonl, under the same names."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import dataset, trainer_of
from test_meter import MODEL

from packtrain.runs.metrics_log import METRICS, MetricsLog
from packtrain.training.meter import StepMeter

pytestmark = pytest.mark.contract
STEPS = 3
NAMES = (  # some that must be there; all that are numbers are compared
    *("loss", "grad_norm", "fill", "mfu", "flops", "tokens_per_second", "samples_seen", "data_wait_share"),
    *("perf/global_seq_len_avg", "perf/global_seq_len_min", "perf/global_seq_len_max"),
)
Told = dict[str, dict[int, float]]  # by name and step


def train_told(folder: Path, logger: str) -> Any:
    """A short run with an evaluation, which writes metrics.jsonl and tells a logger; its state afterwards."""
    meter = StepMeter(model=MODEL, capacity=128)
    with MetricsLog(folder / METRICS) as log:
        parts = {"meter": meter, "on_step": log.step, "eval_dataset": dataset(epochs=1)}
        trainer = trainer_of(
            dataset(), folder, parts=parts, report_to=[logger], max_steps=STEPS, save_strategy="no",
            eval_strategy="steps", eval_steps=STEPS, run_name="ours",
        )  # fmt: skip
        trainer.train()
    return trainer.state


def assert_told(told: Told, folder: Path, state: Any) -> None:
    """Every number of every step, and the evaluation."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(steps[0][name] is not None for name in NAMES)
    for line in steps:
        step = line["step"]
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
        assert set(NAMES) <= set(numbers)
        for name, value in numbers.items():
            assert told[f"train/{name}"][step] == pytest.approx(value, rel=1e-5), name
        assert told["train/learning_rate"][step] == pytest.approx(line["learning_rates"]["language"], rel=1e-5)
    [evaluated] = [line for line in state.log_history if "eval_loss" in line]
    assert told["eval/loss"] == pytest.approx({STEPS: evaluated["eval_loss"]}, rel=1e-5)
    assert told["eval/samples"][STEPS] == evaluated["eval_samples"]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    state = train_told(tmp_path, "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    told = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert_told(told, tmp_path, state)


@pytest.mark.full
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    settings = {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    state = train_told(tmp_path, "wandb")
    assert wandb.run.name == "ours"
    wandb.finish()
    [written] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    told: Told = {}
    for _ in range(120):  # its own process writes the file, and may not be done where the machine is busy
        for line in wandb_lines(written):
            for name, value in line.items():
                told.setdefault(name, {})[int(line["train/global_step"])] = value
        if "eval/loss" in told:
            break
        time.sleep(0.5)
    assert_told(told, tmp_path, state)


def wandb_lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a run that was never sent anywhere has in its file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in logged(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def logged(content: bytes, block: int = 32_768, head: int = 7) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB: blocks, in which pieces stand with a checksum, length and kind."""
    at, whole = head, b""  # behind the head of the file itself
    while at + head <= len(content):
        left = block - at % block
        if left < head:  # too little for a piece
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + head : at + head + size]
        at += head + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""
