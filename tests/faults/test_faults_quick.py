"""A group is killed and goes on; and what the checks would say of loaders that lose, repeat, swap or change packs."""

from __future__ import annotations

from collections.abc import Callable

import fault_data as data
import pytest
from fault_groups import MakeRun, Run
from fault_ledgers import Attempt, problems

pytestmark = pytest.mark.full
Sound = Callable[[Run], None]
Reference = Callable[[str], Attempt]


def test_a_killed_group_goes_on_where_it_was_saved(make_run: MakeRun, sound: Sound) -> None:
    run = make_run("map")
    group = run.start(2, workers=1, parks=[(0, "line:0:2")])
    assert group.parked() == "line:0:2"
    group.kill()
    run.finish(2, workers=1)
    first, second = run.ledgers()
    assert second.next_pack == 2 * data.PACKS_PER_STEP
    assert any(line.at == (0, 2) for line in first.lines), "nothing is behind the state, so nothing was repeated"
    sound(run)


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        ("drop", {"lost"}),
        ("duplicate", {"twice"}),
        ("swap", {"order"}),
        ("change", {"content"}),
    ],
)
def test_a_broken_loader_is_noticed(make_run: MakeRun, reference: Reference, broken: str, kinds: set[str]) -> None:
    run = make_run("map")
    run.finish(broken=broken)
    found = problems(run.ledgers(), reference("map"), data.PACKS_PER_STEP)
    assert {text.split(":")[0] for text in found} == kinds, found


def test_a_state_that_counts_what_is_only_prepared_is_noticed(make_run: MakeRun, reference: Reference) -> None:
    run = make_run("map")
    group = run.start(broken="ahead", parks=[(0, "saved:0:1")])
    group.parked()
    group.kill()
    run.finish()
    found = problems(run.ledgers(), reference("map"), data.PACKS_PER_STEP)
    assert {text.split(":")[0] for text in found} == {"lost", "order"}, found
