"""What a page says of a run, and of several beside each other, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from packtrain.reports.numbers import count, elapsed, isolated, large, loss, percent, plural, shown, times
from packtrain.reports.run_summary import Comparison, Summary
from packtrain.reports.run_values import Run

ALIKE = 0.03  # losses that are closer than this, relatively, are called the same
_FASTER = 1.05
_ON_TOP = 0.001  # relative difference of losses that no chart can show
_ENDED = {
    "complete": "It is complete.",
    "interrupted": "It was interrupted and can be resumed.",
    "failed": "It has failed.",
    "running": "It is still running, or was killed.",
    "begun": "It is still running, or ended without saying so.",
    "not begun": "Its first step has not ended yet.",
}


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Short names that tell the runs apart: their modes if these do, else their folders.

    Folders of one name are numbered.
    """
    modes = [run.about.mode for run in runs]
    if len(runs) > 1 and None not in modes and len(set(modes)) == len(runs):
        return [shown(str(mode), 40).capitalize() for mode in modes]
    names = [shown(run.name, 40) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(names)]


def headline(runs: Sequence[Run], summaries: Sequence[Summary], labels: Sequence[str], both: Comparison | None) -> str:
    """The one thing to know."""
    if both is not None:
        return _compared(both, labels)
    first = summaries[0]
    if not first.steps:
        return "No step yet"
    if first.loss_end is None or first.loss_start is None:
        return "The loss is not a number"
    if len(runs) > 1:
        return f"{plural(len(runs), 'run')}, not comparable yet"
    return f"Loss {loss(first.loss_start)} → {loss(first.loss_end)}"


def lead(runs: Sequence[Run], summaries: Sequence[Summary], labels: Sequence[str], both: Comparison | None) -> str:
    """What happened, in two or three sentences."""
    if both is not None:
        return " ".join(_compared_lead(summaries, labels, both))
    return f"{_trained(runs[0], summaries[0])} {ended(runs[0])}"


def why_apart(runs: Sequence[Run], labels: Sequence[str], apart: float | None) -> str:
    """What makes the losses of runs comparable, and why they may differ all the same."""
    kernels = [run.about.derived.get("attention") for run in runs]
    others = len(set(kernels)) > 1 and all(kernels)
    named = _listed(
        [f"{isolated(str(kernel), 40)} in {name}" for kernel, name in zip(kernels, _named(labels), strict=True)]
    )
    if same_steps(runs):
        found = (
            "Every optimizer step has the same samples in all runs. What their losses still differ by is rounding: "
            "numbers are added up in another order"
        )
        found += f", and attention is computed by other kernels ({named})." if others else "."
        return f"{found} Over samples their curves lie on each other." if (apart or 0) < _ON_TOP else found
    found = (
        "Steps of the runs hold different samples, so losses are compared where the runs have seen equally many. They "
        "differ by which samples shared a step, beside what was set differently"
    )
    return f"{found}; attention was {named}." if others else f"{found}."


def same_steps(runs: Sequence[Run]) -> bool:
    """Has every step the same samples in all runs? So it is with the same plan in the same order."""
    orders = {run.about.other.get("fingerprints.schedule") for run in runs}
    return len(orders) == 1 and None not in orders


def ended(run: Run) -> str:
    """How the run ended."""
    return _ENDED.get(run.status) or f"It says of itself: {isolated(run.status, 120)}."


def _trained(run: Run, one: Summary) -> str:
    mode = f" {run.about.mode}" if run.about.mode in ("packed", "padded") else ""
    words = f"{isolated(run.about.model or 'A model', 80)}, trained{mode}"
    if one.steps:
        words += f" for {plural(one.steps, 'step')}: {count(one.samples or 0)} samples"
        words += f", {large(one.tokens or 0)} real tokens" if one.tokens else ""
        words += f" in {elapsed(one.seconds)}" if one.seconds else ""
    return words + "."


def _compared(both: Comparison, labels: Sequence[str]) -> str:
    subject, speed = labels[both.subject], both.runs[both.subject].speedup
    if both.apart is None:
        return "A loss is not a number"
    same = both.apart <= ALIKE
    if speed is None or 1 / _FASTER < speed < _FASTER:
        return "The same loss, equally fast" if same else f"Losses {percent(both.apart)} apart, equally fast"
    return f"The same loss, {times(speed)} as fast" if same else f"{subject} is {times(speed)} as fast"


def _compared_lead(summaries: Sequence[Summary], labels: Sequence[str], both: Comparison) -> list[str]:
    names, found = _named(labels), []
    values = [one.eval_loss if both.evaluated else one.loss for one in both.runs]
    losses = [f"{loss(value)} {name}" for name, value in zip(names, values, strict=True) if value is not None]
    if losses:
        apart = f", {percent(both.apart)} apart" if both.apart is not None else ""
        which = "the loss on held-out data" if both.evaluated else "the loss"
        found.append(f"After {count(both.samples)} samples each {which} is {_listed(losses)}{apart}.")
    spent = [f"{elapsed(one.seconds)} {name}" for name, one in zip(names, both.runs, strict=True) if one.seconds]
    if spent:
        found.append(f"Training on them took {_listed(spent)}.")
    padding = [
        f"{percent(one.padding)} {name}" for name, one in zip(names, summaries, strict=True) if one.padding is not None
    ]
    if len(padding) > 1:
        found.append(f"The share of padding in what was computed is {_listed(padding)}.")
    return found


def _named(labels: Sequence[str]) -> list[str]:
    """Labels inside a sentence."""
    return [label.lower() if label in ("Packed", "Padded") else isolated(label) for label in labels]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
