"""Packs from a stream that is not measured first: entries in, packs by number out, with a state that can be saved.

    entries --cost by rule--> waiting (bounded) --OnlinePacker--> packs 0 1 2 3 ... of the run, pass after pass

Every process reads the same stream and computes every cost, so that all agree on the packs without a word; media are
decoded for the packs that it is asked for only. This gives up what measuring first gives: how many packs a pass has is
not known, packs are chosen among the samples at hand, samples keep the order of the stream but for the buffer, and
resuming reads again from the first sample that waits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any, NamedTuple

from packtrain.core.errors import ArtifactError, ConfigError, DataError, RecordError
from packtrain.core.fingerprint import digest
from packtrain.core.modality import VISION_TOKENS
from packtrain.core.numbers import counted
from packtrain.core.values import Cost, LedgerEntry, Measured
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.pack_source import delivery_failure, read_media
from packtrain.delivery.encode.unlisted import ProcessorEncoder, cost_rule, sample_encoder
from packtrain.measuring.measurer import CostRule, Measurer
from packtrain.measuring.request import Request, stream_inputs
from packtrain.packing.cutting import UNFIT
from packtrain.packing.online import OnlinePacker, OnlinePlan
from packtrain.packing.packing_config import SETTING_OF, PackingConfig
from packtrain.packing.plan_builder import STAGE as PACKING
from packtrain.packing.schedule import EMPTY_PACK
from packtrain.records.open import iter_units, read_unit
from packtrain.records.source import Entry, SourceSpec

_STATE = 2  # version of the saved state


class EntryPlace(NamedTuple):
    """The position of an entry in its stream; places sort in reading order."""

    unit: int = 0
    entry: int = 0

    @property
    def key(self) -> str:
        return f"{self.unit}:{self.entry}"

    @classmethod
    def of_key(cls, key: str) -> EntryPlace:
        """Parse a key."""
        unit, entry = key.split(":")
        return cls(int(unit), int(entry))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An entry and its place."""

    place: EntryPlace
    source: int  # position in the request's list of sources
    entry: Entry


