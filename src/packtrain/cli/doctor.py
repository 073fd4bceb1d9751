"""`packtrain doctor`."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape

from packtrain.cli.common import Json, print_json
from packtrain.cli.terminal import output, table


def doctor(as_json: Json = False) -> None:
    """Check the environment: Python, torch, GPU, driver, kernels, packages, cache; and what each missing one is for."""
    from packtrain.app.doctor import examine

    parts = examine()
    if as_json:
        print_json({"parts": [asdict(part) for part in parts]})
        return
    columns = ("", "part", "found")
    environment = table("Environment", columns, text=columns)
    for part in parts:
        if part.details:
            environment.add_row(part.group, part.name, escape(part.details))
    output.print(environment)
    missing = [part for part in parts if not part.details]
    if not missing:
        output.print("Nothing is missing.")
        return
    output.print("Missing")
    for part in missing:  # no table: commands are copied
        output.print(f"  [bold]{part.name}[/]: {escape(part.gives)}\n      {escape(part.get)}")
