"""Measures optimizer steps: what each rank did and how long it took -> the metrics of the step over all ranks.

    meter.begin()                        before the first batch of a step is asked for
    meter.took(batch.info, waited)       once for every batch of this rank
    meter.end(step=..., loss=..., ...)   when the optimizer has stepped; every rank, for they exchange one small vector

The host waits for the GPU once a step, in `end`: without that no step has a time of its own. What lies between `end`
and the next `begin`, as evaluating and saving do, belongs to no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from packtrain.core.errors import ArtifactError
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.predicting.flops import training_flops
from packtrain.predicting.values import ModelShape, TrainingSetup
from packtrain.runs.step_metrics import StepMetrics
from packtrain.training.predictions import Prediction, batch_load, useful_load
from packtrain.training.stopwatch import BackwardEnd, Memory, Stopwatch, device_memory, stopwatch

_STATE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One optimizer step of one rank. The trainer makes it, the meter turns those of all ranks into metrics."""

    step: int  # counted from 1, over the whole run
    epoch: float
    loss: float  # of the step over all ranks: sum over its tokens divided by their number
    grad_norm: float | None
    learning_rates: Mapping[str, float]  # by part: language, vision, projector
    batches: tuple[BatchInfo, ...]  # of this rank
    seconds: float  # from the end of the step before to the end of this one
    data_seconds: float  # of it: waiting for batches
    own_seconds: float  # of it: until this rank was done and waited for the others
    memory_bytes: int = 0  # the most that torch had allocated on this rank's GPU; 0 without one
    memory_limit: int = 0  # what that GPU has


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One rank's part of a step as the numbers that ranks exchange; NaN stands for what is not known."""

    loss: float
    grad_norm: float
    batches: float
    samples: float
    tokens: float
    supervised_tokens: float
    padding: float
    images: float
    videos: float
    frames: float
    patches: float
    shortest: float  # batch, in real tokens
    longest: float
    seconds: float
    data_seconds: float
    own_seconds: float
    memory_bytes: float
    memory_limit: float
    flops: float
    predicted_seconds: float
    predicted_memory: float


