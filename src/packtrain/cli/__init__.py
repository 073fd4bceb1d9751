"""The command line: verbs only. Every verb calls one function of the library and shows what it returned."""

from packtrain.cli.main import app, main

__all__ = ["app", "main"]
