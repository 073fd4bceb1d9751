"""Prints how easy this code is to live in: its size, its layers, and how many files a sample and a step pass through.

    python scripts/architecture.py [CHECKOUT]

CHECKOUT is the root of a checkout, this one by default. A few samples are measured, packed, delivered and trained with
a tiny model, half a minute on a CPU, to count the files whose functions are called.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ANY_MAPPING = re.compile(r"(?:dict|Mapping|MutableMapping)\[str, (?:typing\.)?Any\]")
UNTYPED_MAPPING = re.compile(r"(?:dict|Mapping|MutableMapping)\[str, (?:typing\.)?(?:Any|object)\]")
# The files that name one of a kind have to know it; a folder of its own counts once.
NAMED = {"family": "internvl", "config key": "packing_drop_last", "metric": "grad_norm"}
TRACED = """
import json, sys, threading
from pathlib import Path

import packtrain

root, folder, seen = {root!r}, Path({folder!r}), set()

def profile(frame, event, _):
    if event == "call":
        seen.add(frame.f_code.co_filename)

def files(act):
    seen.clear()
    threading.setprofile(profile)
    sys.setprofile(profile)
    act()
    sys.setprofile(None)
    threading.setprofile(None)
    return len([name for name in seen if name.startswith(root)])

data, cache = str(folder / "data.jsonl"), str(folder / "cache")
config = packtrain.DatasetConfig(dataset_path=data, model="tiny:qwen2_5_vl", packing_length=512, cache_dir=cache)
dataset = packtrain.MultiModalDataset(config)
dataset.build()
dataset[0]
print(files(lambda: dataset[0]), files(lambda: packtrain.train({config!r})))
"""


def modules(src: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name inside the package, and file."""
    for path in sorted(src.rglob("*.py")):
        yield ".".join(path.relative_to(src).with_suffix("").parts).removesuffix("__init__").rstrip("."), path


def imports(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Modules of the package that are imported while it runs, with the names taken from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "packtrain":
            base = (node.module or "").removeprefix("packtrain").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield (full, []) if full in names else (base, [alias.name])


def cycles(edges: dict[str, set[str]]) -> int:
    """Modules that import themselves by way of others."""
    reach = {name: set(ends) for name, ends in edges.items()}
    grown = True
    while grown:
        grown = False
        for ends in reach.values():
            more = set().union(*(reach.get(end, set()) for end in ends)) - ends
            grown |= bool(more)
            ends |= more
    return sum(name in ends for name, ends in reach.items())


def table(src: Path) -> list[tuple[str, str]]:
    """The rows that reading the source gives."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules(src)}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = sum(text.count("\n") for text in texts.values())
    public: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in tree.body if name.split(".")[0] != "cli" else ():  # type: ignore[attr-defined]
            # a command is called as the function that it calls, and nobody imports it
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                public[node.name].add(name)
    edges: dict[str, set[str]] = defaultdict(set)
    private = 0
    for name, tree in trees.items():
        for module, taken in imports(tree, set(texts)):
            edges[name].add(module)
            private += sum(item.startswith("_") and not item.startswith("__") for item in taken)
    shared = Counter(name.rsplit(".", 1)[-1] for name, path in modules(src) if path.name != "__init__.py")
    rows = [
        ("lines / files of the package", f"{lines:,} / {len(texts)}"),
        ("`dict` or `Mapping[str, Any]` per 1,000 lines", f"{1000 * _count(ANY_MAPPING, texts) / lines:.1f}"),
        ("the same with `object`, and by names of their own", f"{1000 * _count_untyped(texts, trees) / lines:.1f}"),
        (
            "module names used twice / public names defined twice",
            f"{sum(n > 1 for n in shared.values())} / {sum(len(found) > 1 for found in public.values())}",
        ),
        ("modules in import cycles / private names imported", f"{cycles(edges)} / {private}"),
    ]
    for what, word in NAMED.items():
        files = [name for name, text in texts.items() if re.search(rf"\b{word}\b", text)]
        own = {name for name in files if word in name.split(".")}  # a folder of its own is one place
        rows.append((f"places that name a {what} (`{word}`)", str(len(files) - len(own) + bool(own))))
    return rows


def _count(pattern: re.Pattern[str], texts: dict[str, str]) -> int:
    return sum(len(pattern.findall(text)) for text in texts.values())


def _count_untyped(texts: dict[str, str], trees: dict[str, ast.Module]) -> int:
    """Mappings of anything: written out, and by a name that stands for one."""
    aliases = {
        target.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and UNTYPED_MAPPING.fullmatch(ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return _count(UNTYPED_MAPPING, texts) + sum(node.id in aliases and isinstance(node.ctx, ast.Load) for node in used)


def trace(root: Path) -> list[tuple[str, str]]:
    """The rows that a small run gives."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        _samples(data)
        config = Path(folder) / "run.yaml"
        training = {"max_steps": 1, "packs_per_step": 1, "output_dir": f"{folder}/run", "use_cpu": True}
        settings = {
            "model": "tiny:qwen2_5_vl",
            "data": {"dataset_path": str(data), "packing_length": 512, "cache_dir": f"{folder}/trained"},
            "training": training,
        }
        config.write_text(json.dumps(settings), encoding="utf-8")
        code = TRACED.format(root=str(root / "src"), folder=folder, config=str(config))
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    sample, step = done.stdout.split()[-2:]
    return [("files that one delivered sample passes", sample), ("files that `train()` of one step touches", step)]


def _samples(path: Path) -> None:
    from PIL import Image

    lines = []
    for number in range(8):
        Image.new("RGB", (64, 48), (30 * number, 90, 120)).save(path.parent / f"{number}.png")
        asked = {"role": "user", "content": "<image>What is it?"}
        chat = [asked, {"role": "assistant", "content": f"Colour {number}."}]
        lines.append(json.dumps({"messages": chat, "images": [f"{number}.png"]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parent.parent)
    root = parser.parse_args().checkout.resolve()
    rows = table(root / "src" / "packtrain") + trace(root)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"| {name.ljust(width)} | {value} |")


if __name__ == "__main__":
    main()
