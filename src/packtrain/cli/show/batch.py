"""How a batch looks in a terminal: what the model's arguments are, then every token with its place and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packtrain.app.inspect_batch import PADDING, SeenBatch, SeenMedium, SeenSample, SeenToken
from packtrain.core.numbers import counted, shown

_ID, _NAME, _TOKEN = 120, 60, 200  # characters of names and texts from data that are shown
_AXES = ("position", "time", "height", "width")  # the rows of position_ids
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", '"': r"\""}
_BOUNDARY = "-" * 4


def batch_json(seen: SeenBatch) -> dict[str, object]:
    """A batch for machines: everything, token by token."""
    return asdict(seen)


def show_batch(seen: SeenBatch, console: Console, *, all_tokens: bool = False) -> None:
    """A batch for people; runs of media tokens are one line each unless all tokens are wanted."""
    _head(seen, console)
    for failure in seen.failures:
        name = f"{shown(failure.id, _ID)} ({shown(failure.origin, _ID)})"
        reason = shown(f"{failure.reason}: {failure.detail}", 2 * _ID)
        console.print(f"[bold red]not in the batch:[/] {escape(name)}: {escape(reason)}", soft_wrap=True)
    for line in _token_lines(seen, all_tokens):
        console.print(line, soft_wrap=True)
    if not all_tokens and any(len(run) > 1 for run in _runs(seen.tokens, fold=True)):
        console.print("Runs of media and padding are folded; --all-tokens shows each token.", soft_wrap=True)


def quoted(text: str) -> str:
    r"""A text of data as one line that steers no terminal.

    >>> print(quoted('say "hi"\n\x1b[31m\u202e'))
    "say \"hi\"\n\x1b[31m\u202e"
    """
    return '"' + "".join(_ESCAPES.get(char) or _printable(char) for char in _shortened(text)) + '"'


def _shortened(text: str) -> str:
    half = _TOKEN // 2
    return text if len(text) <= _TOKEN else f"{text[:half]}…{text[-half:]}"


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ---- the head


def _head(seen: SeenBatch, console: Console) -> None:
    patches = "an unknown number of patches" if seen.patches is None else counted(seen.patches, "patch", "patches")
    counts = [
        counted(len(seen.samples), "sample"),
        f"{seen.num_tokens:,} of {seen.packing_length:,} tokens",
        f"{seen.supervised_tokens:,} with loss",
        *([counted(seen.images, "image")] if seen.images else []),
        *([counted(seen.videos, "video")] if seen.videos else []),
        *([patches] if seen.images or seen.videos else []),
        *([f"{seen.padding:,} padding tokens"] if seen.padding else []),
    ]
    title = f"Pack {seen.pack} of epoch {seen.epoch} as {seen.model_type} gets it ({seen.attn_implementation})"
    console.print(f"{escape(title)}: {', '.join(counts)}", soft_wrap=True)
    table = Table(title="Arguments of the forward pass", title_justify="left")
    for name in ("argument", "shape", "type"):
        table.add_column(name, overflow="fold")
    for one in seen.arguments:
        shape = " x ".join(map(str, one.shape)) if one.shape is not None else f"= {one.value}"
        table.add_row(one.name, shape, one.dtype)
    console.print(table)
    ends = ", ".join(f"{place:,}" for place in seen.boundaries)
    console.print(f"Boundaries, where positions restart: {ends}", soft_wrap=True)


# ---- tokens


def _runs(tokens: Sequence[SeenToken], *, fold: bool) -> Iterator[list[SeenToken]]:
    """Tokens that are shown in one line."""
    run: list[SeenToken] = []
    for token in tokens:
        same = run and _run_of(run[-1]) == _run_of(token)
        if run and not (fold and same and token.kind != "text"):
            yield run
            run = []
        run.append(token)
    if run:
        yield run


def _run_of(token: SeenToken) -> tuple[int | None, str, int | None, bool]:
    # Media never carry loss; if they did, it must show.
    return token.sample, token.kind, token.medium, token.loss


def _token_lines(seen: SeenBatch, all_tokens: bool) -> Iterator[Text]:
    """A headline for each sample, and under it one line for each token or run."""
    if not seen.tokens:
        return
    runs = list(_runs(seen.tokens, fold=not all_tokens))
    axes = _AXES[: len(seen.tokens[0].positions)]
    cells = [[_range(run, lambda t: t.at), *(_range(run, _axis(n)) for n in range(len(axes)))] for run in runs]
    titles = ["token", *axes]
    widths = [max(len(title), *(len(row[n]) for row in cells)) for n, title in enumerate(titles)]
    yield Text(
        "  ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True)) + "  loss  text or medium",
        "bold",
    )
    last: int | None = -1
    for run, row in zip(runs, cells, strict=True):
        owner = run[0].sample
        if owner != last:
            yield _headline(seen, owner)
            last = owner
        line = Text("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        line.append("  loss  " if run[0].loss else "        ", "green")
        yield line.append(_what(seen, run), "" if run[0].kind == "text" else "cyan")


def _axis(number: int) -> Any:
    return lambda token: token.positions[number]


def _range(run: Sequence[SeenToken], value: Any) -> str:
    """The smallest and the largest of a number over a run."""
    found = [value(token) for token in run]
    low, high = min(found), max(found)
    return str(low) if low == high else f"{low}-{high}"


def _headline(seen: SeenBatch, number: int | None) -> Text:
    if number is None:
        return Text(f"{_BOUNDARY} padding: no loss, not attended to", "bold")
    sample = seen.samples[number]
    part = f", from its token {sample.start:,}" if sample.start else ""
    counts = f"{counted(sample.tokens, 'token')}{part}, {sample.supervised_tokens:,} with loss"
    name = shown(sample.id, _ID) + (f" ({shown(sample.origin, _ID)})" if sample.origin != sample.id else "")
    return Text(f"{_BOUNDARY} sample {number}: {name}: {counts}", "bold")


def _what(seen: SeenBatch, run: Sequence[SeenToken]) -> str:
    """The text of a token, or whose tokens a run is."""
    token = run[0]
    count = f": {len(run):,} tokens" if len(run) > 1 else ""
    if token.kind == PADDING:
        return f"padding{count}"
    if token.kind != "text":
        assert token.sample is not None, "media belong to samples"
        medium = _medium(seen.samples[token.sample], token)
        size = f"{shown(medium.name, _NAME)}, {medium.width}x{medium.height}"
        return f"{token.kind} {token.medium} of sample {token.sample} ({size}){count}"
    if token.text is not None:
        return quoted(token.text)
    return f"bytes {token.bytes}, part of a character" if token.bytes else f"id {token.id}, which has no text"


def _medium(sample: SeenSample, token: SeenToken) -> SeenMedium:
    return next(one for one in sample.media if (one.kind, one.number) == (token.kind, token.medium))
