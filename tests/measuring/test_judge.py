"""The failure budget: one verdict for any order of arrival, in words that say what to mend."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import ConfigError, DataError
from packtrain.measuring.failure_budget import JUDGED_AFTER, FailureBudget, FailureJudge
from packtrain.measuring.journal import UnitResult


def unit(number: int, *, good: int = 0, failed: int = 0, filtered: int = 0, reason: str = "no messages") -> UnitResult:
    lines = [
        {"id": "a", "origin": f"u{number}:f{i}", "stage": "filter", "reason": "r", "detail": "", "filtered": True}
        for i in range(filtered)
    ] + [
        {"id": "a", "origin": f"u{number}:{i}", "stage": "schema", "reason": reason, "detail": "d", "filtered": False}
        for i in range(failed)
    ]
    return UnitResult(
        number=number,
        source=0,
        file="data.jsonl",
        entries=good + failed + filtered,
        rows=good,
        failed=failed,
        reasons={f"schema: {reason}": failed} if failed else {},
        costs=b"c",
        media=b"m",
        ledger="".join(json.dumps(line) + "\n" for line in lines).encode(),
    )


def verdict(budget: FailureBudget, units: Iterable[UnitResult]) -> str:
    """The message of the judge, or that there was none."""
    judge = FailureJudge(budget)
    try:
        for result in units:
            judge.take(result)
        judge.finish()
    except DataError as error:
        return str(error)
    return "fine"


UNITS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 60), st.integers(0, 300), st.sampled_from(["a", "b", "c", "d"])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(UNITS, st.randoms(use_true_random=False), st.sampled_from(["skip", "fail"]), st.sampled_from([0.0, 0.02, 0.3]))
def test_same_verdict_for_any_order_of_arrival(shapes, random, on_error, rate) -> None:  # type: ignore[no-untyped-def]
    units = [unit(i, good=g, failed=f, filtered=s, reason=r) for i, (g, f, s, r) in enumerate(shapes)]
    budget = FailureBudget(on_error=on_error, max_failure_rate=rate)
    arriving = units[:]
    random.shuffle(arriving)
    assert verdict(budget, arriving) == verdict(budget, units)


def test_both_verdicts_occur() -> None:
    """The property above would hold for a judge that never speaks."""
    assert verdict(FailureBudget(), [unit(0, good=95, failed=5)]) == "fine"
    assert "6 of the first 100 records" in verdict(FailureBudget(), [unit(0, good=94, failed=6)])


def test_not_before_a_rate_means_something() -> None:
    judge = FailureJudge(FailureBudget(max_failure_rate=0.1))
    judge.take(unit(0, failed=JUDGED_AFTER - 1))
    with pytest.raises(DataError, match=f"{JUDGED_AFTER:,} of the first {JUDGED_AFTER:,} records"):
        judge.take(unit(1, failed=1))
    judge = FailureJudge(FailureBudget(max_failure_rate=0.1))
    judge.take(unit(0, good=800, failed=199))
    judge.take(unit(1, good=2000))  # the rate is low again once there is enough to judge by
    judge.finish()
    judge = FailureJudge(FailureBudget(max_failure_rate=0.1))
    judge.take(unit(0, failed=2, good=3))
    with pytest.raises(DataError, match="2 of the first 5 records"):
        judge.finish()


def test_stops_at_the_unit_that_spends_the_budget() -> None:
    judge = FailureJudge(FailureBudget())
    judge.take(unit(2, failed=5000))  # later in the dataset, so it must wait
    judge.take(unit(0, good=1000))
    with pytest.raises(DataError, match="5,000 of the first 6,500"):
        judge.take(unit(1, good=500))


def test_filtered_records_are_neither_failures_nor_good() -> None:
    assert verdict(FailureBudget(max_failure_rate=0.0), [unit(0, good=1, filtered=5000)]) == "fine"
    # 40 of the 50 that were looked at fail: the 100,000 that a filter left out do not make that better
    spoken = verdict(FailureBudget(), [unit(0, good=10, failed=40, filtered=100_000)])
    assert "40 of the first 50 records" in spoken


def test_on_error_fail_names_the_first_in_dataset_order() -> None:
    judge = FailureJudge(FailureBudget(on_error="fail"))
    judge.take(unit(3, failed=1))
    judge.take(unit(1, good=4, filtered=2, failed=3, reason="unknown role"))
    judge.take(unit(2, failed=1))
    with pytest.raises(DataError, match=r"schema: unknown role \(u1:0: d\)"):
        judge.take(unit(0, good=1, filtered=1))


NAMED = {"often": 1, "common": 3, "seldom": 2}  # the unit of each


def test_the_most_frequent_reasons_are_listed() -> None:
    counts = {"rare": 1, "often": 30, "seldom": 2, "common": 20}
    units = [unit(i, failed=n, reason=reason) for i, (reason, n) in enumerate(counts.items())]
    spoken = verdict(FailureBudget(), units)
    listed = [line.split("found:")[-1].strip() for line in spoken.splitlines()[1:4]]
    assert listed == [f"{counts[name]} x schema: {name} (first u{at}:0: d)" for name, at in NAMED.items()]
    assert "rare" not in spoken
    assert "at most 5 %" in spoken


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"max_failure_rate": 1.5}, {"max_failure_rate": -0.1}])
def test_budgets_are_checked_at_birth(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FailureBudget(**wrong)  # type: ignore[arg-type]
