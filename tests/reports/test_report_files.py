"""The folder of a study: whole or untouched, replaced when it is a study's, refused when it is somebody else's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import studies
from pages import Page
from PIL import Image
from study_parts import Made

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.reports import figures
from packtrain.reports.study_files import FILES, SampleChunk, write_study
from packtrain.reports.study_page import sweep_charts, sweeps

Written = tuple[Made, Path]


def failing(samples: Iterable[SampleChunk]) -> Iterator[SampleChunk]:
    """Samples that cannot be read to their end."""
    yield from samples
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


def test_figures_show_tokens_by_modality_and_the_numbers_of_the_page(tmp_path: Path) -> None:
    study = replace(
        studies.lvis(2_000).study,
        dataset=replace(studies.lvis(2_000).study.dataset, modality_tokens={"text": 730, "image": 270}),
    )
    figure = figures.draw_distribution(study, tmp_path / "one.png")
    drawn = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert [text.get_text() for text in drawn["Tokens by modality"].texts] == ["Text  73.0 %", "Image  27.0 %"]
    assert len(drawn["Tokens by source"].patches) == len(study.dataset.by_source)
    histogram = study.dataset.histograms["tokens"]
    assert [bar.get_height() for bar in drawn["Tokens per sample"].patches] == list(histogram.counts)
    figure = figures.draw_efficiency(study, tmp_path / "two.png")
    assert len(figure.axes) == len(sweeps(study)) == 4
    for axes, one, chart in zip(figure.axes, sweeps(study), sweep_charts(study), strict=True):
        points = {tuple(point) for marks in axes.collections for point in np.asarray(marks.get_offsets()).tolist()}
        top = one.top if one.top is not None else math.inf
        assert points == {(each.packing_length, min(one.value(each), top)) for each in study.simulations}
        assert axes.get_title(loc="left").startswith(chart.title)
        assert str(chart.svg).count("<title>") == len(study.simulations)


def test_figures_mark_what_is_recommended_and_what_does_not_fit(tmp_path: Path) -> None:
    made = studies.lvis(2_000).study
    chosen, other, *_ = made.simulations
    simulations = tuple(replace(one, fits=one is not other) for one in made.simulations)
    study = replace(
        made, simulations=simulations, recommendation=replace(made.recommendation, simulation=0, packing=True)
    )
    figure = figures.draw_efficiency(study, tmp_path / "one.png")
    for axes, one in zip(figure.axes, sweeps(study), strict=True):
        marks = [part for part in axes.collections if len(part.get_offsets())]
        [ring] = [part for part in marks if not len(part.get_facecolors())]
        others = [part for part in marks if part is not ring]
        assert np.asarray(ring.get_offsets()).tolist() == [[chosen.packing_length, one.value(chosen)]]
        assert ring.get_zorder() > max(part.get_zorder() for part in others)
        assert ring.get_sizes()[0] >= 2**2 * max(part.get_sizes()[0] for part in others), "twice as wide"
        white = {
            int(x)
            for part in others
            for (x, _), color in zip(np.asarray(part.get_offsets()), part.get_facecolors(), strict=True)
            if tuple(color) == (1, 1, 1, 1)
        }
        assert white == {other.packing_length}
        if one.top is not None:
            assert axes.get_ylim()[1] == one.top
        across = [line for line in axes.lines if len(line.get_ydata()) == 2 and len(set(line.get_ydata())) == 1]
        levels = [line.get_ydata()[0] for line in across if set(line.get_xdata()) == {0, 1}]
        assert levels == ([study.memory.usable_bytes / 2**30] if one.title == "Memory" else [])
    [title] = [legend.get_title().get_text() for legend in figure.legends]
    assert "recommended" in title
    assert "hollow: does not fit" in title
    [fill] = [axes for axes, one in zip(figure.axes, sweeps(study), strict=True) if one.title == "Fill"]
    assert fill.get_ylim()[1] == 1.0


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
    write_study(replace(made.study, model="another"), made.samples, tmp_path, overwrite=True)
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
        write_study(replace(made.study, model="another"), failing(made.samples), tmp_path, overwrite=True)
    assert contents(tmp_path) == before


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    made = studies.single()
    write_study(made.study, made.samples, tmp_path)
    (tmp_path / ".study.12345.tmp").mkdir()
    (tmp_path / ".study.12345.tmp" / "sample_stats.jsonl").write_text("half a li")
    write_study(made.study, made.samples, tmp_path, overwrite=True)
    assert set(contents(tmp_path)) == set(FILES)


def test_samples_of_another_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="3,000 samples"):
        write_study(studies.lvis(3000).study, studies.single().samples, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    made = studies.single()
    with pytest.raises(ConfigError, match="is a file"):
        write_study(made.study, (), tmp_path / "out")
