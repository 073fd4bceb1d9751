"""The yardstick of the loader benchmark: a plain DataLoader whose collate function calls the HF processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

Messages = list[dict[str, Any]]


class PlainRecords(Dataset[Messages]):
    """The lines of a file, held in memory as such datasets do; pictures are decoded when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._root = path.parent
        self._lines = path.read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Messages:
        messages: Messages = json.loads(self._lines[number])["messages"]
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    with Image.open(self._root / part["image"]) as picture:
                        part["image"] = picture.convert("RGB")
        return messages


class ProcessorCollate:
    """A padded batch, its labels, and nothing else."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoProcessor
        from transformers.utils import logging

        logging.set_verbosity_error()
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        # A processor ignores a template that only its tokenizer has.
        self._template = getattr(self._processor, "chat_template", None) or self._processor.tokenizer.chat_template

    def __call__(self, batch: list[Messages]) -> dict[str, Any]:
        outputs = self._processor.apply_chat_template(
            batch,
            chat_template=self._template,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        found = dict(outputs)
        found["labels"] = found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)
        found["samples"] = len(batch)
        found["images"] = sum(part["type"] == "image" for one in batch for turn in one for part in turn["content"])
        return found


def plain_loader(path: Path, folder: str, *, batch_size: int, workers: int) -> DataLoader[Any]:
    """Shuffled batches of a given number of records."""
    return DataLoader(
        PlainRecords(path),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        collate_fn=ProcessorCollate(folder),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
