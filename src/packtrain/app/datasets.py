"""Datasets of packs for training: one config, map-style or streaming, the same packs in the same order.

dataset = MultiModalDataset(DatasetConfig(dataset_path="train.jsonl", model="Qwen/Qwen3-VL-2B-Instruct"))
dataset.build()                      # measures and packs what is not there yet
for batch in dataset.loader(num_workers=4):
    ...
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.app.measure import make_request, measure_outcome, tokenized_request
from packtrain.app.pack import pack_outcome
from packtrain.app.reuse import cache_folder
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.artifacts import alone
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.fingerprint import differences, digest
from packtrain.core.numbers import counted, memory
from packtrain.families.model_folder import resolve_model
from packtrain.measuring.measure_summary import EntryCounts, data_notes
from packtrain.measuring.table import CostTable
from packtrain.packing.online import OnlineSchedule
from packtrain.packing.pack_plan import PackPlan, plan_inputs
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.schedule import Schedule
from packtrain.predicting.shapes import context_length
from packtrain.records.formats.source_files import split_notes

if TYPE_CHECKING:
    import torch

    from packtrain.delivery.collate.collators import PackCollator, PaddedCollator
    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.delivery.encode.encoded_sample import PackedRow, PackKey
    from packtrain.delivery.encode.pack_source import PackSource
    from packtrain.delivery.encode.row_table import RowTable
    from packtrain.delivery.encode.token_cache import TokenTable
    from packtrain.delivery.encode.unlisted import ProcessorEncoder
    from packtrain.delivery.loader.pack_loader import PackLoader, PackStream
    from packtrain.families.family import BatchContract
    from packtrain.records.shards.data_files import LocalFiles


_SUMMED = ("tokens", "supervised_tokens", "images", "videos", "patches")
__all__ = ["DatasetConfig", "MultiModalDataset", "MultiModalIterableDataset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSummary:
    """The numbers of a dataset. Packs and samples are those of the first epoch."""

    packing: bool
    samples: int  # one that is split counts once
    packs: int
    samples_per_pack: float
    packing_length: int
    fill: float  # share of real tokens in packs
    padding: float  # share of padding in padded batches; 0 for packs
    tokens: int
    supervised_tokens: int
    longest: int  # sample
    tokens_per_pack: tuple[int, float, int]  # least, mean, most
    images: int
    videos: int
    patches: int
    epochs: int
    packs_per_step: int
    rows_per_batch: int
    steps: int  # of all epochs
    order: str  # balance of the schedule
    left_out: Mapping[str, int]  # records that are in no pack, by stage and reason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Built:
    """The result of building a dataset."""

    source: PackSource
    encoder: SampleEncoder | ProcessorEncoder
    tokens: TokenTable | None = None
    measured: EntryCounts = field(default_factory=lambda: EntryCounts(entries=0, rows=0))
    notes: tuple[str, ...] = ()


class _PackDataset:
    """Shared by datasets with random access and iterable ones."""

    _streams = False

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self._built: _Built | None = None

    def __repr__(self) -> str:
        about = f"{self.config.dataset_path!r} for {self.config.model_name!r}"
        return f"{type(self).__name__}({about}, {'not built' if self._built is None else repr(self.plan)})"

    def build(self, progress: Callable[[Any], None] = lambda _: None) -> None:
        """Measure, pack and tokenize what is not in the cache yet.

        With several ranks on a machine one does it and the others wait. Call it before the process group is
        initialised: how long it takes depends on the data.
        """
        config, root = self.config, self.config.cache_root
        for name in ("schedule", "_stream"):  # of an earlier build
            self.__dict__.pop(name, None)
        if config.online:
            self._built = self._online()
            return
        from packtrain.delivery.encode.encode import SampleEncoder
        from packtrain.delivery.encode.row_table import RowTable
        from packtrain.delivery.encode.unlisted import sample_encoder

        with alone(root / "locks" / f"{digest(config.measured_by())}.lock"):
            table = measure_outcome(config, streaming=None if self._streams else False, progress=progress).table
            if config.plan is not None:
                plan = _load_given_plan(config, table)
            else:
                plan = pack_outcome(table, config.packing_config(_context(config)), progress=progress, cache=root).plan
            encoder = sample_encoder(
                table.request(), packing=bool(config.packing), measured_settings=table.summary.settings
            )
            _require_rotary_lengths(plan, encoder.contract.longest_together, self.rows_per_batch)
            rows = RowTable.make(table, root / "rows")
            if config.caches_tokens and isinstance(encoder, SampleEncoder):
                encoder.cached = self._tokens(table, rows, root, progress)
            self._built = _Built(
                source=self._source(plan, table, rows, encoder, root),
                encoder=encoder,
                tokens=encoder.cached,
                measured=table.summary.counts,
                notes=(*split_notes(table.request().specs), *data_notes(table.summary)),
            )

    def _online(self) -> _Built:
        raise ConfigError(
            "online",
            got=f"true for a {type(self).__name__}",
            expected="a MultiModalIterableDataset: packs of a stream have no index",
            fix="MultiModalIterableDataset(config)",
        )

    @property
    def plan(self) -> PackPlan:
        """Which samples share a pack, in each epoch."""
        return self.source.plan

    @cached_property
    def schedule(self) -> Schedule:
        """The order of packs."""
        config = self.config
        if config.online:
            return OnlineSchedule(self.plan, packs_per_step=config.packs_per_step)  # type: ignore[arg-type]
        return _schedule(config, self.plan)

    @property
    def source(self) -> PackSource:
        """Packs by their key."""
        return self._parts().source

    @property
    def encoder(self) -> SampleEncoder | ProcessorEncoder:
        """Encodes records into samples."""
        return self._parts().encoder

    @property
    def contract(self) -> BatchContract:
        """What a batch of this model looks like."""
        return self.encoder.contract

    @property
    def tokens(self) -> TokenTable | None:
        """Cached tokens; None where text is tokenized when it is read."""
        return self._parts().tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of measuring the data, and of settings that mean something else for packs."""
        grouped = self.config.group_by_length and self.config.has_packs
        note = ("group_by_length is balance: strict for packs: packs of similar work share a step",) if grouped else ()
        return (*note, *self._parts().notes)

    @property
    def measured(self) -> EntryCounts:
        """Numbers of entries that were measured and left out."""
        return self._parts().measured

    @property
    def rows_per_batch(self) -> int:
        """Packs that share a batch: 1, or the rows of a padded one."""
        return self.config.rows_per_batch

    def get_collator(self, *, dtype: torch.dtype | None = None, **options: Any) -> PackCollator | PaddedCollator:
        """Makes batches of packs: one padding-free row each, or padded rows with `packing: false`."""
        from packtrain.delivery.collate.collators import PackCollator, PaddedCollator

        capacity, encoder = self.plan.config.packing_length, self._parts().encoder
        make: Any = PaddedCollator
        if self.config.packing:
            make, options = PackCollator, {"alignment": self.plan.config.pack_alignment, **options}
        return make(encoder.contract, pad_id=encoder.pad_id, capacity=capacity, dtype=dtype, **options)

    def loader(self, collator: Any = None, **options: Any) -> PackLoader:
        """This rank's batches, with a state; see PackLoader for the options."""
        from packtrain.delivery.loader.pack_loader import PackLoader

        options = {"rows_per_batch": self.rows_per_batch, **options}
        return PackLoader(self.source, self.schedule, collator or self.get_collator(), **options)

    def describe(self, *, world_size: int = 1) -> DatasetSummary:
        """The numbers to print before training on this many ranks; a stream has none."""
        schedule, plan = self.schedule, self.plan
        packs, rows_per_batch = plan.epoch(0), self.rows_per_batch
        tokens = packs.load("tokens")  # refused for a stream
        counts = plan.summary.epochs[0]
        return DatasetSummary(
            packing=bool(self.config.packing),
            samples=packs.num_samples,
            packs=packs.num_packs,
            samples_per_pack=packs.num_samples / max(1, packs.num_packs),
            packing_length=plan.config.packing_length,
            fill=float(counts.fill),
            padding=0.0 if self.config.packing else schedule.padding_share(rows_per_batch, world_size=world_size),
            tokens_per_pack=(int(tokens.min()), float(tokens.mean()), int(tokens.max()))
            if len(tokens)
            else (0, 0.0, 0),
            **{name: int(packs.load(name).sum()) for name in _SUMMED},
            longest=int(packs.load("longest").max(initial=0)),
            epochs=plan.num_epochs,
            packs_per_step=schedule.packs_per_step,
            rows_per_batch=rows_per_batch,
            steps=schedule.num_steps(),
            order=schedule.balance,
            left_out={**self.measured.reasons, **plan.summary.ledger.reasons},
        )

    def _source(
        self, plan: PackPlan, table: CostTable, rows: RowTable, encoder: SampleEncoder | ProcessorEncoder, root: Path
    ) -> PackSource:
        raise NotImplementedError

    def _files(self, root: Path) -> LocalFiles:
        raise NotImplementedError

    def _tokens(self, table: CostTable, rows: RowTable, root: Path, progress: Callable[[Any], None]) -> TokenTable:
        """The tokens of a table: a folder beside it, by the same name."""
        from packtrain.delivery.encode.token_cache import make_tokens

        files = self._files(root)
        workers = self.config.workers or len(os.sched_getaffinity(0))
        try:
            name = digest(self.config.measured_by())
            folder = cache_folder(root, "tokens", name, dataset=self.config.dataset_path)
            # A lock of its own: datasets with other settings may share these tokens.
            lock = root / "locks" / f"tokens-{name}.lock"
            return make_tokens(table, rows, files, folder, lock=lock, workers=workers, report=progress)
        finally:
            files.close()

    def _parts(self) -> _Built:
        if self._built is None:
            raise ConfigError(type(self).__name__, got="not built", fix="call .build() first")
        return self._built

    def __getstate__(self) -> dict[str, Any]:
        """A worker needs the packs; it computes the schedule again if it needs it."""
        return {name: value for name, value in self.__dict__.items() if name not in ("schedule", "_stream")}


