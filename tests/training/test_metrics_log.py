"""metrics.jsonl: whatever happens to the writer, every step is there once and can be read back as it was."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from made_metrics import eval_of, step_of

from packtrain.core.errors import ArtifactError
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.metrics_log import MetricsLog, read_metrics
from packtrain.runs.step_metrics import METRICS, STEP_KEYS, StepMetrics, flat, step_from_plain, to_plain
from packtrain.runs.training_run import read_run

WARNING = EarlyWarning(kind="loss_spike", step=2, message="NaN", advice="größer, \ud800")


def write(path: Path, steps: int) -> None:
    with MetricsLog(path) as log:
        for step in range(1, steps + 1):
            log.step(step_of(step))
            if step == 2:
                log.warning(WARNING)
                log.evaluation(eval_of(2, 1.5))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 3)
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.steps == tuple(step_of(step) for step in (1, 2, 3))
    assert found.evaluations == (eval_of(2, 1.5),)
    assert [one.message for one in found.warnings] == ["NaN"]  # a text, not a number
    assert found.unreadable == 0
    assert lines(tmp_path / "metrics.jsonl")[0] == {"kind": "metrics", "version": 1}
    assert [line["kind"] for line in lines(tmp_path / "metrics.jsonl")[1:]] == [
        "step",
        "step",
        "warning",
        "eval",
        "step",
    ]


def test_numbers_that_are_not_finite_come_back_and_unknown_ones_stay_unknown(tmp_path: Path) -> None:
    odd = step_of(1, loss=math.nan, grad_norm=math.inf, rank_seconds=(1.0, -math.inf), mfu=None)
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.step(odd)

    def strict(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)
    (found,) = read_metrics(tmp_path / "m.jsonl").steps
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert (found.grad_norm, found.rank_seconds, found.mfu) == (math.inf, (1.0, -math.inf), None)


def test_resuming_cuts_away_what_will_be_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 6)
    log = MetricsLog(path)
    assert log.resume(4) == step_of(4)
    for step in range(5, 9):
        log.step(step_of(step, loss=9.0))
    log.close()
    found = read_metrics(path)
    assert [one.step for one in found.steps] == list(range(1, 9))
    assert [one.loss == 9.0 for one in found.steps] == [False] * 4 + [True] * 4
    assert len(found.warnings) == len(found.evaluations) == 1  # of step 2, which stays


def test_warnings_and_evaluations_of_cut_steps_go_with_them(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 4)
    log = MetricsLog(tmp_path / "m.jsonl")
    assert log.resume(1) == step_of(1)
    log.close()
    found = read_metrics(tmp_path / "m.jsonl")
    assert (len(found.steps), found.evaluations, found.warnings) == (1, (), ())


def test_an_evaluation_that_comes_again_is_cut_with_what_follows_it(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 3)
    for evaluated in (True, False):
        log = MetricsLog(tmp_path / "m.jsonl")
        assert log.resume(2, evaluated=evaluated) == step_of(2)
        log.close()
        found = read_metrics(tmp_path / "m.jsonl")
        assert (len(found.steps), len(found.warnings), len(found.evaluations)) == (2, 1, int(evaluated))


@pytest.mark.parametrize("cut", range(1, 200, 13))
def test_a_line_that_was_never_finished_is_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 3)
    os.truncate(path, path.stat().st_size - cut)
    before = read_metrics(path)  # a reader beside a running writer sees the same
    assert [one.step for one in before.steps] == [1, 2]
    assert before.unreadable == 0
    log = MetricsLog(path)
    assert log.resume(7) == step_of(2)
    log.step(step_of(3))
    log.close()
    assert [one.step for one in read_metrics(path).steps] == [1, 2, 3]


def test_every_prefix_of_a_file_can_be_read_and_resumed(tmp_path: Path) -> None:
    path, copy = tmp_path / "m.jsonl", tmp_path / "copy.jsonl"
    write(path, 2)
    whole = path.read_bytes()
    seen = set()
    for size in range(0, len(whole) + 1, 37):
        copy.write_bytes(whole[:size])
        seen.add(len(read_metrics(copy).steps))
        log = MetricsLog(copy)
        log.resume(2)
        log.step(step_of(3))
        log.close()
        assert read_metrics(copy).steps[-1].step == 3
    assert seen == {0, 1, 2}


def test_a_killed_writer_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.append({str(Path(__file__).parent)!r})
from made_metrics import step_of
from packtrain.runs.metrics_log import MetricsLog
log = MetricsLog({str(tmp_path / "m.jsonl")!r})
for step in range(1, 6):
    log.step(step_of(step))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [one.step for one in read_metrics(tmp_path / "m.jsonl").steps] == [1, 2, 3, 4, 5]


def test_a_damaged_line_in_the_middle_is_counted_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 3)
    parts = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*parts[:2], b"\xff\x00{\n", b'{"kind": "step", "step": 2}\n', *parts[2:]]))
    found = read_metrics(path)
    assert (len(found.steps), found.unreadable) == (3, 2)
    assert MetricsLog(path).resume(3) == step_of(3)


def test_metrics_of_another_run_are_not_continued_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 3)
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="another run"):
        MetricsLog(path).step(step_of(1))
    assert path.read_bytes() == before


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "metrics", "version": 2}\n')
    with pytest.raises(ArtifactError, match="version 2"):
        read_metrics(path)
    with pytest.raises(ArtifactError, match="version 2"):
        MetricsLog(path).resume(0)
    assert path.read_text() == '{"kind": "metrics", "version": 2}\n'
    with pytest.raises(ArtifactError, match="No such file"):
        read_metrics(tmp_path / "none.jsonl")


def test_no_step_is_written_twice(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.step(step_of(2))
    with pytest.raises(AssertionError, match="after step 2"):
        log.step(step_of(2))


def test_a_full_disk_is_said_and_leaves_no_half_line(tmp_path: Path) -> None:
    """The limit on the size of files stands in for the end of the disk."""
    path = tmp_path / "m.jsonl"
    code = f"""
