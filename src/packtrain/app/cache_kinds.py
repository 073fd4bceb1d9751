"""The kinds of entries in the cache: their names, what they were made from, whether they are stale, and intact."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from packtrain.app.reuse import user_folders
from packtrain.core.artifacts import read_json
from packtrain.core.errors import ArtifactError, PacktrainError
from packtrain.core.fingerprint import differences
from packtrain.core.numbers import counted
from packtrain.delivery.encode.row_table import RowTable, rows_fingerprint
from packtrain.delivery.encode.token_cache import KIND as TOKENS_KIND
from packtrain.delivery.encode.token_cache import TOKENS, TokenTable, token_inputs
from packtrain.delivery.encode.token_cache import VERSION as TOKENS_VERSION
from packtrain.families.model_folder import known_as
from packtrain.measuring.request import measure_inputs
from packtrain.measuring.table import SUMMARY, CostTable, read_summary
from packtrain.packing.pack_plan import PACKER_VERSION, PackPlan, plan_inputs
from packtrain.predicting import calibration
from packtrain.records.shards.cache_folder import MARKER, list_folder
from packtrain.records.yaml_text import read_yaml

_UNREADABLE = (PacktrainError, OSError, KeyError, ValueError, TypeError, pa.ArrowException)
_HEX = re.compile(r"[0-9a-f]{20}")
_NAMED = re.compile(r"(?:[\w.-]+-)?[0-9a-f]{20}")  # DATASET-MODE-FINGERPRINT
_STUDY = "recommended.yaml"
_INCOMPLETE = "incomplete; the same command continues it"
_REASONS = 5  # differences that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKind:
    """One kind of entry. `check` reads an entry as its users do, with all checksums, and raises or names faults."""

    what: str
    names: re.Pattern[str]  # of entries, in the folder of this kind
    marks: tuple[str, ...] = ()  # an entry is a folder with one of these files; none: it is a file itself
    about: Callable[[Path], str]
    check: Callable[[Path], Iterable[str] | object]
    stale: Callable[[Path, Path], Iterable[str]] | None = None  # of an entry, and the root of the cache

    def holds(self, path: Path) -> bool:
        """Is this an entry, by its name and by a file that only packtrain writes?"""
        if not self.names.fullmatch(path.name):
            return False
        return path.is_dir() and any((path / mark).is_file() for mark in self.marks) if self.marks else path.is_file()

    def describe(self, path: Path) -> str:
        """The dataset and the model of an entry."""
        try:
            return self.about(path)
        except _UNREADABLE:
            return "cannot be read"

    def why_stale(self, path: Path, root: Path) -> tuple[str, ...]:
        """Why an entry would not be reused; empty where it would."""
        try:
            return tuple(self.stale(path, root)) if self.stale is not None else ()
        except ArtifactError as error:
            return (f"{Path(error.where).name}: {error.got}",)
        except _UNREADABLE as error:
            return (f"cannot be read: {_first_line(error)}",)

    def faults(self, path: Path) -> tuple[str, ...]:
        """The faults of an entry's content."""
        try:
            faults = self.check(path)
            return tuple(faults) if isinstance(faults, Iterator) else ()
        except _UNREADABLE as error:
            return (_first_line(error),)


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no details'}"[:300]


# ---- what entries were made from


def _about_table(path: Path) -> str:
    if not (path / SUMMARY).is_file():
        return "an unfinished measurement"
    return f"{counted(read_summary(path).counts.rows, 'sample')} of {_sources(path)}"


def _sources(table: Path) -> str:
    """Data and model of a cost table; its folder where it cannot be read."""
    try:
        places = read_summary(table).places
    except (PacktrainError, OSError, KeyError, TypeError):
        return table.name
    specs = ["/".join(Path(source.path).parts[-2:]) for source in places.sources]
    more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
    return f"{specs[0] if specs else '?'}{more} for {_model_name(places.model)}"


def _model_name(folder: str) -> str:
    """The name that the user gave."""
    name = known_as(folder)
    return Path(name).name if name == folder else name


