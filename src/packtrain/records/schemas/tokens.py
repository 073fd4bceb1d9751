"""Tokens that others have made: `input_ids`, and where their loss is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.modality import MODALITIES
from packtrain.core.values import TokenIds
from packtrain.records.schemas.chat import ConvertedRecord
from packtrain.records.schemas.recognise import LOSS_MASKS
from packtrain.records.schemas.references import MediaPool

IGNORED = -100  # in `labels`
_LARGEST = 2**31 - 1
# Columns of made batches: a sample that needs them is not made of these ids alone.
_OF_MEDIA = (
    *(name for one in MODALITIES.values() for name in (one.features, one.sizes) if name is not None),
    "mm_inputs",
)
_OF_PACKS = ("seq_lengths", "cu_seqlens", "cu_seq_lens", "seq_idx", "sequence_ids", "segment_ids")
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids", "special_tokens_mask", *LOSS_MASKS, *_OF_PACKS)


def tokens_schema(value: Mapping[str, Any], pool: MediaPool | None) -> ConvertedRecord:
    """`input_ids`, with `labels` and masks of 0 and 1 where there are any; without them all tokens carry loss."""
    ids = _numbers(value["input_ids"], "input_ids")
    if not ids:
        raise RecordError("schema", "no tokens", "input_ids is empty")
    if min(ids) < 0 or max(ids) > _LARGEST:
        raise RecordError("schema", "an id outside the vocabulary", f"input_ids: {_first_outside(ids)}")
    if pool is not None or any(_filled(value.get(name)) for name in _OF_MEDIA):
        raise RecordError("schema", "media beside input_ids", "images need the processor: use messages")
    _refuse_packs(value, len(ids))
    learned = [True] * len(ids)
    for name, mask in _masks(value, ids):
        if len(mask) != len(ids):
            raise RecordError("schema", "columns of different lengths", f"{len(ids)} input_ids, {len(mask)} {name}")
        learned = [one and bool(other) for one, other in zip(learned, mask, strict=True)]
    return ConvertedRecord((), tokens=TokenIds(ids=ids, learned=_spans(learned)))


def _masks(value: Mapping[str, Any], ids: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """Which tokens carry loss, by each column that says so."""
    if value.get("labels") is not None:
        labels = _numbers(value["labels"], "labels")
        for at, (label, own) in enumerate(zip(labels, ids, strict=False)):
            if label not in (own, IGNORED):
                detail = f"token {at}: label {label}, id {own}; the model shifts labels itself"
                raise RecordError("schema", "a label is neither its token nor -100", detail)
        yield "labels", [label != IGNORED for label in labels]
    for name in LOSS_MASKS:
        if value.get(name) is not None:
            mask = _numbers(value[name], name)
            if not set(mask) <= {0, 1}:
                raise RecordError("schema", "a loss mask is neither 0 nor 1", f"{name}: {max(mask)}")
            yield name, mask


def _refuse_packs(value: Mapping[str, Any], count: int) -> None:
    """Refuse what is padded, or several samples in one: they would see each other."""
    mask = value.get("attention_mask")
    if mask is not None and (mask := _numbers(mask, "attention_mask")) != (1,) * count:
        ones = len(mask) == count and set(mask) <= {0, 1}
        detail = f"{mask.count(0)} zeros: leave padding out" if ones else f"{len(mask)} numbers for {count} ids"
        raise RecordError("schema", "attention_mask is not 1 for every token", detail)
    positions = value.get("position_ids")
    if positions is not None and _numbers(positions, "position_ids") != tuple(range(count)):
        raise RecordError("schema", "samples that are packed already", "position_ids do not count from 0: unpack them")
    for name in _OF_PACKS:
        item = value.get(name)
        if isinstance(item, list | tuple) and item and list(item) not in ([count], [0, count], [0] * count):
            raise RecordError("schema", "samples that are packed already", f"column {name}: unpack them")
    for name, item in value.items():
        known = name in _OF_TOKENS or (name == "token_type_ids" and isinstance(item, list) and not any(item))
        if not known and isinstance(item, list | tuple) and len(item) == count > 1:
            detail = f"column {name}; loss masks are {', '.join(LOSS_MASKS)}: --columns renames it"
            raise RecordError("schema", "an unknown column with one number per token", detail)


def _numbers(item: object, name: str) -> tuple[int, ...]:
    if not isinstance(item, list | tuple):
        raise RecordError("schema", "a column has the wrong type", f"{name}: {type(item).__name__}, not a list")
    for number in item:
        if type(number) is not int and not (type(number) is bool and name in LOSS_MASKS):
            raise RecordError("schema", "a column has the wrong type", f"{name}: {ascii(number)[:40]}, not an integer")
    return tuple(item)


def _filled(item: object) -> bool:
    return item is not None and (not isinstance(item, list | tuple) or bool(item))


def _first_outside(ids: Sequence[int]) -> int:
    return next(one for one in ids if not 0 <= one <= _LARGEST)


def _spans(marked: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Where spans begin and end.

    >>> _spans([True, False, True, True])
    ((0, 1), (2, 4))
    """
    found, at = [], 0
    for learned, run in itertools.groupby(marked):
        begin, at = at, at + sum(1 for _ in run)
        if learned:
            found.append((begin, at))
    return tuple(found)
