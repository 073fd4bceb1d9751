"""Fitting finds what made the measurements, and stays sensible where they say nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from packtrain.predicting.calibration import Knob, fit_ratios


@dataclass(frozen=True, kw_only=True)
class Line:
    slope: float = 1.0
    offset: float = 1.0
    unused: float = 3.0


PLACES = (1.0, 2.0, 5.0, 9.0, 20.0)
KNOBS = (
    Knob(name="slope", spread=1.0, low=0.01, high=100),
    Knob(name="offset", spread=1.0, low=0.01, high=100),
    Knob(name="unused", spread=0.5, low=0.01, high=100),
)


def values(line: Line) -> list[float]:
    return [line.slope * place + line.offset for place in PLACES]


def test_numbers_are_found_again_and_unused_ones_stay() -> None:
    found = fit_ratios(Line(), KNOBS, values, values(Line(slope=4.0, offset=0.5)))
    assert found.slope == pytest.approx(4.0, rel=0.02)
    assert found.offset == pytest.approx(0.5, rel=0.15)
    assert found.unused == pytest.approx(3.0)


def test_one_wrong_measurement_does_not_spoil_the_others() -> None:
    measured = values(Line(slope=2.0, offset=2.0))
    measured[2] *= 1.6
    found = fit_ratios(Line(), KNOBS, values, measured)
    others = [at for at in range(len(PLACES)) if at != 2]
    for at in others:
        assert values(found)[at] == pytest.approx(measured[at], rel=0.06)


@pytest.mark.parametrize(("true", "bound"), [(50.0, 1.1), (0.02, 0.9)])
def test_bounds_hold(true: float, bound: float) -> None:
    """Also while it is looked for: values may refuse to exist beyond them."""
    narrow = (Knob(name="slope", spread=5.0, low=0.9, high=1.1), KNOBS[1])

    def asked(line: Line) -> list[float]:
        assert 0.9 - 1e-12 <= line.slope <= 1.1 + 1e-12
        return values(line)

    found = fit_ratios(Line(), narrow, asked, values(Line(slope=true)))
    assert found.slope == pytest.approx(bound)


def test_without_measurements_nothing_moves() -> None:
    assert fit_ratios(Line(), KNOBS, lambda line: [], []) == Line()
