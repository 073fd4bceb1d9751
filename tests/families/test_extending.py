"""The module of docs/guides/extending.md is measured, packed, verified and trained, from outside the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import packtrain
from packtrain.core.errors import ConfigError
from packtrain.families import registry
from packtrain.families.family import Family, Rule, TextOnly
from packtrain.families.model_folder import resolve_model

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
NAME = "vip_llava"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's module, and a small dataset."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("outside")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (folder / f"{NAME}.py").write_text(code, encoding="utf-8")
    lines = []
    for number in range(8):
        Image.new("RGB", (60 + 40 * number, 48), (30 * number, 90, 120)).save(folder / f"{number}.png")
        asked = {"role": "user", "content": "<image>What is it?" if number % 2 else "What is it?"}
        chat = [asked, {"role": "assistant", "content": f"Colour {number}."}]
        lines.append(json.dumps({"messages": chat, **({"images": [f"{number}.png"]} if number % 2 else {})}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, registry.Registered]:
    """The families of users in this process, none to begin with."""
    found: dict[str, registry.Registered] = {}
    monkeypatch.setattr(registry, "_registered", found)
    return found


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(packtrain.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{folder}", "PACKTRAIN_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "packtrain.cli", *arguments]
    return subprocess.run(command, cwd=folder, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)


def test_without_its_module_the_family_is_not_known(registered: dict[str, registry.Registered]) -> None:
    assert registry.find_family("vipllava") is None
    with pytest.raises(ConfigError, match="an unknown family"):
        resolve_model("tiny:vipllava", Path("nowhere"))


def test_measure_pack_verify_and_train(outside: Path) -> None:
    pytest.importorskip("torch")
    named = ("--model", "tiny:vipllava", "--plugins", NAME)
    done = run(outside, "measure", "data.jsonl", *named, "--out", "costs", "--workers", "2", "--check", "8", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads((outside / "costs" / "measure.json").read_text())
    assert summary["inputs"]["request"]["plugins"] == [NAME]
    assert summary["inputs"]["settings"]["family"]["module"] == NAME
    assert summary["user_config"]["model"]["plugins"] == [NAME]
    table = packtrain.CostTable.load(outside / "costs")
    assert set(table.column("image_tokens").tolist()) == {0, 576}

    done = run(outside, "pack", "costs", "--packing-length", "1300", "--out", "plan", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == [], "without the plugin it says that the model cannot be trained"

    done = run(outside, "verify", *named, "--device", "cpu", "--attn-implementation", "sdpa", "--json")
    assert done.returncode == 0, done.stdout + done.stderr

    config = {
        "model": {"model_name_or_path": "tiny:vipllava", "plugins": [NAME]},
        "data": {"dataset_path": "data.jsonl", "costs": "costs", "plan": "plan", "check": 8},
        "training": {"max_steps": 2, "packs_per_step": 1, "output_dir": "run", "use_cpu": True},
    }
    (outside / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    done = run(outside, "train", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((outside / "run" / "run.json").read_text())
    assert facts["families"]["vipllava"]["module"] == NAME
    assert facts["outcome"]["status"] == "complete"
    lines = (outside / "run" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("step") == 2 for line in lines)


def test_another_source_is_another_family(outside: Path, registered: dict[str, registry.Registered]) -> None:
    """Costs follow from the module's text: a table of another one is not taken for the same."""
    from packtrain.app.measure import make_request
    from packtrain.config.dataset_config import DatasetConfig
    from packtrain.measuring.request import settings_state

    sys.path.insert(0, str(outside))
    try:
        config = DatasetConfig(dataset_path=str(outside / "data.jsonl"), model="tiny:vipllava", plugins=[NAME])
        request = make_request(config)
        before = settings_state(request.settings())["family"]
        source = outside / f"{NAME}.py"
        text = source.read_text()
        source.write_text(text + "# changed\n")
        after = settings_state(request.settings())["family"]
        source.write_text(text)
        assert before["module"] == after["module"] == NAME
        assert before["source"] != after["source"]
    finally:
        sys.path.remove(str(outside))
        sys.modules.pop(NAME, None)


