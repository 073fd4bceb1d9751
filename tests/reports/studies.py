"""Studies made by hand: one as large and mixed as a real one, one whose names are hostile, one of a single sample."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from study_parts import GIB, Made, columns_like_lvis, make

from packtrain.planning.question import Baseline
from packtrain.planning.study_values import Reason
from packtrain.predicting.memory import MemoryEstimate
from packtrain.predicting.options import Saving
from packtrain.predicting.values import TrainingSetup
from packtrain.reports.study_files import NUMBERS

HOSTILE = (
    "</script><script>document.title='pwned'</script>",
    "\"'><img src=x onerror=document.title='pwned'>",
    "{{ 7 * 7 }} {% raw %} ${alert(1)}",
    "שלום עולם مرحبا",
    "right\u202eto left\u2066 marks",
    "🦆📦 emoji & <b>bold</b> | pipe `tick` *star*",
    "line\u2028separator\nnewline\ttab\x00nul\x1b[31m",
    "lone surrogate \udc80",
    "x" * 10_000,
    "javascript:document.title='pwned'",
    "]]><!-- --><svg onload=document.title='pwned'>",
    "$\\frac{1}{0}$ %s {0} \\u003c",
)


@functools.cache
def lvis(samples: int = 99_388) -> Made:
    """Shaped like the LVIS detection data: most samples one image and a few hundred tokens, a long tail."""
    return make(columns_like_lvis(samples), ("lvis_train", "refcoco", "chartqa", "sharegpt_text"))


@functools.cache
def hostile() -> Made:
    """Names that try to become markup, formulas, templates or other directions of writing."""
    made = make(columns_like_lvis(600), HOSTILE)
    study = made.study
    bad = HOSTILE[0]
    config = {
        **study.recommendation.config,
        "extra": {"on": HOSTILE[8], "a: b": bad, "lines": HOSTILE[6], "x": [bad, 1.5e-5]},
    }
    recommendation = replace(
        study.recommendation,
        verdict=f"Packing helps, says {bad}.",
        config=config,
        reasons=(
            *study.recommendation.reasons,
            Reason(parameter="a: b", baseline=bad, packing=HOSTILE[6], reason=HOSTILE[6]),
        ),
        advice=HOSTILE,
        warning=HOSTILE[1],
        rule_of_thumb=HOSTILE[5],
    )
    memory = replace(
        study.memory,
        worst_samples=tuple(f"{name}-{at}" for at, name in enumerate(HOSTILE)),
        sentences=HOSTILE,
        savings=(
            *study.memory.savings,
            Saving(option=bad, change=HOSTILE[1], bytes=-GIB, total_after=90 * GIB, cost=HOSTILE[5]),
        ),
    )
    dirty = replace(
        study,
        costs=f"/data/{bad}/{HOSTILE[8]}",
        model=HOSTILE[1],
        recommendation=recommendation,
        memory=memory,
        ledger={**study.ledger, bad: 3, HOSTILE[6]: 2},
        notes=HOSTILE,
    )
    return Made(study=dirty, samples=made.samples)


@functools.cache
def single() -> Made:
    """One text sample: packing cannot help."""
    made = make(
        {name: np.array([700 if "tokens" in name and name != "image_tokens" else 0]) for name in (*NUMBERS, "order")},
        ("only",),
    )
    study = made.study
    simulation = replace(
        study.simulations[0], packing_length=1024, packs=1, bound=1, fill=700 / 1024, fullest={}, speedup=1.0
    )
    run = replace(
        study.padded[0],
        waste=0.0,
        computed_tokens=700,
        real_tokens=700,
        samples=1,
        dropped=0,
        seconds=simulation.seconds,
    )
    recommendation = replace(
        study.recommendation,
        packing=False,
        verdict="Packing will not help: one sample of 700 tokens is 68.4 % of 1,024, and padding wastes nothing.",
        simulation=0,
        config={"model": {}, "data": {"packing": False}, "training": {}},
        reasons=(),
        alternatives=(),
        advice=(),
    )
    parts = tuple(part for part in study.memory.estimate.parts if "vision" not in part.name)
    memory = replace(
        study.memory,
        estimate=MemoryEstimate(parts=parts, moment="the loss"),
        savings=(),
        sentences=(),
        worst_samples=("0",),
    )
    small = replace(
        study,
        simulations=(simulation,),
        padded=(run,),
        recommendation=recommendation,
        memory=memory,
        balance=(),
        picture=(),
        ledger={},
        notes=(),
        setup=TrainingSetup(),
        baseline=Baseline(),
    )
    return Made(study=small, samples=made.samples)