class MultiModalDataset(_PackDataset):
    """Packs by number: `dataset[3]` is the fourth pack of the first epoch, `dataset[PackKey(1, 3)]` of the second."""

    def __len__(self) -> int:
        """Packs of the first epoch."""
        return self.plan.epoch(0).num_packs

    def __getitem__(self, key: int | PackKey) -> PackedRow:
        from packtrain.delivery.encode.encoded_sample import PackKey

        if isinstance(key, tuple):
            return self.source[key]
        if not -len(self) <= key < len(self):
            raise IndexError(f"pack {key} of {len(self)}")
        number = key + len(self) if key < 0 else key
        return self.source[PackKey(epoch=0, pack=number)]

    def _source(
        self, plan: PackPlan, table: CostTable, rows: RowTable, encoder: SampleEncoder | ProcessorEncoder, root: Path
    ) -> PackSource:
        from packtrain.delivery.encode.pack_source import PackSource
        from packtrain.delivery.encode.row_table import RecordReader

        return PackSource(plan, rows, RecordReader(table.request(), rows, self._files(root)), encoder)

    def _files(self, root: Path) -> LocalFiles:
        from packtrain.records.shards.data_files import LocalFiles
        from packtrain.records.shards.shard_cache import ShardCache

        return LocalFiles(ShardCache(root / "shards", self.config.shard_bytes))


