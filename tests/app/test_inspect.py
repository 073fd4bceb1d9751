"""`packtrain inspect`: what it shows of packs and samples is what the plan's files and the cost table hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from lengths import lvis_like
from PIL import Image
from tables import write_table

from packtrain.app.inspect_plan import find_sample, open_plan, pack_samples
from packtrain.app.measure import measure
from packtrain.app.pack import pack
from packtrain.core.errors import ArtifactError
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import PackingConfig

HOSTILE = (
    *("[bold]x[/bold]", "[/]", ":warning:", "a\nb", "\x1b[31mred\x1b[0m", "😀" * 20, "x" * 10_000, "\u202egnp.exe"),
    *(
        "<script>alert(1)</script>",
        "",
        '"quoted"',
        "back\\slash",
        "nul\x00byte",
        "-dash",
        "\u2028line",
        "%s{}",
        "日本語",
    ),
)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"packing_length": 4096},
    "several limits": {"packing_length": 4096, "max_images_per_pack": 2, "max_patches_per_pack": 4000},
    "truncate": {"packing_length": 1024, "overlong": "truncate"},
    "split": {"packing_length": 1024, "overlong": "split"},
    "epochs": {"packing_length": 4096, "epochs": 3},
    "same packs": {"packing_length": 4096, "epochs": 3, "repack_each_epoch": False},
    "windows": {"packing_length": 4096, "packing_window": 20, "packing_drop_last": True, "packs_per_step": 4},
}


@pytest.mark.parametrize(
    ("shape", "repeats"), [*((shape, None) for shape in SHAPES), ("plain", 2), ("split", 2), ("windows", 3)]
)
def test_packs_and_samples_are_two_views_of_one_plan(tmp_path: Path, shape: str, repeats: int | None) -> None:
    """Every pack adds up to what its row of the Arrow file says, and every sample is found where its pack shows it."""
    write_table(tmp_path / "costs", lvis_like(60, 1), mixture={"data": {"repeats": repeats, "weight": None}})
    pack(tmp_path / "costs", PackingConfig(**SHAPES[shape]), tmp_path / "plan")
    plan, table = open_plan(tmp_path / "plan")
    shown: dict[str, list[tuple[int, ...]]] = {str(name): [] for name in table.column("id")}
    for epoch in range(plan.num_epochs):
        packs = plan.epoch(epoch)
        for number in range(packs.num_packs):
            samples = pack_samples(plan, table, number, epoch)
            for name in ("tokens", "vision_tokens", "images", "patches", "supervised_tokens"):
                assert sum(getattr(one, name) for one in samples) == packs.load(name)[number], (number, name)
            assert len(samples) == packs.load("samples")[number]
            for one in samples:
                shown[one.id].append((epoch, number, one.row, one.start, one.tokens))
    lines = [json.loads(line) for line in (tmp_path / "plan" / "ledger.jsonl").read_text().splitlines()]
    whole = dict(zip(table.column("id").tolist(), table.column("tokens").tolist(), strict=True))
    for name, places in shown.items():
        found, rows = find_sample(plan, table, name)
        assert [(one.epoch, one.pack, one.row, one.start, one.tokens) for one in found] == places
        assert [table.column("id")[row] for row in rows] == [name]
        assert [one.whole for one in found] == [one.tokens == whole[name] for one in found]
        assert bool(found) or any(line["id"] == name for line in lines), "in a pack or in the ledger"
    cut = [one for places in shown.values() for one in places if one[3] > 0]
    assert bool(cut) == (shape == "split"), "pieces appear where they should, or nothing was tested"


def test_commands_say_what_the_functions_say(run: Run, tmp_path: Path) -> None:
    write_table(tmp_path / "costs", lvis_like(100, 1))
    pack(tmp_path / "costs", PackingConfig(packing_length=4096, epochs=2), tmp_path / "plan")
    code, out, err = run("inspect", tmp_path / "plan", "--pack", 1, "--epoch", 1, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["pack"], said["epoch"]) == (1, 1)
    for one in said["samples"]:
        found = json.loads(run("inspect", tmp_path / "plan", "--sample", one["id"], "--json")[1])
        assert found["rows"] == [one["row"]]
        assert {"epoch": 1, "pack": 1, "row": one["row"], "start": 0, "tokens": one["tokens"], "whole": True} in found[
            "places"
        ]
        assert len(found["places"]) == 2, "once in each epoch"
    stored = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert json.loads(run("inspect", tmp_path / "plan", "--blocked", "--json")[1]) == stored["blocked"]
    said = json.loads(run("inspect", tmp_path / "plan", "--json")[1])
    assert said["epochs"] == stored["epochs"]
    assert said["config"] == stored["config"]


def test_people_see_the_same_numbers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "costs", lvis_like(100, 1))
    plan = pack(tmp_path / "costs", PackingConfig(packing_length=1024, overlong="truncate"), tmp_path / "plan")
    packs = plan.epoch(0)
    code, out, err = run("inspect", tmp_path / "plan")
    assert (code, err) == (0, "")
    assert f"{packs.num_packs}" in out
    assert f"{packs.num_entries:,} packed" in out
    code, out, _ = run("inspect", tmp_path / "plan", "--pack", 0)
    held = int(packs.load("samples")[0])
    assert f"Pack 0: {held} sample{'' if held == 1 else 's'}, {packs.load('tokens')[0]:,} of 1,024 tokens" in out
    cut = next(
        name
        for name in CostTable.load(tmp_path / "costs").column("id")
        if any(not one.whole for one in find_sample(plan, CostTable.load(tmp_path / "costs"), name)[0])
    )
    assert "0 to 1,024" in run("inspect", tmp_path / "plan", "--sample", cut)[1]
    code, out, _ = run("inspect", tmp_path / "plan", "--blocked")
    assert (code, "packing_length" in out) == (0, True)


def test_a_sample_in_no_pack(run: Run, tmp_path: Path) -> None:
    table = write_table(tmp_path / "costs", lvis_like(100, 1))
    longest = str(table.column("id")[table.column("tokens").argmax()])
    pack(table, PackingConfig(packing_length=int(table.column("tokens").max()) - 1), tmp_path / "plan")
    code, out, _ = run("inspect", tmp_path / "plan", "--sample", longest)
    assert (code, f"{longest} is not packed; the plan's ledger.jsonl has the reason" in out) == (0, True)
    assert json.loads(run("inspect", tmp_path / "plan", "--sample", longest, "--json")[1])["places"] == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--pack", 99), 2, ["--pack", "from 0 to"]),
        (("--pack", -1), 2, ["--pack", "from 0 to"]),
        (("--pack", 0, "--epoch", 1), 2, ["--epoch", "from 0 to 0"]),
        (("--epoch", 0), 2, ["--epoch", "--pack"]),
        (("--pack", 0, "--sample", "a"), 2, ["one of them"]),
        (("--pack", 0, "--blocked"), 2, ["one of them"]),
        (("--sample", "sampel-7"), 2, ["did you mean 'sample-7'?"]),
        (("--sample", "\x1b[31m"), 2, ["the id of a measured sample"]),
        (("--pack", "x"), 2, ["--pack"]),
        (("--costs", "nowhere"), 2, ["nowhere"]),
        (("--pack", 0, "--costs", "nowhere"), 2, ["nowhere"]),
    ],
)
def test_wrong_options(run: Run, tmp_path: Path, options: tuple[Any, ...], code: int, words: list[str]) -> None:
    write_table(tmp_path / "costs", lvis_like(30, 1))
    pack(tmp_path / "costs", PackingConfig(packing_length=8192), tmp_path / "plan")
    found, out, err = run("inspect", tmp_path / "plan", *options, "--json")
    assert (found, out) == (code, ""), err
    for word in words:
        assert word in err


def test_folders_that_are_no_plan(run: Run, tmp_path: Path) -> None:
    write_table(tmp_path / "costs", lvis_like(30, 1))
    pack(tmp_path / "costs", PackingConfig(packing_length=8192), tmp_path / "plan")
    for name in ("plan.json", "packs-0000.arrow", "entries-0000.arrow"):
        for size in (None, 0, 150):
            half = tmp_path / "half"
            shutil.copytree(tmp_path / "plan", half)
            (half / name).unlink() if size is None else (half / name).write_bytes((half / name).read_bytes()[:size])
            code, out, err = run("inspect", half, "--json")
            assert (code, out) == (2 if size is None and name == "plan.json" else 1, "")
            assert name in err
            shutil.rmtree(half)
    for folder, found in ((tmp_path / "costs", "no plan.json"), (tmp_path / "nowhere", "no such folder")):
        code, _, err = run("inspect", folder)
        assert (code, found in err, "packtrain pack COSTS" in err) == (2, True, True)


def test_files_of_two_plans_in_one_folder(run: Run, tmp_path: Path) -> None:
    for length in (4096, 8192):
        write_table(tmp_path / "costs", lvis_like(100, 1))
        pack(tmp_path / "costs", PackingConfig(packing_length=length), tmp_path / str(length))
    shutil.copy(tmp_path / "4096" / "packs-0000.arrow", tmp_path / "8192")
    code, _, err = run("inspect", tmp_path / "8192")
    assert (code, "packs" in err) == (1, True)


class TestTheCostTable:
    def test_moved(self, run: Run, tmp_path: Path) -> None:
        write_table(tmp_path / "costs", lvis_like(30, 1))
        pack(tmp_path / "costs", PackingConfig(packing_length=8192), tmp_path / "plan")
        before = run("inspect", tmp_path / "plan", "--pack", 0, "--json")[1]
        (tmp_path / "costs").rename(tmp_path / "moved")
        code, out, err = run("inspect", tmp_path / "plan", "--pack", 0, "--json")
        assert (code, out) == (1, "")
        assert "--costs" in err
        assert run("inspect", tmp_path / "plan")[0] == 0, "the summary does not need it"
        for costs in (tmp_path / "moved", tmp_path / "moved" / "costs.parquet"):
            assert run("inspect", tmp_path / "plan", "--pack", 0, "--costs", costs, "--json")[:2] == (0, before)

    def test_changed(self, run: Run, tmp_path: Path) -> None:
        write_table(tmp_path / "costs", lvis_like(30, 1))
        pack(tmp_path / "costs", PackingConfig(packing_length=8192), tmp_path / "plan")
        changes = {
            "rows: 30 -> 31": {"columns": lvis_like(31, 1)},
            "measured.settings.model_type: text -> llava": {
                "columns": lvis_like(30, 1),
                "inputs": {"request": {"limits": {}}, "settings": {"model_type": "llava"}},
            },
            "mixture.data.repeats: None -> 2": {
                "columns": lvis_like(30, 1),
                "mixture": {"data": {"repeats": 2, "weight": None}},
            },
        }
        for words, given in changes.items():
            shutil.rmtree(tmp_path / "costs")
            write_table(tmp_path / "costs", **given)
            for option in (("--pack", 0), ("--sample", "sample-0")):
                code, out, err = run("inspect", tmp_path / "plan", *option, "--json")
                assert (code, out) == (1, "")
                assert words in err
            assert words in run("inspect", tmp_path / "plan", "--costs", tmp_path / "costs")[2]

    def test_of_other_limits(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plan of costs under other limits shows those costs, not the measured ones."""
        monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
        for number in range(8):
            Image.new("RGB", (200 + 40 * number, 300)).save(tmp_path / f"{number}.png")
        records = [
            {
                "id": f"r{n}",
                "images": [f"{n}.png"],
                "messages": [
                    {"role": "user", "content": "<image>What?"},
                    {"role": "assistant", "content": "A picture."},
                ],
            }
            for n in range(8)
        ]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        measured = measure(tmp_path / "data.jsonl", model="tiny:qwen2_5_vl", out=tmp_path / "costs", workers=1, check=0)
        smaller = measured.with_limits(max_pixels=28 * 28 * 16)
        assert (smaller.column("tokens") < measured.column("tokens")).all()
        pack(smaller, PackingConfig(packing_length=100), tmp_path / "plan")
        costs = {name: smaller.column(name).tolist() for name in ("tokens", "patches")}
        seen = 0
        for number in range(PackPlan.load(tmp_path / "plan").epoch(0).num_packs):
            said = json.loads(run("inspect", tmp_path / "plan", "--pack", number, "--json")[1])
            for one in said["samples"]:
                seen += 1
                assert (one["tokens"], one["patches"]) == (costs["tokens"][one["row"]], costs["patches"][one["row"]])
                places = json.loads(run("inspect", tmp_path / "plan", "--sample", one["id"], "--json")[1])["places"]
                assert [(place["pack"], place["tokens"]) for place in places] == [(number, one["tokens"])]
        assert seen == 8
        with pytest.raises(ArtifactError, match=r"limits\.max_pixels: gone"):
            PackPlan.load(tmp_path / "plan").check_inputs(measured)


