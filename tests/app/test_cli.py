"""The command line: exit codes, messages without tracebacks, and JSON that stands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Run

from packtrain.models import tiny

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
    assert "20 entries read = 20 measured + 0 in the ledger" in out
    assert f"next: packtrain plan {tmp_path / 'out'} " in out
    code, out, _ = run(*measure(data, model, tmp_path / "out"))
    assert "Nothing has changed" in out
    os.utime(data, ns=(1, 1))
    code, out, err = run(*measure(data, model, tmp_path / "out"))
    assert "measuring again because" in err, "said before the work begins"
    assert "data.data.jsonl.mtime_ns" in err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"model": "tiny:qwen9"}, 2, ["'qwen9'", "did you mean 'qwen"]),
        ({"model": "qwen2_5_vl"}, 2, ["did you mean tiny:qwen2_5_vl?"]),
        ({"model": "no/such/model/folder"}, 2, ["no folder of that name"]),
        ({"model": "nobody/such-a-model"}, 2, ["nobody/such-a-model", "local model folder"]),
        ({"data": "nowhere.jsonl"}, 2, ["dataset_path", "nothing is there"]),
        ({"--dataset-format": "jsnl"}, 2, ["dataset_format", "did you mean 'jsonl'?"]),
        ({"--dataset-type": "vision_audio"}, 2, ["audio has no token rule yet"]),
        ({"--dataset-type": "visoin"}, 2, ["did you mean 'vision'?"]),
        ({"--workers": 0}, 2, ["workers", "at least 1"]),
        ({"--workers": "many"}, 2, ["--workers"]),
        ({"--engine": "rai"}, 2, ["did you mean 'ray'?"]),
        ({"--address": "auto"}, 2, ["--engine ray"]),
        ({"--limit": 0}, 2, ["limit", "a positive number"]),
        ({"--check": -1}, 2, ["check", "0 turns the check off"]),
        ({"--max-pixels": 0}, 2, ["limit max_pixels", "a positive number"]),
        ({"--max-failure-rate": 7}, 2, ["max_failure_rate", "between 0 and 1"]),
        ({"--on-error": "ignore"}, 2, ["on_error", "skip or fail"]),
        ({"--source": "other"}, 2, ["sources", "data"]),
        ({"--schema": "mesages"}, 2, ["did you mean 'messages'?"]),
        ({"--loss-on": "asistant"}, 2, ["loss_on"]),
        ({"--object-ordering": "sort"}, 2, ["did you mean 'sorted'?"]),
        ({"--object-template": "no-such-file.txt"}, 2, ["--object-template", "no-such-file.txt"]),
        ({"--formatting": "no_such_module:f"}, 2, ["no_such_module", "PYTHONPATH"]),
        ({"--formatting": "json"}, 2, ["module:function"]),
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
    assert "an empty dataset" in err
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
    assert code == 1
    assert str(out) in err


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
        ("OSError(errno.ENOSPC, 'No space left on device', '/out')", ["/out", "make room"]),
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
