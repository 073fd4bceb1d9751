"""Verify and train one model that packtrain does not list, in a realistic size, packed against padded.

    python scripts/unlisted_on_gpu.py [--out FOLDER] [--small]

A GLM-4V of 1.4 B random parameters and 400 chats with up to two pictures are made in a temporary folder; `--small` is
the same on a CPU, in a minute. Written to FOLDER: verify.json, and the metrics of each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import packtrain
from packtrain.bench.unlisted_models import write_unlisted
from packtrain.modeling.load import build_model
from packtrain.records.synthetic import sentence

MODEL = "glm4v"
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
}
VISION = {
    "hidden_size": 1024,
    "depth": 20,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "intermediate_size": 4096,
    "initializer_range": 0.02,
}
SECTIONS = [16, 24, 24]  # of half a head, for time, height and width
RUNS = {
    "packed": {"data.packing": "true", "data.packing_length": "8192"},
    "compiled": {"data.packing": "true", "data.packing_length": "8192", "training.compile": "true"},
    "padded": {"data.packing": "false", "training.per_device_train_batch_size": "4"},
}


def write_model(folder: Path, *, small: bool) -> float:
    """A folder with weights; returns their number in billions."""
    write_unlisted(MODEL, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if not small:
        config["text_config"] |= TEXT
        config["text_config"]["rope_parameters"]["mrope_section"] = SECTIONS
        config["vision_config"] |= VISION
        path.write_text(json.dumps(config))
    model = build_model(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return float(sum(weight.numel() for weight in model.parameters()) / 1e9)


def write_data(folder: Path, *, small: bool) -> Path:
    """Chats with no, one or two pictures of noise, and answers of very different lengths."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(24 if small else 400):
        parts: list[dict[str, Any]] = []
        for place in range(int(random.choice([0, 1, 1, 2]))):
            width, height = (int(side) for side in random.integers(8, 24, 2) * (14 if small else 28))
            name = f"{number}-{place}.png"
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
            parts.append({"type": "image", "image": name})
        words = 3 + min(3000, int(np.exp(random.normal(3 if small else 5, 0.9))))
        question, answer = [*parts, {"type": "text", "text": "What is it?"}], sentence(random, words)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": str(number), "messages": turns}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def train(model: Path, data: Path, run: Path, settings: dict[str, str], *, small: bool) -> list[dict[str, Any]]:
    """Train a few steps and return their metrics."""
    common = {
        "model": str(model),
        "data.dataset_path": str(data),
        "data.check": "0",
        "training.max_steps": "2" if small else "12",
        "training.effective_batch_size": "6" if small else "24",
        "training.learning_rate": "1e-5",
        "training.save_strategy": "no",
        "training.gradient_checkpointing": "false",
        "training.output_dir": str(run),
    }
    if small and "data.packing_length" in settings:
        settings = {name: value for name, value in settings.items() if name != "training.compile"}
        settings["data.packing_length"] = "512"
    outcome = packtrain.train(None, [f"{name}={value}" for name, value in {**common, **settings}.items()])
    report = outcome.ready.packing_check
    print(f"  {outcome.ready.attn_implementation}; check: {report.outcome if report is not None else 'none'}")
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("loss") is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("unlisted-on-gpu"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / MODEL
        print(f"{MODEL}: {write_model(model, small=options.small):.2f} B parameters")
        data = write_data(folder, small=options.small)
        report = packtrain.verify(str(model), data=str(data))
        (options.out / "verify.json").write_text(json.dumps(report.as_json(), indent=1))
        print(
            f"verify: {report.outcome} on {report.attn_implementation} in {report.dtype}, {len(report.checks)} checks"
        )
        for name, settings in RUNS.items():
            print(name)
            steps = train(model, data, folder / name, settings, small=options.small)
            (options.out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)))
            warm = steps[len(steps) // 2 :]
            speed = sum(step["tokens"] for step in warm) / sum(step["step_seconds"] for step in warm)
            print(f"  loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}; {speed:,.0f} tokens/s in the second half")


if __name__ == "__main__":
    main()
