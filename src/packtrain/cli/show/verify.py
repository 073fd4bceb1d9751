"""How a verdict looks in a terminal."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.core.numbers import shown
from packtrain.verifying.check_result import Verdict

_SAID = {"passed": "pass", "failed": "[bold red]FAIL[/]", "inconclusive": "[bold yellow]inconclusive[/]"}
_NAME, _WHERE = 120, 400  # characters of what may come from data, or from a model's own errors, that are shown


def show_verdict(verdict: Verdict, console: Console, data: str | None = None) -> None:
    """What was checked, how far apart packed and alone are, and how that was judged."""
    model = shown(verdict.model, _WHERE)
    about = ", ".join((model, verdict.attn_implementation, verdict.dtype, verdict.device))
    table = Table(title=escape(f"Packed vs. alone, largest differences: {about}"), title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("difference", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("result")
    table.add_column("details", overflow="fold")
    for finding in verdict.findings:
        table.add_row(
            escape(finding.check),
            _number(finding.difference),
            _number(finding.allowed),
            _SAID[finding.outcome],
            escape(shown(finding.where, _WHERE)),
        )
    console.print(table)
    samples = ", ".join(shown(sample, _NAME) for sample in verdict.samples)
    console.print(f"one row of {verdict.tokens:,} tokens: {escape(samples)}", soft_wrap=True)
    console.print("Tolerances:")
    for line in verdict.judged:
        console.print(f"  {escape(line)}", soft_wrap=True)
    for line in verdict.left_out:
        console.print(f"[yellow]not checked:[/] {escape(line)}", soft_wrap=True)
    took = f"in {verdict.seconds:.1f} s"
    if verdict.passed:
        console.print(f"[bold green]passed[/]: all {len(verdict.findings)} checks, {took}")
        then = shlex.join(("packtrain", "measure", shown(data or "DATA", _WHERE), "--model", model, "--out", "costs"))
        console.print(f"next: {escape(then)}", soft_wrap=True)
        return
    if not verdict.failures:
        weak = ", ".join(finding.check for finding in verdict.powerless)
        console.print(
            f"[bold yellow]inconclusive[/]: {len(verdict.findings)} checks {took}, none failed; {escape(weak)}: the "
            "change hardly affects the changed sample itself, so nothing follows for its neighbours",
            soft_wrap=True,
        )
        console.print("next: use trained weights, or your own data (--data)", soft_wrap=True)
        return
    console.print(
        f"[bold red]failed[/]: {len(verdict.failures)} of {len(verdict.findings)} checks {took};"
        " packed training with this model and attn_implementation would be wrong",
        soft_wrap=True,
    )
    other = (
        "another version of transformers"
        if verdict.attn_implementation in ("sdpa", "eager")
        else "--attn-implementation sdpa"
    )
    console.print(f"next: try {other}, and report this table with the versions in use", soft_wrap=True)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0f}" if value >= 1 and value == int(value) else f"{value:.2e}"
