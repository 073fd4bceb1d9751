"""What of transformers.Trainer is private and used here stands in one module, and is still there upstream."""

from __future__ import annotations

import ast
from inspect import getsource
from pathlib import Path

import pytest
from transformers import Trainer

import packtrain
from packtrain.training import hf_trainer
from packtrain.training.hf_trainer import HFTrainer
from packtrain.training.trainer import PackedTrainer

pytestmark = pytest.mark.contract
SOURCE = Path(packtrain.__file__).parent
PRIVATE = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}


def private_names(tree: ast.AST) -> set[str]:
    """What is asked of objects by a private name."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in PRIVATE}


def test_every_private_override_stands_in_one_class_with_its_reason() -> None:
    ours = PackedTrainer.__mro__[: PackedTrainer.__mro__.index(Trainer)]
    overridden = {(cls.__name__, name) for cls in ours for name in vars(cls) if name in PRIVATE}
    assert {cls for cls, _ in overridden} == {"HFTrainer"}
    assert len(overridden) >= 10, "else nothing was compared"
    assert all("Until " in getattr(HFTrainer, name).__doc__ for _, name in overridden)


def test_upstream_has_what_is_overridden_and_called() -> None:
    names = {name for name in vars(HFTrainer) if name.startswith("_") and not name.startswith("__")}
    assert names <= PRIVATE, "transformers has lost or renamed a method"
    called = {
        node.attr
        for node in ast.walk(ast.parse(getsource(hf_trainer)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if node.attr.startswith("_")
    }
    assert called
    assert called <= PRIVATE


@pytest.mark.parametrize("folder", ["training", "delivery/trainers", "app/train"])
def test_nobody_else_uses_what_is_private(folder: str) -> None:
    for path in (SOURCE / folder).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if path.name != "hf_trainer.py":
            assert not private_names(tree) - own, f"{path} uses what is private to Trainer: move it to hf_trainer.py"
            inherits = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and private_overrides(node)]
            assert not inherits, f"{path} overrides what is private to Trainer: move it to hf_trainer.py"


def private_overrides(found: ast.ClassDef) -> set[str]:
    bases = {ast.unparse(base) for base in found.bases}
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    return (
        methods & PRIVATE if bases & {"Trainer", "HFTrainer", "CheckpointingTrainer", "PackedTrainerMixin"} else set()
    )
