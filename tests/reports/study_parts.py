"""A study put together from columns of samples, with numbers that agree as those of a real one do."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtrain.measuring.measure_summary import describe
from packtrain.packing.schedule import BalanceLine, Evenness
from packtrain.planning.question import Baseline
from packtrain.planning.study_values import (
    Alternative,
    Beside,
    Combination,
    DatasetStats,
    Group,
    Histogram,
    MemoryReport,
    PaddedRun,
    PicturePack,
    PictureSample,
    Reason,
    Recommendation,
    Simulation,
    Study,
)
from packtrain.predicting.host_memory import HostNeeds
from packtrain.predicting.memory import MemoryEstimate, MemoryPart
from packtrain.predicting.options import Saving
from packtrain.predicting.values import Load, TrainingSetup
from packtrain.reports.study_files import NUMBERS, SampleChunk

GIB = 1 << 30
GPU_BYTES = int(79.1 * GIB)
LENGTHS = (8_000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000)
CHOSEN = 20_000
GAIN = 1.4  # over the best padding


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A study and the samples it is about."""

    study: Study
    samples: tuple[SampleChunk, ...]


def columns_like_lvis(samples: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    text = np.clip(random.lognormal(6.25, 0.95, samples), 20, 30_000).astype(np.int64)
    images = np.where(random.random(samples) < 0.12, 0, np.where(random.random(samples) < 0.06, 3, 1))
    per_image = random.integers(200, 560, samples)
    return {
        "text_tokens": text,
        "image_tokens": per_image * images,
        "video_tokens": np.zeros(samples, np.int64),
        "tokens": text + per_image * images,
        "images": images,
        "frames": np.zeros(samples, np.int64),
        "objects": random.poisson(6, samples) * (images > 0),
        "patches": 4 * per_image * images,
        "supervised_tokens": (text * 0.65).astype(np.int64),
        "order": random.random(samples),
    }


def _best_fit(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of every sample, -1 for the overlong: the tightest pack it fits, the longest samples first."""
    packs, room, number = np.full(len(tokens), -1, np.int64), [], 0
    for at in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[at])
        if size > capacity:
            continue
        found = bisect.bisect_left(room, (size, -1))
        left, pack = room.pop(found) if found < len(room) else (capacity, number)
        number += pack == number
        packs[at] = pack
        bisect.insort(room, (left - size, pack))
    return packs


def make(columns: Mapping[str, np.ndarray], sources: Sequence[str]) -> Made:
    tokens = columns["tokens"]
    names = [sources[int(x * x * len(sources))] for x in columns["order"].clip(0, 0.999)]
    ids = [f"{name[:9_990]}/{at:012d}" for at, name in enumerate(names)]
    packings = {length: _best_fit(tokens, length) for length in LENGTHS}
    simulations = tuple(_simulation(columns, packs, length) for length, packs in packings.items())
    simulations += (_limited(simulations[6]), _limited(simulations[4]))
    packs = packings[CHOSEN]
    why = {int(at): "pack: longer than packing_length" for at in np.flatnonzero(packs < 0)}
    chunk = SampleChunk(id=ids, source=names, pack=packs, why=why, **{name: columns[name] for name in NUMBERS})
    chosen = simulations[LENGTHS.index(CHOSEN)]
    study = Study(
        costs="runs/lvis/costs",
        model="Qwen/Qwen3-VL-2B-Instruct",
        model_type="qwen3_vl",
        parameters=2_127_532_032,
        gpu="h100",
        gpus=4,
        epochs=2,
        setup=TrainingSetup(gpus=4),
        baseline=Baseline(gradient_accumulation_steps=16, effective_batch_size=128, learning_rate=1e-5),
        dataset=_dataset(columns, names),
        padded=_padded(tokens, chosen),
        gain=GAIN,
        simulations=simulations,
        recommendation=_recommendation(chosen, tokens),
        memory=_memory(chosen, [ids[at] for at in np.flatnonzero(packs == 0)]),
        balance=tuple(
            BalanceLine(
                ranks=ranks,
                packs_per_step=max(ranks, 10),
                steps=100,
                random=Evenness(slowest=1.06 + ranks / 2000, length_spread=41.3, samples_spread=2.1),
                sorted=Evenness(slowest=1.008 + ranks / 20000, length_spread=41.3, samples_spread=2.1),
                strict=Evenness(slowest=1.002, length_spread=388.2, samples_spread=30.5),
            )
            for ranks in (8, 64, 512)
        ),
        picture=_picture(columns, names, ids, packs),
        ledger={
            "measure: image file is missing": 12,
            **({"pack: longer than packing_length": len(why)} if why else {}),
        },
        notes=(
            "Time and memory use default coefficients, not fitted to this GPU.",
            "Parameters were counted from config.json.",
        ),
    )
    return Made(study=study, samples=(chunk,))


def _dataset(columns: Mapping[str, np.ndarray], names: list[str]) -> DatasetStats:
    whole = {name: columns[name] for name in NUMBERS} | {"vision_tokens": columns["image_tokens"]}
    kinds = np.array(["text", "image", "images"])[np.minimum(columns["images"], 2)]
    return DatasetStats(
        samples=len(names),
        tokens=int(columns["tokens"].sum()),
        statistics={name: describe(column) for name, column in whole.items()},
        histograms={
            name: _histogram(whole[name])
            for name in ("tokens", "text_tokens", "vision_tokens", "patches", "images", "objects")
            if whole[name].any()
        },
        by_source=_groups(whole, np.array(names, dtype=object)),
        by_modality=_groups(whole, kinds),
        entries_read=len(names) + 12,
        measured_ledger={"measure: image file is missing": 12},
    )


def _histogram(values: np.ndarray) -> Histogram:
    most = int(values.max())
    if most <= 40:
        edges = np.arange(most + 2) - 0.5
    else:
        usual = max(float(np.percentile(values, 99.5)), 1.0)
        edges = np.append(np.arange(0, usual, max(1.0, round(usual / 40, -1) or 1.0)), most + 1.0)
    counts, _ = np.histogram(values, edges)
    return Histogram(edges=tuple(map(float, edges)), counts=tuple(map(int, counts)))


def _groups(columns: Mapping[str, np.ndarray], names: np.ndarray) -> tuple[Group, ...]:
    total = int(columns["tokens"].sum())
    found = []
    for name in dict.fromkeys(names.tolist()):
        mine = names == name
        tokens = int(columns["tokens"][mine].sum())
        found.append(
            Group(
                name=name,
                samples=int(mine.sum()),
                tokens=tokens,
                share_of_tokens=tokens / total,
                statistics={column: describe(values[mine]) for column, values in columns.items()},
            )
        )
    return tuple(found)


def _simulation(columns: Mapping[str, np.ndarray], packs: np.ndarray, length: int) -> Simulation:
    tokens, kept = columns["tokens"], packs >= 0
    number, real = int(packs.max()) + 1, int(tokens[kept].sum())
    bound = -(-real // length)
    per_pack = int(kept.sum()) / number
    load = Load(
        tokens=length,
        squared_tokens=length * 3000,
        longest=int(tokens[kept].max()),
        samples=60,
        patches=length,
        images=25,
    )
    seconds = real / 69_800 * (1 + 2e-6 * length)
    return Simulation(
        packing_length=length,
        limits={},
        packs=number,
        bound=bound,
        of_bound=bound / number,
        fill=real / (number * length),
        samples_packed=int(kept.sum()),
        samples_dropped=int((~kept).sum()),
        tokens_dropped=int(tokens[~kept].sum()),
        samples_per_pack=per_pack,
        packs_per_step=max(1, round(128 / per_pack)),
        samples_per_step=max(1, round(128 / per_pack)) * per_pack,
        micro_batches=-(-max(1, round(128 / per_pack)) // 4),
        steps=-(-number // max(1, round(128 / per_pack))),
        worst=load,
        memory_bytes=int((67.3 + (length - 20_000) * 2.85e-3) * GIB),
        fits=length < 22_000,
        seconds=seconds,
        tokens_per_second=real / seconds,
        speedup=real / 16_260 / seconds,
        fullest={"tokens": 0.93, "images": 0.07},
    )


def _limited(one: Simulation) -> Simulation:
    packs = round(one.packs * 1.12) + 1
    return replace(
        one,
        limits={"max_images_per_pack": 8},
        packs=packs,
        fill=one.fill * one.packs / packs,
        of_bound=one.bound / packs,
        memory_bytes=one.memory_bytes - 9 * GIB,
        fits=True,
        tokens_per_second=one.tokens_per_second * 0.93,
        speedup=one.speedup * 0.93,
    )


def _padded(tokens: np.ndarray, chosen: Simulation) -> tuple[PaddedRun, ...]:
    kept = tokens[tokens <= chosen.packing_length]
    real, runs = int(kept.sum()), []
    for order, factor, seconds, kernels in (
        ("random", 1.6, chosen.speedup * chosen.seconds, "own"),
        ("by_length", 1.03, 2.1 * chosen.seconds, "own"),
        ("by_length", 1.03, GAIN * chosen.seconds, "packs"),
    ):
        computed = int(real * factor)
        runs.append(
            PaddedRun(
                order=order,  # type: ignore[arg-type]
                batch_size=2,
                batches=-(-len(kept) // 2),
                steps=-(-len(kept) // 128),
                samples=len(kept),
                dropped=len(tokens) - len(kept),
                real_tokens=real,
                computed_tokens=computed,
                waste=1 - real / computed,
                worst=Load(tokens=40_000, squared_tokens=8 * 10**8, longest=20_000, rows=2, samples=2),
                seconds=seconds,
                memory_bytes=58 * GIB,
                fits=True,
                kernels=kernels,  # type: ignore[arg-type]
            )
        )
    return tuple(runs)


def _config(length: int, accumulation: int) -> dict[str, Any]:
    return {
        "model": {"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct"},
        "data": {
            "packing": True,
            "packing_length": length,
            "packing_strategy": "best_fit",
            "overlong": "drop",
            "packing_drop_last": False,
            "eval_packing": True,
        },
        "training": {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": accumulation,
            "num_train_epochs": 2,
            "learning_rate": 1e-05,
            "warmup_ratio": 0.1,
            "eval_steps": 200,
            "save_steps": 200,
            "logging_steps": 10,
            "gradient_checkpointing": True,
        },
    }


def _recommendation(chosen: Simulation, tokens: np.ndarray) -> Recommendation:
    at = LENGTHS.index(CHOSEN)
    return Recommendation(
        packing=True,
        verdict=f"Packing at {chosen.packing_length:,} tokens is predicted to train {chosen.speedup:.1f} times as fast "
        f"as padded batches of 2: {chosen.packs:,} packs, {100 * chosen.fill:.1f} % filled, "
        f"{chosen.samples_dropped:,} samples too long.",
        simulation=at,
        config=_config(CHOSEN, chosen.micro_batches),
        reasons=(
            Reason(
                parameter="packing_length",
                baseline="none",
                packing=f"{CHOSEN:,}",
                reason="the fastest of 9 lengths that fits with 10 % to spare and drops fewer than 0.5 % of samples",
            ),
            Reason(
                parameter="training.gradient_accumulation_steps",
                baseline="16",
                packing=str(chosen.micro_batches),
                reason=f"{chosen.packs_per_step} packs on 4 GPUs keep about 128 samples in an optimizer step",
            ),
            Reason(parameter="per_device_train_batch_size", baseline="2", packing="1", reason="one pack is one row"),
        ),
        alternatives=(
            Alternative(
                name="efficient",
                simulation=at + 1,
                reason="A little faster, but 5 GiB more memory.",
                config=_config(22_000, 3),
            ),
            Alternative(
                name="conservative",
                simulation=at - 2,
                reason="Leaves 23 GiB more of the GPU free.",
                config=_config(16_000, 4),
            ),
        ),
        advice=(
            "No change of learning rates is needed: a step keeps its number of samples.",
            f"{chosen.samples_dropped:,} samples are longer than {CHOSEN:,} tokens; 24,000 would keep more.",
        ),
        mean_share=float(tokens.mean()) / CHOSEN,
        rule_of_thumb=f"Samples fill {100 * float(tokens.mean()) / CHOSEN:.1f} % of a pack; below 50 % packing helps.",
    )


def _memory(chosen: Simulation, worst: list[str]) -> MemoryReport:
    sizes = {
        **{"weights": 3.96, "gradients": 3.96, "optimizer states": 7.93, "language activations": 26.2},
        **{"vision activations": 16.4, "attention": 0.01, "logits and loss": 2.4, "inputs": 0.9},
        **{"communication buffers": 0.05, "framework": 4.2},
    }
    parts = tuple(
        MemoryPart(name=name, bytes=int(size * GIB), why=f"{name} of the worst pack, counted")
        for name, size in sizes.items()
    )
    estimate = MemoryEstimate(parts=parts, moment="the backward pass of the language model")
    total = estimate.total
    return MemoryReport(
        gpu="h100",
        gpu_bytes=GPU_BYTES,
        usable_bytes=int(0.9 * GPU_BYTES),
        estimate=estimate,
        beside=(Beside(name="stock padded run", estimate=estimate, fits=True),),
        vision_layer={"attention scores, if written out": 3 * GIB, "MLP": GIB},
        vision_layers=24,
        comfortable=Combination(changes=("packing_length 12,000",), memory_bytes=40 * GIB, seconds=4000.0, lost=12),
        worst_bytes=total - GIB,
        worst_pack=0,
        worst_samples=tuple(worst),
        savings=tuple(
            Saving(option=option, change=change, bytes=int(size * GIB), total_after=total - int(size * GIB), cost=cost)
            for option, change, size, cost in (
                ("gradient checkpointing", "language: recompute each layer", 21.3, "about a third more forward time"),
                ("vision sub-batches", "at most 16,384 patches at once", 9.7, "none to speak of"),
                ("max_images_per_pack", "25 -> 8", 9.0, "14 % more packs"),
                ("sdpa attention", "a dense mask instead of varlen", -0.8, "slower"),
            )
        ),
        sentences=(
            f"Pack 0 holds {chosen.worst.tokens:,} tokens and {chosen.worst.patches:,} patches.",
            "20,000 tokens hold at most 97 images of 206 tokens, so max_images_per_pack 306 never binds.",
        ),
        host=HostNeeds(
            memory=(MemoryPart(name="workers", bytes=6 * GIB, why="8 workers of 750 MiB"),),
            shared_memory=(MemoryPart(name="batches on their way", bytes=2 * GIB, why="16 batches of the worst size"),),
            disk=(
                MemoryPart(name="checkpoints", bytes=48 * GIB, why="3 kept, 16 GiB each"),
                MemoryPart(name="plan", bytes=2 << 20, why="packs of 2 epochs"),
            ),
        ),
    )


def _picture(
    columns: Mapping[str, np.ndarray], names: list[str], ids: list[str], packs: np.ndarray
) -> tuple[PicturePack, ...]:
    number = int(packs.max()) + 1
    found = []
    for pack in sorted({int(x) for x in np.linspace(0, number - 1, 40)}):
        rows = np.flatnonzero(packs == pack).tolist()
        samples = tuple(
            PictureSample(
                id=ids[at],
                source=names[at],
                tokens=int(columns["tokens"][at]),
                vision_tokens=int(columns["image_tokens"][at]),
            )
            for at in rows
        )
        found.append(PicturePack(number=pack, tokens=sum(sample.tokens for sample in samples), samples=samples))
    return tuple(found)
