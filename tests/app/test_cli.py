"""The command line: exit codes, messages without tracebacks, and JSON that stands alone."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Run
from PIL import Image
from rich.progress import Progress
from rich.table import Table

import packtrain
from packtrain.app.doctor import _install
from packtrain.app.measure import measure_outcome
from packtrain.cli.config_options import GROUPS
from packtrain.cli.measure import show_measured
from packtrain.cli.terminal import ElapsedColumn, Terminal
from packtrain.cli.train import PrepareBar
from packtrain.config.data_section import MEDIA_LIMITS
from packtrain.config.run_config import load_config
from packtrain.config.sections import KEYS
from packtrain.families import tiny
from packtrain.measuring.measurement import MeasureProgress as Measuring
from packtrain.packing.plan_builder import PackProgress

RECORDS = [
    {"id": f"r{n}", "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(20)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def measure(data: object, model: object, out: object, *more: object) -> tuple[object, ...]:
    return ("measure", data, "--model", model, "--out", out, "--workers", 1, "--check", 0, *more)


def test_json_is_all_there_is_on_stdout(run: Run, data: Path, model: Path, tmp_path: Path) -> None:
    code, out, _ = run(*measure(data, model, tmp_path / "out", "--json"))
    assert code == 0
    said = json.loads(out)
    assert (said["reused"], said["counts"]["rows"], said["measured_by"]) == (False, 20, "rule")
    assert said["family"] == "qwen2_5_vl"
    code, out, _ = run(*measure(data, model, tmp_path / "out", "--json"))
    assert (code, json.loads(out)["reused"]) == (0, True)


def test_people_get_a_table_and_the_next_step(run: Run, data: Path, model: Path, tmp_path: Path) -> None:
    code, out, err = run(*measure(data, model, tmp_path / "out"))
    assert (code, err) == (0, "")
    assert "20 records read = 20 measured + 0 skipped" in out
    assert f"next: packtrain plan {tmp_path / 'out'} " in out
    code, out, _ = run(*measure(data, model, tmp_path / "out"))
    assert "Nothing has changed" in out
    os.utime(data, ns=(1, 1))
    code, out, err = run(*measure(data, model, tmp_path / "out"))
    assert "measuring again:" in err, "said before the work begins"
    assert "data.data.jsonl.mtime_ns" in err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"model": "tiny:qwen9"}, 2, ["'qwen9'", "did you mean 'tiny:qwen"]),
        ({"model": "qwen2_5_vl"}, 2, ["did you mean tiny:qwen2_5_vl?"]),
        ({"model": "no/such/model/folder"}, 2, ["no folder of that name"]),
        ({"model": "nobody/such-a-model"}, 2, ["nobody/such-a-model", "local model folder"]),
        ({"data": "nowhere.jsonl"}, 2, ["dataset_path", "which does not exist"]),
        ({"--dataset-format": "jsnl"}, 2, ["dataset_format", "did you mean 'jsonl'?"]),
        ({"--dataset-type": "vision_audio"}, 2, ["audio has no token rule yet"]),
        ({"--dataset-type": "visoin"}, 2, ["did you mean 'vision'?"]),
        ({"--workers": 0}, 2, ["workers: 0", "a positive integer"]),
        ({"--workers": "many"}, 2, ["--workers"]),
        ({"--engine": "rai"}, 2, ["did you mean 'ray'?"]),
        ({"--address": "auto"}, 2, ["--engine ray"]),
        ({"--limit": 0}, 2, ["max_samples: 0", "a positive integer"]),
        ({"--check": -1}, 2, ["check: -1", "an integer of at least 0"]),
        ({"--max-pixels": 0}, 2, ["processor_config.max_pixels: 0", "a positive integer"]),
        ({"--max-failure-rate": 7}, 2, ["max_failure_rate: 7.0", "a share from 0 to 1"]),
        ({"--on-error": "ignore"}, 2, ["on_error", "skip or fail"]),
        ({"--source": "other"}, 2, ["sources", "data"]),
        ({"--schema": "mesages"}, 2, ["did you mean 'messages'?"]),
        ({"--schema": "sharegpt"}, 2, ["text. ShareGPT is conversations", "leave it out to detect it"]),
        ({"--loss-on": "asistant"}, 2, ["loss_on"]),
        ({"--object-ordering": "sort"}, 2, ["did you mean 'sorted'?"]),
        ({"--object-template": "no-such-file.txt"}, 2, ["--object-template", "no-such-file.txt"]),
        ({"--formatting-func": "no_such_module:f"}, 2, ["no_such_module", "PYTHONPATH"]),
        ({"--formatting-func": "json"}, 2, ["module:function"]),
        ({"--split": "x", "--no-such-option": 1}, 2, ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_options(
    run: Run, data: Path, model: Path, tmp_path: Path, change: dict[str, object], code: int, words: list[str]
) -> None:
    given: dict[str, object] = {"--workers": 1, "--check": 0, **change}
    arguments = [given.pop("data", data), "--model", given.pop("model", model), "--out", tmp_path / "out", "--json"]
    found, out, err = run("measure", *arguments, *(item for pair in given.items() for item in pair))
    assert (found, out) == (code, ""), err
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


def test_options_of_other_trainers(run: Run) -> None:
    for given, meant in (
        (("train", "run.yaml", "--learning_rate", "1e-4"), "training.learning_rate=1e-4"),
        (("train", "run.yaml", "--per_device_train_batch_size=2"), "training.per_device_train_batch_size=2"),
        (("train", "run.yaml", "--cutoff_len", 2048), "data."),
        (("measure", "x", "--max_pixels", 12544), "--max-pixels"),
    ):
        code, _, err = run(*given)
        assert code == 2
        assert meant in " ".join(err.split()), err


def test_help_and_completion(run: Run) -> None:
    assert run("-h")[:2] == run("--help")[:2]
    assert "--max-pixels" in run("measure", "-h")[1]
    assert "--show-completion" in run("-h")[1]


def test_init_writes_a_config_that_loads(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    assert run("init", path, "--model", "tiny:qwen3_vl", "--data", "a: b.jsonl", "-o", "1e5")[0] == 0
    config = load_config(path)
    assert (config.model.model_name_or_path, config.data.dataset_path) == ("tiny:qwen3_vl", "a: b.jsonl")
    assert config.data.packing_length is None, "train makes packs as long as a step needs"
    assert config.training.given() == {"effective_batch_size": 16, "output_dir": "1e5"}
    text = path.read_text()
    assert "# Learning rate schedule: linear, cosine, " in text, "values as they are typed"
    assert text.index(" #learning_rate: ") < text.index(" #vit_lr:"), "what people set comes first"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").touch()
    assert run("init", "sub.yaml", "--data", "here.jsonl")[0] == 0
    assert load_config(tmp_path / "sub.yaml").data.dataset_path == str(tmp_path / "here.jsonl")
    code, _, err = run("init", path)
    assert (code, "not overwritten" in err) == (2, True)
    said = run("init", tmp_path / "url.yaml", "--data", "http://me:SECRET@host/a.jsonl")[1]
    assert "data.dataset_path=URL" in said
    assert load_config(tmp_path / "url.yaml").data.dataset_path == "http://host/a.jsonl"
    # Every default stands as it would be said: with all of them the config still loads.
    said = [line.replace("#", "", 1) if re.match(r" *#\w+:( \S|$)", line) else line for line in path.open()]
    (tmp_path / "all.yaml").write_text("".join(line for line in said if not line.startswith("  #")))
    every = load_config(tmp_path / "all.yaml")
    known = {name: one.default for name, one in KEYS.items() if one.default is not None and not one.shown}
    known |= {"effective_batch_size": 16}
    found = {**every.model.given(), **every.data.given(), **every.training.given()}
    assert {name: found.get(name) for name in known} == known


def test_doctor_says_what_is_there_and_what_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.app.doctor.find_spec", lambda name: None if name == "ray" else find_spec(name))
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    parts = {part["name"]: part for part in json.loads(out)["parts"]}
    assert parts["Python"]["details"].startswith(platform.python_version())
    assert parts["ray"]["details"] == ""
    assert {"torch", "GPUs", "driver", "flash-attn", "flex attention", "cache"} <= set(parts)
    code, out, _ = run("doctor")
    assert "[ray]'" in out, "brackets are no markup"
    for url, folder in ((f"file://{Path.cwd()}", str(Path.cwd())), ("https://host/packtrain.git", "packtrain")):
        noted = SimpleNamespace(read_text=lambda _, url=url: json.dumps({"url": url}))
        monkeypatch.setattr("packtrain.app.doctor.metadata.distribution", lambda _, noted=noted: noted)
        assert _install("ray") == f"pip install '{folder}[ray]'"


def test_what_is_piped_is_not_cut(run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    note = "skipped: torch is not installed (pip install 'packtrain[train]')"
    monkeypatch.setattr("packtrain.app.measure.load_reference", lambda _: note)
    code, out, err = run("measure", data, "--model", "tiny:qwen2_5_vl", "--out", tmp_path / "out", "--workers", 1)
    assert code == 0, err
    assert "…" not in out
    assert "pip install 'packtrain[train]'" in out, "brackets are no markup"
    table = Table("name", *(["x" * 30] * 8))
    table.add_row("row", *(["y" * 30] * 8))
    terminal = Terminal(file=StringIO())
    terminal.print(table)
    assert "y" * 30 in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_values_say_what_they_are(data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config = packtrain.DatasetConfig(dataset_path=str(data), model=str(model), packing_length=512, check=0, workers=1)
    dataset = packtrain.MultiModalDataset(config)
    assert "packing_length=512" in repr(config)
    assert "None" not in repr(config), "what was said, and no more"
    assert "not built" in repr(dataset)
    dataset.build()
    table = packtrain.measure(data, model=str(model), out=tmp_path / "out", check=0, workers=1)
    assert inspect.signature(packtrain.measure).return_annotation == "CostTable", "as help() shows it"
    assert repr(table) == f"CostTable('{tmp_path / 'out'}': 20 samples, 0 in the ledger)"
    assert "packs of 512 tokens (best_fit), epochs: 1)" in repr(dataset.plan)
    assert repr(dataset.plan) in repr(dataset)
    assert repr(dataset.loader()).startswith("PackLoader(Schedule(")


def test_a_narrow_terminal_cuts_no_number(data: Path, model: Path, tmp_path: Path) -> None:
    outcome = measure_outcome(data, model=str(model), out=tmp_path / "out", workers=1, check=0)
    pages = {}
    for columns in (40, 60, 120):
        terminal = Terminal(file=StringIO(), force_terminal=True, color_system=None, width=columns)
        show_measured(outcome, terminal)
        pages[columns] = terminal.file.getvalue()  # type: ignore[attr-defined]
        cells = {cell.strip() for line in pages[columns].splitlines() for cell in re.split(r" {2,}|[│┃]", line)}
        table = outcome.table.summary.statistics.columns["tokens"]
        assert {f"{table[name]:,.0f}" for name in ("min", "median", "p95", "p99", "max", "total")} <= cells
        assert "…" not in pages[columns]
    assert [page.count("per record") > 1 for page in pages.values()] == [True, False, False], "columns that moved below"
    assert ["┃" in page for page in pages.values()] == [False, False, True]


def test_copies_and_few_labels_are_said(run: Run, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "so " * 200}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "data.jsonl").write_text(3 * (json.dumps({"messages": turns}) + "\n"))
    out = run(*measure(tmp_path / "data.jsonl", "tiny:llama", tmp_path / "out"))[1]
    assert "2 of 3 records have the same text as another one" in out
    assert "of all tokens are supervised (6 of" in out


def test_bars_say_how_long() -> None:
    bar = Progress(ElapsedColumn(), console=Terminal(file=StringIO(), force_terminal=True), get_time=lambda: now[0])
    now = [0.0]
    task = bar.add_task("x", total=4)
    now[0] = 10.0
    bar.update(task, completed=2)
    assert str(ElapsedColumn().render(bar.tasks[0])).startswith("elapsed 0:10")


def test_stages_have_a_line_each_where_there_is_no_terminal() -> None:
    for terminal, quiet, said in ((False, False, "measuring ...\nproving ...\n"), (False, True, ""), (True, False, "")):
        shown = StringIO()
        bar = PrepareBar(quiet=quiet, console=Terminal(file=shown, force_terminal=terminal))
        for state in (Measuring(), Measuring(), "proving"):
            bar.update(state)
        assert shown.getvalue() == said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--lr", "1e-5"), "training.learning_rate=1e-5, without dashes"),
        (("verify", "--backend", "sdpa"), "--attn-implementation"),
        (("verify", "--loss_on", "all"), "--loss-on"),
        (("pack", "costs", "--seq-len", "9"), "--packing-length"),
    ],
    ids=str,
)
def test_options_of_other_trainers_lead_to_ours(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*arguments)
    assert (code, words in err) == (2, True)


def test_missing_arguments_are_usage_errors(run: Run, data: Path) -> None:
    assert run("measure")[0] == 2
    assert run("measure", data)[0] == 2
    assert run("mesure")[0] == 2
    assert run("--help")[0] == 0
    assert run("--version")[1].startswith("packtrain 0.")


def test_empty_data(run: Run, model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    code, out, err = run(*measure(empty, model, tmp_path / "out", "--json"))
    assert (code, out) == (1, "")
    assert re.search(r"an empty dataset: \S", err)
    folder = tmp_path / "folder"
    folder.mkdir()
    code, _, err = run(*measure(folder, model, tmp_path / "out"))
    assert code == 2
    assert "no data file" in err


def test_out_is_a_file(run: Run, data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "taken"
    out.write_text("mine")
    code, _, err = run(*measure(data, model, out))
    assert code == 2
    assert "which is a file" in err
    assert out.read_text() == "mine"
    code, _, err = run(*measure(data, model, out / "below"))
    assert code == 2
    assert str(out) in err


def shows(image: str) -> str:
    turns = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "A picture."}]
    return json.dumps({"messages": turns, "images": [image]}) + "\n"


@pytest.mark.parametrize(
    ("content", "model_files", "words"),
    [
        (shows("a/1.jpg"), "qwen2_5_vl", ["a/1.jpg", "media root {root}", "--media-root", "{root}/out/ledger.jsonl"]),
        (shows("/tmp/none/1.jpg"), "qwen2_5_vl", ["/tmp/none/1.jpg", "--allow-outside-root", "--media-root"]),
        (shows("http://host/1.jpg"), "qwen2_5_vl", ["download the media"]),
        (shows("x.png"), "no template", ["{model} has no chat template", "--chat-template"]),
        (shows("x.png"), "no processor", ["{model}", "no processor files", "preprocessor_config.json"]),
        (
            shows("x.png"),
            "qwen2",
            ["this model takes no image", "model {model}", "use a model that takes images"],
        ),
        (shows("x.png"), "no liking", ["refused the record (first data.jsonl:1: not you", "--chat-template"]),
        ('{"messages": 3}\n', "qwen2_5_vl", ["data.jsonl:1", "fix the records"]),
        ('[{"messages": 1},\n {"messages": 2},\n {"messages" 3}]', "qwen2_5_vl", ["at line 3, character"]),
    ],
    ids=["missing", "outside", "url", "no template", "no processor", "text model", "refused", "schema", "broken json"],
)
def test_records_that_cannot_be_used_name_what_helps(
    run: Run, tmp_path: Path, content: str, model_files: str, words: list[str]
) -> None:
    data, folder = tmp_path / ("data.json" if content.startswith("[") else "data.jsonl"), tmp_path / "model"
    data.write_text(content)
    Image.new("RGB", (64, 48)).save(tmp_path / "x.png")
    tiny.write(model_files if model_files in tiny.tiny_families() else "qwen2_5_vl", folder)
    if model_files == "no template":
        (folder / "chat_template.jinja").unlink()
    if model_files == "no liking":
        (folder / "chat_template.jinja").write_text("{{ raise_exception('not you') }}")
    if model_files == "no processor":
        (folder / "processor_config.json").unlink()
    code, _, err = run(*measure(data, folder, tmp_path / "out"))
    assert code == (2 if model_files == "no processor" else 1)
    words = [word.format(root=tmp_path, model=folder) for word in words]
    assert [word for word in words if word not in err] == [], err
    assert ("fix the records" in err) == ("schema" in err or "JSON" in err), err
    assert "max-failure-rate" not in err, "nothing would be left"


def test_a_model_without_a_chat_template_says_how_chats_are_written(run: Run, tmp_path: Path) -> None:
    tiny.write("qwen2", tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    code, out, _ = run(*measure(tmp_path / "data.jsonl", tmp_path / "model", tmp_path / "with"))
    assert (code, "no chat template" in out) == (0, False)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    code, out, _ = run(*measure(tmp_path / "data.jsonl", tmp_path / "model", tmp_path / "without"))
    assert (code, "concatenated as plain text" in out, "--chat-template" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("plan", "data.jsonl", "-o", "r"), ["data.jsonl", "a file", "packtrain measure data.jsonl --model"]),
        (("pack", "data.jsonl", "-n", 64, "-o", "r"), ["packtrain measure data.jsonl"]),
        (("plan", "costs", "-o", "r"), ["no such folder", "packtrain measure DATA --model MODEL --out costs"]),
        (("plan", ".", "-o", "r"), ["no measure.json", "that packtrain measure wrote"]),
        (("inspect", "plan"), ["no such folder", "packtrain pack COSTS"]),
        (measure("data.xlsx", "tiny:qwen2_5_vl", "out"), ["XLSX", "save it as CSV"]),
        (measure("data.jsonl", "tiny:qwen2_5_vl", "."), ["holds other files:", "another folder"]),
        (measure("data.jsonl", "models/qwen", "out"), ["no folder of that name", "did you mean 'qwen2'?"]),
        (measure("data.jsonl", "./qwen", "out"), ["no folder of that name in"]),
        (measure("data.jsonl", "tiny:qwen2_5_vl", "/proc/x"), ["/proc/x", "use another one"]),
    ],
    ids=lambda value: " ".join(map(str, value[:3])) if isinstance(value, tuple) else "",
)
def test_a_wrong_place_names_the_right_one(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen2").mkdir(parents=True)
    (tmp_path / "data.xlsx").write_text("PK")
    code, _, err = run(*command)
    assert code in (1, 2)
    assert [word for word in words if word not in err] == [], err
    assert "Error:" not in err


def test_a_model_folder_without_files(run: Run, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hollow"
    folder.mkdir()
    code, _, err = run(*measure(data, folder, tmp_path / "out"))
    assert code == 2
    assert "hollow" in err


@pytest.mark.parametrize("name", ["[bold]", "[/]", "[red]x[/red]", ":warning:", "back\\[slash]", "x" * 150])
def test_names_are_printed_as_they_are(run: Run, data: Path, model: Path, tmp_path: Path, name: str) -> None:
    """Not as markup, not as emoji, and not broken into lines."""
    folder = tmp_path / name.replace("/", "_") if "/" not in name else tmp_path / f"a{name}"
    code, out, err = run(*measure(data, model, folder))
    assert (code, err) == (0, "")
    assert f"next: packtrain plan {folder} " in out
    missing = f"{folder}/nothing.jsonl"
    code, _, err = run(*measure(missing, model, tmp_path / "other"))
    assert code == 2
    assert repr(missing) in err


ESCAPES = "\x1b[31m\x9b2J\u202e"


def test_control_characters_of_names_reach_no_terminal(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / f"a{ESCAPES}.jsonl"
    path.write_text(json.dumps(RECORDS[0]) + "\n" + '{"id": "bad"}\n')
    (tmp_path / "run.yaml").write_text(f'model: {{"a\\e[31m": 1}}\ndata: {{dataset_path: "{tmp_path}"}}\n')
    commands = [
        measure(path, model, tmp_path / "out", "--on-error", "fail"),
        measure(path, model, tmp_path / f"out{ESCAPES}", "--max-failure-rate", 1),
        measure(path, model, tmp_path / "json", "--max-failure-rate", 1, "--json"),
        measure(tmp_path / f"missing{ESCAPES}", model, tmp_path / "none"),
        ("train", tmp_path / "run.yaml", "--dry-run"),
    ]
    said = ["".join(run(*command)[1:]) for command in commands]
    assert [one for one in said if set(one) & {"\x1b", "\x9b", "\u202e"}] == []
    assert sum(r"\x1b[31m" in one for one in said) >= 3, "names are shown"


def raising(error: str, *imports: str) -> subprocess.CompletedProcess[str]:
    """What the command line makes of an error that a command ends with."""
    program = (
        f"import {', '.join(('typer', 'errno', *imports))}; from packtrain.cli.common import run\n"
        f"app = typer.Typer()\n@app.command()\ndef main() -> None:\n    raise {error}\nrun(app)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("OSError(errno.EROFS, 'Read-only file system', '/home/me/.cache')", ["/home/me/.cache", "PACKTRAIN_CACHE"]),
        ("PermissionError(errno.EACCES, 'Permission denied', '/out')", ["/out", "--out"]),
        ("OSError(errno.EMFILE, 'Too many open files', 'a.tar')", ["a.tar", "ulimit -n"]),
        ("OSError(errno.ENOSPC, 'No space left on device', '/out')", ["/out", "free some space"]),
        ("OSError('said in other words, of http://me:WORD@host/a?token=WORD')", ["said in other words", "host/a"]),
        ("ModuleNotFoundError(\"No module named 'num2words'\", name='num2words')", ["pip install num2words"]),
    ],
)
def test_what_the_system_says_has_a_place_and_a_way_out(error: str, words: list[str]) -> None:
    done = raising(error)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "WORD" not in done.stderr
    assert [one for one in words if one not in " ".join(done.stderr.split())] == []


@pytest.mark.parametrize(
    "command",
    [
        "measure nowhere --model tiny:llama --out costs",
        "measure {file} --model no/where/model --out costs",
        "pack nowhere --packing-length 64 --out plan",
        "pack {folder} --packing-length 64 --out plan",
        "pack {file} --packing-length 64 --out plan",
        "plan nowhere --out study",
        "inspect nowhere",
        "inspect {folder}",
        "verify --model nowhere",
        "verify --model tiny:llama --data nowhere",
        "train nowhere",
        "train nowhere.yaml",
        "train --model tiny:llama --data nowhere",
        "train --resume nowhere",
        "train --resume {folder}",
        "report nowhere",
        "report {folder}",
        "config show nowhere",
        "config convert nowhere",
        "calibrate --again nowhere",
        "init {folder}/none/run.yaml",
    ],
)
def test_a_path_that_is_not_there_is_bad_usage(run: Run, tmp_path: Path, command: str) -> None:
    """With one exit code in every command; it is named, and no command leaves anything behind."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.jsonl").write_text("{}\n")
    code, _, err = run(*command.format(folder=tmp_path / "folder", file=tmp_path / "file.jsonl").split())
    assert code == 2, err
    assert "error:" in err
    assert any(word in err for word in ("nowhere", "no/where", str(tmp_path)))


