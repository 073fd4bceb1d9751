"""The contents of the cache: listed with size, source, last use and why an entry is stale; verified; and cleared.

Only what has a name that packtrain gives, in a folder that packtrain makes, is ever read or removed: a cache may be
in a folder with other things. What users wrote with --out is theirs, wherever it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.cache_kinds import KINDS
from packtrain.app.reuse import cache_folder, user_folders
from packtrain.core.artifacts import remove_folder
from packtrain.core.errors import ConfigError, PacktrainError, nearest
from packtrain.core.fingerprint import digest
from packtrain.core.numbers import counted
from packtrain.delivery.encode.row_table import checksum_path, rows_fingerprint
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PLAN, PackPlan, plan_inputs
from packtrain.records.shards.cache_folder import CacheFolder, is_ours, remove_if_unused

if TYPE_CHECKING:
    from packtrain.app.train.resolve import ResolvedRun
    from packtrain.config.dataset_config import DatasetConfig

KEPT = ("calibration",)  # only removed by name: they can be made again on their GPU alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached:
    """One entry of the cache."""

    kind: str
    path: Path
    bytes: int
    used: float  # seconds since 1970; when it was last read or written, as far as the disk keeps it
    about: str  # its dataset and model
    stale: tuple[str, ...] = ()  # why it would not be reused; empty: it would
    faults: tuple[str, ...] = ()  # what is wrong with its content, where that was checked

    @property
    def days(self) -> float:
        """Since it was used."""
        return max(0.0, (time.time() - self.used) / 86_400)


def list_cache(root: Path, kinds: Sequence[str] = (), *, look: bool = True) -> list[Cached]:
    """Everything in a cache, by kind, the largest first; `look` also says what is stale."""
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError("kind", got=kind, expected=", ".join(KINDS), fix=nearest(kind, tuple(KINDS)))
    entries = []
    for kind in kinds or KINDS:
        of_kind = [_entry(kind, path, root, look=look) for path in _paths(root, kind)]
        entries += sorted(of_kind, key=lambda entry: (-entry.bytes, entry.path.name))
    return entries


def verify_cache(
    root: Path, kinds: Sequence[str] = (), progress: Callable[[Cached], None] = lambda _: None
) -> list[Cached]:
    """Everything in a cache, read to its end with all its checksums."""
    verified = []
    for entry in list_cache(root, kinds):
        progress(entry)
        verified.append(replace(entry, faults=KINDS[entry.kind].faults(entry.path)))
    return verified


def clear_cache(entries: Iterable[Cached], root: Path) -> int:
    """Remove these entries; the bytes that are free now. Data files that a living process uses stay."""
    freed = 0
    for entry in entries:
        _require_inside(entry, root)
        if entry.kind == "shards":
            _clear_shards(entry.path)
        elif entry.path.is_dir() and not entry.path.is_symlink():
            remove_folder(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
            if entry.kind == "rows":
                checksum_path(entry.path).unlink(missing_ok=True)
            with suppress(OSError):
                entry.path.with_name(f".{entry.path.name}.lock").unlink(missing_ok=True)
        freed += entry.bytes - (_size(entry.path) if entry.path.exists() else 0)
    return freed


def older_than(entries: Iterable[Cached], days: float) -> list[Cached]:
    """Entries that were not used for this long."""
    return [entry for entry in entries if entry.days >= days]


def clear_run(run: ResolvedRun) -> tuple[str, ...]:
    """Remove the cost tables, plans, rows and tokens of a run; what was removed, in words."""
    removed: list[Cached] = []
    for config in (run.data, run.evaluation):
        if config is not None:
            root = Path(str(config.cache_dir))
            entries = _config_entries(config, root)
            clear_cache(entries, root)
            removed += entries
    if not removed:
        return ("--clear-cache: nothing of this config was in the cache",)
    size = sum(entry.bytes for entry in removed)
    return (f"--clear-cache: {counted(len(removed), 'entry', 'entries')} of this config removed, {size:,} bytes",)


def _config_entries(config: DatasetConfig, root: Path) -> list[Cached]:
    """Its cost table with rows and tokens, its plans of this mode, whatever their length; the other mode's stay."""
    name = digest(config.measured_by())
    folder, tokens = (cache_folder(root, kind, name, dataset=config.dataset_path) for kind in ("measure", "tokens"))
    own = (folder, *((tokens,) if config.caches_tokens else ()))
    try:
        table = CostTable.load(folder)
        rows, inputs = f"rows-{rows_fingerprint(table)}.arrow", plan_inputs(table)
    except (PacktrainError, OSError):
        rows, inputs = "", None

    def is_plan(path: Path) -> bool:
        """A plan of this table, or of one with the same content that lies elsewhere."""
        try:
            plan = PackPlan.load(path / PLAN, checked=False)
        except (PacktrainError, OSError):
            return False
        padded = plan.config.packing_strategy == "none"
        of_table = plan.summary.cost_table == str(folder.resolve()) or plan.summary.inputs == inputs
        return of_table and padded == (not config.has_packs)

    return [
        entry
        for entry in list_cache(root, ("measure", "plans", "rows", "tokens"), look=False)
        if entry.path in own or entry.path.name == rows or (entry.kind == "plans" and is_plan(entry.path))
    ]


def _paths(root: Path, kind: str) -> Iterator[Path]:
    folder = root / kind
    if folder.is_symlink() or not folder.is_dir():
        return
    theirs = {path.resolve() for path in user_folders(kind)}
    for path in [folder] if kind == "shards" else sorted(folder.iterdir()):
        if not path.is_symlink() and path.resolve() not in theirs and KINDS[kind].holds(path):
            yield path


def _entry(kind: str, path: Path, root: Path, *, look: bool) -> Cached:
    used = max((max(state.st_atime, state.st_mtime) for state in _files(path)), default=0.0)
    about, stale = KINDS[kind].describe(path), KINDS[kind].why_stale(path, root) if look else ()
    return Cached(kind=kind, path=path, bytes=_size(path), used=used, about=about, stale=stale)


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


def _require_inside(entry: Cached, root: Path) -> None:
    """Never outside of the cache, whatever an entry says."""
    expected = root / entry.kind if entry.kind == "shards" else root / entry.kind / entry.path.name
    inside = entry.path == expected and not expected.is_symlink() and not (root / entry.kind).is_symlink()
    if entry.kind not in KINDS or not inside:
        raise ConfigError("cache", got=str(entry.path), expected=f"a path inside {root}")


def _clear_shards(folder: Path) -> None:
    with CacheFolder(str(folder), 1).locked() as (entries, _):
        for entry in entries:
            if is_ours(entry.name):
                remove_if_unused(str(folder / entry.name))
