"""The contents of the cache: size, source, last use, and whether and why an entry is stale; and clearing it.

Only what has a name that packtrain gives, in a folder that packtrain makes, is ever read or removed: a cache may be
in a folder with other things. What users wrote with --out is theirs, wherever it is.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from packtrain.app.cache_checks import CHECKS, STUDIED, entry_described, staleness
from packtrain.app.reuse import in_cache, of_users
from packtrain.app.train.resolve import ResolvedRun
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.errors import ConfigError, PacktrainError, nearest
from packtrain.core.fingerprint import digest
from packtrain.core.numbers import counted
from packtrain.delivery.encode.row_table import fingerprint_of, sum_of
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PLAN, PackPlan, plan_inputs
from packtrain.records.shards.cache_folder import MARKER, CacheFolder, is_ours, remove_if_unused

_HEX = re.compile(r"[0-9a-f]{20}")
_NAMED = re.compile(r"(?:[\w.-]+-)?[0-9a-f]{20}")  # after the dataset, and how it is packed
# What each kind's entries are called, below the folder of that kind.
NAMES: dict[str, re.Pattern[str]] = {
    "measure": _NAMED,
    "plans": _NAMED,
    "rows": re.compile(r"rows-[0-9a-f]{20}\.arrow"),
    "tokens": _NAMED,
    "studies": _HEX,
    "shards": re.compile(re.escape(MARKER)),
    "models": re.compile(r"tiny-[\w.-]+"),
    "tokenizers": _HEX,
    "configs": re.compile(r"[0-9a-f]{20}\.json"),
    "calibration": re.compile(r"[\w.-]+\.json"),
}
KINDS = tuple(NAMES)
KEPT = ("calibration",)  # only removed by name: they can be made again on their GPU alone
WHAT = {
    "measure": "cost tables",
    "plans": "pack plans",
    "rows": "rows for delivery",
    "tokens": "tokenized samples",
    "studies": "studies that runs were planned with",
    "shards": "data files, unpacked",
    "models": "models made here",
    "tokenizers": "tokenizers built by transformers",
    "configs": "model configs loaded by transformers",
    "calibration": "what was fitted to a GPU",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached:
    """One thing in the cache."""

    kind: str
    path: Path
    bytes: int
    used: float  # seconds since 1970; when it was last read or written, as far as the disk keeps it
    about: str  # of which dataset and model
    stale: tuple[str, ...] = ()  # why it would not be used again; empty: it would
    faults: tuple[str, ...] = ()  # what is wrong with it, where that was looked for

    @property
    def days(self) -> float:
        """Since it was used."""
        return max(0.0, (time.time() - self.used) / 86_400)


def list_cache(root: Path, kinds: Sequence[str] = (), *, look: bool = True) -> list[Cached]:
    """Everything in a cache, by kind, the largest first; `look` also says what is stale."""
    _check_kinds(kinds)
    found = []
    for kind in kinds or KINDS:
        entries = [_cached(kind, path, root, look=look) for path in _entries(root, kind)]
        found += sorted(entries, key=lambda entry: (-entry.bytes, entry.path.name))
    return found


def verify_cache(
    root: Path, kinds: Sequence[str] = (), progress: Callable[[Cached], None] = lambda _: None
) -> list[Cached]:
    """Everything in a cache, read to its end and compared with what it says of itself."""
    found = []
    for entry in list_cache(root, kinds):
        progress(entry)
        found.append(replace(entry, faults=tuple(CHECKS[entry.kind](entry.path))))
    return found


def clear_cache(entries: Iterable[Cached], root: Path) -> int:
    """Remove these entries; the bytes that are free now. Data files that a living process uses stay."""
    freed = 0
    for entry in entries:
        _require_inside(entry, root)
        before = entry.bytes
        if entry.kind == "shards":
            _clear_shards(entry.path)
        elif entry.path.is_dir() and not entry.path.is_symlink():
            # Under another name first: what is half removed must not look whole.
            hidden = entry.path.with_name(f".{entry.path.name}.removing")
            shutil.rmtree(hidden, ignore_errors=True)
            os.rename(entry.path, hidden)
            shutil.rmtree(hidden)
        else:
            entry.path.unlink(missing_ok=True)
            if entry.kind == "rows":
                sum_of(entry.path).unlink(missing_ok=True)
            with suppress(OSError):
                entry.path.with_name(f".{entry.path.name}.lock").unlink(missing_ok=True)
        freed += before - (_size(entry.path) if entry.path.exists() else 0)
    return freed


def older_than(entries: Iterable[Cached], days: float) -> list[Cached]:
    """Those that were not used for so long."""
    return [entry for entry in entries if entry.days >= days]


def _entries(root: Path, kind: str) -> Iterator[Path]:
    folder = root / kind
    if folder.is_symlink() or not folder.is_dir():
        return
    if kind == "shards":
        if (folder / MARKER).is_file():
            yield folder
        return
    theirs = {path.resolve() for path in of_users(kind)}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.resolve() in theirs:
            continue
        if NAMES[kind].fullmatch(path.name) and _is_ours(kind, path):
            yield path


def _is_ours(kind: str, path: Path) -> bool:
    """Does it hold what only we write?"""
    marks = {
        "measure": ("measure.json", ".measure.journal", "ledger.jsonl", "costs.parquet"),
        "plans": ("plan.json",),
        "tokens": ("tokens.json",),
        "studies": (STUDIED,),
        "models": ("config.json",),
        "tokenizers": ("tokenizer.json",),
    }
    if kind in ("rows", "configs", "calibration"):
        return path.is_file()
    return path.is_dir() and any((path / name).is_file() for name in marks[kind])


def _cached(kind: str, path: Path, root: Path, *, look: bool) -> Cached:
    return Cached(
        kind=kind,
        path=path,
        bytes=_size(path),
        used=_used(path),
        about=entry_described(kind, path),
        stale=tuple(staleness(kind, path, root)) if look else (),
    )


def _files(path: Path) -> Iterator[os.stat_result]:
    if path.is_file():
        yield path.stat()
        return
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # gone since
                yield os.lstat(os.path.join(folder, name))


def _size(path: Path) -> int:
    """Bytes on the disk."""
    return sum(state.st_blocks * 512 for state in _files(path))


def _used(path: Path) -> float:
    return max((max(state.st_atime, state.st_mtime) for state in _files(path)), default=0.0)


def _require_inside(entry: Cached, root: Path) -> None:
    """Never outside of the cache, whatever an entry says."""
    expected = root / entry.kind if entry.kind == "shards" else root / entry.kind / entry.path.name
    inside = entry.path == expected and not expected.is_symlink() and not (root / entry.kind).is_symlink()
    if entry.kind not in NAMES or not inside:
        raise ConfigError("cache", got=str(entry.path), expected=f"a path inside {root}")


def _clear_shards(folder: Path) -> None:
    with CacheFolder(str(folder), 1).locked() as (entries, _):
        for entry in entries:
            if is_ours(entry.name):
                remove_if_unused(str(folder / entry.name))


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError("kind", got=kind, expected=", ".join(KINDS), fix=nearest(kind, KINDS))


def clear_run(run: ResolvedRun) -> tuple[str, ...]:
    """Remove the cost tables, plans, rows and tokens of a run; what was removed, in words."""
    removed: list[Cached] = []
    for config in (run.data, run.evaluation):
        if config is not None:
            root = Path(str(config.cache_dir))
            entries = _made_by(config, root)
            clear_cache(entries, root)
            removed += entries
    if not removed:
        return ("--clear-cache: nothing of this config was in the cache",)
    size = sum(entry.bytes for entry in removed)
    return (f"--clear-cache: {counted(len(removed), 'entry', 'entries')} of this config removed, {size:,} bytes",)


def _made_by(config: DatasetConfig, root: Path) -> list[Cached]:
    """Its cost table with rows and tokens, its plans of this mode, whatever their length; the other mode's stay."""
    name = digest(config.measured_by())
    table, tokens = (in_cache(root, kind, name, of=config.dataset_path) for kind in ("measure", "tokens"))
    own = (table, *((tokens,) if config.caches_tokens else ()))
    measured = _measured(table)
    rows = f"rows-{fingerprint_of(measured)}.arrow" if measured is not None else ""
    inputs = plan_inputs(measured) if measured is not None else None
    found = list_cache(root, ("measure", "plans", "rows", "tokens"), look=False)
    plans = [one for one in found if one.kind == "plans" and _is_plan(one, table, inputs, config)]
    return [one for one in found if one.path in own or one.path.name == rows or one in plans]


def _measured(table: Path) -> CostTable | None:
    try:
        return CostTable.load(table)
    except (PacktrainError, OSError):
        return None


def _is_plan(entry: Cached, table: Path, inputs: dict[str, object] | None, config: DatasetConfig) -> bool:
    """A plan of this table, or of one with the same content that lies elsewhere."""
    try:
        plan = PackPlan.load(entry.path / PLAN, checked=False)
    except (PacktrainError, OSError):
        return False
    padded = plan.config.packing_strategy == "none"
    of_table = plan.summary.cost_table == str(table.resolve()) or plan.summary.inputs == inputs
    return of_table and padded == (not config.has_packs)
