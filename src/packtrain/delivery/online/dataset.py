"""Packs from a stream that is not measured first: entries in, packed rows out, with a state that can be saved.

    entries --cost by rule--> waiting (bounded) --OnlinePacker--> packs 0 1 2 | 3 4 5 | ...
                                                                  rank 0 1 2   0 1 2      one round each

Every rank reads the same stream and computes every cost, so that all agree on the packs without a word; pixels are
decoded for its own packs only. This gives up what measuring first gives: the number of steps is not known, packs are
chosen among the samples at hand, samples keep the order of the stream but for the buffer, and resuming reads again from
the first sample that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from packtrain.core.errors import ArtifactError, ConfigError, DataError, RecordError
from packtrain.core.fingerprint import digest
from packtrain.core.modality import VISION_TOKENS
from packtrain.core.values import Cost, LedgerEntry, Measured, Record
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.source import STAGE, media_read
from packtrain.delivery.encode.values import EMPTY_PACK, EncodedSample, PackedRow, PackKey
from packtrain.delivery.loader.sampler import rank_and_world
from packtrain.delivery.online.entries import Arrival, EntryStream, Place, SourceStream
from packtrain.delivery.online.length_error import LengthError
from packtrain.measuring.fingerprint import stream_inputs
from packtrain.measuring.measurer import CostRule, FamilyRule, Measurer
from packtrain.measuring.request import Request
from packtrain.packing.arrays import WRAPPED
from packtrain.packing.build import STAGE as PACKING
from packtrain.packing.config import SETTING_OF, PackingConfig
from packtrain.packing.online import OnlinePacker
from packtrain.packing.overlong import UNFIT
from packtrain.packing.own import is_own
from packtrain.records.media import MediaStore

_STATE = 1  # version of the saved state


class Encoder(Protocol):
    """Encodes single records."""

    def encode(self, record: Record, store: MediaStore) -> EncodedSample:
        """RecordError: it never can be encoded. OSError: it cannot be read now."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A pack that was decided, and what had to be left out on the way to it."""

    samples: tuple[tuple[str, int], ...] = ()  # key, estimated tokens
    left_out: tuple[LedgerEntry, ...] = ()


