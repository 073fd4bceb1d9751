"""The folder of a study: whole or untouched, replaced when it is a study's, refused when it is somebody else's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import studies
from markupsafe import Markup
from pages import Page
from PIL import Image
from study_parts import Made

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.reports import figures
from packtrain.reports.samples import SampleChunk, SampleChunks
from packtrain.reports.study_content import study_content
from packtrain.reports.study_files import FILES, write_study
from packtrain.reports.study_page import render_page, sweep_charts

Written = tuple[Made, Path]


class Failing:
    """Samples that cannot be read to their end."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def chunks(self) -> Iterator[SampleChunk]:
        yield from self._made.samples.chunks()
        raise OSError("the disk is gone")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_there_and_nothing_else(written: Written) -> None:
    assert set(contents(written[1])) == set(FILES)


def test_figures_are_pictures_with_something_on_them(written: Written) -> None:
    for name in ("token_distribution", "packing_efficiency"):
        with Image.open(written[1] / "figures" / f"{name}.png") as image:
            assert image.width >= 1200
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_figures_show_tokens_by_modality_and_the_charts_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Markup] = {}
    monkeypatch.setattr(figures._Canvas, "chart", lambda self, chart, *_: drawn.update({chart.title: chart.svg}))
    study = replace(
        studies.lvis(2_000).study,
        dataset=replace(studies.lvis(2_000).study.dataset, modality_tokens={"text": 730, "image": 270}),
    )
    figures.draw_distribution(study, tmp_path / "one.png")
    assert ">Text  73.0 %<" in drawn["Tokens by modality"]
    assert drawn["Tokens by source"].count("<rect") == len(study.dataset.by_source)
    drawn.clear()
    figures.draw_efficiency(study, tmp_path / "two.png")
    page = Page(render_page(study, study_content(study), ""))
    marks = [{title.text for title in Page(str(svg)).all("title")} for svg in drawn.values()]
    assert len(marks) == 4
    assert all(found and found <= {title.text for title in page.all("title")} for found in marks)


def test_what_is_recommended_is_seen_where_another_does_not_fit() -> None:
    """At one length, with and without a limit that makes it fit: both marks are there, neither over the other."""
    made = studies.lvis(2_000).study
    best = made.simulations[made.recommendation.simulation]
    limited = replace(best, limits={"max_images_per_pack": 9}, fits=True)
    found = (*(replace(one, fits=False) for one in made.simulations if not one.limits), limited)
    study = replace(
        made, simulations=found, recommendation=replace(made.recommendation, simulation=len(found) - 1, packing=True)
    )
    charts = sweep_charts(study)
    assert len(charts) == 4
    for chart in charts:
        circles = [one.attributes for one in Page(str(chart.svg)).all("circle")]
        [ring] = [at for at, one in enumerate(circles) if one["class"].startswith("ring")]
        own = circles[ring - 1]
        [hollow] = [one for one in circles[:ring] if one["cx"] == own["cx"] and "hollow" in one["class"]]
        assert "hollow" not in own["class"]
        assert float(own["r"]) < float(hollow["r"]), "the mark itself is seen inside what does not fit"
        assert float(circles[ring]["r"]) > 1.5 * float(hollow["r"])


def test_same_study_gives_the_same_bytes(hostile: Written, tmp_path: Path) -> None:
    made, out = hostile
    again = write_study(made.study, made.samples, tmp_path / out.name)
    found = contents(tmp_path / out.name)
    places = str(tmp_path).encode(), str(out.parent).encode()  # the commands name the folder
    assert {name: data.replace(*places) for name, data in found.items()} == contents(out)
    assert again["report.html"] == tmp_path / out.name / "report.html"


def test_an_earlier_study_is_replaced(tmp_path: Path) -> None:
    made = studies.single()
    write_study(made.study, made.samples, tmp_path)
    write_study(replace(made.study, model="another"), made.samples, tmp_path)
    assert set(contents(tmp_path)) == set(FILES)
    assert json.loads((tmp_path / "recommendations.json").read_text())["about"]["model"] == "another"


@pytest.mark.parametrize("name", ["thesis.txt", "figures/holiday.png", "report.html", "dataset_stats.json"])
def test_a_folder_with_other_files_is_not_touched(name: str, tmp_path: Path) -> None:
    made = studies.single()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": true}')
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=name):
        write_study(made.study, made.samples, tmp_path)
    assert contents(tmp_path) == before
    write_study(made.study, made.samples, tmp_path, overwrite=True)
    after = contents(tmp_path)
    assert set(after) == {*FILES, name}
    assert name in FILES or after[name] == before[name], "what has another name is never deleted"


def test_a_failure_leaves_the_earlier_study_as_it_was(tmp_path: Path) -> None:
    made = studies.single()
    write_study(made.study, made.samples, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        write_study(replace(made.study, model="another"), Failing(made), tmp_path)
    assert contents(tmp_path) == before


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    made = studies.single()
    write_study(made.study, made.samples, tmp_path)
    (tmp_path / ".study.12345.tmp").mkdir()
    (tmp_path / ".study.12345.tmp" / "sample_stats.jsonl").write_text("half a li")
    write_study(made.study, made.samples, tmp_path)
    assert set(contents(tmp_path)) == set(FILES)


def test_samples_of_another_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="3,000 samples"):
        write_study(studies.lvis(3000).study, studies.single().samples, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    made = studies.single()
    with pytest.raises(ConfigError, match="is a file"):
        write_study(made.study, SampleChunks(()), tmp_path / "out")
