"""What the README and the documentation show works as it is written."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from packtrain.app.train.resolve import resolve_run
from packtrain.cli import app
from packtrain.config.run_config import load_config
from packtrain.families.registry import all_families
from packtrain.families.tiny import tiny_families
from packtrain.records.synthetic import write_dataset

ROOT = Path(__file__).parents[1]
# So that a CPU is done in seconds.
QUICKER = {
    "measure": ("--check", "0", "--workers", "1"),
    "train": ("data.packing_length=2048", "data.max_samples=24"),
}
LAUNCHERS = ("--nproc-per-node",)  # options of torchrun
IMPORTS = re.compile(r"^from (packtrain\S*) import (\([^)]*\)|.*)$", re.M)
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def test_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    data = write_dataset(tmp_path, pictures=16)
    lines = [line for line in data.read_text().splitlines() if '"objects"' in line]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    names: dict[str, object] = {}
    exec(example.replace('out="costs"', 'out="costs", check=0, workers=1'), names)
    assert len(names["table"]) == len(names["smaller"]) == 16  # type: ignore[arg-type]
    assert names["smaller"].column("patches").sum() < names["table"].column("patches").sum()  # type: ignore[attr-defined]


def test_the_config_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "run.yaml").write_text(text)
    run = resolve_run(load_config(tmp_path / "run.yaml"), world_size=2)
    assert run.notes[1:] == (), "nothing in it needs words, but how the size of a step is meant"
    assert (run.model.method, run.size.samples, run.length.epochs) == ("lora", 32, 2)
    assert run.arguments["learning_rate"] == 1e-4


def test_every_guarantee_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "internals" / "guarantees.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "guarantee" not in line]
    assert rows
    for row in rows:
        named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"


@pytest.mark.full
def test_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with a tiny model in place of the one from the hub."""
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    commands = [command for block in blocks for command in re.findall(r"^packtrain (.*)$", block, re.M)]
    first = ["doctor", "train", "train", "report"]  # the data alone
    verbs = [*first, "measure", "plan", "pack", "inspect", "verify", "train", "train", "report"]
    assert [command.split()[0] for command in commands] == verbs
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path, pictures=160).rename(tmp_path / "train.jsonl")
    for path in (tmp_path / "images").glob("0*.jpg"):  # a quarter of the size: a CPU sees them in seconds
        with Image.open(path) as picture:
            smaller = picture.resize((picture.width // 4, picture.height // 4))
        smaller.save(path)
    for command in commands:
        words = [re.sub(r"^Qwen/.*", "tiny:qwen2_5_vl", word) for word in shlex.split(command)]
        done = CliRunner().invoke(app, [*words, *QUICKER.get(words[0], ())])
        assert done.exit_code == 0, done.output
    for name in ("costs/costs.parquet", "costs/ledger.jsonl", "report/report.html", "report/recommended.yaml"):
        assert (tmp_path / name).exists()
    for name in ("comparison.html", "first/final/model.safetensors", "padded/metrics.jsonl"):
        assert (tmp_path / name).exists()
    for name in ("plan/plan.json", "run/report.html", "run/final/model.safetensors", "run/metrics.jsonl"):
        assert (tmp_path / name).exists()


def test_every_family_is_named() -> None:
    table = (ROOT / "README.md").read_text().partition("## Models")[2].partition("\n\n`tiny:FAMILY`")[0]
    assert sorted(re.findall(r"`tiny:(\w+)`", table)) == sorted(tiny_families())
    with_rules = {name for name, one in all_families().items() if one.rule is not None}
    assert {name for name in with_rules if not name.endswith("text")} <= set(tiny_families())


def test_the_reference_is_that_of_the_code() -> None:
    """After a change: make reference"""
    pages = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()
    assert {path.name for path in pages} == {"cli.md", "config.md", "run-folder.md"}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what the code says: make reference"


def test_names_of_the_package_exist() -> None:
    """Looked up in the source: importing all of it would take as long as the rest of this file."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    named = {f"{module}.{name}" for module, names in IMPORTS.findall(text) for name in re.findall(r"\w+", names)}
    assert len(named) > 20
    for name in named | set(re.findall(r"(?<![\w/.-])packtrain(?:\.[a-z_]+)+\.[A-Za-z_]+", text)):
        module, _, last = name.rpartition(".")
        place = ROOT.joinpath("src", *module.split("."))
        if (place / last).is_dir() or (place / f"{last}.py").exists():
            continue
        source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
        assert re.search(rf"\b{last}\b", source), name


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_of(command: Any) -> Iterator[str]:
    """Of a command and of all below it."""
    yield "--help"
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_options_exist(document: Path) -> None:
    text = document.read_text()
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        page = document.parent / target if target else document
        assert page.exists(), target
        assert not heading or heading in anchors(page), f"{target}#{heading}"
    options = {*options_of(get_command(app)), *LAUNCHERS}
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert option in options, option
