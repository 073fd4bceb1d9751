"""`packtrain cache`: list, clear and verify."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import Json, print_json
from packtrain.cli.terminal import Terminal, errors, output, table
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import counted, duration, memory, shown

if TYPE_CHECKING:
    from packtrain.app.cache import Cached

_ABOUT = 160  # characters of what an entry is about that are shown

Root = Annotated[
    Path | None, typer.Option("--cache-dir", help="The cache folder. Default: $PACKTRAIN_CACHE or the user's.")
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help="Only measure, plans, rows, tokens, shards, models, tokenizers, configs or calibration."
    ),
]


def ls(kind: Kinds = None, cache_dir: Root = None, as_json: Json = False) -> None:
    """List the cache: size, dataset and model, last use, and whether an entry is stale and why."""
    from packtrain.app.cache import list_cache

    root = _root(cache_dir)
    entries = list_cache(root, kind or ())
    if as_json:
        print_json(cache_json(entries, root))
    else:
        show_cache(entries, root, output)


def clear(
    kind: Kinds = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Only entries unused for this many days.")] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only entries that would not be reused.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything except calibrations, which need their GPU.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    cache_dir: Root = None,
    as_json: Json = False,
) -> None:
    """Remove cache entries that can be rebuilt: by kind, by age, stale ones, or all.

    Files outside the cache, foreign files in it, and what measure and pack wrote with --out are not touched. Do not
    clear plans or rows that a running job uses.

    Example: packtrain cache clear --kind plans --older-than 30
    """
    from packtrain.app.cache import KEPT, clear_cache, list_cache
    from packtrain.app.cache import older_than as unused_for
    from packtrain.app.cache_kinds import KINDS

    if not (kind or stale or everything or older_than is not None):
        raise ConfigError(
            "packtrain cache clear", got="no selection", expected="--kind, --older-than, --stale or --all"
        )
    root = _root(cache_dir)
    kinds = kind or [one for one in KINDS if one not in KEPT]
    entries = listed = list_cache(root, kinds, look=stale or not as_json)
    if stale:
        entries = [entry for entry in entries if entry.stale]
    if older_than is not None:
        entries = unused_for(entries, older_than)
    if not as_json:
        output.print(considered_line(listed))
    if not entries and not as_json:
        what = "nothing stale" if stale else "nothing of these" if kind or older_than is not None else "nothing"
        output.print(f"{what} in the cache {escape(str(root))}; nothing removed")
        return
    if not as_json:
        show_cache(entries, root, output)
    if entries and not yes and (as_json or not typer.confirm(f"Remove these {len(entries)}?", err=True)):
        errors.print("nothing removed" + ("; --yes skips the confirmation" if as_json else ""))
        raise typer.Exit(1)
    freed = clear_cache(entries, root)
    if as_json:
        print_json({**cache_json(entries, root), "considered": len(listed), "freed": freed})
    else:
        output.print(f"{len(entries)} removed, {escape(memory(freed))} freed")


def verify(kind: Kinds = None, cache_dir: Root = None, as_json: Json = False) -> None:
    """Read every entry of the cache and verify its checksums. Exit code 1: an entry is damaged."""
    from packtrain.app.cache import verify_cache

    root = _root(cache_dir)
    with errors.status("reading") as status:
        if as_json or not errors.is_terminal:
            status.stop()
        entries = verify_cache(root, kind or (), lambda entry: status.update(f"reading {entry.kind}/{entry.path.name}"))
    if as_json:
        print_json(cache_json(entries, root))
    else:
        show_cache(entries, root, output, verified=True)
    broken = [entry for entry in entries if entry.faults]
    if broken:
        if not as_json:
            errors.print(f"[bold red]{len(broken)} broken[/]; remove them and they are rebuilt")
        raise typer.Exit(1)


def _root(given: Path | None) -> Path:
    from packtrain.core.cache_root import cache_dir

    root = (given if given is not None else cache_dir()).expanduser()
    if root.exists() and not root.is_dir():
        raise ConfigError("--cache-dir", got=f"{root}, which is a file", expected="a folder")
    return root


def show_cache(entries: Sequence[Cached], root: Path, console: Terminal, *, verified: bool = False) -> None:
    """The entries of the cache, and which of them are stale."""
    if not entries:
        console.print(f"empty cache: {escape(str(root))}")
        return
    from packtrain.app.cache_kinds import KINDS

    state = "intact" if verified else "state"
    listed = table(escape(str(root)), ("kind", "name", "size", "used", "of", state), ("kind", "name", "of", state))
    name = listed.columns[1]
    name.no_wrap, name.overflow, name.max_width = True, "ellipsis", 14
    for entry in entries:
        listed.add_row(
            entry.kind,
            escape(entry.path.name),
            memory(entry.bytes),
            _ago(entry.days),
            escape(shown(entry.about, _ABOUT)),
            _state(entry, verified=verified),
        )
    console.print(listed)
    for kind in KINDS:
        of_kind = [entry for entry in entries if entry.kind == kind]
        if of_kind:
            total = memory(sum(entry.bytes for entry in of_kind))
            console.print(f"{kind}: {total} in {len(of_kind)} ({KINDS[kind].what})", highlight=False)
    stale = [entry for entry in entries if entry.stale]
    if stale and not verified:
        console.print(
            f"next: packtrain cache clear --stale removes {counted(len(stale), 'stale entry', 'stale entries')}"
        )


def considered_line(entries: Sequence[Cached]) -> str:
    """The entries that `clear` selects from."""
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


def _ago(days: float) -> str:
    if days < 1 / 24:
        return "now"
    return f"{duration(days * 86400)} ago"


def _state(entry: Cached, *, verified: bool) -> str:
    if verified:
        return f"[bold red]{escape(shown('; '.join(entry.faults), _ABOUT))}[/]" if entry.faults else "yes"
    return f"[yellow]stale[/]: {escape(shown('; '.join(entry.stale), _ABOUT))}" if entry.stale else "current"
