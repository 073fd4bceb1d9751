"""Signs of life of ranks, and what follows from them: who is gone, who has failed, who keeps the others waiting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["runs", "failed", "done", "ended"]
NOT_BEGUN = -1  # the step of a rank that has not had its first batch
_NOWHERE = (NOT_BEGUN, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """The last heartbeat of one rank."""

    number: int  # grows with every sign, so that nobody's clock is compared with another's
    host: str
    step: int = NOT_BEGUN
    part: int = 0  # of the step
    at: str = ""  # the line of code its main thread was at
    state: State = "runs"
    message: str = ""  # why it failed or ended
    of_others: bool = False  # it failed in a way that another rank's end explains
    verdict: str = ""  # of the rank that judges
    heard: bool = False  # it knows the verdict

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.part

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, found: bytes) -> Sign:
        """What `to_bytes` wrote."""
        return cls(**json.loads(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a rank may be in each state before the others give up, in seconds."""

    silence: float  # without a sign
    behind: float  # at a step that others have left
    start: float  # until the first sign, and until the first step once others have started


class SignJudge:
    """Looks at signs again and again and says, once it is sure, what is wrong. Knows time only from its caller."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._since: dict[tuple[int, str], tuple[object, float]] = {}

    def look(self, now: float, signs: Mapping[int, Sign | None]) -> str:
        """A message that names the rank, its host and its last step; empty while there is hope.

        A rank whose collective broke has failed, too, but names the wrong one: it is believed only if no rank turns
        out to be gone.
        """
        running = {rank: sign for rank, sign in signs.items() if sign is not None and sign.state == "runs"}
        most = max((sign.place for sign in running.values()), default=_NOWHERE)
        found: list[tuple[int, int, str]] = []
        for rank, sign in signs.items():
            if sign is None:
                if self._lasts(now, rank, "missing", True) > self.patience.start:
                    found.append((1, rank, f"rank {rank} has not started within {self.patience.start:.0f} s"))
            elif sign.state == "ended":
                return sign.message  # another rank has judged
            elif sign.state == "failed":
                waited = self._lasts(now, rank, "failed", True)
                if not sign.of_others or waited > self.patience.silence:
                    found.append((0 if not sign.of_others else 3, rank, f"{_name(rank, sign)} failed: {sign.message}"))
            elif sign.state == "runs":
                found += self._judge_running(now, rank, sign, most)
        return min(found)[2] if found else ""

    def _judge_running(self, now: float, rank: int, sign: Sign, most: tuple[int, int]) -> list[tuple[int, int, str]]:
        silent = self._lasts(now, rank, "silent", sign.number)
        if silent > self.patience.silence:
            return [(1, rank, f"{_name(rank, sign)} is gone: no heartbeat for {silent:.1f} s")]
        behind = self._lasts(now, rank, "behind", (sign.place, sign.place < most))
        limit = self.patience.start if sign.step == NOT_BEGUN else self.patience.behind
        # One that has just fallen silent is rather gone than late; that shows soon.
        if sign.place >= most or behind <= limit or silent > self.patience.silence / 4:
            return []
        others = f"while others are at step {most[0]}"
        at = f"; it is at {sign.at}" if sign.at else ""
        return [(2, rank, f"{_name(rank, sign)} has made no progress for {behind:.1f} s {others}{at}")]

    def _lasts(self, now: float, rank: int, what: str, value: object) -> float:
        """For how long this has been seen to be so."""
        known = self._since.get((rank, what))
        if known is None or known[0] != value:
            self._since[rank, what] = known = (value, now)
        return now - known[1]


def _name(rank: int, sign: Sign) -> str:
    step = f"last step {sign.step}" if sign.step != NOT_BEGUN else "before its first step"
    return f"rank {rank} on {sign.host} ({step})"
