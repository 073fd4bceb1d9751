"""What lies in a cache folder, as its file names say it: the folder itself is the record of what is reserved.

    <address>.<version>.<token>.<bytes reserved>.part     being fetched; its writer holds a lock on it
    <address>.<version>.<token>.<bytes>.ready             complete; readers hold shared locks on it
    <token>.member                                        the addresses that one process wants; it holds a lock on it

A reservation changes by a rename and ends with its file, so after a crash there is no second record to disagree with.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.records.shards.address import Identity

State = Literal["part", "ready"]
MARKER = "packtrain-shard-cache"
LOCK = "lock"
_ENTRY = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9]{1,18})\.(part|ready)")
_MEMBER = re.compile(r"[0-9a-f]{16}\.member")


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryKey:
    """One content of one file, as digests: no name of a source can reach the file system."""

    address: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """One cached file, whole or in the making."""

    key: EntryKey
    token: str
    reserved: int  # bytes; never fewer than the file has
    state: State

    @property
    def name(self) -> str:
        """Its file name."""
        return f"{self.key.address}.{self.key.version}.{self.token}.{self.reserved}.{self.state}"


def address_of(file: str) -> str:
    """The digest that stands for a path or URL."""
    return hashlib.sha256(file.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def key_of(file: str, identity: Identity, kind: str = "") -> EntryKey:
    """The key of a file as it is now; `kind` tells apart several things made from it."""
    version = hashlib.sha256(f"{identity.size} {identity.stamp}".encode()).hexdigest()[:16]
    return EntryKey(address=address_of(kind + file), version=version)


def new_token() -> str:
    """A name that no other process has."""
    return secrets.token_hex(8)


def new_part(key: EntryKey) -> CacheEntry:
    """A file that is about to be fetched."""
    return CacheEntry(key=key, token=new_token(), reserved=0, state="part")


def with_reservation(entry: CacheEntry, reserved: int, state: State = "part") -> CacheEntry:
    """The same file with another reservation."""
    return replace(entry, reserved=reserved, state=state)


def parse(name: str) -> CacheEntry | None:
    """The entry that a file name stands for."""
    found = _ENTRY.fullmatch(name)
    if not found:
        return None
    address, version, token, reserved, state = found.groups()
    key = EntryKey(address=address, version=version)
    return CacheEntry(key=key, token=token, reserved=int(reserved), state="part" if state == "part" else "ready")


def is_ours(name: str) -> bool:
    """Does a cache make files of this name?"""
    return name in (MARKER, LOCK) or bool(_ENTRY.fullmatch(name) or _MEMBER.fullmatch(name))


def list_folder(folder: str) -> tuple[list[CacheEntry], list[str]]:
    """The entries and the names of the members."""
    entries, members = [], []
    with os.scandir(folder) as found:
        for item in found:
            if entry := parse(item.name):
                entries.append(entry)
            elif _MEMBER.fullmatch(item.name):
                members.append(item.name)
    return entries, members


def try_lock(fd: int, kind: int) -> bool:
    """Lock an open file without waiting. The system releases it when the process ends, however it ends."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def remove_if_unused(path: str) -> bool:
    """Remove a file on which nobody holds a lock, and free its space even where someone has it open.

    True where it is gone. Only with the folder's lock held: otherwise a file could be locked before it is removed.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(fd, fcntl.LOCK_EX):
            return False
        os.ftruncate(fd, 0)
        os.unlink(path)
        return True
    finally:
        os.close(fd)


def wanted_by_living(folder: str, members: list[str]) -> set[str]:
    """The addresses that living processes want; the files of dead ones are removed."""
    wanted: set[str] = set()
    for name in members:
        path = os.path.join(folder, name)
        if not remove_if_unused(path):
            wanted.update(_lines(path))
    return wanted


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            yield from file.read().splitlines()
    except FileNotFoundError:
        return
