"""Run folders as packtrain train leaves them: made from a model of how training goes, written in the same format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.core.artifacts import write_json
from packtrain.runs.metrics_log import MetricsLog
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics
from packtrain.training.monitors import EarlyWarning

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a synthetic run went."""

    mode: str = "packed"
    steps: int = 120
    samples_per_step: int = 16
    seconds: float = 0.4  # of a step
    padding: float = 0.03
    world_size: int = 2
    seed: int = 0
    start: float = 7.0
    end: float = 0.8
    noise: float = 0.03  # of the loss, relatively
    half: float = 300.0  # samples in which the way to the end is halved
    evaluate: int = 30
    warnings: tuple[EarlyWarning, ...] = ()
    outcome: dict[str, Any] = field(default_factory=lambda: {"status": "complete", "step": 120, "steps": 120})
    gpu: bool = True
    nan_at: tuple[int, ...] = ()
    model: str = "tiny:qwen2_5_vl"


def write_run(folder: Path, made: Made) -> Path:
    """The folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model": made.model,
        "mode": made.mode,
        "plan": str(folder / "plan"),
        "packs_per_step": 4 if made.mode == "packed" else made.samples_per_step,
        "rows_per_batch": 1 if made.mode == "packed" else 4,
        "seed": 7,
        "balance": "sorted",
        "world_size": made.world_size,
        "derived": {
            **{"steps": made.steps, "samples_per_step": made.samples_per_step, "attn_implementation": "varlen"},
            **{"samples": 1000, "images": 0, "videos": 12, "frames": 96, "epochs": 3.0, "packing_length": 4096},
            **{"method": "lora", "lora": {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}},
            **{"trainable": {"language": 20_000, "vision": 0}, "weights": {"language": 1_000_000, "vision": 9}},
            "course": {
                **{"rates": {"language": 2e-4}, "schedule": "cosine", "warmup_steps": 4, "precision": "bf16 autocast"},
                **{"optimizer": "adamw_torch_fused", "weight_decay": 0.1, "max_grad_norm": 1.0},
            },
        },
        "began": "2026-01-02T03:04:05Z",
        "command": "packtrain train run.yaml",
        "commit": "0123abcd-dirty",
        "outcome": made.outcome,
        "notes": ["data.packing_length: the model's own"],
        "prepared": ["the cost table is reused"],
        "written": {"model": {"name": made.model}},
        "versions": {"torch": "2.15.0", "transformers": "5.22.2"},
    }
    write_json(folder / "run.json", "run", 1, content)
    (folder / "run.yaml").write_text(config(made), encoding="utf-8")
    reasons = [("decode", "image cannot be decoded")] * 2 + [("plan", "longer than a pack")] * 3
    lines = [
        json.dumps({"id": f"s{at}", "origin": f"data.jsonl:{at}", "stage": stage, "reason": reason, "detail": ""})
        for at, (stage, reason) in enumerate(reasons)
    ]
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in steps_of(made):
            log.step(step)
            for warning in made.warnings:
                if warning.step == step.step:
                    log.warning(warning)
            if made.evaluate and step.step % made.evaluate == 0:
                log.evaluation(
                    EvalMetrics(
                        step=step.step, epoch=step.epoch, eval_loss=expected_loss(made, step.samples_seen) * 1.05,
                        samples_seen=step.samples_seen, seconds=1.0,
                    )
                )  # fmt: skip
    return folder


def expected_loss(made: Made, samples: float) -> float:
    """The loss without noise after so many samples."""
    return made.end + (made.start - made.end) * 0.5 ** (samples / made.half)


def config(made: Made) -> str:
    """run.yaml."""
    packing = "true" if made.mode == "packed" else "false"
    return (
        f"# as it was resolved\nmodel:\n  name: {made.model}\ndata:\n  dataset_path: data.jsonl\n"
        f"  packing: {packing}\n  packing_length: 4096\ntraining:\n  learning_rate: 0.0002\n"
    )


def steps_of(made: Made) -> list[StepMetrics]:
    """The steps, drawn from a seeded stream."""
    random = np.random.default_rng(made.seed)
    found, samples_seen, tokens_seen = [], 0, 0
    for number in range(1, made.steps + 1):
        samples = int(random.integers(made.samples_per_step - 3, made.samples_per_step + 4))
        if made.mode == "padded":
            samples = made.samples_per_step
        tokens = int(samples * random.normal(700, 30))
        samples_seen, tokens_seen = samples_seen + samples, tokens_seen + tokens
        seconds = made.seconds * float(random.lognormal(0, 0.06)) * (4 if number == 1 else 1)
        found.append(_step(made, number, samples, tokens, seconds, samples_seen, tokens_seen, random))
    return found


def _step(
    made: Made, number: int, samples: int, tokens: int, seconds: float, samples_seen: int, tokens_seen: int,
    random: np.random.Generator,
) -> StepMetrics:  # fmt: skip
    value = expected_loss(made, samples_seen) * float(random.lognormal(0, made.noise))
    warm = min(1.0, number / max(1, made.steps // 10))
    rate = 2e-4 * warm * 0.5 * (1 + math.cos(math.pi * number / made.steps))
    waited = float(random.exponential(0.02)) * seconds
    spread = float(random.normal(1.02, 0.006)) if made.world_size > 1 else 1.0
    batches = 4
    return StepMetrics(
        step=number,
        epoch=number / made.steps * 2,
        loss=math.nan if number in made.nan_at else value,
        grad_norm=float(random.lognormal(0, 0.3)) * (1 + 3 * value / made.start) * (40 if number == 57 else 1),
        learning_rates={"language": rate, "vision": rate / 10, "projector": rate / 2},
        batches=batches,
        samples=samples,
        tokens=tokens,
        supervised_tokens=tokens // 3,
        images=samples,
        patches=samples * 1024,
        seq_len_avg=tokens / batches,
        seq_len_min=tokens // batches - 200,
        seq_len_max=tokens // batches + 200,
        fill=1 - made.padding,
        padding_share=min(0.95, max(0.0, made.padding * float(random.normal(1, 0.1)))),
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        samples_per_second=samples / seconds,
        images_per_second=samples / seconds,
        patches_per_second=samples * 1024 / seconds,
        data_wait_seconds=waited,
        data_wait_share=waited / seconds,
        rank_seconds=tuple([seconds] * made.world_size),
        spread=max(1.0, spread),
        work_spread=1.01,
        flops=1e12,
        mfu=0.42 * made.seconds / seconds if made.gpu else None,
        memory_bytes=int(61 * GIB * random.normal(1, 0.01)) if made.gpu else None,
        memory_limit=80 * GIB if made.gpu else None,
        samples_seen=samples_seen,
        tokens_seen=tokens_seen,
        predicted_seconds=made.seconds * 1.04 if made.gpu else None,
        predicted_memory_bytes=64 * GIB if made.gpu else None,
    )


WARNINGS = (
    EarlyWarning(
        kind="grad_norm",
        step=57,
        message="gradient norm 81.2, 40 times its median of 2.0",
        advice="lower training.learning_rate, or set training.max_grad_norm",
    ),
    EarlyWarning(
        kind="data_bound",
        step=90,
        message="12 % of the last 50 steps went into waiting for data",
        advice="raise training.dataloader_num_workers",
    ),
)
