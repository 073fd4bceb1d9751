"""Small chats to train on, made by a seed, and the shortest config that trains on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = ["red", "blue", "green", "cup", "table", "window", "river", "stone", "cloud", "paper"]


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Chats of a few words, of very different lengths."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    lines = []
    for number in range(count):
        turns = [{"role": "user", "content": words(24)}, {"role": "assistant", "content": words(12)}]
        lines.append(json.dumps({"id": f"chat-{seed}-{number}", "messages": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_config(folder: Path, **training: Any) -> Path:
    """A config beside its data; `training` is added to its section."""
    write_chats(folder / "train.jsonl", 40)
    content = {
        "model": {"model_name_or_path": "tiny:llama"},
        "data": {"dataset_path": str(folder / "train.jsonl"), "packing_length": 192},
        "training": {
            "learning_rate": 1e-2,
            "effective_batch_size": 8,
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "save_steps": 100,
            **training,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
