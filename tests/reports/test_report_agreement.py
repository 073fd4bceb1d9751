"""One computation, several renderings: every number in every file is the study's, and they agree with each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from pages import at, read_page
from study_parts import Made

from packtrain.core.artifacts import read_json
from packtrain.core.numbers import FORMATS, format_number, gib, memory
from packtrain.reports.study_content import SIMULATED, compared_tables, json_value, study_content
from packtrain.reports.study_files import KINDS, NUMBERS, VERSION

Written = tuple[Made, Path]


def parts_of(out: Path) -> dict[str, Any]:
    """Everything that the JSON files hold, as one content again."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        body = read_json(out / name, kind, VERSION)
        for key in set(body) - {"kind", "version"}:
            assert key not in found or found[key] == body[key], f"{key} differs between files"
            found[key] = body[key]
    return found


def tables(path: Path) -> list[list[list[str]]]:
    """The tables of a Markdown file, cell by cell."""
    found: list[list[list[str]]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip().strip("*") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_json_files_hold_the_study(written: Written) -> None:
    made, out = written
    study, content = made.study, parts_of(out)
    assert content == json.loads(json.dumps(study_content(study)))
    assert content["dataset"]["tokens"] == study.dataset.tokens
    assert content["memory"]["estimate"]["total"] == study.memory.estimate.total
    assert [one["packs"] for one in content["simulations"]] == [one.packs for one in study.simulations]
    assert content["memory"]["host"]["memory"]["total"] == study.memory.host.memory_bytes
    assert content["headline"]["left_out"] == sum(study.ledger.values())


def test_every_visible_number_is_in_the_page_and_in_the_files(written: Written) -> None:
    _, out = written
    page, content = read_page(out / "report.html"), parts_of(out)
    inside = page.data
    numbers = page.all("data")
    assert len(numbers) > 60
    seen = set()
    for number in numbers:
        pointer, kind, text = number.attributes["data-at"], number.attributes["data-as"], number.text
        value = at(inside, pointer)
        exact = json.loads(number.attributes["value"]) if number.attributes["value"] else None
        assert exact == value, pointer
        assert kind in FORMATS
        assert format_number(kind, value) == text, pointer
        if not pointer.startswith(("/dataset/by_source", "/dataset/more_sources", "/ledger", "/memory/more_samples")):
            assert at(content, pointer) == value, f"{pointer} is not the number of the JSON files"
        seen.add(pointer.split("/")[1])
    assert {"about", "headline", "dataset", "simulations", "memory"} <= seen


def test_page_carries_what_the_files_hold(written: Written) -> None:
    _, out = written
    inside, content = read_page(out / "report.html").data, parts_of(out)
    for key in ("headline", "padded", "simulations", "balance"):
        assert inside[key] == content[key]
    assert inside["memory"]["estimate"]["total"] == content["memory"]["estimate"]["total"]
    assert sum(inside["ledger"].values()) == sum(content["ledger"].values())
    shown, more = inside["dataset"]["by_source"], inside["dataset"]["more_sources"]
    assert sum(group["tokens"] for group in shown) + more["tokens"] == content["dataset"]["tokens"]
    whole = {(group["samples"], group["tokens"]) for group in content["dataset"]["by_source"]}
    assert {(group["samples"], group["tokens"]) for group in shown} <= whole


def test_sample_lines_add_up_to_the_statistics(written: Written) -> None:
    made, out = written
    content = parts_of(out)
    lines = [json.loads(line) for line in (out / "sample_stats.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == content["dataset"]["samples"]
    for name in NUMBERS:
        assert sum(line[name] for line in lines) == content["dataset"]["statistics"][name]["total"]
    packed = [line for line in lines if line["pack"] is not None]
    assert all("why" in line for line in lines if line["pack"] is None)
    if made.study.recommendation.packing:
        best = content["simulations"][content["recommendation"]["simulation"]]
        assert len(packed) == best["samples_packed"] == content["headline"]["packed"]
        assert len({line["pack"] for line in packed}) == best["packs"]
        assert sum(line["tokens"] for line in packed) == best["real_tokens"]


def test_picture_shows_packs_as_the_sample_lines_have_them(lvis: Written) -> None:
    _, out = lvis
    tokens: dict[int, int] = {}
    for line in (out / "sample_stats.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        if sample["pack"] is not None:
            tokens[sample["pack"]] = tokens.get(sample["pack"], 0) + sample["tokens"]
    tips = [title.text for title in read_page(out / "report.html").all("title") if "svg" in title.parents]
    tips = [tip for tip in tips if tip.startswith("Pack ")]
    assert len(tips) > 30
    for tip in tips:
        number, held = re.match(r"Pack ([\d,]+): ([\d,]+) of", tip).groups()  # type: ignore[union-attr]
        assert tokens[int(number.replace(",", ""))] == int(held.replace(",", ""))


def test_comparison_table_has_the_numbers_of_the_files(written: Written) -> None:
    _, out = written
    content = parts_of(out)
    whole, tried = tables(out / "figures" / "comparison_table.md")
    best = content["simulations"][content["recommendation"]["simulation"]]
    groups = compared_tables(content["about"]["epochs"])
    assert [title for title, _ in groups] == [cells[0] for cells in whole[2:] if not any(cells[1:])]
    assert {"total_steps", "samples_per_second"} <= {row.packed for _, rows in groups for row in rows}
    lines = [cells for cells in whole[2:] if any(cells[1:])]
    for row, cells in zip((row for _, rows in groups for row in rows), lines, strict=True):
        expected = [(run, row.padded) for run in content["padded"]] + [(best, row.packed)]
        for cell, (values, name) in zip(cells[1:], expected, strict=True):
            value = values[name] if name else None
            assert cell == (("yes" if value else "no") if row.kind == "fits" else format_number(row.kind, value))
    for one, cells in zip(content["simulations"], tried[2:], strict=True):
        assert cells[0] == format_number("count", one["packing_length"])
        for cell, column in zip(cells[2:], SIMULATED, strict=True):
            value = one[column.name]
            share = f" ({format_number('percent', one[column.share])})" if column.share else ""
            text = ("yes" if value else "no") if column.kind == "fits" else format_number(column.kind, value)
            assert cell == text + share


def test_memory_table_has_the_numbers_of_the_files(written: Written) -> None:
    _, out = written
    report = parts_of(out)["memory"]
    parts, *others = tables(out / "figures" / "memory_estimates.md")
    sizes = [row[1] for row in parts[2:]]
    assert len(parts[0]) == 3 + len(report["beside"])
    assert sizes == [gib(part["bytes"]) for part in report["estimate"]["parts"]] + [gib(report["estimate"]["total"])]
    assert [row[2] for row in others[0][2:]] == [gib(size) for size in report["vision_total"].values()]
    if report["savings"]:
        assert [row[2] for row in others[1][2:]] == [gib(one["bytes"]) for one in report["savings"]]
        assert [row[3] for row in others[1][2:]] == [gib(one["total_after"]) for one in report["savings"]]
    needs = [part["bytes"] for section in report["host"].values() for part in section["parts"]]
    assert [row[2] for row in others[-1][2:]] == [memory(size) for size in needs]


def test_config_is_the_same_in_yaml_json_and_page(written: Written) -> None:
    made, out = written
    text = (out / "recommended.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert config == json_value(made.study.recommendation.config)
    assert config == parts_of(out)["recommendation"]["config"]
    page = read_page(out / "report.html")
    [shown] = [one for one in page.all("pre") if one.attributes.get("id") == "config-text"]
    assert shown.text == text
