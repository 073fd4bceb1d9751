"""Fixtures of the families' tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    """Every real processor by name; none is left out of the list that the tests run over."""
    from rule_cases import IMAGE_CASES, all_cases  # needs transformers, which not every test here does

    made = all_cases()
    assert set(made) == set(IMAGE_CASES)
    return made