def _about_plan(path: Path) -> str:
    plan = PackPlan.load(path, checked=False)
    counts, config = plan.summary.epochs[0], plan.config
    layout = "padded" if config.packing_strategy == "none" else f"packs of {config.packing_length:,}"
    sources = _sources(Path(plan.summary.cost_table))
    return f"{counted(counts.entries, 'sample')}, {layout}, {counted(plan.num_epochs, 'epoch')}: {sources}"


def _about_rows(path: Path) -> str:
    rows = RowTable(path)
    files = [Path(file.file).name for file in rows.files]
    return f"{counted(len(rows), 'row')} of {', '.join(files[:2])}{' and more' if len(files) > 2 else ''}"


def _about_tokens(path: Path) -> str:
    content = read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)
    about = f"tokens of {counted(content['inputs']['rows'], 'sample')}"
    if content["parts"] is None:
        return f"{about}, not complete"
    return f"{about} of {_sources(path.parent.parent / 'measure' / path.name)}"


def _about_calibration(path: Path) -> str:
    content = read_json(path, calibration.KIND, calibration.VERSION)
    return f"{content['device']}, {content['date']}, torch {content['torch']}"


def _about_shards(path: Path) -> str:
    entries, members = list_folder(str(path))
    files = counted(sum(one.state == "ready" for one in entries), "file")
    return f"{files}, used by {counted(len(members), 'process', 'processes')}"


def _about_study(path: Path) -> str:
    config = read_yaml(path / _STUDY)
    return f"{config['model']['model_name_or_path']} on {config['data']['dataset_path']}"


# ---- why entries are stale


def _stale_table(path: Path, root: Path) -> Iterator[str]:
    if not (path / SUMMARY).is_file():
        yield _INCOMPLETE
        return
    table = CostTable.load(path)
    states = table.summary.inputs.get("data", {}).values()
    now = measure_inputs(
        table.request(),
        content_hash=any("sha256" in state for state in states),
        by_processor=table.summary.measured_by == "processor",
    )
    yield from differences(table.summary.inputs, now)[:_REASONS]


def _stale_plan(path: Path, root: Path) -> Iterator[str]:
    plan = PackPlan.load(path, checked=False)
    if plan.summary.packer_version != PACKER_VERSION:
        yield f"packed by version {plan.summary.packer_version} of the packer, now {PACKER_VERSION}"
    folder = Path(plan.summary.cost_table)
    if not (folder / SUMMARY).is_file():
        yield f"its cost table is gone ({folder})"
        return
    yield from differences(plan.summary.inputs, plan_inputs(CostTable.load(folder)))[:_REASONS]
    if folder.parent.resolve() == (root / "measure").resolve():
        yield from (f"its cost table is stale: {why}" for why in _stale_table(folder, root))


def _stale_rows(path: Path, root: Path) -> Iterator[str]:
    """Rows are named by their table: is there still one of that name?"""
    for folder in (*sorted((root / "measure").glob("*")), *user_folders("measure")):
        if (folder / SUMMARY).is_file():
            try:
                table = CostTable.load(folder)
            except PacktrainError:
                continue
            if f"rows-{rows_fingerprint(table)}.arrow" == path.name:
                return
    yield "its cost table is gone, or was measured again"


def _stale_tokens(path: Path, root: Path) -> Iterator[str]:
    """Tokens have the name of their cost table, which may be in a folder of the user's."""
    content = read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)
    table = root / "measure" / path.name
    if not table.exists():
        table = next(user_folders("measure", path.name.rpartition("-")[2]), table)
    if not (table / SUMMARY).is_file():
        yield f"its cost table is gone ({table})"
        return
    yield from differences(content["inputs"], token_inputs(CostTable.load(table)))[:_REASONS]
    yield from (f"its cost table is stale: {why}" for why in _stale_table(table, root))
    if content["parts"] is None:
        yield _INCOMPLETE


def _stale_tokenizer(path: Path, root: Path) -> Iterator[str]:
    if not (path / "special_tokens.json").is_file():
        yield f"incomplete (transformers {importlib.metadata.version('transformers')})"


