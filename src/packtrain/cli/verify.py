"""`packtrain verify`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from packtrain.cli.common import Json, print_json
from packtrain.cli.config_options import verb_options
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.cli.terminal import Terminal, errors, output, table
from packtrain.core.numbers import elapsed, shown

if TYPE_CHECKING:
    from packtrain.verifying.check_result import CheckReport

_INCONCLUSIVE = 3  # exit code
_OUTCOMES = {"passed": "pass", "failed": "[bold red]FAIL[/]", "inconclusive": "[bold yellow]inconclusive[/]"}
_NAME, _WHERE = 120, 400  # characters of what may come from data, or from a model's own errors, that are shown


@verb_options("verify")
def verify(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder with weights, a hub name, or tiny:FAMILY.")
    ],
    settings: dict[str, Any],
    attn_implementation: Annotated[
        str, typer.Option(help="auto, varlen, flash_attention_2, flash_attention_3, flex, sdpa or eager.")
    ] = "auto",
    data: Annotated[
        str | None, typer.Option(help="Take samples from the start of this data. Default: synthetic samples.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of samples to pack.")] = 6,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")] = None,
    shape: Annotated[
        str,
        typer.Option(help="Size of tiny:FAMILY: tiny, or small or medium with head dimension 64 or 128."),
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of synthetic samples and random weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Check that packing is correct for a model and its attention.

    Compares packed logits, loss and gradients with those of each sample alone, and checks that changing one sample
    leaves its neighbours unchanged. Exit code 0: all checks passed, 1: one failed, 3: inconclusive (none failed, but a
    change hardly affected even the changed sample).

    Example: packtrain verify --model Qwen/Qwen2.5-VL-3B-Instruct --attn-implementation varlen --data train.jsonl
    """
    from packtrain.app.verify import verify as verify_model

    with interruptible(STARTS_OVER), errors.status("verifying") as status:
        if as_json or not errors.is_terminal:
            status.stop()
        report = verify_model(
            model,
            attn_implementation=attn_implementation,
            data=data,
            samples=samples,
            dtype=dtype,
            device=device,
            shape=shape,
            seed=seed,
            **settings,
            progress=lambda what: status.update(f"verifying: {what}"),
        )
    if as_json:
        print_json(report.as_json())
    else:
        show_report(report, output, data)
    if not report.passed:
        raise typer.Exit(1 if report.failures or not report.checks else _INCONCLUSIVE)


def show_report(report: CheckReport, console: Terminal, data: str | None = None) -> None:
    """Show the checks, how far apart packed and alone are, and the tolerances."""
    model = shown(report.model, _WHERE)
    about = ", ".join((model, report.attn_implementation, report.dtype, report.device))
    title = escape(f"Packed vs. alone, largest differences: {about}")
    words = ("check", "result", "details")
    checks = table(title, ("check", "difference", "allowed", "result", "details"), words)
    checks.columns[0].no_wrap = True
    for check in report.checks:
        checks.add_row(
            escape(check.check),
            _number(check.difference),
            _number(check.allowed),
            _OUTCOMES[check.outcome],
            escape(shown(check.where, _WHERE)),
        )
    console.print(checks)
    samples = ", ".join(shown(sample, _NAME) for sample in report.samples)
    console.print(f"one row of {report.tokens:,} tokens: {escape(samples)}")
    console.print("Tolerances:")
    for line in report.tolerances:
        console.print(f"  {escape(line)}")
    for line in report.left_out:
        console.print(f"[yellow]not checked:[/] {escape(line)}")
    took = f"in {elapsed(report.seconds)}"
    if report.passed:
        console.print(f"[bold green]passed[/]: all {len(report.checks)} checks, {took}")
        then = shlex.join(("packtrain", "train", "--model", model, "--data", shown(data or "DATA", _WHERE)))
        console.print(f"next: {escape(then)}")
        return
    if not report.failures:
        weak = ", ".join(check.check for check in report.inconclusive)
        console.print(
            f"[bold yellow]inconclusive[/]: {len(report.checks)} checks {took}, none failed; {escape(weak)}: the "
            "change hardly affects the changed sample itself, so nothing follows for its neighbours"
        )
        console.print("next: use trained weights, or your own data (--data)")
        return
    console.print(
        f"[bold red]failed[/]: {len(report.failures)} of {len(report.checks)} checks {took};"
        " packed training with this model and attn_implementation would be wrong"
    )
    other = (
        "another version of transformers"
        if report.attn_implementation in ("sdpa", "eager")
        else "--attn-implementation sdpa"
    )
    console.print(f"next: try {other}, and report this table with the versions in use")


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0f}" if value >= 1 and value == int(value) else f"{value:.2e}"
