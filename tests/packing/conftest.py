"""The small table that tests of plans pack."""

from __future__ import annotations

import pytest
from lengths import lvis_table

from packtrain.measuring.table import CostTable


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    """300 samples, of which a few are longer than 8,000 tokens."""
    return lvis_table(tmp_path_factory.mktemp("costs"), 300)
