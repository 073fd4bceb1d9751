"""The folder tree is the architecture: a package imports only what stands above it, and the light ones stay light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import packtrain

SRC = Path(packtrain.__file__).parent
# Data flows down this list; a package may import itself and what stands before it.
ORDER = (
    *("core", "records", "families", "measuring", "predicting", "packing", "planning", "runs", "reports"),
    *("delivery", "modeling", "verifying", "training", "config", "app", "demo", "bench", "cli"),
)
LIGHT = ("core", "records", "families", "measuring", "predicting", "packing", "planning", "runs", "reports")
# The one exception: what a family's vision encoder needs of torch, imported when there is a model.
ENCODERS = set(SRC.glob("families/*/vision_encoder.py"))
HEAVY = {"torch", "torchvision", "transformers", "accelerate", "peft"}
# What each light package may use beside the standard library; imports inside functions count too.
ALLOWED = {
    "core": {"numpy"},
    "records": {
        *("numpy", "pyarrow", "PIL", "av", "yaml", "jinja2", "zstandard", "datasets", "huggingface_hub"),
        *("fsspec", "aiohttp", "indexed_gzip"),
    },
    "families": {"numpy", "jinja2", "tokenizers", "num2words", "huggingface_hub"},
    "measuring": {"numpy", "pyarrow", "ray"},
    "predicting": {"numpy"},
    "packing": {"numpy", "numba", "pyarrow"},
    "planning": {"numpy", "pyarrow"},
    "runs": {"numpy", "yaml"},
    "reports": {"numpy", "pyarrow", "matplotlib", "jinja2", "markupsafe", "yaml"},
}


def imports_of(path: Path) -> set[str]:
    """Every module named in an import statement anywhere in a file, without those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def modules() -> list[tuple[str, Path]]:
    """(package, file) of every module; a module beside the packages is a package of its own."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).parts
        if parts != ("__init__.py",):
            found.append((parts[0].removesuffix(".py"), path))
    return found


def test_every_package_has_its_place() -> None:
    assert {package for package, _ in modules()} == set(ORDER)


def test_imports_go_up_only() -> None:
    seen = 0
    for package, path in modules():
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "packtrain" and len(parts) > 1:
                seen += 1
                assert ORDER.index(parts[1]) <= ORDER.index(package), f"{path.relative_to(SRC)} imports {name}"
    assert seen > 100, "nothing was looked at"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside a package too, and whether an import stands at the top of a module or in a function."""
    names = {".".join(("packtrain", *path.relative_to(SRC).with_suffix("").parts)): path for _, path in modules()}
    edges = {name: {end for end in named_by(path) if end in names} for name, path in names.items()}
    while edges:
        leaves = {name for name, ends in edges.items() if not ends & edges.keys()}
        assert leaves, f"import cycles among {sorted(edges)}"
        edges = {name: ends for name, ends in edges.items() if name not in leaves}


def test_no_folder_of_a_package_imports_itself_by_way_of_others() -> None:
    """Of delivery for one: encode, then collate, then loader, then trainers."""
    folders = {path.relative_to(SRC).parent.as_posix() for _, path in modules()}
    edges: dict[str, set[str]] = {folder: set() for folder in folders if "/" in folder}
    for _, path in modules():
        folder = path.relative_to(SRC).parent.as_posix()
        if folder in edges and path.name != "__init__.py":
            named = {"/".join(name.split(".")[1:3]) for name in imports_of(path) if name.startswith("packtrain.")}
            edges[folder] |= named & edges.keys() - {folder}
    assert edges["delivery/loader"] >= {"delivery/collate", "delivery/encode"}
    while edges:
        leaves = {name for name, ends in edges.items() if not ends & edges.keys()}
        assert leaves, f"import cycles among {edges}"
        edges = {name: ends for name, ends in edges.items() if name not in leaves}


def test_no_string_stands_alone() -> None:
    """A second line of a message that is no part of the expression is cut off without a word."""
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for block in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                for number, line in enumerate(block if isinstance(block, list) else ()):
                    is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant | ast.JoinedStr)
                    docstring = number == 0 and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                    text = is_text and getattr(line.value, "value", "") is not ...
                    assert docstring or not text, f"{path}:{line.lineno}: a string by itself"


def named_by(path: Path) -> set[str]:
    """What a file may import: modules, and names that are modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return imports_of(path) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_use_only_what_they_may(package: str) -> None:
    for owner, path in modules():
        if owner == package:
            third = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"packtrain"}
            allowed = ALLOWED[package] | (HEAVY if path in ENCODERS else set())
            assert third <= allowed, f"{path.relative_to(SRC)} imports {third - allowed}"


def test_importing_everything_light_loads_nothing_heavy() -> None:
    names = [
        ".".join(("packtrain", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        for package, path in modules()
        if package in (*LIGHT, "app", "cli") and path not in ENCODERS
    ]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "packtrain.measuring.measurement" in loaded
    assert not loaded & HEAVY


FACES = sorted(
    ".".join(path.parent.relative_to(SRC).parts)
    for path in SRC.rglob("*/__init__.py")
    if path.parent.parent != SRC / "families"  # a family's lists what the registry looks up
)


@pytest.mark.parametrize("package", FACES)
def test_the_face_of_a_package_lists_its_own(package: str) -> None:
    """A name that is a module's too would be one or the other, by what was imported first."""
    face = importlib.import_module(f"packtrain.{package}")
    assert len(str(face.__doc__).strip().split("\n\n")) == 2, "a line, and a paragraph of what it takes and gives"
    assert face.__all__
    assert dir(face) == face.__all__
    for name in face.__all__:
        assert not (SRC / package.replace(".", "/") / f"{name}.py").exists(), f"{name} is a module of {package}"
        assert f"import {name} as {name}\n" in Path(str(face.__file__)).read_text()
        value = getattr(face, name)
        if isinstance(value, type | FunctionType):
            assert value.__module__.startswith(f"packtrain.{package}"), name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = face.nothing


def test_import_packtrain_is_nearly_free() -> None:
    assert len(FACES) > 8
    code = f"import sys, packtrain, {', '.join(f'packtrain.{name}' for name in FACES)}; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & (HEAVY | {"pyarrow", "numpy", "PIL", "av", "tokenizers", "rich", "typer"})
