"""How fast training is: padded and packed, eager and compiled, with and without checkpointing, in one run."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from packtrain.bench.host import host_facts
from packtrain.bench.train_data import POOL, Pool
from packtrain.bench.train_loop import BenchTrainer, LoopSettings
from packtrain.bench.train_rows import (
    BASELINE,
    YARDSTICK,
    BenchModel,
    BenchRow,
    bench_model,
    bench_rows,
    with_method,
)
from packtrain.core.cache_root import cache_dir
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.load import quantize_random
from packtrain.modeling.model_settings import ModelSettings
from packtrain.predicting.values import Method

_TINY_SCALE = 24  # by which lengths are divided for the tiny model
_LORA_RANK = 16


def bench_train(
    *,
    model: str,
    only: Sequence[str] = (),
    settings: LoopSettings | None = None,
    progress: Callable[[str], None] = lambda _: None,
    done: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """All rows, or those with one of some words in their names. `done` gets the result after each row."""
    bench = bench_model(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = settings or LoopSettings()
    if device.type == "cpu":
        settings = replace(settings, dtype=torch.float32)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    samples, scale = (256, _TINY_SCALE) if bench.tiny else (POOL, 1)
    pool = Pool.of_lvis_shape(longest=bench.longest, samples=samples, scale=scale, images=bench.has_vision)
    result: dict[str, Any] = {**_run_facts(bench, device, settings, pool), "rows": []}
    model_of = _Models(bench, device, settings.dtype, progress)
    # Rows differ in their constant lengths: each is compiled for its own, and what they share stays compiled. Where
    # that were too often, layers would run uncompiled without a word.
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, **limits):
        for row in bench_rows(bench):
            if only and not any(word in row.name for word in only):
                continue
            trained = model_of(row.method)
            progress(row.name)
            result["rows"].append(measure_row(bench, trained, row, pool, settings))
            _compare(result["rows"])
            done(result)
    return result


class _Models:
    """The model as a row's method wants it. Only one is held: a row of another kind of adapters gets a new one."""

    def __init__(
        self, bench: BenchModel, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
    ) -> None:
        self._bench, self._device, self._dtype, self._progress = bench, device, dtype, progress
        self._model: Any = None
        self._method: Method = "full"

    def __call__(self, method: Method) -> Any:
        kept = method == self._method or (self._method == "full" and method != "qlora")
        if self._model is None or not kept:
            self._model = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._progress("building the model")
            self._model = self._bench.build(self._device, self._dtype)
            if method == "qlora":
                self._progress("storing its weights in 4 bits")
                self._model = quantize_random(self._model, cache_dir() / "models", self._dtype).train()
        if method != "full":
            self._model = with_adapters(self._model, method)
        self._method = method
        return self._model


def measure_row(bench: BenchModel, model: Any, row: BenchRow, pool: Pool, settings: LoopSettings) -> dict[str, Any]:
    """One row; memory that does not suffice is a result too, and so is code that had to be compiled too often."""
    trainer: BenchTrainer | None = None
    try:
        trainer = BenchTrainer(bench, model, row, pool, settings)
        return {"name": row.name, **trainer.run()}
    except torch.OutOfMemoryError:
        return {"name": row.name, "error": "out of memory"}
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        return {"name": row.name, "error": "compiled too often"}
    finally:
        if trainer is not None:
            trainer.close()


def with_adapters(model: Any, method: Method) -> Any:
    """The model with adapters as training adds them to a decoder, for rows with masters; one that has them stays."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        return model
    torch._dynamo.reset()  # layers are others now
    # So that one code serves the first layer and the others. Transformers' own switch would include the encoder.
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())
    settings = ModelSettings(name=model.config.model_type, method=method, lora_rank=_LORA_RANK)
    return set_trainable(model, settings, half_adapters=True)


def _run_facts(bench: BenchModel, device: torch.device, settings: LoopSettings, pool: Pool) -> dict[str, Any]:
    import transformers

    return {
        "model": bench.name,
        "parameters": bench.shape.parameters.total,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "samples": len(pool.tokens),
        "mean_tokens": float(pool.tokens.mean()),
        "mean_image_tokens": float(pool.image_tokens.mean()),
        "mean_supervised_tokens": float(pool.supervised.mean()),
        "longest": int(pool.tokens.max()),
        "step_samples": settings.step_samples,
        "loss_chunk": settings.loss_chunk,
        "workers": settings.workers,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "host": host_facts(torch.get_num_threads()),
    }


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    speeds = {row["name"]: row["tokens_per_second"] for row in rows if "error" not in row}
    for row in rows:
        for key, name in (("to_baseline", BASELINE), ("to_yardstick", YARDSTICK)):
            other = speeds.get(with_method(name, row.get("method", "full")), speeds.get(name))
            if other is not None and row["name"] in speeds:
                row[key] = speeds[row["name"]] / other
