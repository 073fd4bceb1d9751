"""What an entry of the cache is of, whether it would still be used, and whether it is whole."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from packtrain.app.reuse import of_users
from packtrain.core.artifacts import read_json
from packtrain.core.errors import ArtifactError, PacktrainError
from packtrain.core.fingerprint import differences
from packtrain.core.numbers import counted
from packtrain.delivery.encode.row_table import RowTable, fingerprint_of
from packtrain.delivery.encode.token_table import KIND as TOKENS_KIND
from packtrain.delivery.encode.token_table import TOKENS, TokenTable, token_inputs
from packtrain.delivery.encode.token_table import VERSION as TOKENS_VERSION
from packtrain.families.model_folder import known_as
from packtrain.measuring.columns import content_of
from packtrain.measuring.measure_summary import table_statistics
from packtrain.measuring.request import measure_inputs as measured_inputs
from packtrain.measuring.table import COSTS, MEDIA, SUMMARY, CostTable, read_summary
from packtrain.packing.pack_plan import PACKER_VERSION, PackPlan, plan_inputs
from packtrain.packing.resources import RESOURCES
from packtrain.predicting import calibration
from packtrain.records.shards.cache_folder import list_folder
from packtrain.records.yaml_text import read_yaml

STUDIED = "recommended.yaml"
Faults = Iterator[str]


def entry_described(kind: str, path: Path) -> str:
    """The dataset and the model that an entry is of."""
    try:
        return _DESCRIBED[kind](path)
    except (PacktrainError, OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return "cannot be read"


def staleness(kind: str, path: Path, root: Path) -> list[str]:
    """Why an entry would not be used again as it is; empty where it would."""
    try:
        return list(_STALE[kind](path, root)) if kind in _STALE else []
    except ArtifactError as error:
        return [f"{Path(error.where).name}: {error.got}"]
    except (PacktrainError, OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        return [f"cannot be read: {_first_line(error)}"]


def _of_table(path: Path) -> str:
    if not (path / SUMMARY).is_file():
        return "an unfinished measurement"
    summary = read_summary(path)
    return f"{counted(summary.counts.rows, 'sample')} of {_names(path)}"


def _names(table: Path) -> str:
    """Of which data and model a cost table is; its folder where it cannot be read."""
    try:
        places = read_summary(table).places
    except (PacktrainError, OSError, KeyError, TypeError):
        return table.name
    specs = ["/".join(Path(source.path).parts[-2:]) for source in places.sources]
    more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
    return f"{specs[0] if specs else '?'}{more} for {_model_name(places.model)}"


def _model_name(folder: str) -> str:
    """As users call it."""
    name = known_as(folder)
    return Path(name).name if name == folder else name


def _of_plan(path: Path) -> str:
    plan = PackPlan.load(path, checked=False)
    counts, config = plan.summary.epochs[0], plan.config
    how = "padded" if config.packing_strategy == "none" else f"packs of {config.packing_length:,}"
    about = _names(Path(plan.summary.cost_table))
    return f"{counted(counts.entries, 'sample')}, {how}, {counted(plan.num_epochs, 'epoch')}: {about}"


def _of_rows(path: Path) -> str:
    rows = RowTable(path)
    files = [Path(file.file).name for file in rows.files]
    return f"{counted(len(rows), 'row')} of {', '.join(files[:2])}{' and more' if len(files) > 2 else ''}"


def _of_tokens(path: Path) -> str:
    content = read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)
    about = f"tokens of {counted(content['inputs']['rows'], 'sample')}"
    if content["parts"] is None:
        return f"{about}, not complete"
    return f"{about} of {_names(path.parent.parent / 'measure' / path.name)}"


def _of_calibration(path: Path) -> str:
    found = read_json(path, calibration.KIND, calibration.VERSION)
    return f"{found['device']}, {found['date']}, torch {found['torch']}"


def _of_shards(path: Path) -> str:
    entries, members = list_folder(str(path))
    return f"{sum(one.state == 'ready' for one in entries)} files, used by {len(members)} processes"


def _of_study(path: Path) -> str:
    found = read_yaml(path / STUDIED)
    return f"{found['model']['model_name_or_path']} on {found['data']['dataset_path']}"


_DESCRIBED: dict[str, Callable[[Path], str]] = {
    "measure": _of_table,
    "plans": _of_plan,
    "rows": _of_rows,
    "tokens": _of_tokens,
    "studies": _of_study,
    "shards": _of_shards,
    "models": lambda path: _model_name(str(path)),
    "tokenizers": lambda path: f"made with transformers, {len(list(path.iterdir()))} files",
    "configs": lambda path: str(json.loads(path.read_text(encoding="utf-8"))["config"].get("model_type")),
    "calibration": _of_calibration,
}


def _stale_table(path: Path, root: Path) -> Faults:
    if not (path / SUMMARY).is_file():
        yield "incomplete; the same command continues it"
        return
    table = CostTable.load(path)
    before = table.summary.inputs
    states = before.get("data", {}).values()
    now = measured_inputs(
        table.request(),
        content_hash=any("sha256" in state for state in states),
        by_processor=table.summary.measured_by == "processor",
    )
    yield from differences(before, now)[:5]


def _stale_plan(path: Path, root: Path) -> Faults:
    plan = PackPlan.load(path, checked=False)
    if plan.summary.packer_version != PACKER_VERSION:
        yield f"packed by version {plan.summary.packer_version} of the packer, now {PACKER_VERSION}"
    folder = Path(plan.summary.cost_table)
    if not (folder / SUMMARY).is_file():
        yield f"its cost table is gone ({folder})"
        return
    yield from differences(plan.summary.inputs, plan_inputs(CostTable.load(folder)))[:5]
    if folder.parent == root / "measure" or folder.parent.resolve() == (root / "measure").resolve():
        yield from (f"its cost table is stale: {why}" for why in _stale_table(folder, root))


def _stale_rows(path: Path, root: Path) -> Faults:
    """Rows are named by their table; where none that is known has that name, it has been measured again or is gone."""
    for folder in (*sorted((root / "measure").glob("*")), *of_users("measure")):
        if (folder / SUMMARY).is_file():
            try:
                table = CostTable.load(folder)
            except PacktrainError:
                continue
            if f"rows-{fingerprint_of(table)}.arrow" == path.name:
                return
    yield "its cost table is gone, or was measured again"


def _stale_tokens(path: Path, root: Path) -> Faults:
    """Tokens have the name of their cost table, which may lie in a folder of the user's."""
    content = read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)
    table = root / "measure" / path.name
    if not table.exists():
        table = next(of_users("measure", path.name.rpartition("-")[2]), table)
    if not (table / SUMMARY).is_file():
        yield f"its cost table is gone ({table})"
        return
    yield from differences(content["inputs"], token_inputs(CostTable.load(table)))[:5]
    yield from (f"its cost table is stale: {why}" for why in _stale_table(table, root))
    if content["parts"] is None:
        yield "incomplete; the same command continues it"


