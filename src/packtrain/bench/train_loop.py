"""Trains a model one way for some steps and measures it: tokens per second, use of the chip, memory.

A plain loop over the pieces that training is made of (`prepare_model`, `ChunkedLoss`, `compile_layers`, collators, a
DataLoader with workers, fused AdamW over fp32 masters), so that what is measured is them and not a trainer around them.
Reading batches, moving them, clipping gradients and the optimizer's steps are all inside the measured time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from packtrain.bench.host import throttled_seconds
from packtrain.bench.train_data import Batches, MadeRows, Pool, evenly_chosen, put_into_batches
from packtrain.bench.train_rows import BenchModel, BenchRow
from packtrain.core.numbers import GIB
from packtrain.delivery.collate.batch_values import Batch
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import PackedRow
from packtrain.families.contracts import contract_for
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.modeling.compiled import compile_layers, undo_compile
from packtrain.modeling.host_sync import avoid_host_sync
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import use_patch_matmul
from packtrain.predicting.calibration import coefficients_for
from packtrain.predicting.flops import training_flops
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, estimate_memory
from packtrain.training.callbacks import freeze_objects
from packtrain.training.masters import make_optimizer
from packtrain.training.step_settings import LOSS_CHUNK

_MULTIPLE = 128  # of the tokens of a static shape: matrix products like it


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """What is the same for all rows."""

    tokens: int = 160_000  # real tokens to time, about
    step_samples: int = 32  # of an optimizer step
    warmup: int = 4  # batches before the clock starts, an optimizer step among them
    loss_chunk: int = LOSS_CHUNK
    workers: int = 4
    dtype: torch.dtype = torch.bfloat16
    backend: str = "inductor"  # of compiled layers


# What a tiny model on a CPU is run with: a smoke test, whose speeds mean nothing.
TINY_SETTINGS = LoopSettings(tokens=1_500, step_samples=8, warmup=2, loss_chunk=64, backend="eager")


class _Marks:
    """When batches and optimizer steps were done, and what memory they took, without waiting; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._events, self._batches = device, list[torch.cuda.Event](), list[bool]()
        self.peaks, self._padding, self._host = list[int](), list[int](), list[float]()
        self._mark(batch=False)

    def passed(self, padding: int) -> None:
        """After the backward pass of a batch."""
        self._padding.append(padding)
        self._mark(batch=True)

    def stepped(self) -> None:
        """After a step of the optimizer."""
        self._mark(batch=False)

    def _mark(self, *, batch: bool) -> None:
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._host.append(time.perf_counter())
        self._events.append(event)
        self._batches.append(batch)
        self.peaks.append(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def results(self) -> tuple[list[dict[str, float]], list[float]]:
        """What each batch took, and seconds of optimizer steps; call it when the GPU is done.

        `host_seconds` is how long the host took to send it. Where that is as long as the GPU took, the GPU waited.
        """
        times = [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        sent = [after - before for before, after in pairwise(self._host)]
        marked = list(zip(times, sent, self.peaks[1:], self._batches[1:], strict=True))
        batches = [(seconds, host, peak) for seconds, host, peak, batch in marked if batch]
        each = [
            {"padding": padding, "seconds": seconds, "host_seconds": host, "peak_gib": peak / GIB}
            for padding, (seconds, host, peak) in zip(self._padding, batches, strict=False)
        ]
        return each, [seconds for seconds, *_, batch in marked if not batch]


class _WithoutPositions:
    """Padded batches as processors of transformers make them: the model computes positions from kinds of tokens."""

    def __init__(self, collator: PaddedCollator, image_token: int | None) -> None:
        self._collator, self._image_token = collator, image_token

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        batch = self._collator(rows)
        del batch["position_ids"]
        if self._image_token is not None:
            batch["mm_token_type_ids"] = (batch["input_ids"] == self._image_token).int()
        return batch


def _graphs() -> int:
    """How many graphs were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class BenchTrainer:
    """One row: the model as the row wants it, its batches, its optimizer."""

    def __init__(self, bench: BenchModel, model: Any, row: BenchRow, pool: Pool, settings: LoopSettings) -> None:
        self._bench, self._model, self._row, self._pool, self._settings = bench, model, row, pool, settings
        self._device = next(iter(model.parameters())).device
        every = put_into_batches(pool, row.batching, size=row.size, limit=row.limit)
        mean = len(pool.tokens) / len(every)
        self._per_step = max(1, round(settings.step_samples / mean))
        tokens = float(pool.tokens.mean()) * mean
        steps = max(1, round(row.share * settings.tokens / tokens / self._per_step))
        self.timed = evenly_chosen(pool, every, min(len(every), steps * self._per_step))
        self._warm = evenly_chosen(pool, every, min(len(every), settings.warmup), seed=1)
        if row.compiled and not row.is_packed:
            self._warm = self.timed  # numbers of rows may each have to be compiled for
        self._length = -(-row.size // _MULTIPLE) * _MULTIPLE if row.is_packed else 0  # of packs, all alike
        self._on_host: tuple[str, ...] = ()
        self._loss = self._prepare()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = self._device.type == "cuda"
        options = {"lr": 1e-5, "weight_decay": 0.01, "fused": fused, "foreach": not fused}
        groups = [{"params": self._trained}]
        self._optimizer = make_optimizer(torch.optim.AdamW, groups, options, masters=row.masters)

    def run(self) -> dict[str, Any]:
        """Train and measure. The clock starts while workers are at work and everything is compiled."""
        loader = self.loader([*self._warm, *self.timed])
        # Two steps: the first makes masters and states, and what steps them from then on is compiled in the second.
        self.train(loader, len(self._warm), steps_at={len(self._warm) // 2, len(self._warm)})
        self._synchronize()
        freeze_objects()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        ends = set(range(self._per_step, len(self.timed) + 1, self._per_step)) | {len(self.timed)}
        marks, graphs = _Marks(self._device), _graphs()
        held, begun = throttled_seconds(), time.perf_counter()
        padding, waited = self.train(loader, len(self.timed), steps_at=ends, marks=marks)
        self._synchronize()
        result = self._result(time.perf_counter() - begun, padding, waited, len(ends), marks)
        after = throttled_seconds()
        return {
            **result,
            "compiled_while_timed": _graphs() - graphs,  # anything but 0 spoils the clock
            "throttled_seconds": after - held if held is not None and after is not None else None,
        }

    def close(self) -> None:
        """Give memory back, and leave the model uncompiled and with its own loss."""
        if self._loss is not None:
            self._loss.remove()
        self._model.zero_grad(set_to_none=True)
        self._optimizer = None  # type: ignore[assignment]
        undo_compile(self._model)
        gc.unfreeze()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self) -> ChunkedLoss | None:
        row, model = self._row, self._model
        torch.backends.cuda.enable_cudnn_sdp(row.cudnn)
        prepare_model(model, attn_implementation=row.attention)
        if row.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        if row.tuned:
            use_patch_matmul(model)
            self._on_host = avoid_host_sync(model)
        if row.compiled:
            compile_layers(model, static_shapes=row.is_packed, backend=self._settings.backend)
        return ChunkedLoss.install(model, chunk=self._settings.loss_chunk) if row.chunked_loss else None

    # ---- steps

    def train(
        self, loader: Iterator[Batch], count: int, *, steps_at: set[int], marks: _Marks | None = None
    ) -> tuple[int, float]:
        """Train on some batches, with optimizer steps after some of them; padding, and seconds spent on waiting."""
        padding, waited = 0, 0.0
        for number in range(1, count + 1):
            asked = time.perf_counter()
            batch = next(loader)
            waited += time.perf_counter() - asked
            padding += batch.info.padding
            self._forward_and_backward(batch)
            if marks is not None:
                marks.passed(batch.info.padding)
            if number in steps_at:
                self._step()
                if marks is not None:
                    marks.stepped()
        return padding, waited

    def _forward_and_backward(self, batch: Batch) -> None:
        tokens = batch.info.supervised_tokens * self._per_step  # about those of the step
        targets = Targets.of(batch["labels"])
        kept = {name: batch.pop(name) for name in self._on_host if name in batch}
        moved = {**batch.to(self._device, non_blocking=True), **kept}
        with self._loss.using(targets) if self._loss is not None else nullcontext():
            loss: Tensor = self._model(**moved).loss
        (loss / (tokens if self._loss is not None else self._per_step)).backward()

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def loader(self, batches: Batches) -> Iterator[Batch]:
        """Batches in order, made by workers."""
        settings = self._settings
        loader = DataLoader(
            MadeRows(self._pool, batches, self._bench.config, settings.dtype),
            batch_size=1,
            collate_fn=self._collator(),
            num_workers=settings.workers,
            prefetch_factor=1 if settings.workers else None,  # little is there before the clock starts
            pin_memory=self._device.type == "cuda",
        )
        return iter(loader)

    def _collator(self) -> Callable[[Sequence[PackedRow]], Batch]:
        contract = contract_for(self._bench.config)
        if not self._row.is_packed:
            padded = PaddedCollator(contract, pad_id=0)
            return padded if self._row.tuned else _WithoutPositions(padded, self._bench.config.get("image_token_id"))
        return PackCollator(contract, pad_id=0, static_shapes=StaticShapes(tokens=self._length))

    # ---- results

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _result(self, seconds: float, padding: int, waited: float, steps: int, marks: _Marks) -> dict[str, Any]:
        row = self._row
        load = self._pool.load(self.timed, padded=not row.is_packed)
        flops = training_flops(self._bench.shape, row.setup(self._settings.loss_chunk), load).total
        return {
            **{name: value for name, value in asdict(row).items() if name != "share"},
            "tokens_per_second": load.tokens / seconds,
            "mfu": flops / seconds / self._peak_flops() if self._device.type == "cuda" else None,
            "tflops": flops / seconds / 1e12,
            "batches": len(self.timed),
            "optimizer_steps": steps,
            "batch_seconds": seconds / len(self.timed),
            "step_seconds": seconds / steps,
            "waited_seconds": waited,
            "padding_share": padding / (padding + load.tokens),
            "predicted_gib": self._predicted() / GIB,
            **self._memory(marks),
            "load": asdict(load),
            **self._each(marks),
        }

    def _each(self, marks: _Marks) -> dict[str, Any]:
        """Every batch and every optimizer step: what time and memory can be fitted to."""
        batches, steps = marks.results()
        loads = [asdict(self._pool.load([batch], padded=not self._row.is_packed)) for batch in self.timed]
        each = [{**load, **batch} for load, batch in zip(loads, batches, strict=False)]
        return {"each": each, "optimizer_seconds": steps}

    def _peak_flops(self) -> float:
        return find_gpu(torch.cuda.get_device_name(self._device)).bf16_flops

    def _predicted(self) -> int:
        """What training expects torch to allocate for the heaviest of these batches: CUDA itself is not counted."""
        dtype: Literal["bf16", "fp32"] = "fp32" if self._settings.dtype == torch.float32 else "bf16"
        setup = replace(self._row.setup(self._settings.loss_chunk), weights_dtype=dtype)
        known = DEFAULT_COEFFICIENTS
        if self._device.type == "cuda":
            gpu = find_gpu(torch.cuda.get_device_name(self._device))
            _, known, _ = coefficients_for(gpu, compiled=self._row.compiled)
        loads = [self._pool.load([batch], padded=not self._row.is_packed) for batch in self.timed]
        whole = [replace(load, tokens=self._length or load.rows * load.longest) for load in loads]
        estimates = [estimate_memory(self._bench.shape, setup, load, known) for load in whole]
        return max(estimate.total - estimate.part("framework").bytes for estimate in estimates)

    def _memory(self, marks: _Marks) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        held = sum(value.nbytes for value in states if isinstance(value, Tensor))
        peak = max(marks.peaks)
        return {
            "peak_gib": peak / GIB,
            "optimizer_states_gib": held / GIB,
            "peak_without_states_gib": (peak - held) / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved(self._device) / GIB,
        }