def test_any_names_in_the_locale_c(model: Path, data: Path, tmp_path: Path) -> None:
    """Also where Python was kept from UTF-8: pyarrow takes nothing else."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    named = data.rename(tmp_path / "größe.jsonl")
    command = [sys.executable, "-m", "packtrain.cli", *measure(named, model, tmp_path / "straße")]
    given = [os.fsencode(str(one)) for one in command]
    done = subprocess.run(given, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "straße" / "costs.parquet").is_file()


def test_control_characters_of_warnings_and_logs_reach_no_terminal(tmp_path: Path) -> None:
    program = (
        "import logging, warnings, typer; from packtrain.cli.common import run\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def main(text: str) -> None:\n"
        "    warnings.warn('w' + text); logging.getLogger('other').warning('l' + text)\n"
        "    raise RuntimeError('t' + text)\n"
        "run(app)"
    )
    done = subprocess.run([sys.executable, "-c", program, "\x1b[31m"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert [letter for letter in "wlt" if rf"{letter}\x1b[31m" not in done.stderr] == []


def test_a_mixture_by_its_format(run: Run, data: Path, model: Path, tmp_path: Path) -> None:
    """The help promises the format yaml, for a file of any name."""
    for name in ("mix.yaml", "mix"):
        (tmp_path / name).write_text(f"- {{path: {data.name}, name: one}}\n")
        code, out, err = run(
            *measure(tmp_path / name, model, tmp_path / f"out-{name}", "--dataset-format", "yaml", "--json")
        )
        assert code == 0, err
        assert list(json.loads(out)["statistics"]["sources"]) == ["one"]


def test_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("packtrain")
    for command in ([sys.executable, "-m", "packtrain.cli"], *([[str(script)]] if script.exists() else [])):
        ended = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert ended.stdout.startswith("packtrain 0.")
        ended = subprocess.run([*command, "measure", "nowhere"], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")


def test_help_says_what_it_is_for_and_groups_options(run: Run) -> None:
    for words in ("sequence packing", "fine-tuning"):
        assert words in run("--help")[1].lower()
        assert words in str(packtrain.__doc__).lower()
    assert "train [OPTIONS] [CONFIG] [OVERRIDES]..." in run("train", "--help")[1]
    page = run("measure", "--help")[1]
    assert "measure [OPTIONS] DATA" in page
    headings = re.findall(r"^(\w[\w ]*):$", page, re.M)
    assert headings == ["Arguments", "Options", "Data", "Schema and text", "Media", "Filters", "Run"]
    assert page.partition("Options:")[2].partition("\nData:")[0].count("\n  -") == 4, (
        "model, output, JSON and help: all others are in a group"
    )
    assert {name for names in GROUPS.values() for name in names} <= {*KEYS, *MEDIA_LIMITS}


def test_padded_batches_are_planned_not_packed(capsys: pytest.CaptureFixture[str]) -> None:
    for padded in (False, True):
        with PrepareBar(quiet=False, console=Terminal(file=sys.stdout, force_terminal=False)) as bar:
            bar.update(PackProgress(0, 1, 2, 4, padded))
        assert ("packing" in capsys.readouterr().out) is not padded
