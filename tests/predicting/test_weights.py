"""Headers of safetensors files give the counts of the models that were saved, and hostile ones do no harm."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import ConfigError
from packtrain.families import tiny
from packtrain.modeling.load import build_model
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.weights import count_weights, part_of, read_header


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int]]], *, size: int = 4) -> None:
    """A file whose tensors are all zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for side in shape:
            elements *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size * elements]}
        end += size * elements
    write_raw(path, json.dumps(header).encode(), data=end)


def write_raw(path: Path, header: bytes, *, length: int | None = None, data: int = 0) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(data))


@pytest.mark.contract
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "internvl"]
)
@pytest.mark.parametrize("shard", [None, "100KB"])
def test_saved_models_are_counted_from_their_files(family: str, shard: str | None, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tiny.write(family, tmp_path / "model")
    from_config = read_shape(folder)
    model = build_model(folder)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (shard is not None)
    shape = read_shape(folder)
    assert shape.counted_from == "weights"
    assert shape.parameters == from_config.parameters
    assert shape.parameters.total == sum(weight.numel() for weight in model.parameters())


def test_files_win_over_the_config(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path)
    write_tensors(
        folder / "model.safetensors", {"model.layers.0.x.weight": ("F32", [5, 7]), "lm_head.weight": ("F32", [3])}
    )
    counts = read_shape(folder).parameters
    assert (counts.layers, counts.head, counts.embedding, counts.total) == (35, 3, 0, 38)


@pytest.mark.parametrize("names", [("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight",)])
def test_a_tied_matrix_is_counted_once_under_whatever_name_it_was_saved(names: tuple[str, ...], tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {name: ("F32", [10, 4]) for name in names})
    counts = count_weights(tmp_path, tied=True)
    assert counts is not None
    assert (counts.embedding, counts.head) == (40, 0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("language_model.model.embed_tokens.weight", "embedding"),
        ("decoder.token_embedding.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("language_model.lm_head.weight", "head"),
        ("decoder.head.weight", "head"),
        ("model.language_model.layers.0.self_attn.q_proj.weight", "layers"),
        ("model.norm.weight", "layers"),
        ("visual.blocks.0.attn.qkv.weight", "vision"),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", "vision"),
        ("vision_tower.head.probe", "vision"),
        ("visual.merger.mlp.0.weight", "projector"),
        ("model.visual.deepstack_merger_list.2.linear_fc1.weight", "projector"),
        ("multi_modal_projector.linear_1.bias", "projector"),
        ("model.image_newline", "projector"),
        ("model.connector.modality_projection.proj.weight", "projector"),
        ("MP.proj.weight", "projector"),
    ],
)
def test_names_of_older_and_newer_checkpoints_fall_into_their_parts(name: str, part: str) -> None:
    assert part_of(name) == part


def test_an_index_without_its_shards_leaves_the_config_to_count(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_shape(folder).counted_from == "config"
    write_tensors(folder / names["a"], {"a": ("F32", [2])})
    assert read_shape(folder).counted_from == "config", "half a model was counted"


def test_quantised_files_leave_the_config_to_count(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path)
    write_tensors(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("U8", [64, 1])}, size=1)
    assert read_shape(folder).counted_from == "config"


HEADERS: dict[str, bytes] = {
    "no json": b"\xff" * 16,
    "cut short": b'{"a": {"dtype": "F32", "sha',
    "a list": b'["a"]',
    "deeply nested": b'{"a":' + b"[" * 100_000,
    "entry is a number": b'{"a": 3}',
    "no shape": b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
    "shape of text": b'{"a": {"dtype": "F32", "shape": ["9"], "data_offsets": [0, 36]}}',
    "negative shape": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "more than the file holds": b'{"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}',
    "claims more than its place": b'{"a": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 64]}}',
    "offsets reversed": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}',
    "endless shape": b'{"a": {"dtype": "F32", "shape": [' + b"9, " * 100_000 + b'9], "data_offsets": [0, 4]}}',
    "unknown type": b'{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_broken_headers_are_refused_with_the_file_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, HEADERS[name], data=64)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        list(read_header(path))


@pytest.mark.parametrize("content", [b"", b"\x01\x02", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 0)])
def test_cut_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="a header within the file"):
        list(read_header(path))


def test_a_huge_claimed_header_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, b"{}", length=2**40)
    with path.open("r+b") as file:
        file.truncate(2**41)  # sparse: the file really is that long
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="a header within the file"):
            list(read_header(path))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": "../x.safetensors"}},
        {"weight_map": {"a": 3, "b": "c"}},
    ],
)
def test_broken_indexes_are_refused(index: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        count_weights(tmp_path, tied=False)