class MultiModalIterableDataset(_PackDataset):
    """The same packs as a stream: this rank's, an epoch each time it is iterated. Data files go through a cache.

    Plans with a packing_window need the files of two windows at a time, whatever the dataset's size; without one a pack
    needs any files, and where `cache_bytes` does not hold them all they are fetched again and again. Under
    transformers.Trainer use `loader`: an IterableDataset would be shared out among the ranks once more. In a DataLoader
    with workers, `set_epoch` before each epoch: this object does not see what its copies there deliver.
    """

    _streams = True

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._place: tuple[int, int, int, int] | None = None
        _register(type(self))

    def __iter__(self) -> Iterator[PackedRow]:
        return iter(self._stream)

    def __len__(self) -> int:
        """Packs of this rank in the epoch that comes next, with those that fill up."""
        return len(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its beginning."""
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, if it is iterated in this process; with workers use the state of `loader`."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same schedule, saved on any number of ranks."""
        self._stream.load_state_dict(state)

    @cached_property
    def _stream(self) -> PackStream:
        from packtrain.delivery.loader.pack_loader import PackStream

        if self._place is None:
            return PackStream(self.source, self.schedule, rows_per_batch=self.rows_per_batch)
        return PackStream.at(self.source, self.schedule, self._place, rows_per_batch=self.rows_per_batch)

    def __getstate__(self) -> dict[str, Any]:
        """A worker has no process group: it gets its rank and its position with the dataset."""
        return {**super().__getstate__(), "_place": self._stream.place if self._built is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register(type(self))

    def _source(
        self, plan: PackPlan, table: CostTable, rows: RowTable, encoder: SampleEncoder | ProcessorEncoder, root: Path
    ) -> PackSource:
        from packtrain.delivery.encode.pack_source import StreamedSource
        from packtrain.delivery.encode.row_table import RecordReader

        files = self._files(root)
        reader = RecordReader(table.request(), rows, files)
        schedule = _schedule(self.config, plan)
        _warn_of_thrashing(table, plan, self.config.shard_bytes)
        return StreamedSource(plan, rows, reader, encoder, files=files, schedule=schedule)

    def _online(self) -> _Built:
        """Packs of a stream that nobody measured; data files are read as they are, not through the cache."""
        from packtrain.delivery.encode.unlisted import sample_encoder
        from packtrain.delivery.online_source import OnlineSource

        request = tokenized_request(make_request(self.config, streaming=None))
        parts = [spec.name for spec in request.specs if (spec.repeats, spec.weight, spec.max_samples) != (None,) * 3]
        if parts:
            raise ConfigError(
                "online",
                got=f"repeats, weights or max_samples of {', '.join(parts)}",
                expected="sources that are read once per pass, every sample once",
                fix="remove them from the mixture, or measure the data first (online: false)",
            )
        config, encoder = self.config, sample_encoder(request, packing=bool(self.config.packing))
        packing, num_packs = config.packing_config(_context(config)), int(config.max_steps or 0) * config.packs_per_step
        source: Any = OnlineSource(request, packing, num_packs=num_packs, encoder=encoder)
        return _Built(source=source, encoder=encoder, notes=tuple(split_notes(request.specs)))

    def _files(self, root: Path) -> LocalFiles:
        from packtrain.records.shards.data_files import CachedFiles
        from packtrain.records.shards.shard_cache import ShardCache

        return CachedFiles(ShardCache(root / "shards", self.config.shard_bytes))


def _require_rotary_lengths(plan: PackPlan, limit: int | None, rows_per_batch: int) -> None:
    """Refuse batches in which one long sample would change the positions of the others, before training finds one."""
    from packtrain.delivery.collate.join import too_long_together

    for epoch in range(plan.num_epochs if limit is not None else 0):
        packs = plan.epoch(epoch)
        mixed = (packs.load("longest") > limit) & (packs.load("samples") * rows_per_batch > 1)
        if mixed.any():
            lengths = (
                f"{int(mixed.sum())} packs of epoch {epoch} with a sample of up to {packs.load('longest').max()} tokens"
            )
            raise too_long_together(f"{lengths} beside others", int(limit or 0))


def _warn_of_thrashing(table: CostTable, plan: PackPlan, budget: int) -> None:
    """A plan without windows may need any file at any time: what does not fit the cache is fetched again and again."""
    from packtrain.records.shards.address import is_remote

    if plan.config.packing_window is not None or plan.config.packing_strategy.startswith("window_"):
        return
    states = table.summary.data
    fetched = {
        file: state for file, state in states.items() if is_remote(file) or file.endswith((".gz", ".tgz", ".zst"))
    }
    size = sum(state.get("size") or 0 for state in fetched.values())
    if size > budget:
        warnings.warn(
            f"{counted(len(fetched), 'compressed or remote data file')} of {memory(size)} in all, and the cache may "
            f"hold {memory(budget)}. Without packing_window any of them may be needed at any time, so they will be "
            "fetched repeatedly: set packing_window, or raise cache_bytes.",
            stacklevel=4,
        )


def _schedule(config: DatasetConfig, plan: PackPlan) -> Schedule:
    return Schedule(plan, packs_per_step=config.packs_per_step, seed=config.seed, balance=config.order)


def _load_given_plan(config: DatasetConfig, table: CostTable) -> PackPlan:
    """The plan of data.plan; it decides how to pack, so data and settings must not contradict it."""
    plan = PackPlan.load(str(config.plan)).at_table(table)
    problems = differences(plan.summary.inputs, plan_inputs(table))
    settings = config.packing_config(plan.config.packing_length).describe()
    defaults = PackingConfig(packing_length=plan.config.packing_length).describe()
    planned = plan.config.describe()
    given = (config.given_names or frozenset()) - {"seed"}  # a run has a seed for more than packs
    problems += [
        f"{name}: {planned[name]} -> {settings[name]}"
        for name in planned
        if name not in ("epochs", "packs_per_step")  # training decides these
        and settings[name] != planned[name]
        and (name in given or settings[name] != defaults[name])
    ]
    if plan.num_epochs < config.epochs:
        problems.append(f"epochs: {plan.num_epochs} -> {config.epochs}")
    if problems:
        raise ArtifactError(
            f"data.plan {config.plan}",
            got="a plan of other data or settings: " + "; ".join(problems[:5]),
            expected="a plan that this run can train",
            fix="pack again with these settings, leave them out, or leave data.plan out",
        )
    return plan


def _context(config: DatasetConfig) -> int:
    """The packing length; by default the context length of the model."""
    if config.packing_length is not None:
        return config.packing_length
    return context_length(resolve_model(config.model_name, cache_dir() / "models"))


def _register(cls: type) -> None:
    """DataLoader asks whether a dataset is an IterableDataset; inheriting from it would load torch with this module."""
    from torch.utils.data import IterableDataset

    IterableDataset.register(cls)
