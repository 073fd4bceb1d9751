"""What the tests of measuring share: datasets, the command line as a process, and the hashes of a result."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

RESULT = ("costs.parquet", "media.parquet", "ledger.jsonl")
WORDS = tuple(f"word{number}" for number in range(500))


def chat(question: str, answer: str = "Yes, it is.", **columns: Any) -> dict[str, Any]:
    """A record of one question and one answer."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {**columns, "messages": turns}


def chats(number: int, *, words: int = 12, seed: int = 0, images: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Different chats; every third shows an image, where there are some."""
    random_words = random.Random(seed)
    records = []
    for at in range(number):
        text = " ".join(random_words.choices(WORDS, k=random_words.randint(1, words)))
        if images and at % 3 == 0:
            records.append(chat(f"<image>\n{text}", text, id=f"r{at}", images=[images[at % len(images)]]))
        else:
            records.append(chat(text, text[::-1], id=f"r{at}"))
    return records


def write_lines(path: Path, records: Iterable[Mapping[str, Any] | str]) -> Path:
    """Records, or lines that are none, as JSON Lines."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def write_image(path: Path, width: int = 64, height: int = 48) -> Path:
    """A picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (width % 256, height % 256, 90)).save(path)
    return path


def hashes(folder: Path) -> dict[str, str]:
    """The content of a result, file by file."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in RESULT}


def ledger(folder: Path) -> list[dict[str, Any]]:
    """The lines of a ledger."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]


def start_command(*arguments: object, log: Path, path: Path | None = None) -> subprocess.Popen[bytes]:
    """`packtrain ...` in a session of its own, so that a signal to its group reaches what a terminal's would.

    `path` is a folder whose modules the command and its workers can import.
    """
    places = [str(place) for place in (path, os.environ.get("PYTHONPATH")) if place]
    with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "packtrain.cli", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
            preexec_fn=_accept_interrupts,
        )


def _accept_interrupts() -> None:
    """A shell that starts the tests in the background has them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(*arguments: object, log: Path, path: Path | None = None) -> tuple[int, str, str]:
    """Run `packtrain ...` to its end: exit code, stdout, stderr."""
    code = start_command(*arguments, log=log, path=path).wait(timeout=300)
    return code, log.with_suffix(".out").read_text(), log.with_suffix(".err").read_text()
