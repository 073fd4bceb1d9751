"""Which remote files a URL stands for: itself, those of a folder, or those that wildcards match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from packtrain.core.errors import DataError, RecordError
from packtrain.core.public import public
from packtrain.records.shards.address import PAUSES, file_system, reaching, with_retries


def has_wildcards(url: str) -> bool:
    """Does a URL name several files? A question mark in a web address begins its query.

    >>> has_wildcards("s3://bucket/a-?.tar"), has_wildcards("https://host/a.tar?version=2")
    (True, False)
    """
    return any(mark in url for mark in ("*[" if url.startswith(("http://", "https://")) else "*?["))


def list_remote(names: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """The files that URLs stand for, in reading order.

    A name without wildcards stays even where nothing is there: a missing shard must be noticed, not left out.
    """
    found: list[str] = []
    for name in names:
        with reaching(name), _in_words(name):
            if has_wildcards(name):
                found.extend(with_retries(name, lambda name=name: _matching(name), PAUSES))  # type: ignore[misc]
            elif len(names) == 1 and not name.lower().endswith(endings):
                found.extend(with_retries(name, lambda name=name: _inside(name, endings), PAUSES))  # type: ignore[misc]
            else:
                found.append(name)
    return found


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """What cannot be listed, as an archive that is not there, is no record's fault."""
    try:
        yield
    except RecordError as error:
        raise DataError(f"data file {name}", got=error.detail or error.reason, fix="check the URL") from None


def _matching(pattern: str) -> list[str]:
    system, inner = file_system(pattern)
    return [_url(pattern, name) for name in sorted(system.glob(inner))]


def _inside(name: str, endings: tuple[str, ...]) -> list[str]:
    """The files below a folder whose names end so, hidden ones left out; a file is itself."""
    system, inner = file_system(name)
    if not system.isdir(inner):
        return [name]
    below = [file for file in sorted(system.find(inner)) if file.lower().endswith(endings)]
    hidden = (any(part.startswith(".") for part in file.removeprefix(inner).split("/")) for file in below)
    return [_url(name, file) for file, skip in zip(below, hidden, strict=True) if not skip]


def _url(asked: str, name: str) -> str:
    """A name that a file system has answered, as the URL of that file."""
    return public(name) if "://" in name else asked.rpartition("://")[0] + "://" + name
