"""Small sums on the host are done by one thread, and what was set before is set again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from packtrain.modeling import chunked_loss
from packtrain.modeling.host_sync import in_one_thread


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_behind(three_threads: None) -> None:
    with in_one_thread():
        assert torch.get_num_threads() == 1
        with in_one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="whatever"), in_one_thread():
        raise ValueError("whatever")
    assert torch.get_num_threads() == 3


def test_targets_are_found_by_one_thread(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watched(chunked_loss.Targets):
        def __new__(cls, *args: object, **kwargs: object) -> Watched:
            seen.append(torch.get_num_threads())
            return super().__new__(cls)

    Watched.of(torch.tensor([[1, 2, 3]]))
    assert seen == [1]
    assert torch.get_num_threads() == 3
