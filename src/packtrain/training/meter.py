"""Measures optimizer steps: what each rank did and how long it took -> the metrics of the step over all ranks.

    meter.begin()                        before the first batch of a step is asked for
    meter.add_batch(batch.info, waited)  once for every batch of this rank
    meter.end(step=..., loss=..., ...)   when the optimizer has stepped; every rank, for they exchange one small vector

The host waits for the GPU once a step, in `end`: without that no step has a time of its own. What lies between `end`
and the next `begin`, as evaluating and saving do, belongs to no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from packtrain.core.errors import ArtifactError
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.predicting.flops import training_flops
from packtrain.runs.step_metrics import SUMMED, StepMetrics, over_ranks
from packtrain.training.predictions import ModelPrediction, batch_load, useful_load
from packtrain.training.stopwatch import BackwardEnd, Memory, Stopwatch, device_memory, stopwatch

_STATE = 1
# What is summed over batches and ranks under one name in both; patches are counted with care, as they may be unknown.
_COUNTED = tuple(one.name for one in fields(BatchInfo) if one.name in SUMMED and one.name != "patches")


class Meter:
    """Measures steps; this one measures nothing. `StepMeter` is one, and users may have others."""

    def attach(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Training begins."""

    def detach(self) -> None:
        """Training is over."""

    def begin(self) -> None:
        """A step begins: its first batch is about to be asked for."""

    def add_batch(self, info: BatchInfo, waited: float) -> None:
        """This rank got a batch, after waiting for it for this many seconds."""

    def end(
        self,
        *,
        step: int,
        epoch: float,
        loss: Tensor | float,
        grad_norm: Tensor | float | None,
        learning_rates: Mapping[str, float],
    ) -> Any:
        """The step is over. The mean over ranks of the losses is the loss of the step."""

    def state_dict(self) -> dict[str, int]:
        """The state from which a resumed run continues."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was counted before a checkpoint."""


