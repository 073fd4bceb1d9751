"""Rows for what depends on length: a sample longer than the model's windows, and rows filled up to a static shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packtrain.delivery.collate.collators import ConstantShapes
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.families.family import BatchContract
from packtrain.verifying.comparison_passes import Collate
from packtrain.verifying.verification import NamedRow

MOST_TOKENS = 8_448  # of a synthetic sample
_LEAST = 1_024  # tokens: also where no length is known to matter
_BEYOND = 64  # tokens behind the end of a window
_TILE = 128  # tokens; rows of static shape are multiples of it
_LENGTHS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")


def lengths_that_matter(config: Any) -> list[int]:
    """Windows of the language model, and lengths at which its positions may change, as its config says them."""
    text = config.get_text_config().to_dict()
    ropes = [value for key, value in text.items() if key.startswith("rope") and isinstance(value, Mapping)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, Mapping)]
    found = {part.get(name) for part in (text, *ropes) for name in _LENGTHS}
    if text.get("use_sliding_window") is False:
        found.discard(text.get("sliding_window"))
    return sorted(length for length in found if isinstance(length, int) and length > 0)


def long_enough(config: Any, contract: BatchContract) -> int:
    """The length of a synthetic sample beyond the longest of these lengths that is not too long, where it may be."""
    known = [length for length in lengths_that_matter(config) if length + _BEYOND <= MOST_TOKENS]
    wanted = max([_LEAST, *(length + _BEYOND for length in known)])
    # It would have to be alone, or its row would have no place for it.
    limits = [limit for limit in (contract.longest_together, contract.longest_row) if limit is not None]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or wanted
    return int(min([wanted, int(0.9 * positions), *(max(_BEYOND, limit // 2) for limit in limits)]))


def unreached(config: Any, longest: int) -> str | None:
    """What to say where no sample is longer than a window."""
    beyond = [length for length in lengths_that_matter(config) if length >= longest]
    if not beyond:
        return None
    named = ", ".join(f"{length:,}" for length in beyond)
    return f"rows beyond {named} tokens (a limit in its config): the longest sample has {longest:,}"


def long_rows(
    samples: Sequence[EncodedSample],
    long: EncodedSample,
    contract: BatchContract,
    collate: Callable[[ConstantShapes], Collate],
) -> list[NamedRow]:
    """The long sample between others, and the samples in a row that is mostly padding: as compiled layers get them."""
    limit, room = contract.longest_together, contract.longest_row
    row = [samples[0], long, samples[-1]]
    if (limit is not None and len(long) > limit) or (room is not None and sum(map(len, row)) > room):
        row = [long]
    padding = limit if limit is not None and limit <= MOST_TOKENS else 0  # more than that would show
    most = max(sum(map(len, row)), sum(map(len, samples)) + padding + _TILE)
    tokens = -(-most // _TILE) * _TILE
    constant = collate(ConstantShapes(tokens=tokens if room is None else room))
    return [
        NamedRow(name="longest", samples=row, collate=constant),
        NamedRow(name="static shape", samples=samples, collate=constant),
    ]
