"""Runs in plain sentences: one, or several compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packtrain.core.numbers import count, counted, decimal, elapsed, isolate, large, loss, percent, shown, times
from packtrain.runs.run_folder import Origin, RunOutcome
from packtrain.runs.run_summary import FEWEST, RunComparison, Summary
from packtrain.runs.training_run import TrainingRun

ALIKE = 0.03  # losses that are closer than this, relatively, are called the same
_FASTER = 1.05
_UNEVEN = 1.1  # between numbers of samples per step that are told apart
_FALLS = 0.02  # a loss that falls by this share over the last tenth of a run is said to
_ON_TOP = 0.001  # relative difference of losses that no chart can show
_ENDED = {"complete": "Completed.", "not started": "The first step has not finished yet."}


def run_labels(runs: Sequence[TrainingRun]) -> list[str]:
    """Short names that tell the runs apart: their modes if these do, else their folders.

    Folders of one name are numbered.
    """
    modes = [run.facts.mode for run in runs]
    if len(runs) > 1 and None not in modes and len(set(modes)) == len(runs):
        return [shown(str(mode), 40).capitalize() for mode in modes]
    names = [shown(run.name, 40) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(names)]


def headline(
    runs: Sequence[TrainingRun], summaries: Sequence[Summary], labels: Sequence[str], both: RunComparison | None
) -> str:
    """The one thing to know."""
    if both is not None:
        return _comparison_sentence(runs, both, labels)
    first = summaries[0]
    if not first.steps:
        return "No step yet"
    if first.loss_end is None or first.loss_start is None:
        return "The loss is not a number"
    if len(runs) > 1:
        return f"{counted(len(runs), 'run')}, not comparable yet"
    so_far = " so far" if runs[0].is_training else ""
    return f"Loss {loss(first.loss_start)} → {loss(first.loss_end)}{so_far}"


def lead(
    runs: Sequence[TrainingRun], summaries: Sequence[Summary], labels: Sequence[str], both: RunComparison | None
) -> str:
    """The run in two or three sentences."""
    if both is not None:
        return " ".join(_comparison_sentences(summaries, labels, both))
    return f"{_training_sentence(runs[0], summaries[0])} {end_text(runs[0])}{_falling(runs[0], summaries[0])}"


def why_apart(runs: Sequence[TrainingRun], labels: Sequence[str], apart: float | None, others: Sequence[str]) -> str:
    """Why the losses of runs can be compared, and why they may still differ.

    `others`: settings that differ and affect the loss, apart from model, kernels and the samples of a step.
    """
    kernels = [derived.attn_implementation if (derived := run.facts.derived) is not None else None for run in runs]
    named = _join_words(
        [f"{isolate(str(kernel), 40)} in {name}" for kernel, name in zip(kernels, _short_names(labels), strict=True)]
    )
    kernel = f"other attention kernels ({named})" if len(set(kernels)) > 1 and all(kernels) else ""
    same, alike = same_steps(runs), _alike_steps(runs)
    sentences, reasons = [], []
    if other_starts(runs):
        starts = [f"{name} from {initial_weights(run)}" for name, run in zip(_short_names(labels), runs, strict=True)]
        sentences.append(f"The runs started from different weights: {_join_words(starts)}.")
        reasons.append("their starting weights")
    if same:
        sentences.append("Every optimizer step has the same samples in all runs.")
    elif alike:
        sentences.append("Every optimizer step has as many samples, tokens and labels in one run as in the other.")
    else:
        sentences.append("Steps of the runs hold different samples, so losses are compared after equally many samples.")
        sizes = [float(np.nan_to_num(run.steps["samples"]).mean()) if len(run.steps) else 0.0 for run in runs]
        each = _join_words([f"{decimal(size)} {name}" for size, name in zip(sizes, _short_names(labels), strict=True)])
        uneven = min(sizes) > 0 and max(sizes) > _UNEVEN * min(sizes)
        reasons.append(f"how many samples make a step ({each})" if uneven else "which samples shared a step")
    reasons += [f"what was set differently ({', '.join(isolate(name, 40) for name in others[:4])})"] if others else []
    reasons += [kernel] if kernel else []
    if same and not other_starts(runs) and not others:
        rounding = "The remaining difference of their losses is rounding: sums in another order"
        sentences.append(f"{rounding}, and by {kernel}." if kernel else f"{rounding}.")
        sentences += ["Over samples their curves coincide."] if (apart or 0) < _ON_TOP else []
    elif reasons:
        sentences.append(f"Their losses may differ by {_join_words(reasons)}.")
    return " ".join(sentences)


def same_steps(runs: Sequence[TrainingRun]) -> bool:
    """Has every step the same samples in all runs? So it is with the same plan in the same order."""
    orders = {run.facts.fingerprints.get("schedule") for run in runs}
    return len(orders) == 1 and None not in orders


def _alike_steps(runs: Sequence[TrainingRun]) -> bool:
    """Has every step of one run as much in it as that of the others, as far as all of them go?"""
    length = min(len(run.steps) for run in runs)
    names = ("samples", "tokens", "supervised_tokens")
    columns = [np.stack([run.steps[name][:length] for name in names]) for run in runs]
    return length > 0 and all(np.array_equal(columns[0], one) for one in columns[1:])


def other_starts(runs: Sequence[TrainingRun]) -> bool:
    """Did the runs begin from different weights, as far as their names say?"""
    return len({initial_weights(run) for run in runs}) > 1


def initial_weights(run: TrainingRun) -> str:
    """The weights that a run began from."""
    name, origin = isolate(run.facts.model or "a model", 80), run.facts.origin or Origin()
    if origin.run is not None:
        after = f", trained on {count(origin.samples_seen)} samples" if origin.samples_seen is not None else ""
        weights = isolate(origin.weights or "weights", 40)
        return f"{weights} of the run {isolate(Path(origin.run).name, 40)}{after}"
    return name if origin.seed is None else f"{name} (random weights, seed {origin.seed})"


def end_text(run: TrainingRun) -> str:
    """How the run ended, or how far it is."""
    outcome = run.facts.outcome or RunOutcome(status=run.status)
    step = count(max(len(run.steps), outcome.step))
    where = f"step {step} of {count(outcome.steps)}" if outcome.steps else f"step {step}"
    again = f"packtrain train --resume {isolate(run.folder, 200)}"
    if run.is_training:
        return f"It is still training: {where}."
    if run.status in ("running", "started"):
        why = "stopped from outside, or on another machine"
        return f"It stopped at {where} without a reason: {why}. {again} continues it."
    if run.status == "interrupted":
        return f"It was interrupted at {where}; {again} continues it."
    if run.status == "failed":
        why = shown(outcome.detail, 200)
        return f"It failed at {where}{f': {why}' if why else ''}."
    return _ENDED.get(run.status) or f"It says of itself: {isolate(run.status, 120)}."


def _falling(run: TrainingRun, one: Summary) -> str:
    """Whether a run that is complete might have gone on."""
    if run.status != "complete" or one.fall is None or one.fall < _FALLS:
        return ""
    return f" The loss was still falling: by {percent(one.fall)} over the last {count(one.loss_window)} samples."


def _training_sentence(run: TrainingRun, one: Summary) -> str:
    mode = f" {run.facts.mode}" if run.facts.mode in ("packed", "padded") else ""
    words = f"{isolate(run.facts.model or 'A model', 80)}, trained{mode}"
    if one.steps:
        words += f" for {counted(one.steps, 'step')}: {count(one.samples or 0)} samples"
        words += f", {large(one.tokens or 0)} real tokens" if one.tokens else ""
        words += f" in {elapsed(one.seconds)}" if one.seconds else ""
    return words + "."


def same_loss(both: RunComparison) -> bool:
    """May the losses be called the same?"""
    return both.enough and both.apart is not None and both.apart <= ALIKE


def too_few(labels: Sequence[str], both: RunComparison) -> str:
    """Why speeds are not compared, or nothing where they are."""
    if both.enough:
        return ""
    have = [
        f"{name} has {counted(one.steps, 'step')}" for name, one in zip(_short_names(labels), both.runs, strict=True)
    ]
    needed = f"{FEWEST} of each, first step excluded, are needed to compare speed"
    return f"In {count(both.samples)} samples {_join_words(have)}; {needed}"


def _comparison_sentence(runs: Sequence[TrainingRun], both: RunComparison, labels: Sequence[str]) -> str:
    subject, speed = labels[both.subject], both.runs[both.subject].speedup
    if both.apart is None:
        return "A loss is not a number"
    same = same_loss(both)
    losses = "The same loss" if same else f"Losses {percent(both.apart)} apart"
    losses += "" if both.enough else f" after {count(both.samples)} samples"
    if other_starts(runs):
        losses += ", from different starting weights"
    if speed is None:
        return losses if both.enough else f"{losses}; too few steps to compare speed"
    if 1 / _FASTER < speed < _FASTER:
        return f"{losses}, equally fast"
    return f"{losses}, {times(speed)} as fast" if same else f"{losses}; {subject} is {times(speed)} as fast"


def _comparison_sentences(summaries: Sequence[Summary], labels: Sequence[str], both: RunComparison) -> list[str]:
    names, sentences = _short_names(labels), []
    values = [one.eval_loss if both.evaluated else one.loss for one in both.runs]
    losses = [f"{loss(value)} {name}" for name, value in zip(names, values, strict=True) if value is not None]
    if losses:
        apart = f", {percent(both.apart)} apart" if both.apart is not None else ""
        which = "the loss on held-out data" if both.evaluated else "the loss"
        sentences.append(f"After {count(both.samples)} samples each {which} is {_join_words(losses)}{apart}.")
    if both.noise is not None and ALIKE < (both.apart or 0) <= both.noise:
        sentences.append(f"Single steps alone make such losses differ by up to {percent(both.noise)}.")
    sentences += [f"{few}."] if (few := too_few(labels, both)) else []
    spent = [f"{elapsed(one.seconds)} {name}" for name, one in zip(names, both.runs, strict=True) if one.seconds]
    if spent:
        sentences.append(f"Training took {_join_words(spent)}, first step excluded.")
    padding = [
        f"{percent(one.padding)} {name}" for name, one in zip(names, summaries, strict=True) if one.padding is not None
    ]
    if len(padding) > 1 and any(one.padding for one in summaries):
        sentences.append(f"The share of padding in what was computed is {_join_words(padding)}.")
    return sentences


def _short_names(labels: Sequence[str]) -> list[str]:
    """Labels inside a sentence."""
    return [label.lower() if label in ("Packed", "Padded") else isolate(label) for label in labels]


def _join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
