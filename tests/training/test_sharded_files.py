"""Nothing in a sharded checkpoint is run as code: neither by its lists nor by the values in its files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from packtrain.core.errors import ArtifactError
from packtrain.training.sharded_files import refuse_code

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
DCP = "torch.distributed.checkpoint"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def states() -> dict[str, Any]:
    """As an optimizer has them, in several precisions."""
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None, "name": "vision", "params": ["a", "b"]}]
    tensors = {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    return {"optimizer": {"param_groups": groups, "step": torch.tensor(3.0)}, **tensors}


def saved(folder: Path, values: dict[str, Any]) -> Path:
    """A checkpoint with one sharded part; the path of that."""
    dcp.save(values, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder / "optimizer_0"


def changed(part: Path, change: Callable[[Metadata], object]) -> None:
    """Its lists as they are after a change."""
    metadata = pickle.loads((part / ".metadata").read_bytes())
    change(metadata)
    (part / ".metadata").write_bytes(pickle.dumps(metadata))


def first_value(metadata: Metadata) -> MetadataIndex:
    return next(index for index in metadata.storage_data if "lr" in index.fqn)


def test_what_torch_writes_is_accepted(tmp_path: Path) -> None:
    part = saved(tmp_path, states())
    refuse_code(tmp_path)
    metadata = pickle.loads((part / ".metadata").read_bytes())
    kinds = {type(one) for one in metadata.state_dict_metadata.values()}
    assert len(kinds) == 2, "tensors, and values"
    assert BytesStorageMetadata in kinds
    changed(part, lambda metadata: None)
    refuse_code(tmp_path)
    refuse_code(tmp_path / "nowhere")


# ---- lists


def text(words: str) -> bytes:
    coded = words.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(coded)]) + coded


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def builtins_first(made: str) -> bytes:
    """Changes what `isinstance` is, through what the module of the descriptions imports, and then has any name."""
    files = f"{DCP}.filesystem"
    change = named(files, "__builtins__") + text("isinstance") + named(files, "cast") + pickle.SETITEM + pickle.POP
    return change + named("torch", "os.mkdir") + text(made) + pickle.TUPLE1 + pickle.REDUCE


LISTS: dict[str, Callable[[str], bytes]] = {
    "builtins": builtins_first,
    "a name with a dot": lambda made: named("torch", "os.mkdir") + text(made) + pickle.TUPLE1 + pickle.REDUCE,
    "what the module imports": lambda _: named(f"{DCP}.metadata", "os"),
    "a class that is no description": lambda _: named(f"{DCP}.filesystem", "FileSystem"),
    "a known class is changed": lambda _: (
        named(f"{DCP}.metadata", "MetadataIndex") + pickle.NONE + pickle.EMPTY_DICT
        + text("__eq__") + named("torch", "Size") + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD
    ),
    "a known class is made in another way": lambda _: (
        named(f"{DCP}.filesystem", "_StorageInfo") + pickle.MARK + text("a") + pickle.TUPLE + pickle.REDUCE
    ),
    "no checkpoint": lambda _: pickle.EMPTY_DICT,
}  # fmt: skip


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("kind", LISTS)
def test_lists_that_would_do_anything_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    part = saved(tmp_path / "checkpoint", states())
    (part / name).write_bytes(pickle.PROTO + b"\x04" + LISTS[kind](str(tmp_path / "made")) + pickle.STOP)
    before = isinstance
    with pytest.raises(ArtifactError, match="as torch writes them"):
        refuse_code(tmp_path / "checkpoint")
    assert isinstance is before
    assert MetadataIndex("a") == MetadataIndex("a")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"no pickle", b"", pickle.dumps([1, 2])])
def test_what_is_no_list_is_refused(tmp_path: Path, content: bytes) -> None:
    (saved(tmp_path, states()) / ".metadata").write_bytes(content)
    with pytest.raises(ArtifactError, match="as torch writes them"):
        refuse_code(tmp_path)


# ---- values


def test_a_value_that_would_run_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", {**states(), "more": Evil(tmp_path / "made")})
    with pytest.raises(ArtifactError, match="more would create more than plain values"):
        refuse_code(tmp_path / "checkpoint")
    assert not (tmp_path / "made").exists()
    dcp.load({"more": 1}, checkpoint_id=tmp_path / "checkpoint" / "optimizer_0", no_dist=True)
    assert (tmp_path / "made").exists(), "torch itself would have run it"


def test_a_value_in_another_format_is_refused(tmp_path: Path) -> None:
    part = saved(tmp_path, states())
    coded = pickle.dumps(Evil(tmp_path / "made"))
    (part / "x.distcp").write_bytes(coded)
    info = _StorageInfo("x.distcp", 0, len(coded))
    changed(part, lambda metadata: metadata.storage_data.update({first_value(metadata): info}))
    with pytest.raises(ArtifactError, match="not a torch archive"):
        refuse_code(tmp_path)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (_StorageInfo("../outside.distcp", 0, 1), "outside the checkpoint"),
        (_StorageInfo("a/../../outside.distcp", 0, 1), "outside the checkpoint"),
        (_StorageInfo("/etc/passwd", 0, 1), "outside the checkpoint"),
        (_StorageInfo("..\\outside.distcp", 0, 1), "outside the checkpoint"),
        (_StorageInfo("__0_0.distcp", 0, 1 << 40), "past the end"),
        (_StorageInfo("__0_0.distcp", -1, 1), "past the end"),
        (_StorageInfo("__0_0.distcp", 1 << 40, 1), "past the end"),
        (_StorageInfo("missing.distcp", 0, 1), "FileNotFoundError"),
        (_StorageInfo("__0_0.distcp", 0, 1, ["zstd"]), "fields that torch writes"),
        ("__0_0.distcp", "an invalid offset"),
    ],
)
@pytest.mark.parametrize("what", ["lr", "step"])
def test_places_are_inside_the_files(tmp_path: Path, info: Any, said: str, what: str) -> None:
    part = saved(tmp_path, states())

    def move(metadata: Metadata) -> None:
        at = next(index for index in metadata.storage_data if what in index.fqn)
        metadata.storage_data[at] = info

    changed(part, move)
    with pytest.raises(ArtifactError, match=said):
        refuse_code(tmp_path)


def test_a_value_cannot_pass_for_a_tensor(tmp_path: Path) -> None:
    """By a second entry of its name: what is read in the end is the one that was looked at."""
    part = saved(tmp_path / "checkpoint", {**states(), "more": Evil(tmp_path / "made")})

    def hide(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "more")
        metadata.state_dict_metadata["more"] = "a tensor"
        metadata.storage_data[MetadataIndex("other")] = metadata.storage_data.pop(index)

    changed(part, hide)
    with pytest.raises(ArtifactError, match="Unpickling"):
        refuse_code(tmp_path / "checkpoint")
    assert not (tmp_path / "made").exists()
