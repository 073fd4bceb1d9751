"""The files of a study: rendered completely beside their places, then moved there, so that none is ever a part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.core.artifacts import atomic_path, leftovers, read_json, write_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.planning.study_values import Study
from packtrain.reports.markdown import comparison_text, memory_text, summary_text
from packtrain.reports.recommended import checklist, config_text
from packtrain.reports.samples import SampleTable, write_samples
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


def write_study(study: Study, samples: SampleTable, out: Path, *, overwrite: bool = False) -> dict[str, Path]:
    """Write every rendering of a study into a folder, and say where each is.

    An earlier study there is replaced when everything has been rendered. A folder that holds anything else is refused
    unless `overwrite` is given, and even then nothing is deleted that has another name.
    """
    out = Path(out)
    check_place(out, overwrite=overwrite)
    with _staging(out) as stage:
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


def _render(study: Study, samples: SampleTable, stage: Path, out: Path) -> None:
    # matplotlib takes half a second to import: only who draws pays for it.
    from packtrain.reports.figures import draw_distribution, draw_efficiency

    content = study_content(study)
    for name, part in files_content(content).items():
        write_json(stage / name, KINDS[name], VERSION, part)
    with atomic_path(stage / "sample_stats.jsonl") as path:
        lines = write_samples(path, samples.chunks())
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


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder inside `out`, and so on the same disk, that is gone afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    for left in leftovers(out, "study"):
        shutil.rmtree(left, ignore_errors=True)
    stage = out / f".study.{os.getpid()}.tmp"
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _refuse_others(out: Path) -> None:
    """Only a new or empty folder, or one with an earlier study and nothing else, may be written into."""
    if not out.is_dir():
        return
    left = leftovers(out, "study")
    found = [
        path for path in sorted(out.rglob("*")) if not path.is_dir() and not any(one in path.parents for one in left)
    ]
    names = [path.relative_to(out).as_posix() for path in found]
    foreign = [name for name in names if name not in FILES]
    if not foreign and names:
        foreign = [] if _is_study(out, names) else names
    if foreign:
        raise ConfigError(
            str(out),
            got="other files: "
            + ", ".join(foreign[:5])
            + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""),
            expected="a new or empty folder, or one with an earlier study",
            fix="choose another folder, or ask for overwriting; files with other names stay either way",
        )


def _is_study(out: Path, names: list[str]) -> bool:
    """Does every JSON file say what it is? The first one of a study is always there."""
    try:
        for name in KINDS:
            if name in names:
                read_json(out / name, KINDS[name], VERSION)
    except ArtifactError:
        return False
    return next(iter(KINDS)) in names