class StepMeter:
    """One rank's meter. `capacity`: tokens that a pack can hold; without it fill is the share that is no padding.

    `peak_flops` is that of one GPU. The mean over ranks of the losses given to `end` must be the loss of the step.
    `device` is where training runs; without it that is where the model of `attend` is, else the host.
    """

    def __init__(
        self,
        *,
        shape: ModelShape | None = None,
        setup: TrainingSetup | None = None,
        peak_flops: float | None = None,
        world: int = 1,
        rank: int = 0,
        capacity: int | None = None,
        predicted: Prediction | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        watch: Stopwatch | None = None,
        gib: Memory | None = None,
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self._shape, self._setup, self._peak_flops, self._predicted = shape, setup, peak_flops, predicted
        self._world, self._rank, self._capacity, self._group = world, rank, capacity, group
        self._device, self._given = device, (watch, gib)
        self._backward: BackwardEnd | None = None
        self._stand_on(device if device is not None else torch.device("cpu"))
        self._samples_seen = self._tokens_seen = 0
        self.begin()

    def attend(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Notice when a backward pass of this rank is over, so that ranks can be told apart; see BackwardEnd.

        Weights that are offloaded are not where training runs: then `device` says it.
        """
        self.leave()
        self._backward = BackwardEnd(model, self.done)
        if self._device is None:
            weight = next(model.parameters(), None)
            self._stand_on(device or (weight.device if weight is not None else torch.device("cpu")))
            self.begin()

    def leave(self) -> None:
        """Take away what `attend` has added to the model."""
        if self._backward is not None:
            self._backward.close()
        self._backward = None

    def _stand_on(self, device: torch.device) -> None:
        watch, gib = self._given
        self._watch = watch if watch is not None else stopwatch(device)
        self._memory = gib if gib is not None else device_memory(device)

    def begin(self) -> None:
        """A step begins: its first batch is about to be asked for."""
        self._batches: list[BatchInfo] = []
        self._waited = 0.0
        self._memory.restart()
        self._start, self._done = self._watch.mark(), None

    def took(self, info: BatchInfo, waited: float) -> None:
        """This rank got a batch, after so many seconds of waiting."""
        self._batches.append(info)
        self._waited += waited

    def done(self) -> None:
        """The rank's own work of the step is done, as far as is known now; what follows may wait for others."""
        self._done = self._watch.mark()

    def end(
        self,
        *,
        step: int,
        epoch: float,
        loss: Tensor | float,
        grad_norm: Tensor | float | None,
        learning_rates: Mapping[str, float],
    ) -> StepMetrics:
        """The step is over on this rank; what it was over all of them."""
        finish = self._watch.mark()
        self._watch.wait()
        facts = StepFacts(
            step=step,
            epoch=epoch,
            loss=_number(loss),
            grad_norm=None if grad_norm is None else _number(grad_norm),
            learning_rates=dict(learning_rates),
            batches=tuple(self._batches),
            seconds=self._watch.between(self._start, finish),
            data_seconds=self._waited,
            own_seconds=self._watch.between(self._start, finish if self._done is None else self._done),
            memory_bytes=self._memory.peak(),
            memory_limit=self._memory.limit(),
        )
        if self._backward is not None:
            self._backward.settle()
        shares = self._gather(self._share(facts))
        self._samples_seen += int(sum(share.samples for share in shares))
        self._tokens_seen += int(sum(share.tokens for share in shares))
        metrics = self._metrics(facts, shares)
        self.begin()
        return metrics

    def state_dict(self) -> dict[str, int]:
        """What was seen until now, by all ranks together."""
        return {"version": _STATE, "samples_seen": self._samples_seen, "tokens_seen": self._tokens_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there, on any number of ranks."""
        counts = [state.get(name) for name in ("samples_seen", "tokens_seen")]
        if state.get("version") != _STATE or not all(isinstance(count, int) and count >= 0 for count in counts):
            expected = f"version {_STATE} with samples_seen and tokens_seen"
            raise ArtifactError("state of the step meter", got=str(dict(state))[:200], expected=expected)
        self._samples_seen, self._tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])

    def _share(self, facts: StepFacts) -> RankShare:
        real = [info for info in facts.batches if info.samples]
        loads = [batch_load(info) for info in facts.batches]
        expected = self._predicted if loads else None
        return RankShare(
            loss=facts.loss,
            grad_norm=math.nan if facts.grad_norm is None else facts.grad_norm,
            batches=len(real),
            samples=sum(info.whole_samples for info in real),
            tokens=sum(info.tokens for info in real),
            supervised_tokens=sum(info.supervised_tokens for info in real),
            padding=sum(info.padding for info in facts.batches),
            images=sum(info.images for info in real),
            videos=sum(info.videos for info in real),
            frames=sum(info.frames for info in real),
            patches=math.nan if any(info.patches is None for info in real) else sum(info.patches or 0 for info in real),
            shortest=min((info.tokens for info in real), default=math.inf),
            longest=max((info.tokens for info in real), default=0),
            seconds=facts.seconds,
            data_seconds=facts.data_seconds,
            own_seconds=facts.own_seconds,
            memory_bytes=facts.memory_bytes,
            memory_limit=facts.memory_limit,
            flops=self._flops(real),
            predicted_seconds=math.nan if expected is None else expected.seconds(loads),
            predicted_memory=math.nan if expected is None else expected.memory_bytes(loads),
        )

    def _flops(self, batches: Sequence[BatchInfo]) -> float:
        """Useful FLOPs; those of an encoder that sees patches in unknown numbers are not known."""
        if self._shape is None or self._setup is None or any(info.patches is None for info in batches):
            return math.nan
        return sum(training_flops(self._shape, self._setup, useful_load(info)).total for info in batches)

    def _gather(self, mine: RankShare) -> list[RankShare]:
        """The shares of all ranks, in their order: sums do not depend on who was first."""
        if self._world == 1:
            return [mine]
        on_host = "cpu:" in dist.get_backend_config(self._group)
        device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator(check_available=True)
        vector = torch.tensor(astuple(mine), dtype=torch.float64, device=device)
        parts = [torch.empty_like(vector) for _ in range(self._world)]
        dist.all_gather(parts, vector, group=self._group)
        names = [one.name for one in fields(RankShare)]
        return [RankShare(**dict(zip(names, row, strict=True))) for row in torch.stack(parts).tolist()]

    def _metrics(self, facts: StepFacts, shares: Sequence[RankShare]) -> StepMetrics:
        def total(name: str) -> float:
            return sum(getattr(share, name) for share in shares)

        def most(name: str) -> float:
            found = [getattr(share, name) for share in shares]
            return max((value for value in found if not math.isnan(value)), default=math.nan)

        tokens, padding, batches, seconds = total("tokens"), total("padding"), total("batches"), most("seconds")
        fullest = max(shares, key=lambda share: share.memory_bytes)
        own = tuple(share.own_seconds for share in shares)
        flops, wait, held = total("flops"), most("data_seconds"), batches * (self._capacity or 0)
        utilisation = _ratio(flops, seconds * self._world * self._peak_flops) if self._peak_flops else math.nan
        return StepMetrics(
            step=facts.step,
            epoch=facts.epoch,
            loss=total("loss") / self._world if total("supervised_tokens") else None,
            grad_norm=None if facts.grad_norm is None else shares[0].grad_norm,
            learning_rates=facts.learning_rates,
            batches=int(batches),
            samples=int(total("samples")),
            tokens=int(tokens),
            supervised_tokens=int(total("supervised_tokens")),
            images=int(total("images")),
            patches=_whole(total("patches")),
            seq_len_avg=_ratio(tokens, batches),
            seq_len_min=int(min(share.shortest for share in shares)) if batches else 0,
            seq_len_max=int(most("longest")),
            fill=_ratio(tokens, held or tokens + padding),
            padding_share=_ratio(padding, tokens + padding),
            step_seconds=seconds,
            tokens_per_second=_ratio(tokens, seconds),
            samples_per_second=_ratio(total("samples"), seconds),
            images_per_second=_ratio(total("images"), seconds),
            patches_per_second=_known(_ratio(total("patches"), seconds)),
            data_wait_seconds=wait,
            data_wait_share=_ratio(wait, seconds),
            rank_seconds=own,
            spread=_spread(own),
            work_spread=_known(_spread([share.flops for share in shares])),
            flops=_known(flops),
            mfu=_known(utilisation),
            memory_bytes=int(fullest.memory_bytes) or None,
            memory_limit=int(fullest.memory_limit) or None,
            samples_seen=self._samples_seen,
            tokens_seen=self._tokens_seen,
            predicted_seconds=_known(most("predicted_seconds")),
            predicted_memory_bytes=_whole(most("predicted_memory")),
            videos=int(total("videos")),
            frames=int(total("frames")),
        )


def _number(value: Tensor | float) -> float:
    if hasattr(value, "full_tensor"):  # a norm over sharded gradients is in pieces; all ranks are here
        value = value.full_tensor()
    return value.item() if isinstance(value, Tensor) else float(value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(values: Sequence[float]) -> float:
    """The largest over the mean; 1 where there is nothing to compare."""
    mean = sum(values) / len(values)
    return 1.0 if mean == 0 else max(values) / mean


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
