"""What tests of proofs name: samples of text made by hand, and the checks of a report by their kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.verifying.check_result import CheckReport

LENGTHS = (23, 40, 17, 31)


def text_samples(vocabulary: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[EncodedSample]:
    """Random ids; the first half of each sample is a prompt."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, vocabulary, (length,), generator=draw)
        found.append(synthetic_sample(f"text-{number}", ids, supervised=length - max(1, length // 2)))
    return found


def failed(report: CheckReport) -> set[str]:
    """The checks that failed."""
    return {finding.check for finding in report.failures}


def checks(report: CheckReport) -> set[str]:
    """All checks that were made."""
    return {finding.check for finding in report.checks}
