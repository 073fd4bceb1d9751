"""Every format is delivered map-style and streaming, with the same batches, bit for bit, pixels included."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from PIL import Image

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.core.errors import PacktrainError

SAMPLES = 12


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((36 + 4 * (number % 3), 32), 90).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = {number: picture(number) for number in range(0, SAMPLES, 2)}


def text_of(number: int) -> str:
    return " ".join(f"word{number * 5 + place}" for place in range(1 + number % 7))


def chat(number: int, image: str | None = None) -> dict[str, Any]:
    shown = [{"type": "image", "image": image}] if image else []
    question = {"role": "user", "content": [*shown, {"type": "text", "text": text_of(number)}]}
    return {"id": f"r{number}", "messages": [question, {"role": "assistant", "content": text_of(number + 1)}]}


def with_files(folder: Path) -> list[dict[str, Any]]:
    for number, data in PICTURES.items():
        (folder / f"{number}.png").write_bytes(data)
    return [chat(number, f"{number}.png" if number in PICTURES else None) for number in range(SAMPLES)]


def lines(folder: Path) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in with_files(folder)).encode()


def write_json(folder: Path) -> Path:
    (folder / "data.json").write_text(json.dumps(with_files(folder), indent=1))
    return folder / "data.json"


def write_jsonl(folder: Path) -> Path:
    (folder / "data.jsonl").write_bytes(lines(folder))
    return folder / "data.jsonl"


def write_jsonl_zst(folder: Path) -> Path:
    (folder / "data.jsonl.zst").write_bytes(zstandard.compress(lines(folder)))
    return folder / "data.jsonl.zst"


def table() -> pa.Table:
    """Pictures inside the table."""
    rows = [
        {
            "id": f"r{number}",
            "images": [{"bytes": PICTURES[number], "path": None}] if number in PICTURES else [],
            "conversations": [
                {"from": "human", "value": ("<image>" if number in PICTURES else "") + text_of(number)},
                {"from": "gpt", "value": text_of(number + 1)},
            ],
        }
        for number in range(SAMPLES)
    ]
    return pa.Table.from_pylist(rows)


def write_parquet(folder: Path) -> Path:
    pq.write_table(table(), folder / "data.parquet", row_group_size=5)
    return folder / "data.parquet"


def write_arrow(folder: Path) -> Path:
    with pa.ipc.new_stream(str(folder / "data.arrow"), table().schema) as writer:
        writer.write_table(table(), max_chunksize=4)
    return folder / "data.arrow"


def write_hf_dataset(folder: Path) -> Path:
    from datasets import Dataset

    Dataset(table()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_yaml(folder: Path) -> Path:
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    write_jsonl(folder / "one")
    write_parquet(folder / "two")
    (folder / "mix.yaml").write_text(
        "datasets:\n  - {path: one/data.jsonl, name: one, repeats: 2}\n  - {path: two/data.parquet, name: two}\n"
    )
    return folder / "mix.yaml"


def tar(numbers: range) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in numbers:
            parts = {"png": PICTURES[number]} if number in PICTURES else {}
            shown = "png" if number in PICTURES else None
            for ending, data in {**parts, "json": json.dumps(chat(number, shown)).encode()}.items():
                info = tarfile.TarInfo(f"{number:03d}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tar(folder: Path) -> Path:
    for shard in range(3):
        (folder / f"s-{shard}.tar").write_bytes(tar(range(shard, SAMPLES, 3)))
    return folder


def write_tar_zst(folder: Path) -> Path:
    for shard in range(3):
        (folder / f"s-{shard}.tar.zst").write_bytes(zstandard.compress(tar(range(shard, SAMPLES, 3))))
    return folder


WAYS: dict[str, Callable[[Path], Path]] = {
    "json": write_json,
    "jsonl": write_jsonl,
    "jsonl.zst": write_jsonl_zst,
    "yaml": write_yaml,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "hf_dataset": write_hf_dataset,
    "tar": write_tar,
    "tar.zst": write_tar_zst,
}


class ForwardOnly(fsspec.AbstractFileSystem):
    """Files that are read from front to back and in no other way."""

    protocol = "forwardonly"
    files: ClassVar[dict[str, bytes]] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        inside = self._strip_protocol(path).rstrip("/") + "/"
        found = [self.info(name) for name in sorted(self.files) if name.startswith(inside)]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name in self.files:
            return {"name": name, "size": len(self.files[name]), "type": "file"}
        if any(other.startswith(name + "/") for other in self.files):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.info(path)
        return _Forward(self.files[self._strip_protocol(path)])


class _Forward(io.RawIOBase):
    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._data.readinto(buffer)

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise AssertionError("this source forbids random access")


@pytest.fixture
def forward() -> Iterator[dict[str, bytes]]:
    fsspec.register_implementation("forwardonly", ForwardOnly, clobber=True)
    yield ForwardOnly.files
    ForwardOnly.files.clear()


def batches(kind: type[Any], path: str, cache: Path, **settings: Any) -> list[Any]:
    given: dict[str, Any] = {"packing_length": 160, "packs_per_step": 2, "seed": 3, "cache_dir": str(cache), **settings}
    dataset = kind(DatasetConfig(dataset_path=path, model="tiny:qwen3_vl", workers=1, check=0, **given))
    dataset.build()
    return list(dataset.loader())


def require_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other) > 2
    for left, right in zip(one, other, strict=True):
        assert left.info == right.info
        assert left.keys() == right.keys()
        for name, value in left.items():
            same = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
            assert same, name


@pytest.mark.parametrize("name", WAYS)
def test_both_ways_deliver_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = str(WAYS[name](tmp_path / "data"))
    settings: dict[str, Any] = {"packing_window": 4} if name.startswith("tar") else {}
    mapped = batches(MultiModalDataset, path, tmp_path / "one", **settings)
    streamed = batches(MultiModalIterableDataset, path, tmp_path / "two", **settings)
    require_same(mapped, streamed)
    seen = [identity for batch in mapped for identity in batch.info.ids]
    assert len(seen) == SAMPLES * (3 if name == "yaml" else 1)
    assert sum(batch.info.images for batch in mapped) > 2, "pixels were compared"


def test_a_source_that_forbids_random_access(forward: dict[str, bytes], tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for file in sorted(write_tar_zst(local).iterdir()):
        forward[f"data/{file.name}"] = file.read_bytes()
    url = "forwardonly://data/s-{0..2}.tar.zst"
    expected = batches(MultiModalDataset, str(local), tmp_path / "one", packing_window=4)
    remote: dict[str, Any] = {"packing_window": 4, "media_root": str(tmp_path)}
    require_same(expected, batches(MultiModalDataset, url, tmp_path / "two", **remote))
    require_same(expected, batches(MultiModalIterableDataset, url, tmp_path / "three", **remote))
    del forward["data/s-1.tar.zst"]
    with pytest.raises(PacktrainError, match=r"s-1\.tar\.zst"):
        batches(MultiModalIterableDataset, url, tmp_path / "four", **remote)


def test_the_file_system_of_this_test_does_forbid_it(forward: dict[str, bytes]) -> None:
    forward["data/a"] = b"12345"
    with fsspec.open("forwardonly://data/a") as file, pytest.raises(AssertionError, match="random access"):
        file.seek(2)
