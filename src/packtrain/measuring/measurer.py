"""One raw entry in, one cost row or one ledger line out; what every worker does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import LedgerEntry, Measured, MediaHeader, Record
from packtrain.families.encoder import RecordEncoder, SizedRecord, SupervisedCost, TooManyTokens
from packtrain.families.part_limits import with_limits
from packtrain.families.registry import is_text_only, load_rule
from packtrain.families.skeleton import texts_of
from packtrain.measuring.request import Filters, Request
from packtrain.records.media import MediaStore
from packtrain.records.schemas.converters import load_formatting, to_record
from packtrain.records.schemas.recognise import ID_COLUMNS
from packtrain.records.schemas.unread import UnreadNames
from packtrain.records.source import Entry


class Filtered(RecordError):
    """A record that the user's own filters leave out."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__("filter", reason, detail)


class Converter:
    """Makes the records of one request, and knows where their media are."""

    def __init__(self, request: Request) -> None:
        self._request = request
        function = request.schema.formatting_func
        self._formatting = load_formatting(function)[0] if function else None
        self.unread = UnreadNames(strict=request.strict_columns)
        self.schemas: Counter[str] = Counter()  # what records were read as
        self._text_only = _text_only(request)
        self._stores = [
            MediaStore(
                spec.media_root,
                allow_outside_root=request.allow_outside_root,
                max_image_pixels=request.max_image_pixels,
            )
            for spec in request.specs
        ]

    def record(self, entry: Entry, source: int) -> Record:
        """The entry as a record, if the user's filters want it. Raises RecordError for one that cannot be used."""
        filters, name = self._request.filters, self._request.specs[source].name
        if filters.sources and name not in filters.sources:
            raise Filtered("source not selected", name)
        if entry.error is not None:
            raise entry.error
        record = to_record(
            entry,
            source=name,
            options=self._request.schema,
            formatting=self._formatting,
            text_only=self._text_only,
            unread=self.unread,
            schemas=self.schemas,
        )
        most = filters.max_images_per_sample
        if most is not None and (images := sum(medium.kind == "image" for medium in record.media())) > most:
            raise Filtered("more images than max_images_per_sample", f"{images} images")
        return record

    def store(self, source: int) -> MediaStore:
        """Where the media of one source are."""
        return self._stores[source]

    def forget_names(self) -> None:
        """Count unread names and schemas from zero."""
        self.unread.drain()
        self.schemas.clear()


def _text_only(request: Request) -> bool:
    try:
        return is_text_only(request.settings())
    except ConfigError:  # no model that we could read; with an encoder of its own a stream needs none
        return False


TOO_LONG = "longer than max_sample_length"


class CostRule(Protocol):
    """Anything that knows what records cost: a family's rule, or the processor itself."""

    def compute_costs(self, batch: Sequence[SizedRecord], store: MediaStore) -> list[SupervisedCost | RecordError]:
        """One result for each record, in order."""
        ...


class FamilyRule:
    """Costs computed from headers by the family's rule, without touching a pixel."""

    def __init__(self, request: Request) -> None:
        settings = request.settings()
        family = load_rule(settings, request.limits)
        assert family is not None, "the caller chooses the processor for families without a rule"
        self.encoder = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
        self._most = request.filters.max_sample_length

    def compute_costs(self, batch: Sequence[SizedRecord], store: MediaStore) -> list[SupervisedCost | RecordError]:
        return self.encoder.costs(batch, self._most)