class StepMeter(Meter):
    """One rank's meter. `capacity`: tokens that a pack can hold; without it fill is the share that is no padding.

    `model` counts FLOPs, and predicts time and memory where it knows the GPU. `device` is where training runs; without
    it that is where the model of `attach` is, else the host.
    """

    def __init__(
        self,
        *,
        model: ModelPrediction | None = None,
        world_size: int = 1,
        rank: int = 0,
        capacity: int | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        watch: Stopwatch | None = None,
        memory: Memory | None = None,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self._model, self._world_size, self._capacity, self._group = model, world_size, capacity, group
        self._device, self._given = device, (watch, memory)
        self._backward: BackwardEnd | None = None
        self._measure_on(device if device is not None else torch.device("cpu"))
        self._samples_seen = self._tokens_seen = 0
        self.begin()

    def attach(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Notice when a backward pass of this rank is over, so that ranks can be told apart; see BackwardEnd.

        Weights that are offloaded are not where training runs: then `device` says it.
        """
        self.detach()
        self._backward = BackwardEnd(model, self.done)
        if self._device is None:
            weight = next(model.parameters(), None)
            self._measure_on(device or (weight.device if weight is not None else torch.device("cpu")))
            self.begin()

    def detach(self) -> None:
        """Take away what `attach` has added to the model."""
        if self._backward is not None:
            self._backward.close()
        self._backward = None

    def _measure_on(self, device: torch.device) -> None:
        watch, memory = self._given
        self._watch = watch if watch is not None else stopwatch(device)
        self._memory = memory if memory is not None else device_memory(device)

    def begin(self) -> None:
        """A step begins: its first batch is about to be asked for."""
        self._batches: list[BatchInfo] = []
        self._waited = 0.0
        self._memory.restart()
        self._start, self._done = self._watch.mark(), None

    def add_batch(self, info: BatchInfo, waited: float) -> None:
        """This rank got a batch, after waiting for it for this many seconds."""
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
        own = self._watch.between(self._start, finish if self._done is None else self._done)
        shares = self._gather(
            {
                **self._counts(),
                "loss": _number(loss),
                "grad_norm": math.nan if grad_norm is None else _number(grad_norm),
                "step_seconds": self._watch.between(self._start, finish),
                "data_wait_seconds": self._waited,
                "own_seconds": own,
                "memory_bytes": self._memory.peak(),
                "memory_limit": self._memory.limit(),
            }
        )
        if self._backward is not None:
            self._backward.keep_last()
        counts = over_ranks(shares)
        self._samples_seen += counts["samples"]
        self._tokens_seen += counts["tokens"]
        metrics = StepMetrics(
            step=step,
            epoch=epoch,
            loss=sum(share["loss"] for share in shares) / self._world_size if counts["supervised_tokens"] else None,
            grad_norm=None if grad_norm is None else shares[0]["grad_norm"],
            learning_rates=dict(learning_rates),
            samples_seen=self._samples_seen,
            tokens_seen=self._tokens_seen,
            **counts,
            **self._derived_fields(counts, shares),
        )
        self.begin()
        return metrics

    def state_dict(self) -> dict[str, int]:
        """The totals so far, over all ranks."""
        return {"version": _STATE, "samples_seen": self._samples_seen, "tokens_seen": self._tokens_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there, on any number of ranks."""
        counts = [state.get(name) for name in ("samples_seen", "tokens_seen")]
        if state.get("version") != _STATE or not all(isinstance(count, int) and count >= 0 for count in counts):
            expected = f"version {_STATE} with samples_seen and tokens_seen"
            raise ArtifactError("state of the step meter", got=str(dict(state))[:200], expected=expected)
        self._samples_seen, self._tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])

    def _counts(self) -> dict[str, float]:
        """Counts of this rank's batches, by the names of StepMetrics; unknown ones are NaN."""
        real = [info for info in self._batches if info.samples]
        loads = [batch_load(info) for info in self._batches]
        model = self._model if loads and self._model is not None and self._model.gpu is not None else None
        patches = [info.patches for info in real]
        return {
            **{name: sum(getattr(info, name) for info in real) for name in _COUNTED},
            "batches": len(real),
            "samples": sum(info.whole_samples for info in real),
            "padding": sum(info.padding for info in self._batches),
            "patches": sum(math.nan if one is None else one for one in patches),
            "seq_len_min": min((info.tokens for info in real), default=math.nan),
            "seq_len_max": max((info.tokens for info in real), default=0),
            "flops": self._flops(real),
            "predicted_seconds": math.nan if model is None else model.seconds(loads),
            "predicted_memory_bytes": math.nan if model is None else model.memory_bytes(loads),
        }

    def _flops(self, batches: Sequence[BatchInfo]) -> float:
        """Useful FLOPs; those of an encoder that sees patches in unknown numbers are not known."""
        model = self._model
        if model is None or any(info.patches is None for info in batches):
            return math.nan
        return sum(training_flops(model.shape, model.setup, useful_load(info)).total for info in batches)

    def _gather(self, mine: dict[str, float]) -> list[dict[str, float]]:
        """The shares of all ranks, in their order: sums do not depend on who was first."""
        if self._world_size == 1:
            return [mine]
        on_host = "cpu:" in dist.get_backend_config(self._group)
        device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator(check_available=True)
        names = sorted(mine)  # numbers travel without them
        vector = torch.tensor([mine[name] for name in names], dtype=torch.float64, device=device)
        parts = [torch.empty_like(vector) for _ in range(self._world_size)]
        dist.all_gather(parts, vector, group=self._group)
        return [dict(zip(names, row, strict=True)) for row in torch.stack(parts).tolist()]

    def _derived_fields(self, counts: Mapping[str, Any], shares: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The fields that follow from those of the whole step, and from how ranks differ."""
        tokens, batches, seconds = counts["tokens"], counts["batches"], counts["step_seconds"]
        padding = sum(share["padding"] for share in shares)
        fullest = max(shares, key=lambda share: share["memory_bytes"])
        own = tuple(share["own_seconds"] for share in shares)
        flops, gpu = counts["flops"], self._model.gpu if self._model is not None else None
        return {
            "seq_len_avg": _ratio(tokens, batches),
            "fill": _ratio(tokens, batches * (self._capacity or 0) or tokens + padding),
            "padding_share": _ratio(padding, tokens + padding),
            **{f"{name}_per_second": _ratio(counts[name], seconds) for name in ("tokens", "samples", "images")},
            "patches_per_second": None if counts["patches"] is None else _ratio(counts["patches"], seconds),
            "data_wait_share": _ratio(counts["data_wait_seconds"], seconds),
            "rank_seconds": own,
            "spread": _spread(own),
            "work_spread": None if flops is None else _spread([share["flops"] for share in shares]),
            "mfu": None if flops is None or gpu is None else _ratio(flops, seconds * self._world_size * gpu.bf16_flops),
            "memory_bytes": int(fullest["memory_bytes"]) or None,
            "memory_limit": int(fullest["memory_limit"]) or None,
        }


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