def _stale_tokenizer(path: Path, root: Path) -> Faults:
    del root
    if not (path / "special_tokens.json").is_file():
        yield f"incomplete (transformers {importlib.metadata.version('transformers')})"


_STALE: dict[str, Callable[[Path, Path], Faults]] = {
    "measure": _stale_table,
    "plans": _stale_plan,
    "rows": _stale_rows,
    "tokens": _stale_tokens,
    "tokenizers": _stale_tokenizer,
}


def _check_table(path: Path) -> Faults:
    """Every value against the hash of all rows; statistics of all columns, as they are and as they were."""
    if not (path / SUMMARY).is_file():
        return
    table = CostTable.load(path)
    if table.summary.content not in (None, content_of(path / COSTS, path / MEDIA)):
        yield "its rows differ from what was measured"
    before, now = (asdict(one) for one in (table.summary.statistics, table_statistics(table)))
    yield from (f"statistics differ: {change}" for change in differences(before, now)[:3])


def _check_plan(path: Path) -> Faults:
    """Every byte against its checksum; totals of all packs, and every row within its cost table."""
    plan = PackPlan.load(path, checked=True)
    rows = plan.summary.inputs["rows"]
    for number, counts in enumerate(plan.summary.epochs):
        packs = plan.epoch(number)
        totals = {name: int(packs.load(name).sum()) for name in (*RESOURCES, "supervised_tokens")}
        yield from (f"epoch {number}: {change}" for change in differences(counts.totals, totals)[:3])
        if packs.num_entries and not (packs.rows.min() >= 0 and packs.rows.max() < rows):
            yield f"epoch {number}: rows outside of the {rows:,} of its cost table"
        if (np.diff(packs.offsets) < 1).any() or (len(packs.ends) and packs.ends[-1] != packs.num_entries):
            yield f"epoch {number}: packs are not contiguous"


