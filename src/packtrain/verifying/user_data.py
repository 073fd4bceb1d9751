"""Samples from the user's own data: the first usable ones of every kind that are short enough."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from packtrain.core.errors import DataError, RecordError
from packtrain.core.values import Cost, Record
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.delivery.encode.unlisted import ProcessorEncoder, cost_rule
from packtrain.families.encoder import SizedRecord
from packtrain.measuring.measurer import CostRule, Measurer
from packtrain.measuring.request import Request
from packtrain.records.open import iter_units, read_unit
from packtrain.records.source import Entry
from packtrain.verifying.check_result import PricedSample
from packtrain.verifying.packing_check import sample_kind

MOST_LOOKED_AT = 500  # records
MOST_TOKENS = 8_192  # of all samples together: logits of every token are kept
LONGEST = 16_384  # tokens of the longest sample, which runs forward only


def user_samples(
    request: Request, encoder: SampleEncoder | ProcessorEncoder, count: int, room: int | None = None
) -> tuple[list[PricedSample], EncodedSample | None]:
    """Up to `count` samples of different kinds from the beginning of the data, and the longest of all.

    The longest is None if it is among them. `room` is the longest row that the model takes.
    """
    most, most_alone = (min(bound, room or bound) for bound in (MOST_TOKENS, LONGEST))
    rule = cost_rule(request)
    measurer = Measurer(request, rule)
    by_kind: dict[str, list[PricedSample]] = {}
    looked_at = 0
    longest: tuple[int, EncodedSample | None] = (0, None)
    for entry, source in islice(_entries(request), MOST_LOOKED_AT):
        looked_at += 1
        try:
            record = measurer.record(entry, source)
            cost = _cost(rule, record, measurer, source)
            kind = sample_kind(cost.images, cost.videos)
            small = cost.tokens <= most // 2 and len(by_kind.get(kind, ())) < count
            if not small and not longest[0] < cost.tokens <= most_alone:
                continue
            sample = encoder.encode(record, measurer.store(source))
        except RecordError:
            continue  # measuring reports what is wrong with it
        if cost.tokens > longest[0]:
            longest = cost.tokens, sample
        if small:
            by_kind.setdefault(kind, []).append(PricedSample(sample=sample, cost=cost))
    chosen = _of_every_kind(by_kind, count, most)
    if len(chosen) < 2:
        raise DataError(
            "--data",
            got=f"{len(chosen)} usable among the first {looked_at:,} records",
            expected=f"at least two records of at most {most // 2:,} tokens",
            fix="run packtrain measure for the reasons; leave out --data for synthetic samples",
        )
    return chosen, None if any(one.sample is longest[1] for one in chosen) else longest[1]


def _cost(rule: CostRule, record: Record, measurer: Measurer, source: int) -> Cost:
    (price,) = rule.compute_costs([SizedRecord(record, measurer.headers(record, source))], measurer.store(source))
    if isinstance(price, RecordError):
        raise price
    return price[0]


def _entries(request: Request) -> Iterator[tuple[Entry, int]]:
    for unit in iter_units(request.specs):
        for entry in read_unit(request.specs, unit):
            yield entry, unit.source


def _of_every_kind(by_kind: dict[str, list[PricedSample]], count: int, most: int) -> list[PricedSample]:
    """Samples of each kind in turn, within the limit of tokens."""
    chosen: list[PricedSample] = []
    queues = [list(queue) for queue in by_kind.values()]
    while len(chosen) < count and any(queues):
        for queue in queues:
            if not queue or len(chosen) >= count:
                continue
            one = queue.pop(0)
            if sum(len(other.sample) for other in chosen) + len(one.sample) <= most:
                chosen.append(one)
    return chosen
