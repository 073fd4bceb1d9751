"""One dataset of every format, all in one mixture, so that measuring it once covers them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from PIL import Image

RECORDS = 12  # of each source

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
SOURCES = (
    *("lines", "lines.gz", "lines.zst", "list", "list.gz", "list.zst", "parquet", "arrow_file", "arrow_stream"),
    *("saved", "loaded", "tar", "tar.gz", "tar.zst"),
)


def picture(number: int) -> bytes:
    """A PNG that differs from the others."""
    buffer = io.BytesIO()
    Image.new("RGB", (30 + 5 * number, 40), (number, 90, 120)).save(buffer, "png")
    return buffer.getvalue()


def chat(source: str, number: int, shown: bool = True) -> dict[str, Any]:
    """A record; every second one shows an image."""
    mark = "<image>\n" if shown and number % 2 else ""
    turns = [
        {"role": "user", "content": f"{mark}what is «{source}» {number}? 北京"},
        {"role": "assistant", "content": f"it is {number} " * (1 + number % 4)},
    ]
    return {"id": f"{source}-{number}", "messages": turns}


def with_paths(source: str) -> list[dict[str, Any]]:
    """Records whose images are files."""
    made = [chat(source, number) for number in range(RECORDS)]
    return [{**row, "images": [f"{n}.png"] if n % 2 else []} for n, row in enumerate(made)]


def with_bytes(source: str) -> list[dict[str, Any]]:
    """Records whose images are in a column."""
    made = [chat(source, number) for number in range(RECORDS)]
    return [{**row, "images": [{"bytes": picture(n), "path": None}] if n % 2 else []} for n, row in enumerate(made)]


def write_lines(path: Path, source: str, packer: Callable[[bytes], bytes]) -> None:
    """Lines with blank ones between them, one that is no record, and Windows line ends."""
    lines = [json.dumps(row, ensure_ascii=False) for row in with_paths(source)]
    lines[3:3] = ["", "  ", "{broken"]
    path.write_bytes(packer(b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))


def write_list(path: Path, source: str, packer: Callable[[bytes], bytes]) -> None:
    """A list inside an object, after other values, printed over many lines."""
    body = {"info": {"äö": [1, 2]}, "data": with_paths(source), "more": []}
    path.write_bytes(packer(b"\xef\xbb\xbf" + json.dumps(body, ensure_ascii=False, indent=3).encode()))


def write_tar(path: Path, source: str, packer: Callable[[bytes], bytes]) -> None:
    """Samples with images beside their text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(RECORDS):
            parts = [("png", picture(number))] if number % 2 else []
            parts.append(("json", json.dumps(chat(source, number)).encode()))
            for ending, data in parts:
                info = tarfile.TarInfo(f"{'long/' * 25}{number}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    path.write_bytes(packer(buffer.getvalue()))


def write_mixture(folder: Path) -> Path:
    """The mixture file of one source of every format."""
    import datasets

    for number in range(RECORDS):
        (folder / f"{number}.png").write_bytes(picture(number))
    for ending, packer in PACKERS.items():
        write_lines(folder / f"lines.jsonl{ending}", f"lines{ending}", packer)
        write_list(folder / f"list.json{ending}", f"list{ending}", packer)
        for shard in ("a", "b"):
            (folder / f"tar{ending}").mkdir(exist_ok=True)
            write_tar(folder / f"tar{ending}" / f"{shard}.tar{ending}", f"tar{ending}-{shard}", packer)
    pq.write_table(pa.Table.from_pylist(with_bytes("parquet")), folder / "d.parquet", row_group_size=5)
    for kind, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        table = pa.Table.from_pylist(with_bytes(f"arrow_{kind}"))
        with new(folder / f"{kind}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    datasets.Dataset.from_list(with_bytes("saved")).save_to_disk(folder / "saved", num_shards=2)
    (folder / "loaded").mkdir()
    pq.write_table(pa.Table.from_pylist(with_bytes("loaded")), folder / "loaded" / "train.parquet")
    items = [f"- {{path: {name}.jsonl{end}, name: {name}{end}}}" for name in ("lines",) for end in PACKERS]
    items += [f"- {{path: list.json{end}, name: list{end}}}" for end in PACKERS]
    items += ["- {path: d.parquet, name: parquet}"]
    items += [f"- {{path: {kind}.arrow, name: arrow_{kind}}}" for kind in ("file", "stream")]
    items += ["- {path: saved, name: saved}", "- {path: loaded, name: loaded, format: hf_dataset}"]
    items += [f"- {{path: tar{end}, name: tar{end}, media_root: .}}" for end in PACKERS]
    (folder / "mix.yaml").write_text("\n".join(items) + "\n")
    return folder / "mix.yaml"
