"""summary.md: one document with what the other files say, and the commands that come next."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import studies
from study_parts import Made

from packtrain.reports.recommended import checklist
from packtrain.reports.study_files import write_study

Written = tuple[Made, Path]


def test_it_has_every_part_and_the_tables_of_the_other_files(lvis: Written) -> None:
    text = (lvis[1] / "summary.md").read_text(encoding="utf-8")
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings[:4] == ["The data", "Packing lengths tried", "Padding versus packing", "Method"]
    assert {"Recommended settings", "Memory per GPU", "Next steps", "Assumptions"} <= set(headings)
    others = [(lvis[1] / "figures" / name).read_text(encoding="utf-8") for name in ("comparison_table.md",)]
    tables = re.findall(r"(?:^\|.*\n)+", others[0], re.MULTILINE)
    assert len(tables) == 2
    assert all(table in text for table in tables), "the same tables, word for word"


def test_the_commands_are_in_order_and_for_these_gpus(lvis: Written) -> None:
    study = lvis[0].study
    commands = [shlex.split(task.command) for task in checklist(study, lvis[1])]
    assert [next(word for word in command if word in ("train", "verify", "report")) for command in commands] == [
        *("train", "verify", "train", "train", "train", "report"),
    ]
    assert "--dry-run" in commands[0]
    assert "--max-samples=1000" in commands[2]
    assert commands[3][:3] == ["torchrun", "--nproc-per-node", str(study.gpus)]
    assert "data.packing=false" in commands[4]
    assert commands[5][-2:] == [commands[3][-1], commands[4][-1]], "what was trained is compared"
    alone = checklist(replace(study, gpus=1), lvis[1])
    assert alone[3].command.startswith("packtrain train ")


def test_without_packing_there_is_nothing_to_prove_or_compare(tmp_path: Path) -> None:
    made = studies.single()
    write_study(made.study, made.samples, tmp_path / "study")
    text = (tmp_path / "study" / "summary.md").read_text(encoding="utf-8")
    assert "packtrain verify" not in text
    assert "Try 1,000" not in text, "of a single sample"
    assert "packtrain report" not in text