class SourceStream:
    """The entries of data sources, one after the other, in the same order in every process and every time."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self._specs = tuple(specs)

    def read(self, start: EntryPlace) -> Iterator[Arrival]:
        """All entries from a place on; units before it are not read."""
        for unit in iter_units(self._specs):
            if unit.number < start.unit:
                continue
            skipped = start.entry if unit.number == start.unit else 0
            for number, entry in enumerate(read_unit(self._specs, unit)):
                if number >= skipped:
                    yield Arrival(place=EntryPlace(unit.number, number), source=unit.source, entry=entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlannedPack:
    """A pack that was decided, and what had to be left out on the way to it."""

    samples: tuple[tuple[str, int], ...] = ()  # key, tokens
    left_out: tuple[LedgerEntry, ...] = ()


class OnlineSource:
    """The packs of a stream as a map-style dataset: `source[PackKey(0, number)]` is a PackedRow with a state.

    Packs are numbered through all passes over the stream. A number that lies before the position of this object
    is made again from where it began: from the first entry, or from the state that was loaded. What cannot be used is
    in `failures` of the next pack. Every row carries the state after its pack, from which later packs are reached
    without reading the stream from its beginning; states do not change what the packs are.
    """

    def __init__(
        self,
        request: Request,
        config: PackingConfig,
        *,
        num_packs: int,
        stream: SourceStream | None = None,
        rule: CostRule | None = None,
        encoder: SampleEncoder | ProcessorEncoder | None = None,
        read_ahead: int = 64,  # entries whose texts are tokenized together; 1 for a stream that is slow to come
        report_after: int = 1000,  # entries left out one after the other, before a pack without samples tells of them
    ) -> None:
        request = _with_date(request)
        self._request, self._config = request, config
        self._stream = stream if stream is not None else SourceStream(request.specs)
        self._given_rule = rule
        self._encoder = encoder if encoder is not None else sample_encoder(request)
        self._read_ahead, self._report_after = read_ahead, report_after
        self._capacities = config.capacities()
        inputs = {**stream_inputs(request), "limits": self._capacities, "buffer": config.packing_buffer}
        self.plan = OnlinePlan(config=config, num_packs=num_packs, inputs=inputs)
        self._inputs = digest(inputs)
        self._loaded: Mapping[str, Any] | None = None  # the state that was loaded
        self._process = os.getpid()
        self._reset()

    def __repr__(self) -> str:
        sources = ", ".join(repr(spec.path) for spec in self._request.specs)
        return f"OnlineSource({sources}, packs of {self._config.packing_length:,} tokens, at pack {self._packs:,})"

    def _reset(self) -> None:
        self._packer = OnlinePacker(self._capacities, buffer=self._config.packing_buffer)
        self._epoch, self._place, self._packs, self._at_end = 0, EntryPlace(), 0, False
        self._ready: deque[_PlannedPack] = deque()
        self._left_out: list[LedgerEntry] = []
        self._held: dict[str, Arrival] = {}  # what waits, and what is ready
        self._tokens: dict[str, int] = {}
        self._forget_reading()

    def _forget_reading(self) -> None:
        """Drop entries that were read ahead; they come after the position and are read again."""
        self._arrivals: Iterator[Arrival] | None = None
        self._measured: deque[tuple[Arrival, Measured | LedgerEntry]] = deque()

    # ---- delivery

    def __getitem__(self, key: PackKey) -> PackedRow:
        if key.pack == EMPTY_PACK:
            return PackedRow(key=key)
        self._go_to(key.pack)
        samples, failures = self._encode_pack(self._next())
        self._hand_out()
        return PackedRow(key=key, samples=samples, failures=failures, stream=self.state_dict())

    def lengths(self, number: int) -> list[int]:
        """The tokens of a pack's samples, without encoding them."""
        self._go_to(number)
        return [tokens for _, tokens in self._next().samples]

    def left_out(self, number: int) -> tuple[LedgerEntry, ...]:
        """What is in no pack and comes before this one's last sample."""
        self._go_to(number)
        return self._next().left_out

    def data_files(self, keys: Iterable[PackKey]) -> list[str]:
        """The data files that packs are read from, as sources call them."""
        return [str(spec.path) for spec in self._request.specs]

    def warm_up(self) -> None:
        """Processes forked from this one load what they need themselves: nothing says that there are media."""

    def close(self) -> None:
        """Nothing is needed any more."""
        self._forget_reading()

    def _go_to(self, number: int) -> None:
        """Move to just before a pack."""
        if self._process != os.getpid():  # a forked worker must not share an open file with its parent
            self._process = os.getpid()
            self._forget_reading()
        loaded = -1 if self._loaded is None else int(self._loaded["packs"])
        if self._loaded is not None and (self._packs < loaded <= number or loaded <= number < self._packs):
            self._restore(self._loaded)
        elif number < self._packs:
            self._reset()
        while self._packs < number:
            self._next()
            self._hand_out()

    def _next(self) -> _PlannedPack:
        """The pack that comes next. At the end of the stream the next pass begins, once all of this one is out."""
        self._fetch_held()
        while not self._ready:
            if self._at_end:
                self._epoch, self._place, self._at_end = self._epoch + 1, EntryPlace(), False
                self._forget_reading()
            elif not self._read_one():
                self._end_pass()
        return self._ready[0]

    def _end_pass(self) -> None:
        if self._place == EntryPlace():
            raise DataError(f"{self!r}", got="no entries", expected="a stream with records")
        self._at_end = True
        self._ready.extend(self._make_pack(keys) for keys in self._packer.flush())
        if self._left_out:
            self._ready.append(self._make_pack([]))

    def _hand_out(self) -> None:
        for key, _ in self._ready.popleft().samples:
            del self._held[key], self._tokens[key]
        self._packs += 1

    def _encode_pack(self, pack: _PlannedPack) -> tuple[tuple[EncodedSample, ...], tuple[LedgerEntry, ...]]:
        capacity, tokens = self._capacities["tokens"], 0
        samples: list[EncodedSample] = []
        failures = list(pack.left_out)
        for key, estimated in pack.samples:
            arrival = self._held[key]
            name = origin = arrival.entry.origin
            try:
                record = self._measurer.record(arrival.entry, arrival.source)
                name = record.id
                store = self._measurer.store(arrival.source)
                sample = read_media(partial(self._encoder.encode, record, store), name, origin)
                if tokens + len(sample) > capacity:
                    raise RecordError("pack", "longer than estimated", f"{len(sample)} tokens instead of {estimated}")
            except RecordError as error:
                failures.append(delivery_failure(name, origin, error))
                continue
            samples.append(sample)
            tokens += len(sample)
        return tuple(samples), tuple(failures)

    # ---- reading and packing

    def _read_one(self) -> bool:
        """Take one entry into the buffer or leave it out; False at the end of the stream."""
        if not self._measured:
            self._measure_ahead()
        if not self._measured:
            return False
        arrival, result = self._measured.popleft()
        self._place = EntryPlace(arrival.place.unit, arrival.place.entry + 1)
        if isinstance(result, Measured):
            result = self._push(arrival, result) or result
        if isinstance(result, LedgerEntry):
            self._left_out.append(result)
            if len(self._left_out) >= self._report_after:
                self._ready.append(self._make_pack([]))
        return True

    def _push(self, arrival: Arrival, sample: Measured) -> LedgerEntry | None:
        """Let a sample wait for its pack; says why where no pack can hold it."""
        uses, key = _uses(sample.cost), arrival.place.key
        over = [name for name, limit in self._capacities.items() if uses[name] > limit]
        if over:
            settings = ", ".join(f"{uses[name]} {name}, {SETTING_OF[name]} {self._capacities[name]}" for name in over)
            if self._config.overlong == "error":
                raise DataError(
                    f"sample {sample.record_id} ({sample.origin})",
                    got=settings,
                    expected="a sample that fits one pack",
                    fix="raise the limit, or set data.overlong: drop",
                )
            return LedgerEntry(
                id=sample.record_id,
                origin=sample.origin,
                stage=PACKING,
                reason=UNFIT,
                detail=settings,
                filtered=True,
            )
        self._held[key], self._tokens[key] = arrival, sample.cost.tokens
        self._ready.extend(self._make_pack(keys) for keys in self._packer.push(key, uses))
        return None

    def _make_pack(self, keys: Sequence[str]) -> _PlannedPack:
        left_out, self._left_out = tuple(self._left_out), []
        return _PlannedPack(samples=tuple((key, self._tokens[key]) for key in keys), left_out=left_out)

    def _measure_ahead(self) -> None:
        """Read some entries and compute their costs."""
        if self._arrivals is None:
            self._arrivals = self._stream.read(self._place)
        try:
            block = list(islice(self._arrivals, self._read_ahead))
            for source, together in groupby(block, lambda arrival: arrival.source):
                part = list(together)
                results = self._measurer.measure([arrival.entry for arrival in part], source)
                self._measured.extend(zip(part, results, strict=True))
        except BaseException:
            self._forget_reading()  # a generator that has raised would look like the end of the stream
            raise

    def _fetch_held(self) -> None:
        """Read again what a loaded state says is waiting or ready."""
        wanted = {key for key in self._tokens if key not in self._held}
        if not wanted:
            return
        first = min(map(EntryPlace.of_key, wanted))
        for arrival in self._stream.read(first):
            if arrival.place.key in wanted:
                self._held[arrival.place.key] = arrival
                wanted.remove(arrival.place.key)
            if not wanted:
                return
        raise DataError(
            "data.online",
            got=f"{counted(len(wanted), 'entry', 'entries')} of the saved state missing, the first at {min(wanted)}",
            expected="the same stream as when the state was saved",
            fix="restore the data, or start over",
        )

    @cached_property
    def _measurer(self) -> Measurer:
        return Measurer(self._request, self._given_rule if self._given_rule is not None else cost_rule(self._request))

    def __getstate__(self) -> dict[str, Any]:
        """Without the members that each process creates for itself."""
        own = ("_measurer", "_arrivals", "_measured")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_reading()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The position after the last pack handed out, as JSON; valid for any number of ranks and workers."""
        return {
            "version": _STATE,
            "inputs": self._inputs,
            **({"template_date": date} if (date := self._request.template_date) is not None else {}),
            "epoch": self._epoch,
            "over": self._at_end,
            "place": list(self._place),
            "packs": self._packs,
            "packer": self._packer.state_dict(),
            "tokens": dict(self._tokens),
            "ready": [[[key for key, _ in pack.samples], _entries_to_json(pack.left_out)] for pack in self._ready],
            "left_out": _entries_to_json(self._left_out),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; one of other data or limits is refused."""
        header = (state.get("version"), state.get("inputs"))
        if header != (_STATE, self._inputs):
            raise ArtifactError(
                "state of the stream",
                got=f"version {header[0]}, inputs {header[1]}",
                expected=f"version {_STATE}, inputs {self._inputs}",
                fix="it belongs to other data, another model or other limits: use those, or start over"
                if state.get("template_date") == self._request.template_date
                else f"set template_date: {state.get('template_date')}, or start over",
            )
        self._restore(state)
        self._loaded = dict(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._reset()
            self._packer.load_state_dict(state["packer"])
            self._epoch, self._place = int(state["epoch"]), EntryPlace(*map(int, state["place"]))
            self._packs, self._at_end = int(state["packs"]), bool(state["over"])
            self._tokens = {EntryPlace.of_key(key).key: int(tokens) for key, tokens in state["tokens"].items()}
            for keys, left_out in state["ready"]:
                self._left_out = _entries_from_json(left_out)
                self._ready.append(self._make_pack(keys))
            self._left_out = _entries_from_json(state["left_out"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._reset()
            raise ArtifactError(
                "state of the stream", got=f"{type(error).__name__}: {error}", expected="a whole state"
            ) from None


def _uses(cost: Cost) -> dict[str, int]:
    """The amount of each pack resource that a sample uses."""
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


def _with_date(request: Request) -> Request:
    try:
        return request.with_date()
    except ConfigError:  # no readable model, which a custom encoder does not need
        return request


def _entries_to_json(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def _entries_from_json(plain: Sequence[Mapping[str, Any]]) -> list[LedgerEntry]:
    return [LedgerEntry(**entry) for entry in plain]
