"""What ranks wrote down, and whether it is what one undisturbed process would have: nothing lost, twice or changed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EMPTY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One batch that one rank was given."""

    rank: int
    epoch: int
    step: int
    micro_batch: int
    pack: int
    ids: tuple[str, ...]
    failed: tuple[str, ...]
    checksum: str

    @property
    def at(self) -> tuple[int, int]:
        """Its optimizer step."""
        return self.epoch, self.step

    @property
    def content(self) -> tuple[object, ...]:
        """What may not depend on who was given it, or when."""
        return self.ids, self.failed, self.checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One group of processes from its start to its end."""

    number: int
    world_size: int
    epoch: int  # where it began
    next_pack: int
    lines: tuple[Line, ...]
    ended: int  # ranks that came to the end of the run


def read_attempts(run: Path) -> list[Attempt]:
    """The ledgers of a run; groups that were killed before their first line are left out."""
    found: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(run.glob("ledger-*.jsonl")):
        found[int(path.stem.split("-")[1])].append(path)
    attempts = [_attempt(number, paths) for number, paths in sorted(found.items())]
    return [attempt for attempt in attempts if attempt is not None]


def _attempt(number: int, paths: list[Path]) -> Attempt | None:
    starts, lines, ended = [], [], 0
    for path in paths:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # who is killed while writing was not given that batch yet
        for line in map(json.loads, whole.splitlines()):
            if "world_size" in line:
                starts.append((line["world_size"], line["epoch"], line["next_pack"]))
            elif "end" in line:
                ended += 1
            else:
                rank = int(path.stem.split("-")[2])
                lines.append(Line(rank=rank, **{k: tuple(v) if isinstance(v, list) else v for k, v in line.items()}))
    if not starts:
        return None
    assert len(set(starts)) == 1, f"ranks of attempt {number} began at different places: {starts}"
    world_size, epoch, next_pack = starts[0]
    return Attempt(
        number=number, world_size=world_size, epoch=epoch, next_pack=next_pack, lines=tuple(lines), ended=ended
    )


def problems(attempts: list[Attempt], reference: Attempt, packs_per_step: int) -> list[str]:
    """All that is wrong with a run, each beginning with one word for its kind.

    `reference` is one process that was never disturbed. Lines behind the state from which the next attempt began are
    what a trainer does again: they do not count, but must say the same.
    """
    assert (reference.world_size, reference.ended) == (1, 1), "not an undisturbed run"
    assert reference.lines, "nothing to compare with"
    kept: list[Line] = []
    for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
        stop = (after.epoch, -(-after.next_pack // packs_per_step)) if after is not None else None
        kept += [line for line in attempt.lines if stop is None or line.at < stop]
    found = [*_counted(kept, reference), *_in_order(kept, reference)]
    found += _same_content((line for attempt in attempts for line in attempt.lines), reference)
    for attempt in attempts:
        found += _repeated(attempt)
    if attempts[-1].ended != attempts[-1].world_size:
        found.append(f"unfinished: {attempts[-1].ended} of {attempts[-1].world_size} ranks came to the end")
    return found


def _counted(kept: list[Line], reference: Attempt) -> list[str]:
    """Every pack and every sample of each epoch, once."""
    found = []
    expected = Counter((line.epoch, line.pack) for line in reference.lines)
    assert set(expected.values()) == {1}, "the reference itself has a pack twice"
    packs = Counter((line.epoch, line.pack) for line in kept if line.pack != EMPTY)
    found += [f"lost: pack {pack} of epoch {epoch}" for epoch, pack in sorted(expected - packs)]
    found += [f"twice: pack {pack} of epoch {epoch}" for epoch, pack in sorted(packs - expected)]
    samples = Counter((line.epoch, one) for line in kept for one in (*line.ids, *line.failed))
    whole = Counter((line.epoch, one) for line in reference.lines for one in (*line.ids, *line.failed))
    found += [f"lost: sample {one} of epoch {epoch}" for epoch, one in sorted(whole - samples)]
    found += [f"twice: sample {one} of epoch {epoch}" for epoch, one in sorted(samples - whole)]
    return found


def _in_order(kept: list[Line], reference: Attempt) -> list[str]:
    """The packs of a step's first micro-batches are the first of that step, on any number of ranks."""
    found = []
    steps: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in kept:
        steps[line.at].append(line)
    order: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in sorted(reference.lines, key=lambda line: (line.at, line.micro_batch)):
        order[line.at].append(line.pack)
    for at, lines in sorted(steps.items()):
        given: set[int] = set()
        for micro_batch in sorted({line.micro_batch for line in lines}):
            given |= {line.pack for line in lines if line.micro_batch == micro_batch and line.pack != EMPTY}
            if given != set(order[at][: len(given)]):
                found.append(f"order: epoch {at[0]}, step {at[1]} gave {sorted(given)} of {order[at]}")
                break
    by_rank: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for line in kept:
        by_rank[line.rank].append((*line.at, line.micro_batch))
    found += [f"order: rank {rank} went back" for rank, places in by_rank.items() if places != sorted(places)]
    return found


def _same_content(lines: Iterable[Line], reference: Attempt) -> list[str]:
    expected = {(line.epoch, line.pack): line.content for line in reference.lines}
    return [
        f"content: pack {line.pack} of epoch {line.epoch} on rank {line.rank}"
        for line in lines
        if line.pack != EMPTY and expected.get((line.epoch, line.pack), line.content) != line.content
    ]


def _repeated(attempt: Attempt) -> list[str]:
    """Whatever was consumed, kept or not, was consumed once in one attempt, and nothing before its beginning."""
    packs = Counter((line.epoch, line.pack) for line in attempt.lines if line.pack != EMPTY)
    return [f"twice: pack {key[1]} of epoch {key[0]} in one attempt" for key, count in packs.items() if count > 1]
