"""Errors that say where, what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
from collections.abc import Iterable

from packtrain.core.public import public

_INDENT = "\n" + " " * 12  # of further lines, below the first one's text


class PacktrainError(Exception):
    """A mistake or a fault that the user can act on; the command line prints it without a traceback."""

    exit_code = 1

    def __init__(
        self, where: str, *, got: object = None, expected: str = "", fix: str = "", problems: Iterable[str] = ()
    ) -> None:
        where, expected, fix = public(where), public(expected), public(fix)
        self.problems = tuple(public(problem) for problem in problems)  # where there are several
        if self.problems:
            got = _INDENT.join(problem.replace("\n", f"{_INDENT}  ") for problem in self.problems)
        got = public(got) if isinstance(got, str) else got
        self.where, self.got, self.expected, self.fix = where, got, expected, fix
        lines = [where]
        if got is not None:
            lines.append(f"  found:    {got}")
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  to do:    {fix}")
        super().__init__(public("\n".join(lines)))


class ConfigError(PacktrainError):
    """A setting that cannot be used as it is."""

    exit_code = 2


class DataError(PacktrainError):
    """A dataset, or too much of one, that cannot be used."""


class ArtifactError(PacktrainError):
    """A file written by packtrain that is missing, incomplete, or made by another version or from other inputs."""


class PathError(ArtifactError):
    """A path that cannot be what the command takes it for: bad usage, not a damaged file."""

    exit_code = 2


class DriftError(PacktrainError):
    """The computed cost of a record differs from what the real processor makes of it."""


class InternalError(PacktrainError):
    """A promise that one stage does not keep to the next: a mistake of packtrain, or of a user's own encoder."""


class MemoryLimitError(PacktrainError):
    """A step that needs more memory than there is."""


class RecordError(Exception):
    """One record cannot be used; it becomes one line of the ledger, never a crash.

    `reason` is a short fixed phrase that can be counted; `detail` says what is special about this record.
    """

    def __init__(self, stage: str, reason: str, detail: str = "") -> None:
        self.stage, self.reason, self.detail = stage, reason, public(detail)
        super().__init__(f"{stage}: {reason}" + (f" ({self.detail})" if detail else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return RecordError, (self.stage, self.reason, self.detail)


def require(kept: bool, words: str) -> None:
    """What must hold also where Python leaves out assertions (-O), because else training would go wrong unseen."""
    if not kept:
        raise InternalError(words)


def system_error(error: OSError) -> PacktrainError:
    """An error of the operating system about a file or folder, with a way out."""
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the system"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        fix = "set a writable folder: --out, training.output_dir; for the cache data.cache_dir or "
        return PacktrainError(where, got=error.strerror, fix=f"{fix}the environment variable PACKTRAIN_CACHE")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PacktrainError(where, got=error.strerror, fix="free some space there; finished work is kept")
    if error.filename and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
        return PathError(where, got=error.strerror, fix="check this path, or use another one")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PacktrainError(where, got=error.strerror, fix="allow more open files (ulimit -n), or use fewer workers")
    return (
        PacktrainError(where, got=error.strerror) if error.filename and error.strerror else PacktrainError(str(error))
    )


_INSTALL = re.compile(r"pip install ([A-Za-z][\w.-]*\w)")  # as transformers says it


def install_hint(error: BaseException) -> str:
    """How to install the package that an error asks for; empty for errors of other kinds."""
    if not isinstance(error, ImportError):
        return ""
    said = _INSTALL.search(str(error))
    name = said[1] if said is not None else (error.name or "").partition(".")[0]
    return f"pip install {name}" if name else "install that package"


def missing_package_error(error: ImportError) -> PacktrainError:
    """A package that is not there, or cannot be loaded."""
    fix = install_hint(error)
    return PacktrainError("an installed package", got=str(error).strip().splitlines()[0][:300], fix=fix)


def nearest(name: str, names: Iterable[str], *, least: float = 0.6) -> str:
    """A "did you mean" hint for an unknown name, or an empty string."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=least)
    return f"did you mean {close[0]!r}?" if close else ""


def in_one_line(error: BaseException) -> str:
    """An error of another library and what it is about."""
    lines = str(error).strip().splitlines()
    return public(f"{type(error).__name__}: {lines[0] if lines else 'no details'}")


def describe_exits(codes: Iterable[int]) -> str:
    """Describe the exit codes of processes, naming signals."""
    names = {-number: signal.Signals(number).name for number in signal.valid_signals() if number < signal.SIGRTMIN}
    return ", ".join(sorted({names.get(code, f"exit code {code}") for code in codes}))
