"""A dataset on the hub streams by its name, and goes on exactly where a state was saved; from a hub on loopback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from records.hub_server import COMMIT, hub

NAME = "org/pairs"
JOB = """
import hashlib, json, sys
from packtrain import DatasetConfig, MultiModalIterableDataset
data, cache, state, stop = sys.argv[1:5]
config = {"dataset_path": data, "dataset_format": None if "/data/" in data else "hf_dataset", "cache_dir": cache}
dataset = MultiModalIterableDataset(
    DatasetConfig(model="tiny:qwen2_vl", packing_length=256, packing_window=8, **config)
)
dataset.build()
loader = dataset.loader(num_workers=0)
if state != "-":
    loader.load_state_dict(json.loads(state))
seen, saved = [], None
for number, batch in enumerate(loader, start=1):
    text = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "labels", "pixel_values") if name in batch)
    seen.append(hashlib.sha256(text).hexdigest())
    if number == int(stop):
        saved = loader.state_dict()
        break
print(json.dumps({"seen": seen, "state": saved}))
"""


def picture(number: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (28 + 28 * (number % 3), 56), (number * 9 % 256, 80, 40)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": f"{number}.png"}


def write(folder: Path) -> Path:
    """Two files of split train and one of split test, as a dataset is pushed."""
    (folder / "data").mkdir(parents=True)
    names = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    for part, name in enumerate(names):
        rows = [part * 12 + number for number in range(12)]
        chats = [
            [
                {"role": "user", "content": f"<image>{name} question {n}"},
                {"role": "assistant", "content": "yes " * (n % 9 + 1)},
            ]
            for n in rows
        ]
        table = pa.table({"messages": chats, "images": [[picture(n)] for n in rows]})
        pq.write_table(table, folder / "data" / f"{name}.parquet", row_group_size=4)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def job(*arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", JOB, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.full
def test_a_hub_dataset_streams_and_resumes_exactly(tmp_path: Path) -> None:
    folder = write(tmp_path / "hub" / NAME)
    local = job(str(folder / "data" / "train-*.parquet"), str(tmp_path / "a"), "-", "0")["seen"]
    assert len(local) >= 4
    with hub(tmp_path / "hub") as server:
        known = server.environment(tmp_path / "home")
        begun = job(NAME, str(tmp_path / "b"), "-", "2", **known)
        rest = job(NAME, str(tmp_path / "c"), json.dumps(begun["state"]), "0", **known)  # on another machine
        asked = [one for one in server.asked if ".parquet" in one]
    assert sorted(begun["seen"] + rest["seen"]) == sorted(local)  # each batch once, pixels included
    assert rest["seen"] != begun["seen"]
    assert asked
    assert not any("test-" in one for one in asked)  # nothing of the other split is fetched
    assert all(COMMIT in one for one in asked if one.startswith("GET"))  # and all of one commit
