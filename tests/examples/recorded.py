"""Runs an example as it is and writes down which samples are in its batches: recorded.py LOG EXAMPLE ARGUMENTS.

Batches are recorded where they are made: to go on after a stop, Trainer puts a loader of its own behind our sampler.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from packtrain.delivery.collate.collators import PackCollator


def main() -> None:
    log, example, *arguments = sys.argv[1:]
    sys.argv = [example, *arguments]
    rank = int(os.environ.get("RANK", 0))
    collate = PackCollator.__call__

    def recorded(collator: PackCollator, rows: Any) -> Any:
        batch = collate(collator, rows)
        line = json.dumps({"rank": rank, "step": batch.info.keys[0].step, "ids": batch.info.ids})
        with Path(log, f"{rank}.jsonl").open("a") as stream:
            stream.write(line + "\n")
        return batch

    PackCollator.__call__ = recorded  # type: ignore[method-assign]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