# ---- what is wrong with entries, beyond what their readers refuse


def _check_rows(path: Path) -> Iterator[str]:
    """The name against what the file says of itself."""
    rows = RowTable.open(path)
    if f"rows-{rows.fingerprint}.arrow" != path.name:
        yield f"its fingerprint is {rows.fingerprint}"


def _check_tokens(path: Path) -> Iterator[str]:
    """Incomplete ones are checked when they are continued."""
    if read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)["parts"] is not None:
        yield from TokenTable.load(path).faults()


def _check_shards(path: Path) -> Iterator[str]:
    """Sizes of complete files against their names."""
    entries, _ = list_folder(str(path))
    for entry in entries:
        size = (path / entry.name).stat().st_size if (path / entry.name).exists() else entry.reserved
        if entry.state == "ready" and size != entry.reserved:
            yield f"{entry.name[:16]}: {size:,} bytes instead of {entry.reserved:,}"


def _check_model(path: Path) -> Iterator[str]:
    """Content against the digest in the name; models that were made wider have none."""
    if not re.fullmatch(r".*-[0-9a-f]{12}", path.name):
        return
    content = hashlib.sha256()
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        content.update(f"{file.name}\0{len(data)}\0".encode() + data)
    if not path.name.endswith(f"-{content.hexdigest()[:12]}"):
        yield "its content does not match its name"


def _read_json_files(path: Path, *names: str) -> None:
    for file in (path / name for name in names) if names else (path,):
        json.loads(file.read_text(encoding="utf-8"))


KINDS = {
    "measure": CacheKind(
        what="cost tables",
        names=_NAMED,
        marks=("measure.json", ".measure.journal", "ledger.jsonl", "costs.parquet"),
        about=_about_table,
        stale=_stale_table,
        check=lambda path: CostTable.load(path) if (path / SUMMARY).is_file() else None,
    ),
    "plans": CacheKind(
        what="pack plans",
        names=_NAMED,
        marks=("plan.json",),
        about=_about_plan,
        stale=_stale_plan,
        check=lambda path: PackPlan.load(path, checked=True),
    ),
    "rows": CacheKind(
        what="rows for delivery",
        names=re.compile(r"rows-[0-9a-f]{20}\.arrow"),
        about=_about_rows,
        stale=_stale_rows,
        check=_check_rows,
    ),
    "tokens": CacheKind(
        what="tokenized samples",
        names=_NAMED,
        marks=("tokens.json",),
        about=_about_tokens,
        stale=_stale_tokens,
        check=_check_tokens,
    ),
    "studies": CacheKind(
        what="studies that runs were planned with", names=_HEX, marks=(_STUDY,), about=_about_study, check=_about_study
    ),
    "shards": CacheKind(  # one entry: the folder itself
        what="data files, unpacked",
        names=re.compile("shards"),
        marks=(MARKER,),
        about=_about_shards,
        check=_check_shards,
    ),
    "models": CacheKind(
        what="models made here",
        names=re.compile(r"tiny-[\w.-]+"),
        marks=("config.json",),
        about=lambda path: _model_name(str(path)),
        check=_check_model,
    ),
    "tokenizers": CacheKind(
        what="tokenizers built by transformers",
        names=_HEX,
        marks=("tokenizer.json",),
        about=lambda path: f"made with transformers, {counted(len(list(path.iterdir())), 'file')}",
        stale=_stale_tokenizer,
        check=lambda path: _read_json_files(path, "tokenizer.json", "special_tokens.json"),
    ),
    "configs": CacheKind(
        what="model configs loaded by transformers",
        names=re.compile(r"[0-9a-f]{20}\.json"),
        about=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["config"].get("model_type")),
        check=_read_json_files,
    ),
    "calibration": CacheKind(
        what="calibrations of GPUs",
        names=re.compile(r"[\w.-]+\.json"),
        about=_about_calibration,
        check=lambda path: calibration.read_calibration(path),
    ),
}
