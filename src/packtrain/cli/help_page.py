"""How the help of a command reads: arguments in capitals, options by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

RUN = "Run"  # the group of how a command runs, not of what it makes: the last


class Command(TyperCommand):
    """A command whose help has a heading for each group of options (`rich_help_panel`)."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """DATA, [CONFIG], [OVERRIDES]..."""
        arguments = (one for one in self.get_params(ctx) if one.param_type_name == "argument")
        return [self.options_metavar or "", *(_usage(one) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options without a group, then the groups in the order of their first option."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for title, record in _records(self.get_params(ctx), ctx):
            groups.setdefault(title, []).append(record)
        run = {RUN: groups.pop(RUN, [])}
        for title, records in {**groups, **run}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _usage(argument: Any) -> str:
    name = argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs != 1 else "")


def _records(params: list[Any], ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    for one in params:
        if (record := one.get_help_record(ctx)) is None:
            continue
        if one.param_type_name == "argument":
            yield "Arguments", (one.name.upper(), record[1])
        else:
            yield getattr(one, "rich_help_panel", None) or "Options", record