class Measurer(Converter):
    """Measures entries for one request."""

    batch = 256  # entries that are tokenized together
    batch_bytes = 32 << 20  # of media that travel with their records
    batch_characters = 1 << 20  # of texts: while they are tokenized, each takes some hundred bytes
    most_characters = 8 << 20  # of one record: minutes and gigabytes for a text that no model takes

    def __init__(self, request: Request, rule: CostRule) -> None:
        super().__init__(request)
        self._filters = request.filters
        self._rule = rule

    def measure(self, entries: Iterable[Entry], source: int) -> Iterator[Measured | LedgerEntry]:
        """The row for each entry, or why there is none; in order."""
        batch: list[SizedRecord | LedgerEntry] = []
        held = characters = 0
        for entry in entries:
            item = self._size(entry, source)
            batch.append(item)
            if isinstance(item, SizedRecord):
                held += sum([len(medium.ref.data) for medium in item.record.media() if medium.ref.data is not None])
                characters += _characters(item.record)
            if len(batch) >= self.batch or held >= self.batch_bytes or characters >= self.batch_characters:
                yield from self._compute_costs(batch, source)
                batch, held, characters = [], 0, 0
        yield from self._compute_costs(batch, source)

    def _compute_costs(self, batch: list[SizedRecord | LedgerEntry], source: int) -> Iterator[Measured | LedgerEntry]:
        good = [item for item in batch if isinstance(item, SizedRecord)]
        costs = iter(self._rule.compute_costs(good, self.store(source)))
        for item in batch:
            if not isinstance(item, SizedRecord):
                yield item
                continue
            cost = next(costs)
            record = item.record
            too_long = self._filters.max_sample_length
            if isinstance(cost, tuple) and too_long is not None and cost[0].tokens > too_long:
                cost = Filtered(TOO_LONG, f"{cost[0].tokens} tokens")
            elif isinstance(cost, TooManyTokens):
                cost = Filtered(TOO_LONG, cost.detail)
            if isinstance(cost, RecordError):
                yield _ledger(record.id, record.origin, cost)
                continue
            yield Measured(
                record_id=record.id,
                origin=record.origin,
                source=record.source,
                cost=cost[0],
                media=item.headers,
                supervision=cost[1],
            )

    def _size(self, entry: Entry, source: int) -> SizedRecord | LedgerEntry:
        record: Record | None = None
        try:
            record = self.record(entry, source)
            if (length := _characters(record)) > self.most_characters:
                detail = f"{length:,} characters, the limit is {self.most_characters:,}"
                raise RecordError("schema", "text is too long", detail)
            return SizedRecord(record, self.headers(record, source))
        except RecordError as error:
            fault = error
        except (OSError, MemoryError):
            raise  # the machine's fault, not the record's
        except Exception as error:  # one record must never end a run
            fault = RecordError("internal", "unexpected error", f"{type(error).__name__}: {error}"[:300])
        return _ledger(record.id if record is not None else _id_of(entry), entry.origin, fault)

    def token_ids(self, record: Record, source: int) -> list[int] | None:
        """As the family's rule renders them; None where it cannot."""
        if not isinstance(self._rule, FamilyRule):
            return None
        return self._rule.encoder.token_ids(record, self.headers(record, source))

    def headers(self, record: Record, source: int) -> tuple[MediaHeader, ...]:
        """What the headers of the record's media say."""
        store, filters = self.store(source), self._filters
        headers = tuple(with_limits(store.header(medium.kind, medium.ref), medium) for medium in record.media())
        for header in headers:
            if header.kind == "image":
                continue
            if header.kind == "audio":
                raise RecordError("family", "audio has no token rule yet", f"{header.seconds:.2f} s")
            _check_duration(header, filters)
        return headers


def _characters(record: Record) -> int:
    """How much text a record has, or how many tokens."""
    tokens = len(record.tokens.ids) if record.tokens is not None else 0
    return tokens + sum(map(len, (*texts_of(record), *record.beside())))


def _ledger(record_id: str, origin: str, error: RecordError) -> LedgerEntry:
    return LedgerEntry(
        id=record_id,
        origin=origin,
        stage=error.stage,
        reason=error.reason,
        detail=error.detail,
        filtered=isinstance(error, Filtered),
    )


def _check_duration(header: MediaHeader, filters: Filters) -> None:
    if filters.min_seconds is not None and header.seconds < filters.min_seconds:
        raise Filtered("shorter than min_seconds", f"{header.seconds:.2f} s")
    if filters.max_seconds is not None and header.seconds > filters.max_seconds:
        raise Filtered("longer than max_seconds", f"{header.seconds:.2f} s")


def _id_of(entry: Entry) -> str:
    """The best name for an entry that never became a record."""
    value = entry.value or {}
    named = next((value[name] for name in ID_COLUMNS if name in value), None)
    usable = isinstance(named, (str, int)) and not isinstance(named, bool) and named != ""
    return str(named).encode("utf-8", "backslashreplace").decode() if usable else entry.origin