def test_built_in_names_are_not_replaced(registered: dict[str, registry.Registered]) -> None:
    for name in ("qwen3_vl", "llama", "bamba"):
        with pytest.raises(ConfigError, match="already supports"):
            packtrain.register_family(Family(model_type=name))
    assert not registered


def test_two_modules_cannot_register_one_name(registered: dict[str, registry.Registered]) -> None:
    """Whatever the family says: a rule may be another module's, or none."""

    def register(module: str, rule: type[Rule] | None) -> Family:
        family = Family(model_type="new", rule=rule)
        exec("packtrain.register_family(family)", {"__name__": module, "packtrain": packtrain, "family": family})
        return family

    for rule in (None, TextOnly):
        registered.clear()
        register("one", rule)
        assert registry.plugins_for((), "new") == ("one",)
        with pytest.raises(ConfigError, match="two families of this name, from one and other"):
            register("other", rule)
        again = register("one", rule)  # imported again
        assert registry.find_family("new") is again


def test_media_need_a_small_image(registered: dict[str, registry.Registered]) -> None:
    from packtrain.families.family import BatchContract

    with pytest.raises(ConfigError, match="no small_image"):
        packtrain.register_family(Family(model_type="new", contract=BatchContract(media={"pixel_values": "rows"})))


def test_a_family_names_the_submodules_of_its_model(registered: dict[str, registry.Registered]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from packtrain.families import ModuleNames
    from packtrain.modeling.model_parts import model_parts, part_of_weight

    class Model(transformers.PreTrainedModel):  # type: ignore[misc,name-defined]
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__(transformers.PreTrainedConfig())
            self.config.model_type = "new"
            inner = {name: torch.nn.Linear(1, 1) for name in ("seer", "bridge", "speaker")}
            self.model = torch.nn.ModuleDict(inner)
            self.model.config = self.config

    model = Model()
    assert model_parts(model).vision is None
    assert {part_of_weight(name) for name, _ in model.named_parameters()} == {"language"}
    names = ModuleNames(language="speaker", vision="seer", projector="bridge")
    packtrain.register_family(Family(model_type="new", modules=names))
    parts = model_parts(model)
    assert (parts.vision, parts.language) == (model.model["seer"], model.model["speaker"])
    assert {id(weight) for weight in parts.projector()} == {id(weight) for weight in model.model["bridge"].parameters()}
    for name, _ in model.named_parameters():
        assert (
            part_of_weight(name) == {"seer": "vision", "bridge": "projector", "speaker": "language"}[name.split(".")[1]]
        )


def test_an_installed_entry_point_is_loaded_when_it_is_asked_for(
    registered: dict[str, registry.Registered], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, loaded = Family(model_type="installed"), []

    def point(name: str, found: Any) -> Any:
        return SimpleNamespace(
            name=name, value=f"package:{name}", module="package", load=lambda: loaded.append(name) or found
        )

    points = {"installed": point("installed", family), "llama": point("llama", family), "odd": point("odd", "text")}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    assert registry.find_family("llama") is not family
    assert not loaded
    assert registry.find_family("installed") is family
    assert registry.plugins_for((), "installed") == ("package",)
    with pytest.raises(ConfigError, match="a str instead of"):
        registry.find_family("odd")


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        packtrain.DatasetConfig(dataset_path="data.jsonl", model="tiny:llama", plugins=["no_such_module"])


def test_plugins_of_axolotl_are_not_ours(tmp_path: Path) -> None:
    from packtrain.config.run_config import load_config

    def plugins(name: str, **content: Any) -> list[str] | None:
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        return load_config(tmp_path / name).model.plugins

    liger = "axolotl.integrations.liger.LigerPlugin"
    assert plugins("theirs.yaml", base_model="tiny:llama", plugins=[liger]) is None
    assert plugins("ours.yaml", model={"plugins": [NAME]}) == [NAME]
