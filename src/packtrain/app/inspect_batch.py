"""One pack as the model gets it: read, decoded, encoded and collated as in training, listed token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from packtrain.app.inspect_plan import InspectedStep, pack_samples, run_schedule
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.values import MediaHeader, PartLimits
from packtrain.delivery.batch_contents import InspectedBatch, RecordingEncoder, TokenTexts, batch_contents
from packtrain.delivery.encode.encoded_sample import PackedRow, PackKey
from packtrain.measuring.table import MEDIA, CostTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.runs.training_run import read_run

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import Batch
    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.delivery.encode.unlisted import ProcessorEncoder

BACKENDS = ("sdpa", "eager", "flex", "varlen", "flash_attention_2", "flash_attention_3")
_HEADER = ("kind", "width", "height", "frames", "fps", "seconds", "limits")


def inspect_batch(
    plan: PackPlan, table: CostTable, number: int, epoch: int = 0, *, attn_implementation: str = "sdpa", cache: Path
) -> InspectedBatch:
    """Read, encode and collate one pack as a loader does; `cache` is where the table's rows are kept for delivery."""
    (batch,) = inspect_batches(plan, table, (number,), epoch, attn_implementation=attn_implementation, cache=cache)
    return batch


def inspect_batches(
    plan: PackPlan,
    table: CostTable,
    numbers: Sequence[int],
    epoch: int = 0,
    *,
    attn_implementation: str = "sdpa",
    cache: Path,
) -> Iterator[InspectedBatch]:
    """Several packs of an epoch, one after another."""
    if attn_implementation not in BACKENDS:
        fix = nearest(attn_implementation, BACKENDS) or "leave it out"
        raise ConfigError(
            "--attn-implementation", got=attn_implementation, expected="one of " + ", ".join(BACKENDS), fix=fix
        )
    # Refuses numbers of packs that do not exist.
    planned = {one.row for number in numbers for one in pack_samples(plan, table, number, epoch)}
    _quieten()
    from packtrain.delivery.encode.pack_source import PackSource
    from packtrain.delivery.encode.row_table import RecordReader, RowTable
    from packtrain.delivery.encode.unlisted import sample_encoder
    from packtrain.records.shards.data_files import LocalFiles

    request = table.request()
    encoder = sample_encoder(request, measured_settings=table.summary.settings)
    reason = encoder.contract.refused_backends.get(attn_implementation)
    if reason is not None:
        got = f"{attn_implementation} for {encoder.contract.model_type}: {reason}"
        raise ConfigError("--attn-implementation", got=got, fix="leave it out, or use sdpa")
    rows, files = RowTable.make(table, cache), LocalFiles()
    headers, texts = _measured_headers(table, sorted(planned)), TokenTexts(request.settings())
    try:
        for number in numbers:
            recorder = RecordingEncoder(encoder, headers)
            source = PackSource(plan, rows, RecordReader(request, rows, files), recorder)
            row = source[PackKey(epoch=epoch, pack=number)]
            yield batch_contents(
                plan, row, recorder, _collate_row(plan, row, encoder, attn_implementation), attn_implementation, texts
            )
    finally:
        files.close()


def step_batches(
    run: str | Path,
    inspected: InspectedStep,
    costs: str | Path | None = None,
    *,
    attn_implementation: str | None = None,
    cache: Path,
) -> Iterator[InspectedBatch]:
    """The packs of a step as the model gets them, by default for the attention of the run; the data are needed."""
    training_run = read_run(run)
    if training_run.facts.mode == "padded":
        raise ConfigError(
            "--batch",
            got="a padded run, which has no packs",
            expected="a packed run",
            fix="leave it out: --step names the samples",
        )
    schedule, table = run_schedule(training_run, costs)
    derived = training_run.facts.derived
    trained = derived.attn_implementation.removesuffix("-loop") if derived is not None else ""
    chosen = attn_implementation or (trained if trained in BACKENDS else "sdpa")
    numbers = [one.pack for one in inspected.packs]
    yield from inspect_batches(schedule.plan, table, numbers, inspected.epoch, attn_implementation=chosen, cache=cache)


def _quieten() -> None:
    """Refuse to run without transformers, and silence it."""
    try:
        import torch  # noqa: F401
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError("--batch", got=str(error), fix="pip install 'packtrain[train]'") from error
    logging.set_verbosity_error()


def _measured_headers(table: CostTable, rows: list[int]) -> dict[int, tuple[MediaHeader, ...]]:
    """The media headers of some rows, as they were measured."""
    indices = table.rows(("index",), np.array(rows, np.int64))["index"].tolist()
    columns = pq.read_table(
        table.folder / MEDIA, columns=["record", *_HEADER], filters=[("record", "in", indices)]
    ).to_pylist()
    headers: dict[int, list[MediaHeader]] = {index: [] for index in indices}
    for one in columns:
        limits = PartLimits.of(one.pop("limits"))
        headers[one.pop("record")].append(MediaHeader(**one, limits=limits))
    return {row: tuple(headers[index]) for row, index in zip(rows, indices, strict=True)}


def _collate_row(
    plan: PackPlan, row: PackedRow, encoder: SampleEncoder | ProcessorEncoder, attn_implementation: str
) -> Batch:
    from packtrain.delivery.collate.collators import PackCollator

    collator = PackCollator(
        encoder.contract,
        pad_id=encoder.pad_id,
        capacity=plan.config.packing_length,
        alignment=plan.config.pack_alignment,
        boundaries=attn_implementation.startswith(("varlen", "flash")),
        patch_size=_patch_size(encoder.request.settings().config),
    )
    return collator([row])


def _patch_size(config: Mapping[str, Any]) -> int:
    """Side of a patch of the vision encoder; 0 where the model's config does not say."""
    side = (config.get("vision_config") or {}).get("patch_size") or 0
    return int(side[0] if isinstance(side, (list, tuple)) else side)
