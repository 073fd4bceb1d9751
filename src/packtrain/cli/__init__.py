"""The command line: verbs only. Every verb calls one function of the library and shows what it returned.

Takes arguments, prints tables or one JSON object (`--json`), and ends with an exit code. `app` is the typer
application, `main` the entry point that turns errors into messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.cli.commands import app as app
    from packtrain.cli.commands import main as main

__getattr__, __dir__, __all__ = lazy_names(__name__)
