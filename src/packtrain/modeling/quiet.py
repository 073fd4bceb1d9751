"""Other libraries say nothing of their own where a command prints."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """To be called before Trainer or peft are imported: both import bitsandbytes."""
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    # On some CPUs it looks for a kernel that needs another package, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
