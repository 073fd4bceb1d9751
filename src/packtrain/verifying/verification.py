"""The whole packing check for one model and one attention backend: costs, labels, each sample alone, neighbours.

Rows that depend on length are checked as well: one with a sample longer than the windows of the model, and one that is
padded to a static shape, as compiled layers get it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from packtrain.core.errors import ConfigError, DataError, PacktrainError, in_one_line
from packtrain.core.values import Cost
from packtrain.delivery.collate.collators import StaticShapes
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.families.family import BatchContract
from packtrain.modeling.attention import set_attention
from packtrain.modeling.compiled import refuse_uncompiled
from packtrain.verifying.check_result import CheckReport, CheckResult
from packtrain.verifying.compare import (
    Collate,
    Comparison,
    FullPrecision,
    HalfPrecision,
    PassOutcome,
    alone_inputs,
    compare_costs,
    compare_labels,
    pack_row,
    run_alone,
    run_packed,
    sample_starts,
    split,
    with_media_as,
)
from packtrain.verifying.isolate import allowed_movement, isolate, needed_effect, row_logits
from packtrain.verifying.model_states import (
    CHECKPOINTING,
    EVALUATION,
    TRAINING,
    Mode,
    exact_products,
    hidden_states,
    in_full_precision,
    in_mode,
    is_random_in_training,
    parity,
    stock_attention,
    supports_checkpointing,
)
from packtrain.verifying.packing_check import sample_described
from packtrain.verifying.trained_loss import TrainingLoss, compare_training_loss, loss_tolerance


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NamedRow:
    """One more row to check: samples, and their collator."""

    name: str
    samples: Sequence[EncodedSample]
    collate: Collate


MOST_TOKENS = 8_448  # of a synthetic sample
_LEAST = 1_024  # tokens, if the config has no such length
_BEYOND = 64  # tokens after the end of a window
_TILE = 128  # tokens; rows of static shape are multiples of it
_LENGTHS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
_FORWARDS = 3  # a cache that one forward leaves shows in a later one
Progress = Callable[[str], None]


def verify_model(
    model: Any,
    samples: Sequence[EncodedSample],
    contract: BatchContract,
    collate: Collate,
    *,
    attn_implementation: str | None = None,
    backward: bool = True,
    costs: Sequence[Cost] = (),
    patch_size: int = 0,
    rows: Sequence[NamedRow] = (),
    loss: TrainingLoss | None = None,
    name: str = "",
    progress: Progress = lambda _: None,
) -> CheckReport:
    """Check that samples in one row come out as each of them does alone.

    The reference runs on the model's own attention, the rest on `attn_implementation`; None keeps the current one.
    `rows` are further rows, of other shapes or with longer samples, that run forward only; `loss` is the trainer's.
    """
    if len(samples) < 2:
        raise ConfigError("samples", got=len(samples), expected="at least two samples")
    started = time.perf_counter()
    weight = next(model.parameters())
    samples = [with_media_as(sample, weight.dtype) for sample in samples]
    left_out = [] if backward else ["gradients: this backend has no backward on this device"]
    with exact_products():
        progress("each sample alone")
        comparison, used = _comparison(model, samples, contract, attn_implementation, backward)
        checks = [compare_costs(samples, costs, patch_size)] if costs else []
        checks.append(compare_labels(samples, pack_row(samples, collate)[1].flatten(), sample_starts(samples, collate)))
        checks += _forwards(model, samples, collate, comparison, progress)
        modes = _modes(model, samples, collate, left_out)
        for mode in modes:
            progress(f"packed: {mode.name}")
            checks += _compare(model, samples, collate, comparison, mode, backward=backward)
        for row in rows:
            progress(f"packed: {row.name}")
            checks += _attempt(row.name, partial(_compare_row, model, row, contract))
        last = modes[-1]
        if loss is not None:
            progress("the trainer's loss")
            compare = partial(_training_loss, model, samples, collate, contract, loss, mode=last, backward=backward)
            checks += _attempt("training loss", compare)
        progress("neighbours")
        looked_at = TRAINING if TRAINING in modes else EVALUATION
        checks += _attempt("neighbours", partial(isolate, model, samples, collate, backward=backward, mode=looked_at))
    return CheckReport(
        model=name or type(model).__name__,
        attn_implementation=used,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        samples=(*map(sample_described, samples), *_forward_only(rows, samples)),
        tokens=sum(len(sample) for sample in samples),
        checks=tuple(checks),
        tolerances=(*comparison.describe(), *_row_tolerances(rows, loss, weight.dtype), *_neighbour_tolerances(model)),
        left_out=tuple(left_out),
        seconds=time.perf_counter() - started,
    )


def _comparison(
    model: Any,
    samples: Sequence[EncodedSample],
    contract: BatchContract,
    attn_implementation: str | None,
    backward: bool,
) -> tuple[Comparison, str]:
    """Run every sample alone, then switch the model to its attention backend, which is returned too."""
    half = next(model.parameters()).dtype != torch.float32
    # Refused backends are refused before anything runs.
    used = set_attention(model, attn_implementation, contract) if attn_implementation is not None else "as given"
    with in_full_precision(model) if half else nullcontext(), stock_attention(model):
        reference = _alone(model, samples, contract, backward=backward)
    if not half:
        return FullPrecision(samples=samples, reference=reference), used
    yardstick = _alone(model, samples, contract, backward=backward)
    return HalfPrecision(samples=samples, reference=reference, yardstick=yardstick), used


def _alone(model: Any, samples: Sequence[EncodedSample], contract: BatchContract, *, backward: bool) -> PassOutcome:
    with in_mode(model, EVALUATION):
        try:
            return run_alone(model, samples, contract, backward=backward)
        except PacktrainError:
            raise
        except Exception as error:  # a model may fail in any way
            refuse_uncompiled(error)
            raise DataError(
                "a sample alone",
                got=f"the model failed: {in_one_line(error)[:300]}",
                expected="a model that runs each sample alone",
                fix="try the model with its own processor first",
            ) from error


def _forwards(
    model: Any, samples: Sequence[EncodedSample], collate: Collate, comparison: Comparison, progress: Progress
) -> list[CheckResult]:
    """Logits of the first forward, and of the last of several."""

    def run() -> list[CheckResult]:
        checks: list[CheckResult] = []
        with in_mode(model, EVALUATION):
            for number in range(_FORWARDS):
                progress(f"packed: forward {number + 1}")
                logits = row_logits(model, samples, collate)
                if number in (0, _FORWARDS - 1):
                    checks += comparison.logits(f"forward {number + 1}", logits)
        return checks

    return _attempt("forward", run)


def _compare(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    comparison: Comparison,
    mode: Mode,
    *,
    backward: bool,
) -> list[CheckResult]:
    def run() -> list[CheckResult]:
        with in_mode(model, mode):
            outcome = run_packed(model, samples, collate, backward=backward)
        checks = [*comparison.logits(mode.name, outcome.logits), comparison.loss(mode.name, outcome)]
        return [*checks, *comparison.gradients(mode.name, outcome.gradients)] if backward else checks

    return _attempt(mode.name, run)


def _compare_row(model: Any, row: NamedRow, contract: BatchContract) -> list[CheckResult]:
    """Hidden states of one more row: it may be too long for logits."""
    dtype = next(model.parameters()).dtype
    samples = [with_media_as(sample, dtype) for sample in row.samples]
    with in_mode(model, EVALUATION), torch.no_grad(), hidden_states(model) as hidden:
        states = split(hidden(pack_row(samples, row.collate)[0]), samples, row.collate)
        with stock_attention(model):
            compared = [
                (one, hidden(alone_inputs(one, contract)), ours) for one, ours in zip(samples, states, strict=True)
            ]
    return [parity(f"hidden states ({row.name})", compared, loss_tolerance(dtype).hidden)]


def _training_loss(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    loss: TrainingLoss,
    *,
    mode: Mode,
    backward: bool,
) -> list[CheckResult]:
    dtype = next(model.parameters()).dtype
    with in_mode(model, mode):
        return compare_training_loss(model, samples, collate, contract, loss, dtype=dtype, backward=backward)


def _attempt(what: str, run: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """A model that cannot run a packed row fails the check, and the other checks continue."""
    try:
        return run()
    except PacktrainError:
        raise
    except Exception as error:  # a model may fail in any way
        refuse_uncompiled(error)
        where = in_one_line(error)[:300]
        return [CheckResult(check=f"packed row runs ({what})", difference=float("inf"), allowed=0.0, where=where)]


def _modes(model: Any, samples: Sequence[EncodedSample], collate: Collate, left_out: list[str]) -> list[Mode]:
    try:
        random = is_random_in_training(model, lambda: row_logits(model, samples, collate))
    except Exception:  # a model may fail in any way; the comparison reports it
        random = False
    if random:
        left_out.append(
            "training mode: the model is random beyond dropout (a router, for example) or keeps running statistics, so "
            "gradients are compared in evaluation mode"
        )
        return [EVALUATION]
    if supports_checkpointing(model):
        return [EVALUATION, TRAINING, CHECKPOINTING]
    left_out.append("gradient checkpointing: this model does not support it")
    return [EVALUATION, TRAINING]


def _forward_only(rows: Sequence[NamedRow], samples: Sequence[EncodedSample]) -> list[str]:
    ids = {sample.id for sample in samples}
    others = {sample.id: sample for row in rows for sample in row.samples if sample.id not in ids}
    return [f"{sample_described(sample)}, in a row of its own, forward only" for sample in others.values()]


def _row_tolerances(rows: Sequence[NamedRow], loss: TrainingLoss | None, dtype: torch.dtype) -> tuple[str, ...]:
    allowed = loss_tolerance(dtype)
    lines = []
    if rows:
        what = "norm of packed - alone over that of alone at supervised positions, in the same precision"
        lines.append(f"hidden states: {what}; at most {allowed.hidden:g}")
    if loss is not None:
        lines.append(
            f"training loss: the trainer's, per token, at most {allowed.loss:g}; on exactly the supervised tokens; its "
            f"gradients at most {allowed.gradients:g}"
        )
    return tuple(lines)


def _neighbour_tolerances(model: Any) -> tuple[str, ...]:
    allowed = allowed_movement(model)
    return (
        "neighbours: one sample changed at a fixed layout; the others' logits and the gradients of their loss may move "
        + (f"by rounding only, {allowed:g} of their size" if allowed else "by exactly 0")
        + "; on GPUs, where runs are not deterministic, gradients by 4 times that, or one unit in the last place",
        f"a change that moves the sample's own logits by less than {needed_effect(model):.2g} of their size shows "
        "nothing about others: inconclusive",
        "training mode is checked without dropout",
    )


def lengths_that_matter(config: Any) -> list[int]:
    """From a model's config: attention windows, and lengths at which positions may change."""
    text = config.get_text_config().to_dict()
    ropes = [value for key, value in text.items() if key.startswith("rope") and isinstance(value, Mapping)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, Mapping)]
    lengths = {part.get(name) for part in (text, *ropes) for name in _LENGTHS}
    if text.get("use_sliding_window") is False:
        lengths.discard(text.get("sliding_window"))
    return sorted(length for length in lengths if isinstance(length, int) and length > 0)


