"""The files of a study: all rendered first, then moved to their places, so that none is ever incomplete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packtrain.core.artifacts import atomic_path, leftovers, work_folder, write_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.planning.study_values import Study
from packtrain.reports.markdown import comparison_text, memory_text, summary_text
from packtrain.reports.recommended import checklist, config_text
from packtrain.reports.study_content import files_content, study_content
from packtrain.reports.study_page import render_page

VERSION = 1
KINDS = {
    "dataset_stats.json": "dataset-stats",
    "packing_simulations.json": "packing-simulations",
    "recommendations.json": "recommendations",
}
# In the order in which they are moved to their places; the page, which people open, comes last.
FILES = (
    *KINDS,
    "sample_stats.jsonl",
    "recommended.yaml",
    "figures/token_distribution.png",
    "figures/packing_efficiency.png",
    "figures/comparison_table.md",
    "figures/memory_estimates.md",
    "summary.md",
    "report.html",
)


def write_study(study: Study, samples: Iterable[SampleChunk], out: Path, *, overwrite: bool = False) -> dict[str, Path]:
    """Write every rendering of a study into a folder, and say where each is.

    A folder that holds anything is refused unless `overwrite` is given. Then an earlier study is replaced once
    everything is rendered, and nothing is deleted that has another name.
    """
    out = Path(out)
    check_place(out, overwrite=overwrite)
    with work_folder(out / "study", only_writer=True) as stage:
        _render(study, samples, stage, out)
        for name in FILES:
            place = out / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / name, place)
    return {name: out / name for name in FILES}


def check_place(out: Path, *, overwrite: bool = False) -> None:
    """Refuse a place that a study may not be written to; cheap, for asking before the study is made."""
    if out.exists() and not out.is_dir():
        raise ConfigError("out", got=f"{out} is a file", expected="a folder", fix="choose another name")
    if not overwrite:
        _refuse_others(out)


def _render(study: Study, samples: Iterable[SampleChunk], stage: Path, out: Path) -> None:
    # matplotlib takes half a second to import: only who draws pays for it.
    from packtrain.reports.figures import draw_distribution, draw_efficiency

    content = study_content(study)
    for name, part in files_content(content).items():
        write_json(stage / name, KINDS[name], VERSION, part)
    with atomic_path(stage / "sample_stats.jsonl") as path:
        lines = write_samples(path, samples)
    if lines != study.dataset.samples:
        raise ArtifactError(
            "sample_stats.jsonl", got=f"{lines:,} samples", expected=f"the study's {study.dataset.samples:,} samples"
        )
    yaml = config_text(study.recommendation, title=(f"{study.model} on {study.gpus} x {study.gpu}",))
    tasks = checklist(study, out)
    texts = {
        "recommended.yaml": yaml,
        "figures/comparison_table.md": comparison_text(content),
        "figures/memory_estimates.md": memory_text(content),
        "summary.md": summary_text(content, tasks),
        "report.html": render_page(study, content, yaml, tasks),
    }
    for name, text in texts.items():
        with atomic_path(stage / name) as path:
            path.write_bytes(text.encode("utf-8", "replace"))
    for name, draw in (("token_distribution", draw_distribution), ("packing_efficiency", draw_efficiency)):
        with atomic_path(stage / "figures" / f"{name}.png") as path:
            draw(study, path)


def _refuse_others(out: Path) -> None:
    """Only a new or empty folder may be written into."""
    if not out.is_dir():
        return
    left = leftovers(out, "study")
    others = [
        path for path in sorted(out.rglob("*")) if not path.is_dir() and not any(one in path.parents for one in left)
    ]
    names = [path.relative_to(out).as_posix() for path in others]
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ConfigError(
            str(out),
            got=f"a study ({shown})" if set(names) >= set(FILES) else f"other files: {shown}",
            expected="a new or empty folder",
            fix="choose another folder, or add --overwrite; files with other names stay either way",
        )


# ---- sample_stats.jsonl, written from chunks of columns: a dataset may have 100 million samples

NUMBERS = (
    *("tokens", "text_tokens", "image_tokens", "video_tokens", "images", "frames", "objects", "patches"),
    "supervised_tokens",
)
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_ESCAPE = json.JSONEncoder(ensure_ascii=True).encode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleChunk:
    """Some samples in dataset order, column by column, all of one length."""

    id: Sequence[str]
    source: Sequence[str]
    tokens: np.ndarray
    text_tokens: np.ndarray
    image_tokens: np.ndarray
    video_tokens: np.ndarray
    images: np.ndarray
    frames: np.ndarray
    objects: np.ndarray
    patches: np.ndarray
    supervised_tokens: np.ndarray
    pack: np.ndarray  # number of the first pack that holds the sample in the recommended packing, or -1
    why: Mapping[int, str] = field(default_factory=dict)  # position in the chunk -> why it is in no pack

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("id", "source", *NUMBERS, "pack")}
        assert len(set(lengths.values())) == 1, f"columns of different lengths: {lengths}"
        missing = np.flatnonzero(np.asarray(self.pack) < 0)
        assert set(missing.tolist()) == set(self.why), "every sample in no pack has a reason, and no other has one"


def write_samples(path: Path, chunks: Iterable[SampleChunk]) -> int:
    """Write the lines and return how many there are. The caller makes the file appear whole."""
    lines = 0
    with path.open("wb") as file:
        for chunk in chunks:
            for start in range(0, len(chunk.id), _ROWS):
                file.write(_lines(chunk, start, min(start + _ROWS, len(chunk.id))))
            lines += len(chunk.id)
    return lines


_ROWS = 1 << 16  # formatted at once: some 20 MB of text, and offsets stay in 32 bits even for long names


def _lines(chunk: SampleChunk, start: int, stop: int) -> pa.Buffer:
    """Lines as one buffer. Only names go through Python; numbers are formatted and joined by column."""
    cached: dict[str, bytes] = {}
    sources = [cached.get(name) or cached.setdefault(name, _string(name)) for name in chunk.source[start:stop]]
    packs = np.asarray(chunk.pack[start:stop])
    why = [b""] * (stop - start)
    for position in np.flatnonzero(packs < 0).tolist():
        why[position] = b', "why": ' + _string(chunk.why[start + position])
    pieces: list[object] = [
        b'{"id": ',
        pa.array([_string(name) for name in chunk.id[start:stop]], pa.large_binary()),
        b', "source": ',
        pa.array(sources, pa.large_binary()),
    ]
    for name in NUMBERS:
        pieces += [f', "{name}": '.encode(), _digits(getattr(chunk, name)[start:stop])]
    pack = pc.fill_null(_digits(packs, packs < 0), pa.scalar(b"null", pa.large_binary()))
    pieces += [b', "pack": ', pack, pa.array(why, pa.large_binary()), b"}\n"]
    pieces = [pa.scalar(piece, pa.large_binary()) if isinstance(piece, bytes) else piece for piece in pieces]
    lines = pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))
    return lines.buffers()[2] or pa.py_buffer(b"")


def _digits(values: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    whole = pa.array(np.asarray(values).astype(np.int64, copy=False), mask=mask)
    return whole.cast(pa.large_string()).cast(pa.large_binary())


def _string(text: str) -> bytes:
    # Not only line ends of JSON: some readers end lines at U+2028 as well, and half a surrogate pair is no UTF-8.
    return (_ENCODE if text.isprintable() else _ESCAPE)(text).encode()
