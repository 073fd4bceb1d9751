"""How the cache looks in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.app.cache import KINDS, WHAT, Cached
from packtrain.core.numbers import counted, shown

_ABOUT = 160


def show_cache(entries: Sequence[Cached], root: Path, console: Console, *, verified: bool = False) -> None:
    """The entries of the cache, and which of them are stale."""
    if not entries:
        console.print(f"empty cache: {escape(str(root))}", soft_wrap=True)
        return
    table = Table(title=escape(str(root)), title_justify="left")
    table.add_column("kind")
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=14)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    table.add_column("intact" if verified else "state", overflow="fold")
    for entry in entries:
        table.add_row(
            entry.kind,
            escape(entry.path.name),
            size_of(entry.bytes),
            _ago(entry.days),
            escape(shown(entry.about, _ABOUT)),
            _state(entry, verified=verified),
        )
    console.print(table)
    for kind in KINDS:
        found = [entry for entry in entries if entry.kind == kind]
        if found:
            total = size_of(sum(entry.bytes for entry in found))
            console.print(f"{kind}: {total} in {len(found)} ({WHAT[kind]})", highlight=False)
    stale = [entry for entry in entries if entry.stale]
    if stale and not verified:
        console.print(f"next: packtrain cache clear --stale removes {len(stale)} stale entries")


def considered(entries: Sequence[Cached]) -> str:
    """What `clear` selects from."""
    kinds = ", ".join(dict.fromkeys(entry.kind for entry in entries)) or "none"
    return f"considered: {counted(len(entries), 'entry', 'entries')} ({kinds}); what you wrote with --out is kept"


def cache_json(entries: Sequence[Cached], root: Path) -> dict[str, object]:
    """The cache for machines."""
    return {
        "root": str(root),
        "bytes": sum(entry.bytes for entry in entries),
        "entries": [
            {
                "kind": entry.kind,
                "path": str(entry.path),
                "bytes": entry.bytes,
                "days": round(entry.days, 3),
                "about": entry.about,
                "stale": list(entry.stale),
                "faults": list(entry.faults),
            }
            for entry in entries
        ],
    }


def size_of(number: int) -> str:
    """Bytes for people.

    >>> size_of(512), size_of(3 << 20)
    ('512 B', '3.0 MiB')
    """
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _ago(days: float) -> str:
    if days < 1 / 24:
        return "now"
    return f"{days * 24:.0f} h ago" if days < 2 else f"{days:.0f} d ago"


def _state(entry: Cached, *, verified: bool) -> str:
    if verified:
        return f"[bold red]{escape(shown('; '.join(entry.faults), _ABOUT))}[/]" if entry.faults else "yes"
    return f"[yellow]stale[/]: {escape(shown('; '.join(entry.stale), _ABOUT))}" if entry.stale else "current"