def _check_rows(path: Path) -> Faults:
    """Every value, and the name against what the file says of itself."""
    rows = RowTable.open(path)
    if f"rows-{rows.fingerprint}.arrow" != path.name:
        yield f"it says that it is {rows.fingerprint}"
    if len(rows) and (rows.column("tokens") < 1).any():
        yield "rows without tokens"
    if len(rows) and not (rows.column("file").min() >= 0 and rows.column("file").max() < len(rows.files)):
        yield "rows of unlisted files"


def _check_tokens(path: Path) -> Faults:
    """Every byte against the digests in its list; what is not complete is checked when it is gone on with."""
    if read_json(path / TOKENS, TOKENS_KIND, TOKENS_VERSION)["parts"] is not None:
        yield from TokenTable.load(path).faults()


def _check_shards(path: Path) -> Faults:
    """Sizes of complete files against their names."""
    entries, _ = list_folder(str(path))
    for entry in entries:
        size = (path / entry.name).stat().st_size if (path / entry.name).exists() else entry.reserved
        if entry.state == "ready" and size != entry.reserved:
            yield f"{entry.name[:16]}: {size:,} bytes instead of {entry.reserved:,}"


def _check_model(path: Path) -> Faults:
    """Content against the digest in the name."""
    if not path.name.startswith("tiny-"):
        return
    found = hashlib.sha256()
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        found.update(f"{file.name}\0{len(content)}\0".encode() + content)
    if not path.name.endswith(f"-{found.hexdigest()[:12]}"):
        yield "its content does not match its name"


def _check_tokenizer(path: Path) -> Faults:
    for name in ("tokenizer.json", "special_tokens.json"):
        json.loads((path / name).read_text(encoding="utf-8"))
    yield from ()


def _check_study(path: Path) -> Faults:
    _of_study(path)
    yield from ()


def _check_config(path: Path) -> Faults:
    json.loads(path.read_text(encoding="utf-8"))
    yield from ()


def _check_calibration(path: Path) -> Faults:
    calibration.read_calibration(path)
    yield from ()


def _guarded(check: Callable[[Path], Faults]) -> Callable[[Path], list[str]]:
    def run(path: Path) -> list[str]:
        try:
            return list(check(path))
        except (PacktrainError, OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
            return [_first_line(error)]

    return run


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "measure": _guarded(_check_table),
    "plans": _guarded(_check_plan),
    "rows": _guarded(_check_rows),
    "tokens": _guarded(_check_tokens),
    "studies": _guarded(_check_study),
    "shards": _guarded(_check_shards),
    "models": _guarded(_check_model),
    "tokenizers": _guarded(_check_tokenizer),
    "configs": _guarded(_check_config),
    "calibration": _guarded(_check_calibration),
}


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no details'}"[:300]
