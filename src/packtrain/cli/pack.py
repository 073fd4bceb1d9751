"""`packtrain pack` and `packtrain inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from packtrain.cli.common import Json, output, print_json, progress_console
from packtrain.cli.config_options import settings_of
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.core.errors import ConfigError


@settings_of("pack")
def pack(
    costs: Annotated[Path, typer.Argument(help="A folder written by packtrain measure.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the plan. Plans are never overwritten.")],
    settings: dict[str, Any],
    epochs: Annotated[int, typer.Option(help="Number of epochs to pack.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Pack samples into sequences: near-optimal under any number of limits, deterministic, every sample accounted for.

    The plan lists which samples share a pack in each epoch. Rerunning the command does nothing if nothing has changed.

    Example: packtrain pack costs --packing-length 16384 --max-images-per-pack 16 --out plan
    """
    from packtrain.app.pack import pack_outcome
    from packtrain.cli.show.pack import PackBar, plan_json, show_packed
    from packtrain.packing.pack_plan import PLAN
    from packtrain.packing.packing_config import PackingConfig
    from packtrain.packing.schedule import balance_table

    if "packing_length" not in settings:
        raise ConfigError("--packing-length", got="none", expected="a number of tokens, such as 16384")
    config = PackingConfig(epochs=epochs, seed=seed, **settings)
    there = (out / PLAN).exists()

    def then() -> str:
        return "the plan was already complete" if not there and (out / PLAN).exists() else STARTS_OVER

    with interruptible(then), PackBar(progress_console(), quiet=as_json) as bar:
        packed = pack_outcome(costs, config, out, bar.update)
    balance = balance_table(packed.plan)
    if as_json:
        facts = {"reused": packed.reused, "work_from": packed.work_from, "notes": list(packed.notes)}
        print_json({**facts, **plan_json(packed.plan, balance)})
    else:
        show_packed(packed, balance, output)


def inspect(
    plan: Annotated[
        Path, typer.Argument(help="A folder written by packtrain pack, or by packtrain train: the plan of that run.")
    ],
    pack: Annotated[int | None, typer.Option("--pack", help="Show this pack with its samples.")] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", help="Show which packs hold the sample with this id.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", help="For a run: show the packs and samples of this optimizer step, counted from 1."),
    ] = None,
    blocked: Annotated[bool, typer.Option("--blocked", help="Show how many placements each limit rejected.")] = False,
    epoch: Annotated[int | None, typer.Option("--epoch", help="The epoch of --pack. Default: 0.")] = None,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch", help="With --pack or --step: decode packs and show them token by token, as the model gets them."
        ),
    ] = False,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="With --batch: do not fold runs of media tokens.")
    ] = False,
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            help="With --batch: sdpa, eager, flex, varlen, flash_attention_2 or flash_attention_3. Default: sdpa; "
            "with --step that of the run."
        ),
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="The cost table, if it was moved after packing.")] = None,
    as_json: Json = False,
) -> None:
    """Inspect a plan (summary, pack, sample, limits), a pack as the model gets it, or a step of a run.

    Example: packtrain inspect plan --pack 0 --batch

    Example: packtrain inspect run --step 120 --batch
    """
    from packtrain.app.inspection import plan as looking
    from packtrain.cli.show.pack import plan_json, show_blocked, show_places, show_plan, show_samples
    from packtrain.packing.schedule import balance_table

    if sum((pack is not None, sample is not None, step is not None, blocked)) > 1:
        names = "--pack, --sample, --step, --blocked"
        raise ConfigError("packtrain inspect", got=f"several of {names}", expected="one of them")
    if epoch is not None and pack is None:
        raise ConfigError("--epoch", got=epoch, expected="--pack as well: the pack of that epoch")
    _check_batch_options(pack, step, batch, all_tokens, attn_implementation)
    if step is not None and batch:
        _inspect_step_batches(plan, step, costs, attn_implementation, all_tokens, as_json)
    elif step is not None:
        _inspect_step(plan, step, costs, as_json)
    elif pack is not None and batch:
        _inspect_batch(plan, costs, pack, epoch or 0, attn_implementation or "sdpa", all_tokens, as_json)
    elif pack is not None:
        found, table = looking.open_plan(plan, costs)
        samples = looking.pack_samples(found, table, pack, epoch or 0)
        if as_json:
            print_json({"pack": pack, "epoch": epoch or 0, "samples": [asdict(one) for one in samples]})
        else:
            show_samples(pack, samples, found.config.packing_length, output)
    elif sample is not None:
        found, table = looking.open_plan(plan, costs)
        places, rows = looking.find_sample(found, table, sample)
        if as_json:
            print_json({"sample": sample, "rows": rows, "places": [asdict(place) for place in places]})
        else:
            show_places(sample, places, rows, found, output)
    else:
        found = looking.load_plan(plan) if costs is None else looking.open_plan(plan, costs)[0]
        balance = () if blocked else balance_table(found)
        if as_json:
            print_json(found.summary.blocked.to_json() if blocked else plan_json(found, balance))
        elif blocked:
            show_blocked(found, output)
        else:
            show_plan(found, balance, output)


def _check_batch_options(
    pack: int | None, step: int | None, batch: bool, all_tokens: bool, attn_implementation: str | None
) -> None:
    if batch and pack is None and step is None:
        raise ConfigError("--batch", got="no --pack", expected="--pack or --step as well: what to decode")
    for option, given in (("--all-tokens", all_tokens), ("--attn-implementation", attn_implementation is not None)):
        if given and not batch:
            raise ConfigError(option, got="no --batch", expected="--batch as well: the pack as the model gets it")


def _inspect_step(run: Path, step: int, costs: Path | None, as_json: bool) -> None:
    from packtrain.app.inspection.step import inspect_step
    from packtrain.cli.show.step import show_step, step_json

    seen = inspect_step(run, step, costs)
    if as_json:
        print_json(step_json(seen))
    else:
        show_step(seen, output)


def _inspect_step_batches(
    run: Path, step: int, costs: Path | None, attn_implementation: str | None, all_tokens: bool, as_json: bool
) -> None:
    from packtrain.app.inspection.step import inspect_step, step_batches
    from packtrain.cli.show.batch import batch_json, show_batch
    from packtrain.cli.show.step import show_step, step_json
    from packtrain.core.cache_root import cache_dir

    seen = inspect_step(run, step, costs)
    with interruptible("nothing was changed"):
        batches = list(
            step_batches(run, seen, costs, attn_implementation=attn_implementation, cache=cache_dir() / "rows")
        )
    if as_json:
        print_json({**step_json(seen), "batches": [batch_json(one) for one in batches]})
        return
    show_step(seen, output)
    for place, one in zip(seen.packs, batches, strict=True):
        output.print(f"Micro-batch {place.micro_batch}, rank {place.rank}:")
        show_batch(one, output, all_tokens=all_tokens)


def _inspect_batch(
    plan: Path, costs: Path | None, pack: int, epoch: int, attn_implementation: str, all_tokens: bool, as_json: bool
) -> None:
    from packtrain.app.inspection.batch import inspect_batch
    from packtrain.app.inspection.plan import open_plan
    from packtrain.cli.show.batch import batch_json, show_batch
    from packtrain.core.cache_root import cache_dir

    found, table = open_plan(plan, costs)
    with interruptible("nothing was changed"):
        seen = inspect_batch(
            found, table, pack, epoch, attn_implementation=attn_implementation, cache=cache_dir() / "rows"
        )
    if as_json:
        print_json(batch_json(seen))
    else:
        show_batch(seen, output, all_tokens=all_tokens)
