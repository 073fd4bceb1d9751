"""measure, plan, pack, inspect and verify on a model without a family; what each says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.app.inspect_batch import inspect_batch
from packtrain.app.inspect_plan import open_plan
from packtrain.app.measure import measure_outcome
from packtrain.app.pack import pack
from packtrain.app.plan import plan
from packtrain.app.verify import verify
from packtrain.bench.families import mixed_records
from packtrain.bench.unlisted_models import write_unlisted
from packtrain.core.errors import ConfigError, in_one_line, install_hint
from packtrain.delivery.encode.from_transformers import ON_PROOF, outer_shell, packing_notes
from packtrain.families.settings import read_settings
from packtrain.modeling.load import build_model
from packtrain.packing.packing_config import PackingConfig
from packtrain.predicting.shapes import context_length, shape_from_config

MODEL = "vipllava"
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_unlisted(MODEL, tmp_path / "model")


def test_from_costs_to_the_batch(folder: Path, tmp_path: Path) -> None:
    outcome = measure_outcome(mixed_records(tmp_path), model=str(folder), out=tmp_path / "costs", workers=1, check=0)
    assert ON_PROOF in outcome.notes
    planned = plan(outcome.table, out=tmp_path / "report", gpu="h200")
    assert ON_PROOF in planned.notes
    assert any("read by its usual keys" in note for note in planned.study.notes)
    pack(outcome.table, PackingConfig(packing_length=512, shuffle=False), tmp_path / "plan")
    seen = inspect_batch(*open_plan(tmp_path / "plan"), 0, cache=tmp_path / "rows")
    assert {len(sample.media) for sample in seen.samples} == {0, 1, 2}
    for sample in seen.samples:
        own = [token for token in seen.tokens if token.sample == sample.number and token.kind == "image"]
        if len(sample.media) == 1:
            assert [medium.tokens for medium in sample.media] == [len(own)]
            assert {token.medium for token in own} == {1}
        elif sample.media:  # only the processor knows which token is of which
            assert [medium.tokens for medium in sample.media] == [None, None]
            assert own
            assert {token.medium for token in own} == {None}


def test_a_model_with_weights_is_verified_on_data(folder: Path, tmp_path: Path) -> None:
    build_model(str(folder)).save_pretrained(folder)
    report = verify(str(folder), data=mixed_records(tmp_path), device="cpu", samples=3)
    assert report.passed
    assert any("2 images" in sample for sample in report.samples)


def test_videos_of_it_go_to_the_ledger(folder: Path, tmp_path: Path) -> None:
    data = mixed_records(tmp_path)
    video = {"role": "user", "content": [{"type": "video", "video": "0.mp4"}, {"type": "text", "text": "What?"}]}
    film = {"id": "film", "messages": [video, {"role": "assistant", "content": "A film."}]}
    _write_video(tmp_path / "0.mp4")
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps(film) + "\n")
    table = measure_outcome(data, model=str(folder), out=tmp_path / "costs", workers=1, check=0).table
    (entry,) = [json.loads(line) for line in (table.folder / "ledger.jsonl").read_text().splitlines()]
    assert "a video, for a model without a family" in json.dumps(entry)


def _write_video(path: Path) -> None:
    import av
    import numpy as np

    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=4)
        stream.width, stream.height = 64, 64
        for shade in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 30 * shade, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)


def _remote(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "somebodys", "auto_map": {"AutoConfig": "configuration_somebodys.SomebodysConfig"}}
    (folder / "config.json").write_text(json.dumps(config))


def _without(*names: str) -> Any:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


@pytest.mark.parametrize(
    ("change", "found", "way_out"),
    [
        (_remote, "whose code is in its own repository", "newer transformers"),
        (_without("processor_config.json"), "without a processor", "copy the processor's files"),
        (_without("chat_template.jinja"), "about 1 image: the model has no chat template", "put the model's chat_temp"),
        (
            _without("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
            "no tokenizer",
            "copy the tokenizer's files",
        ),
    ],
    ids=["remote code", "no processor", "no template", "no tokenizer"],
)
def test_what_a_folder_lacks_is_said(change: Any, found: str, way_out: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(ConfigError) as refused:
        verify(str(folder), device="cpu")
    assert found in str(refused.value.got)
    assert way_out in refused.value.fix


def test_a_package_that_is_absent_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("\nSomeModel requires the some library.\nYou can install it with pip: `pip install some`.")

    monkeypatch.setattr("transformers.AutoModelForImageTextToText.from_config", absent)
    with pytest.raises(ConfigError) as refused:
        outer_shell(str(folder))
    assert "requires the some library" in str(refused.value.got)
    assert refused.value.fix == "pip install some"


def test_install_hints() -> None:
    assert install_hint(ImportError("no such module", name="timm.models")) == "pip install timm"
    assert install_hint(ImportError("broken")) == "install that package"
    assert not install_hint(ValueError("pip install timm"))
    assert in_one_line(ValueError("\n\nfirst\nsecond")) == "ValueError: first"


def test_a_model_that_only_trains_padded_says_so(tmp_path: Path) -> None:
    settings = read_settings(write_unlisted("lfm2_vl", tmp_path / "model"))
    (note,) = packing_notes(settings)
    assert note.startswith("packtrain trains this model on padded rows only")


def test_shapes_by_other_keys(tmp_path: Path) -> None:
    shape = shape_from_config({"model_type": "unheard", "text_config": {**SIZES, **MOE, "head_dim": 0}})
    assert shape.language.intermediate == MOE["moe_intermediate_size"]
    assert shape.language.head_dim == SIZES["hidden_size"] // SIZES["num_attention_heads"]
    config = {"model_type": "unheard", "text_config": {"max_position_embeddings": 4096}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == 4096
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    with pytest.raises(ConfigError, match="unheard"):
        context_length(tmp_path)
