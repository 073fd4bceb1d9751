"""What the tests of proofs share: tiny models with samples made for them, and the command line in this process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from packtrain.core.values import Cost
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.families import tiny
from packtrain.families.family import BatchContract
from packtrain.measuring.request import Request
from packtrain.verifying.samples import synthetic_samples

sys.path.append(str(Path(__file__).parents[1] / "measuring"))  # small encoders, as the tests of measuring make them
from conversations import TILED, shrink


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One tiny model's folder, and samples for it."""

    folder: Path
    contract: BatchContract
    pad_id: int
    samples: tuple[EncodedSample, ...]
    costs: tuple[Cost, ...]

    def some(self, *ids: str) -> list[EncodedSample]:
        return [sample for sample in self.samples if sample.id in ids]


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """A family's tiny model, made once."""
    folders = tmp_path_factory.mktemp("proved")

    @functools.cache
    def subject(family: str) -> Subject:
        folder = tiny.write(family, folders / family)
        request = Request(specs=(), model=str(shrink(folder, 8) if family in TILED else folder))
        encoder = SampleEncoder(request)
        made = synthetic_samples(request, encoder)
        return Subject(
            folder=folder,
            contract=encoder.contract,
            pad_id=encoder.pad_id,
            samples=tuple(one.sample for one in made),
            costs=tuple(one.cost for one in made),
        )

    return subject


@pytest.fixture
def run(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """The command line, with room for wide tables."""
    monkeypatch.setenv("COLUMNS", "160")
    return run
