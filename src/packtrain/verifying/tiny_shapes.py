"""Tiny models made wider: heads of the size that GPU kernels take, still small enough for any machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.core.artifacts import made_once

# How much wider than tiny: heads of 16 become heads of 64 or 128, a width of 64 becomes 256 or 512.
SHAPES: Mapping[str, int] = {"tiny": 1, "small": 4, "medium": 8}
_WIDTHS = frozenset(
    (
        *("hidden_size", "intermediate_size", "head_dim", "embed_dim", "out_hidden_size"),
        *("mrope_section", "query_pre_attn_scalar"),
    )
)
# A matrix with four times as many columns needs entries half as large for sums of the same size.
_SPREAD = "initializer_range"


def widened(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A tiny model's config with every width multiplied; depth, vocabulary and vision geometry stay.

    >>> widened({"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": {"mrope_section": [2, 3, 3]}}, 4)
    {'hidden_size': 256, 'num_attention_heads': 4, 'rope_parameters': {'mrope_section': [8, 12, 12]}}
    """
    wide: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            wide[key] = widened(value, times)
        elif key in _WIDTHS:
            wide[key] = [times * one for one in value] if isinstance(value, list) else times * value
        elif key == _SPREAD:
            wide[key] = value / times**0.5
        else:
            wide[key] = value
    return wide


def shaped_folder(tiny: Path, shape: str) -> Path:
    """The folder of a tiny model made wider, beside it; made at most once."""
    folder = tiny.with_name(f"{tiny.name}-{shape}") if SHAPES[shape] > 1 else tiny

    def write(fresh: Path) -> None:
        shutil.copytree(tiny, fresh, dirs_exist_ok=True)
        config = json.loads((tiny / "config.json").read_bytes())
        text = json.dumps(widened(config, SHAPES[shape]), indent=2) + "\n"
        (fresh / "config.json").write_text(text, encoding="utf-8")

    return made_once(folder, write)
