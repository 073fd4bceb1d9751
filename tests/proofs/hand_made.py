"""What tests of proofs name: samples of text made by hand, and the findings of a verdict by their kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packtrain.packs.values import IGNORED, TEXT, EncodedSample
from packtrain.proofs.values import Verdict

LENGTHS = (23, 40, 17, 31)


def text_samples(vocabulary: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[EncodedSample]:
    """Random ids; the first half of each sample is a prompt."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, vocabulary, (length,), generator=draw)
        labels = ids.clone()
        labels[: max(1, length // 2)] = IGNORED
        found.append(
            EncodedSample(
                id=f"text-{number}",
                input_ids=ids,
                labels=labels,
                position_ids=torch.arange(length)[None],
                token_kinds=torch.full((length,), TEXT),
            )
        )
    return found


def failed(verdict: Verdict) -> set[str]:
    """The checks that failed."""
    return {finding.check for finding in verdict.failures}


def checks(verdict: Verdict) -> set[str]:
    """All checks that were made."""
    return {finding.check for finding in verdict.findings}
