"""The whole proof for one model and one backend: costs, labels, parity with each sample alone, isolation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from packtrain.core.errors import ConfigError, DataError, PacktrainError
from packtrain.core.values import Cost
from packtrain.families.contracts import BatchContract
from packtrain.models.attention import dense_backend, set_attention
from packtrain.packs.values import EncodedSample
from packtrain.proofs.compare import FullPrecision, HalfPrecision, Judge, compare_labels
from packtrain.proofs.costs import compare_costs
from packtrain.proofs.isolate import allowed_movement, isolate, row_logits
from packtrain.proofs.modes import (
    CHECKPOINTING,
    EVALUATION,
    TRAINING,
    Mode,
    exact_products,
    in_full_precision,
    in_mode,
    supports_checkpointing,
)
from packtrain.proofs.passes import Collate, Outcome, packed, run_alone, run_packed, with_media_as
from packtrain.proofs.values import Finding, Verdict

_FORWARDS = 3  # a cache that one forward leaves behind shows in a later one
Say = Callable[[str], None]


def verify_model(
    model: Any,
    samples: Sequence[EncodedSample],
    contract: BatchContract,
    collate: Collate,
    *,
    backend: str | None = None,
    backward: bool = True,
    costs: Sequence[Cost] = (),
    patch_size: int = 0,
    name: str = "",
    say: Say = lambda _: None,
) -> Verdict:
    """Prove that samples in one row come out as each of them does alone.

    The reference runs on sdpa, everything else on `backend`; None leaves the model's attention as it is.
    """
    if len(samples) < 2:
        raise ConfigError("samples", got=len(samples), expected="at least two: one has no neighbour")
    weight = next(model.parameters())
    samples = [with_media_as(sample, weight.dtype) for sample in samples]
    left_out = [] if backward else ["gradients: this backend has no backward pass on this device"]
    with exact_products():
        say("each sample alone")
        judge, used = _judge(model, samples, contract, backend, backward)
        findings = [compare_costs(samples, costs, patch_size)] if costs else []
        findings.append(compare_labels(samples, packed(samples, collate)[1].flatten()))
        findings += _forwards(model, samples, collate, judge, say)
        for mode in _modes(model, left_out):
            say(f"packed: {mode.name}")
            findings += _compare(model, samples, collate, judge, mode, backward=backward)
        say("neighbours")
        findings += _attempt("neighbours", lambda: isolate(model, samples, collate, backward=backward))
    return Verdict(
        model=name or type(model).__name__,
        backend=used,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        samples=tuple(f"{sample.id} ({len(sample):,} tokens)" for sample in samples),
        tokens=sum(len(sample) for sample in samples),
        findings=tuple(findings),
        judged=(*judge.describe(), *_judged_neighbours(allowed_movement(model))),
        left_out=tuple(left_out),
    )


def _judge(
    model: Any, samples: Sequence[EncodedSample], contract: BatchContract, backend: str | None, backward: bool
) -> tuple[Judge, str]:
    """Runs every sample alone; leaves the model on its backend, and says which one that is."""
    half = next(model.parameters()).dtype != torch.float32
    if backend is not None:
        set_attention(model, backend, contract)  # what is refused is refused before anything runs
        set_attention(model, dense_backend(model, contract), contract)
    with in_full_precision(model) if half else nullcontext():
        reference = _alone(model, samples, contract, backward=backward)
    used = set_attention(model, backend, contract) if backend is not None else "as the model came"
    if not half:
        return FullPrecision(samples=samples, reference=reference), used
    yardstick = _alone(model, samples, contract, backward=backward)
    return HalfPrecision(samples=samples, reference=reference, yardstick=yardstick), used


def _alone(model: Any, samples: Sequence[EncodedSample], contract: BatchContract, *, backward: bool) -> Outcome:
    with in_mode(model, EVALUATION):
        try:
            return run_alone(model, samples, contract, backward=backward)
        except PacktrainError:
            raise
        except Exception as error:  # a model may fail in any way
            raise DataError(
                "a sample alone",
                got=f"the model failed: {_in_a_line(error)}",
                expected="a model that takes each sample on its own",
                fix="try the model with its own processor first",
            ) from error


def _forwards(model: Any, samples: Sequence[EncodedSample], collate: Collate, judge: Judge, say: Say) -> list[Finding]:
    """The first forward, and the last of several."""

    def run() -> list[Finding]:
        findings: list[Finding] = []
        with in_mode(model, EVALUATION):
            for number in range(_FORWARDS):
                say(f"packed: forward {number + 1}")
                logits = row_logits(model, samples, collate)
                if number in (0, _FORWARDS - 1):
                    findings += judge.logits(f"forward {number + 1}", logits)
        return findings

    return _attempt("forward", run)


def _compare(
    model: Any, samples: Sequence[EncodedSample], collate: Collate, judge: Judge, mode: Mode, *, backward: bool
) -> list[Finding]:
    def run() -> list[Finding]:
        with in_mode(model, mode):
            found = run_packed(model, samples, collate, backward=backward)
        findings = [*judge.logits(mode.name, found.logits), judge.loss(mode.name, found)]
        return [*findings, *judge.gradients(mode.name, found.gradients)] if backward else findings

    return _attempt(mode.name, run)


def _attempt(what: str, run: Callable[[], list[Finding]]) -> list[Finding]:
    """A model that cannot take a packed row has failed the check, and the others may still say more."""
    try:
        return run()
    except PacktrainError:
        raise
    except Exception as error:  # a model may fail in any way
        where = _in_a_line(error)
        return [Finding(check=f"packed row runs ({what})", difference=float("inf"), allowed=0.0, where=where)]


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _modes(model: Any, left_out: list[str]) -> list[Mode]:
    if supports_checkpointing(model):
        return [EVALUATION, TRAINING, CHECKPOINTING]
    left_out.append("gradient checkpointing: this model does not support it")
    return [EVALUATION, TRAINING]


def _judged_neighbours(allowed: float) -> tuple[str, ...]:
    return (
        "neighbours: one sample changed at a fixed layout; the others' logits and the gradients of their loss may move "
        + (f"by rounding only, {allowed:g} of their size" if allowed else "by exactly nothing")
        + "; on GPUs, where equal runs differ, gradients by 4 times that, or a unit in the last place",
        "training mode is looked at without dropout",
    )