def long_enough(config: Any, contract: BatchContract) -> int:
    """The length of a synthetic sample: beyond the longest of these lengths, if the model and the check allow it."""
    lengths = [length for length in lengths_that_matter(config) if length + _BEYOND <= MOST_TOKENS]
    longest = max([_LEAST, *(length + _BEYOND for length in lengths)])
    # Longer ones would have to be alone, or would not fit into a row.
    limits = [limit for limit in (contract.longest_together, contract.longest_row) if limit is not None]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or longest
    return int(min([longest, int(0.9 * positions), *(max(_BEYOND, limit // 2) for limit in limits)]))


def unreached_note(config: Any, longest: int) -> str | None:
    """A note where no sample is longer than a window."""
    beyond = [length for length in lengths_that_matter(config) if length >= longest]
    if not beyond:
        return None
    named = ", ".join(f"{length:,}" for length in beyond)
    return f"rows beyond {named} tokens (a limit in its config): the longest sample has {longest:,}"


def long_rows(
    samples: Sequence[EncodedSample],
    long: EncodedSample,
    contract: BatchContract,
    collate: Callable[[StaticShapes], Collate],
) -> list[NamedRow]:
    """The long sample between others, and the samples in a row that is padded to a static shape."""
    limit, room = contract.longest_together, contract.longest_row
    row = [samples[0], long, samples[-1]]
    if (limit is not None and len(long) > limit) or (room is not None and sum(map(len, row)) > room):
        row = [long]
    padding = limit if limit is not None and limit <= MOST_TOKENS else 0  # longer padding would change positions
    most = max(sum(map(len, row)), sum(map(len, samples)) + padding + _TILE)
    tokens = -(-most // _TILE) * _TILE
    static = collate(StaticShapes(tokens=tokens if room is None else room))
    return [
        NamedRow(name="longest", samples=row, collate=static),
        NamedRow(name="static shape", samples=samples, collate=static),
    ]