class OnlineDataset(IterableDataset):
    """This rank's packs, each as a PackedRow, for the collator of packs. An iterator: it goes on where it stands.

    All ranks get equally many rows: the last round is filled up with rows without samples. What cannot be used is in
    `failures` of the next row, each once among all ranks. When the stream has come to its end, the next `iter` begins
    the next epoch. The state is the same on every rank, and good for another number of them.

    In a DataLoader with workers the rounds are dealt to the workers, in an order that does not depend on their number,
    but this object stays where it was: before saving its state, `skip` the batches that were taken.
    """

    def __init__(
        self,
        request: Request,
        config: PackingConfig,
        *,
        rank: int | None = None,
        world: int | None = None,
        stream: EntryStream | None = None,
        rule: CostRule | None = None,
        encoder: Encoder | None = None,
        read_ahead: int = 64,  # entries whose texts are tokenized together; 1 for a stream that is slow to come
        report_after: int = 1000,  # entries left out one after the other, before a row without samples tells of them
    ) -> None:
        _check(request, config)
        request = _dated(request)
        here = rank_and_world()
        self.rank, self.world = (
            own if given is None else given for given, own in zip((rank, world), here, strict=True)
        )
        if not 0 <= self.rank < self.world or read_ahead < 1 or report_after < 1:
            got = f"rank {self.rank} of {self.world}, read_ahead {read_ahead}, report_after {report_after}"
            raise ConfigError("online dataset", got=got, expected="a rank below the world size, positive numbers")
        self.error = LengthError()  # of the samples that this rank has encoded
        self._request, self._config = request, config
        self._stream = stream if stream is not None else SourceStream(request.specs)
        self._given_rule = rule
        self._encoder = encoder if encoder is not None else SampleEncoder(request)
        self._read_ahead, self._report_after = read_ahead, report_after
        self._capacities = config.capacities()
        self._inputs = digest({**stream_inputs(request), "limits": self._capacities})
        self._first_round = 0  # of this iteration
        self._restart(epoch=0)

    def __repr__(self) -> str:
        sources = ", ".join(repr(spec.path) for spec in self._request.specs)
        packs = f"packs of {self._config.packing_length:,} tokens"
        return f"OnlineDataset({sources}, {packs}, rank {self.rank} of {self.world}, epoch {self._epoch})"

    def _restart(self, epoch: int) -> None:
        self._packer = OnlinePacker(self._capacities, buffer=self._config.packing_buffer)
        self._epoch, self._place, self._packs, self._rounds, self._over = epoch, Place(), 0, 0, False
        self._ready: deque[_Made] = deque()
        self._left_out: list[LedgerEntry] = []
        self._held: dict[str, Arrival] = {}  # what waits, and what is ready
        self._tokens: dict[str, int] = {}
        self._forget_reading()

    def _forget_reading(self) -> None:
        """What was read but not yet taken in is read again: it is behind the place."""
        self._arrivals: Iterator[Arrival] | None = None
        self._priced: deque[tuple[Arrival, Measured | LedgerEntry]] = deque()

    # ---- delivery

    def __iter__(self) -> OnlineDataset:
        if self._over:
            self._restart(self._epoch + 1)
        self._forget_reading()  # a forked worker must not share an open file with its parent
        self._first_round = self._rounds
        return self

    def __next__(self) -> PackedRow:
        worker = get_worker_info()
        while (packs := self._round()) is not None:
            turn = self._rounds - self._first_round
            mine = worker is None or turn % worker.num_workers == worker.id
            row = self._row(packs) if mine else None
            self._hand_out(packs)
            if row is not None:
                return row
        self._over = True
        raise StopIteration

    def skip(self, rounds: int) -> None:
        """Move on by as many rows without encoding them."""
        for _ in range(rounds):
            if (packs := self._round()) is None:
                raise DataError("online dataset", got="the end of the stream", expected=f"{rounds} more rows")
            self._hand_out(packs)

    def _round(self) -> list[_Made] | None:
        """The next pack of every rank, as far as there are; None at the end."""
        self._fetch_held()
        while len(self._ready) < self.world and self._take_in():
            pass
        if len(self._ready) < self.world:
            self._ready.extend(self._made(keys) for keys in self._packer.flush())
            if self._left_out:
                self._ready.append(self._made([]))
        return list(islice(self._ready, self.world)) or None

    def _hand_out(self, packs: Sequence[_Made]) -> None:
        for pack in packs:
            self._ready.popleft()
            for key, _ in pack.samples:
                del self._held[key], self._tokens[key]
        self._packs += len(packs)
        self._rounds += 1

    def _row(self, packs: Sequence[_Made]) -> PackedRow:
        """This rank's pack of a round, encoded."""
        if self.rank >= len(packs):
            return PackedRow(key=PackKey(epoch=self._epoch, pack=EMPTY_PACK))
        made, capacity, tokens = packs[self.rank], self._capacities["tokens"], 0
        samples: list[EncodedSample] = []
        failures = list(made.left_out)
        for key, estimated in made.samples:
            arrival = self._held[key]
            name = origin = arrival.entry.origin
            try:
                record = self._measurer.record(arrival.entry, arrival.source)
                name = record.id
                store = self._measurer.store(arrival.source)
                sample = media_read(partial(self._encoder.encode, record, store), name, origin)
                self.error = self.error.plus(estimated, len(sample))
                if tokens + len(sample) > capacity:
                    raise RecordError("pack", "longer than estimated", f"{len(sample)} tokens instead of {estimated}")
            except RecordError as error:
                detail = f"{error.stage}: {error.detail}" if error.detail else error.stage
                failures.append(LedgerEntry(id=name, origin=origin, stage=STAGE, reason=error.reason, detail=detail))
                continue
            samples.append(sample)
            tokens += len(sample)
        pack = PackKey(epoch=self._epoch, pack=self._packs + self.rank)
        return PackedRow(key=pack, samples=tuple(samples), failures=tuple(failures))

    # ---- reading and packing

    def _take_in(self) -> bool:
        """One more entry, into the buffer or out of the way; False at the end of the stream."""
        if not self._priced:
            self._price_ahead()
        if not self._priced:
            return False
        arrival, found = self._priced.popleft()
        self._place = Place(arrival.place.unit, arrival.place.entry + 1)
        if isinstance(found, Measured):
            found = self._push(arrival, found) or found
        if isinstance(found, LedgerEntry):
            self._left_out.append(found)
            if len(self._left_out) >= self._report_after:
                self._ready.append(self._made([]))
        return True

    def _push(self, arrival: Arrival, found: Measured) -> LedgerEntry | None:
        """Let a sample wait for its pack; says why where no pack can hold it."""
        uses, key = _uses(found.cost), arrival.place.key
        over = [name for name, limit in self._capacities.items() if uses[name] > limit]
        if over:
            settings = ", ".join(f"{uses[name]} {name}, {SETTING_OF[name]} {self._capacities[name]}" for name in over)
            if self._config.overlong == "error":
                raise DataError(f"sample {found.record_id} ({found.origin})", got=settings, expected="less")
            return LedgerEntry(
                id=found.record_id,
                origin=found.origin,
                stage=PACKING,
                reason=UNFIT,
                detail=settings,
                filtered=True,
            )
        self._held[key], self._tokens[key] = arrival, found.cost.tokens
        self._ready.extend(self._made(keys) for keys in self._packer.push(key, uses))
        return None

    def _made(self, keys: Sequence[str]) -> _Made:
        left_out, self._left_out = tuple(self._left_out), []
        return _Made(samples=tuple((key, self._tokens[key]) for key in keys), left_out=left_out)

    def _price_ahead(self) -> None:
        """Read some entries and compute their costs."""
        if self._arrivals is None:
            self._arrivals = self._stream.read(self._place)
        try:
            block = list(islice(self._arrivals, self._read_ahead))
            for source, together in groupby(block, lambda arrival: arrival.source):
                part = list(together)
                found = self._measurer.measure([arrival.entry for arrival in part], source)
                self._priced.extend(zip(part, found, strict=True))
        except BaseException:
            self._forget_reading()  # a generator that has raised would look like the end of the stream
            raise

    def _fetch_held(self) -> None:
        """Read again what a loaded state says is waiting or ready."""
        wanted = {key for key in self._tokens if key not in self._held}
        if not wanted:
            return
        first = min(map(Place.of_key, wanted))
        for arrival in self._stream.read(first):
            if arrival.place.key in wanted:
                self._held[arrival.place.key] = arrival
                wanted.remove(arrival.place.key)
            if not wanted:
                return
        raise DataError(
            "online dataset",
            got=f"{len(wanted)} entries that waited when the state was saved are not there, as that at {min(wanted)}",
            expected="the same stream",
            fix="bring the data back as they were, or begin again",
        )

    @cached_property
    def _measurer(self) -> Measurer:
        return Measurer(self._request, self._given_rule if self._given_rule is not None else FamilyRule(self._request))

    def __getstate__(self) -> dict[str, Any]:
        """Without what each process makes for itself."""
        own = ("_measurer", "_arrivals", "_priced")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_reading()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Behind the last row that was handed out on every rank, as JSON."""
        return {
            "version": _STATE,
            "inputs": self._inputs,
            **({"template_date": date} if (date := self._request.template_date) is not None else {}),
            "epoch": self._epoch,
            "over": self._over,
            "place": list(self._place),
            "packs": self._packs,
            "rounds": self._rounds,
            "packer": self._packer.state_dict(),
            "tokens": dict(self._tokens),
            "ready": [[[key for key, _ in made.samples], _plain(made.left_out)] for made in self._ready],
            "left_out": _plain(self._left_out),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on any number of ranks; one of other data or limits is refused."""
        found = (state.get("version"), state.get("inputs"))
        if found != (_STATE, self._inputs):
            raise ArtifactError(
                "state of the online dataset",
                got=f"version {found[0]}, inputs {found[1]}",
                expected=f"version {_STATE}, inputs {self._inputs}",
                fix="it belongs to other data, another model or other limits: use those, or begin again"
                if state.get("template_date") == self._request.template_date
                else f"give the Request its template_date {state.get('template_date')}, or begin again",
            )
        try:
            self._restart(int(state["epoch"]))
            self._packer.load_state_dict(state["packer"])
            self._place, self._over = Place(*map(int, state["place"])), bool(state["over"])
            self._packs, self._rounds = int(state["packs"]), int(state["rounds"])
            self._tokens = {Place.of_key(key).key: int(tokens) for key, tokens in state["tokens"].items()}
            self._left_out = _entries(state["left_out"])
            self._ready = deque(
                _Made(samples=tuple((key, self._tokens[key]) for key in keys), left_out=tuple(_entries(left_out)))
                for keys, left_out in state["ready"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._restart(epoch=0)
            raise ArtifactError(
                "state of the online dataset", got=f"{type(error).__name__}: {error}", expected="a whole state"
            ) from None
        self._first_round = self._rounds


def _uses(cost: Cost) -> dict[str, int]:
    """What a sample uses of each resource of a pack."""
    return {
        "tokens": cost.tokens,
        "vision_tokens": sum(getattr(cost, name) for name in VISION_TOKENS),
        "patches": cost.patches,
        "images": cost.images,
        "videos": cost.videos,
        "frames": cost.frames,
        "samples": 1,
        "attention": cost.tokens * cost.tokens,
    }


def _check(request: Request, config: PackingConfig) -> None:
    """Refuse what only a measured dataset can do."""
    mixed = [spec.name for spec in request.specs if spec.repeats is not None or spec.weight is not None]
    problems = [
        (config.overlong not in ("drop", "error"), f"overlong: {config.overlong}"),
        (config.cutoff_len is not None, f"cutoff_len: {config.cutoff_len}"),
        (config.packing_drop_last, "packing_drop_last"),
        (config.max_packs is not None, f"max_packs: {config.max_packs}"),
        (config.pack_alignment > 1, f"pack_alignment: {config.pack_alignment}"),
        (config.packing_strategy == WRAPPED or is_own(config.packing_strategy), config.packing_strategy),
        (request.filters.limit is not None, "limit"),
        (bool(mixed), f"repeats or weights of {', '.join(mixed)}"),
    ]
    found = [name for wrong, name in problems if wrong]
    if found:
        raise ConfigError(
            "online dataset",
            got="; ".join(found),
            expected="settings that do not need all samples to be known",
            fix="measure the data first, or leave them out",
        )


def _dated(request: Request) -> Request:
    try:
        return request.dated()
    except ConfigError:  # no model that we could read; whoever brings an encoder needs none
        return request


def _plain(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def _entries(plain: Sequence[Mapping[str, Any]]) -> list[LedgerEntry]:
    return [LedgerEntry(**entry) for entry in plain]
