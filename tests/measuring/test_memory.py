"""Measuring is light: no torch, no transformers, and memory that does not grow with the dataset."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from measuring import chats, command, start_command, write_image, write_lines

HEAVY = ("torch", "transformers", "torchvision", "datasets", "ray")
# Loaded by every Python process that finds it: refuses heavy imports, and writes down that it was there.
GUARD = '''"""Refuses heavy imports in this process and says who asked."""

import os
import sys


class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy}:
            with open({log!r}, "a") as log:
                log.write(f"asked {{os.getpid()}} {{name}}\\n")
            raise ImportError(f"{{name}} is not installed in this test")
        return None


if sys.orig_argv[-2:-1] != ["packtrain.delivery.encode.from_transformers"]:  # the short process that loads the config
    sys.meta_path.insert(0, Guard())
with open({log!r}, "a") as log:
    log.write(f"guarded {{os.getpid()}} {{' '.join(sys.argv)}}\\n")
'''


def guard(folder: Path) -> tuple[Path, Path]:
    """What processes that must not import anything heavy find first, and the log of those that tried."""
    log = folder / "imports.log"
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(GUARD.format(heavy=HEAVY, log=str(log)))
    return folder / "site", log


def test_measuring_imports_neither_torch_nor_transformers(tmp_path: Path, qwen: Path) -> None:
    """In the command and in its workers; images, text and a broken record."""
    site, log = guard(tmp_path)
    write_image(tmp_path / "data" / "a.png", 99, 77)
    for part in range(4):
        write_lines(tmp_path / "data" / f"{part}.jsonl", [*chats(30, images=("a.png",)), "{broken"])
    run = ("measure", tmp_path / "data", "-m", qwen, "-o", tmp_path / "out", "-w", 2, "--check", 0, "--json")
    code, out, err = command(*run, log=tmp_path / "log", path=site)
    assert code == 0, err
    assert json.loads(out)["statistics"]["columns"]["images"]["total"] == 40
    lines = log.read_text().splitlines()
    assert len({line.split()[1] for line in lines if line.startswith("guarded")}) >= 3, "the workers were not guarded"
    assert [line for line in lines if line.startswith("asked")] == []


def test_the_guard_guards(tmp_path: Path) -> None:
    """The test above would pass with a guard that nobody loads."""
    site, log = guard(tmp_path)
    program = [sys.executable, "-c", "import torch"]
    ended = subprocess.run(program, env={"PYTHONPATH": str(site)}, capture_output=True, check=False)
    assert ended.returncode == 1
    assert " torch" in log.read_text()


def test_import_packtrain_is_light() -> None:
    heavy = (*HEAVY, "pyarrow", "PIL", "numpy", "av", "jinja2", "tokenizers", "huggingface_hub", "rich", "typer")
    program = f"import packtrain, sys; print([name for name in {heavy} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_help_needs_no_data_library() -> None:
    program = (
        "import sys\nsys.argv = ['packtrain', 'measure', '--help']\nfrom packtrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('pyarrow', 'PIL', 'av', 'torch', 'transformers') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "[]"


def peak(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The largest sum of own memory over a process and all below it, and how often it was looked at.

    What is mapped from files is left out: how much of it is shared depends on whatever else the machine runs.
    """
    largest = samples = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for member in (root, *root.children(recursive=True)):
                memory = member.memory_info()
                total += memory.rss - memory.shared
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # one has just ended; a part of the sum says nothing
        largest, samples = max(largest, total), samples + 1
        time.sleep(0.05)
    return largest, samples


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is counted by Linux")
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path, qwen: Path) -> None:
    write_image(tmp_path / "a.png", 64, 64)
    peaks = {}
    for records in (10, 25_000, 100_000):  # the first one makes what is made once for a model
        data = tmp_path / f"{records}.jsonl"
        with data.open("w") as stream:
            for number in range(records):
                turns = [
                    {"role": "user", "content": f"<image> Is {number} even?"},
                    {"role": "assistant", "content": "?"},
                ]
                stream.write(json.dumps({"id": str(number), "messages": turns, "images": ["a.png"]}) + "\n")
        run = ("measure", data, "-m", qwen, "-o", tmp_path / str(records), "-w", 2, "--check", 0, "--json")
        process = start_command(*run, log=tmp_path / "log")
        peaks[records], samples = peak(process)
        assert process.returncode == 0, (tmp_path / "log.err").read_text()
        assert json.loads((tmp_path / "log.out").read_text())["counts"]["rows"] == records
        assert samples >= 10
        assert peaks[records] > 50 << 20, "the processes were not seen"
    grown = (peaks[100_000] - peaks[25_000]) / (1 << 20)
    assert grown < 50, f"{grown:.0f} MiB more for 75,000 records more"
