"""`packtrain report`: where the page goes, what is said, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from commands import Run

sys.path.append(str(Path(__file__).parents[1] / "reports"))

from made_runs import Made, write_run


def test_the_page_of_a_run_lies_in_its_folder(run: Run, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=12))
    code, out, _ = run("report", folder)
    assert code == 0
    assert "Loss " in out
    assert str(folder / "report.html") in out
    assert (folder / "report.html").stat().st_size > 10_000


def test_several_runs_are_compared_in_the_named_file(run: Run, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / mode, Made(steps=12, mode=mode)) for mode in ("packed", "padded")]
    code, out, _ = run("report", *folders, "--out", tmp_path / "both.html", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["page"] == str(tmp_path / "both.html")
    assert [one["label"] for one in said["runs"]] == ["Packed", "Padded"]
    assert said["comparison"]["samples"] > 0
    assert (tmp_path / "both.html").exists()
    assert not (folders[0] / "report.html").exists()


def test_a_comparison_leaves_the_pages_of_runs_alone(run: Run, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / mode, Made(steps=12, mode=mode)) for mode in ("packed", "padded")]
    for folder in folders:
        assert run("report", folder)[0] == 0
    own = [(folder / "report.html").read_bytes() for folder in folders]
    code, out, _ = run("report", *folders, "--json")
    assert (code, json.loads(out)["page"]) == (0, str(folders[0] / "comparison-padded.html"))
    said = run("report", *folders)[1]
    assert "comparison-padded.html" in said
    assert "Steps of the runs hold different samples" in said
    assert [(folder / "report.html").read_bytes() for folder in folders] == own
    assert "too few steps to compare speed" in (folders[0] / "comparison-padded.html").read_text()


def test_what_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("report", tmp_path / "none")[0] == 2
    code, _, err = run("report", tmp_path)
    assert code == 2
    assert "neither run.json nor metrics.jsonl" in err
    good = write_run(tmp_path / "run", Made(steps=2))
    assert run("report", good, tmp_path / "none")[0] == 2
    assert not (good / "report.html").exists(), "nothing is written when one of the runs is none"
    assert run("report", good, "--out", tmp_path)[0] == 2
    assert run("report")[0] == 2