class TestNamesFromData:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Path:
        count = len(HOSTILE)
        columns = {**lvis_like(count, 1), "id": list(HOSTILE), "source": list(reversed(HOSTILE))}
        write_table(tmp_path / "costs", {**columns, "origin": [f"{name}.jsonl:1" for name in HOSTILE]})
        pack(tmp_path / "costs", PackingConfig(packing_length=40_000), tmp_path / "plan")
        return tmp_path / "plan"

    def test_machines_get_them_as_they_are(self, run: Run, plan: Path) -> None:
        packs = PackPlan.load(plan).epoch(0).num_packs
        said = [json.loads(run("inspect", plan, "--pack", n, "--json")[1])["samples"] for n in range(packs)]
        found = [one for samples in said for one in samples]
        assert {one["id"]: one["source"] for one in found} == dict(zip(HOSTILE, reversed(HOSTILE), strict=True))

    def test_a_terminal_gets_one_safe_line_of_each(self, run: Run, plan: Path) -> None:
        for number in range(PackPlan.load(plan).epoch(0).num_packs):
            code, out, err = run("inspect", plan, "--pack", number)
            assert (code, err) == (0, "")
            assert not any(bad in out for bad in ("\x1b", "\x00", "\u202e", "\u2028")), "nothing steers the terminal"
            assert out.count("\n") < 200, "ten thousand characters do not fill the screen"

    @pytest.mark.parametrize("name", [name for name in HOSTILE if "\x00" not in name], ids=lambda name: repr(name[:9]))
    def test_each_is_found(self, run: Run, plan: Path, name: str) -> None:
        code, out, _ = run("inspect", plan, f"--sample={name}", "--json")
        assert code == 0
        assert json.loads(out)["rows"] == [HOSTILE.index(name)]
        code, out, err = run("inspect", plan, f"--sample={name}")
        assert (code, err) == (0, "")
        assert not any(bad in out for bad in ("\x1b", "\u202e", "\u2028"))


def test_ids_that_come_again(run: Run, tmp_path: Path) -> None:
    columns = {**lvis_like(30, 1), "id": ["same"] * 30}
    write_table(tmp_path / "costs", columns, row_group=7)
    pack(tmp_path / "costs", PackingConfig(packing_length=20_000), tmp_path / "plan")
    said = json.loads(run("inspect", tmp_path / "plan", "--sample", "same", "--json")[1])
    assert said["rows"] == list(range(30))
    assert sorted(place["row"] for place in said["places"]) == list(range(30))