import resource, signal, sys
sys.path.append({str(Path(__file__).parent)!r})
from made_metrics import step_of
from packtrain.core.errors import ArtifactError
from packtrain.runs.metrics_log import MetricsLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = MetricsLog({str(path)!r})
log.step(step_of(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1 << 30))
try:
    log.step(step_of(2))
except ArtifactError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
log.step(step_of(3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "make room" in done.stdout, done.stderr
    found = read_metrics(path)
    assert ([one.step for one in found.steps], found.unreadable) == ([1, 3], 0)


@pytest.mark.parametrize("what", ["deleted", "moved", "replaced"])
def test_a_folder_that_is_taken_away_is_noticed(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"
    with MetricsLog(folder / "m.jsonl") as log:
        log.step(step_of(1))
        shutil.rmtree(folder) if what == "deleted" else folder.rename(tmp_path / "elsewhere")
        if what == "replaced":
            folder.mkdir()
            (folder / "m.jsonl").touch()
        with pytest.raises(ArtifactError, match="deleted, moved or replaced while the run was writing"):
            log.step(step_of(2))


def test_a_rank_that_does_not_write_does_nothing(tmp_path: Path) -> None:
    with MetricsLog(None) as log:
        assert log.resume(3) is None
        log.step(step_of(1))
        log.warning(WARNING)
        log.sync()


def test_a_report_finds_everything_that_it_looks_for(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 3)
    run = read_run(tmp_path)
    assert [name for name in STEP_KEYS if not run.steps.known(name)] == []
    assert (list(run.steps["step"]), list(run.steps.rates), len(run.warnings)) == ([1, 2, 3], ["language"], 1)
    assert (run.warnings[0].kind, run.evaluations[0].eval_loss) == ("loss_spike", 1.5)
    assert len(to_plain(step_of())) == len(fields(StepMetrics))


def test_loggers_get_numbers_by_the_same_names() -> None:
    told = flat(step_of(3, learning_rates={"language": 1e-4, "vision": 1e-5}, mfu=None))
    assert {"loss", "grad_norm", "perf/global_seq_len_avg", "tokens_per_second", "samples_seen", "spread"} <= set(told)
    assert (told["learning_rate"], told["learning_rate/vision"]) == (1e-4, 1e-5)
    assert told["memory_share"] == 0.75
    assert "mfu" not in told
    assert "loss" not in flat(step_of(3, loss=None, supervised_tokens=0)), "a step without one has none"
    assert all(isinstance(value, int | float) for value in told.values())
    assert "learning_rate/language" not in flat(step_of(3))


def test_steps_of_an_earlier_version_can_be_read() -> None:
    """Whatever metric is new since then."""
    for name, metric in METRICS.items():
        line = {**to_plain(step_of(3)), "kind": "step"}
        del line[metric.name]
        if name in ("step", "samples_seen"):
            with pytest.raises(KeyError):
                step_from_plain(line)
        else:
            found = step_from_plain(line)
            assert (found.step, bool(getattr(found, name))) == (3, False)
