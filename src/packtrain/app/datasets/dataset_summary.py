"""What a built dataset will train, as numbers to print: samples, packs, steps, how full they are, what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.packing.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSummary:
    """A dataset in its schedule. Numbers of packs and samples are those of the first epoch; packed, a row is a pack."""

    packing: bool
    samples: int  # one that is split counts once
    packs: int
    samples_per_pack: float
    packing_length: int
    fill: float  # real tokens in all that packs could hold
    padding: float  # share of padding in the tokens of padded batches; 0 where packs are trained
    tokens: int
    supervised_tokens: int
    longest: int  # sample
    tokens_per_pack: tuple[int, float, int]  # least, mean, most
    images: int
    videos: int
    patches: int
    epochs: int
    packs_per_step: int
    rows_per_batch: int
    steps: int  # of all epochs
    order: str  # of packs: the schedule's balance
    left_out: Mapping[str, int]  # records that are in no pack, by stage and reason


def summarize(
    schedule: Schedule, *, packing: bool, rows_per_batch: int, measured: Mapping[str, int], world: int = 1
) -> DatasetSummary:
    """The numbers of a plan and its schedule; `measured` is what measuring left out, by stage and reason."""
    plan = schedule.plan
    packs = plan.epoch(0)
    tokens, counts = packs.load("tokens"), plan.summary.epochs[0]
    return DatasetSummary(
        packing=packing,
        samples=packs.num_samples,
        packs=packs.num_packs,
        samples_per_pack=packs.num_samples / max(1, packs.num_packs),
        packing_length=plan.config.packing_length,
        fill=float(counts.fill),
        padding=0.0 if packing else schedule.padding_share(rows_per_batch, world=world),
        tokens=int(tokens.sum()),
        supervised_tokens=int(packs.load("supervised_tokens").sum()),
        longest=int(packs.load("longest").max(initial=0)),
        tokens_per_pack=(int(tokens.min()), float(tokens.mean()), int(tokens.max())) if len(tokens) else (0, 0.0, 0),
        images=int(packs.load("images").sum()),
        videos=int(packs.load("videos").sum()),
        patches=int(packs.load("patches").sum()),
        epochs=plan.num_epochs,
        packs_per_step=schedule.packs_per_step,
        rows_per_batch=rows_per_batch,
        steps=schedule.num_steps(),
        order=schedule.balance,
        left_out={**measured, **plan.summary.ledger.reasons},
    )
