"""`packtrain verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, errors, output, print_json
from packtrain.cli.interruptible import STARTS_OVER, interruptible

_INCONCLUSIVE = 3  # exit code


def verify(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder with weights, a hub name, or tiny:FAMILY.")
    ],
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
    media_root: Annotated[
        Path | None, typer.Option(help="Base folder of relative media paths. Default: the data file's folder.")
    ] = None,
    dataset_format: Annotated[str | None, typer.Option(help="Format of the data. Default: detected.")] = None,
    loss_on: Annotated[
        str | None,
        typer.Option(help="assistant, completion or all. Default: assistant for chats, all for plain text."),
    ] = None,
    allow_outside_root: Annotated[
        bool, typer.Option("--allow-outside-root", help="Allow media outside the media root (absolute paths, links).")
    ] = False,
    plugins: Annotated[
        list[str] | None,
        typer.Option(help="Modules to import that register model families (docs/guides/extending.md)."),
    ] = None,
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
    from packtrain.cli.show.verify import show_verdict

    with interruptible(STARTS_OVER), errors.status("verifying") as status:
        if as_json or not errors.is_terminal:
            status.stop()
        verdict = verify_model(
            model,
            attn_implementation=attn_implementation,
            data=data,
            samples=samples,
            dtype=dtype,
            device=device,
            shape=shape,
            media_root=media_root,
            dataset_format=dataset_format,
            loss_on=loss_on,  # type: ignore[arg-type]
            allow_outside_root=allow_outside_root,
            plugins=plugins or (),
            seed=seed,
            say=lambda what: status.update(f"verifying: {what}"),
        )
    if as_json:
        print_json(verdict.as_json())
    else:
        show_verdict(verdict, output, data)
    if not verdict.passed:
        raise typer.Exit(1 if verdict.failures or not verdict.findings else _INCONCLUSIVE)
