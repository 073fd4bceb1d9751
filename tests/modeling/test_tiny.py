"""The tiny models load, render, encode and run as real ones do, and are the same bytes wherever they are written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.core.errors import ConfigError
from packtrain.families import tiny
from packtrain.families.model_folder import known_as, resolve_model
from packtrain.modeling.load import build_model

TEXT_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text", "nanovlm")
VISION_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "idefics3",
    "smolvlm",
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "gemma3",
)
VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
QUICK = ("qwen2_5_vl", "llama")  # the forward passes that run on every change; the others are in the full suite
SAMPLE = "The 12 red circles, naïve café; 北京 🙂\n\tdef f(x): return x*2  # don't\r\nShe said 'we'll see'..."
CODE = "def area(width, height):\n    return width * height\n\n\nprint(area(12, 30))\n| circles | 12 |\n"
IMAGE_TOKENS = {  # of a 60 x 40 picture: by hand from each family's geometry
    "qwen2_vl": 2 * 3,  # 56 x 84 pixels, the least allowed
    "qwen2_5_vl": 2 * 3,
    "qwen3_vl": 7 * 10,  # 224 x 320
    "idefics3": (3 * 4 + 1) * 169,
    "smolvlm": (3 * 4 + 1) * 64,
    "llava": 576,
    "llava_next": 576 + 24 * (36 + 1),  # a canvas of 24 x 48, padding of 6 cut off at both sides, a newline each row
    "llava_onevision": 729 + 19 * (27 + 1),  # a canvas of 27 x 27, padding of 4 cut off above and below
    "internvl": (2 * 3 + 1) * 256,
    "gemma3": 64,
}
ADDS_BOS = ("idefics3", "llava", "llava_next", "gemma3", "gemma3_text", "llama", "mistral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny.write(family, root / family) for family in tiny.tiny_families()}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def quick_or_full(families: tuple[str, ...]) -> list[Any]:
    return [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in families]


def load(folder: Path) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    return (AutoProcessor if (folder / "processor_config.json").exists() else AutoTokenizer).from_pretrained(folder)


def tokenizer_of(loaded: Any) -> Any:
    return getattr(loaded, "tokenizer", loaded)


def picture(seed: int = 0, width: int = 60, height: int = 40) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def conversation(*, image: Any = None) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "How many circles are in the picture?"}
    asked = [{"type": "image", "image": image}, text] if image is not None else [text]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": [{"type": "text", "text": "Two."}]}]


def encode(loaded: Any, messages: list[dict[str, Any]]) -> Any:
    return loaded.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def digest(root: Path) -> str:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert files
    return hashlib.sha256(b"".join(str(p.relative_to(root)).encode() + p.read_bytes() for p in files)).hexdigest()


def test_every_promised_family_has_a_tiny_model() -> None:
    assert set(tiny.tiny_families()) == {*VISION_FAMILIES, *TEXT_FAMILIES}


@pytest.mark.contract
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_processor_loads_and_encodes_an_image(family: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    processor = load(folders[family])
    config = json.loads((folders[family] / "config.json").read_text())
    with_image = encode(processor, conversation(image=picture()))
    without = encode(processor, conversation())
    assert with_image["pixel_values"].numel() > 0
    token = config.get("image_token_id", config.get("image_token_index"))
    assert token == processor.tokenizer.convert_tokens_to_ids(processor.tokenizer.convert_ids_to_tokens(token))
    assert (with_image["input_ids"] == token).sum() == IMAGE_TOKENS[family]
    assert (without["input_ids"] == token).sum() == 0


@pytest.mark.contract
@pytest.mark.parametrize("family", tiny.tiny_families())
def test_transformers_tokenizes_like_the_bare_tokenizer_file(family: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    loaded = tokenizer_of(load(folders[family]))
    bare = Tokenizer.from_file(str(folders[family] / "tokenizer.json"))
    special = "".join(token for token in loaded.all_special_tokens)
    for text in (SAMPLE, CODE, special + "a" + special, "", " ", "<think>no</think> [INST]"):
        for add in (True, False):
            assert loaded(text, add_special_tokens=add)["input_ids"] == bare.encode(text, add_special_tokens=add).ids
    assert bare.decode(bare.encode(SAMPLE, add_special_tokens=False).ids) == SAMPLE
    assert len(loaded) == bare.get_vocab_size()
    assert loaded("", add_special_tokens=True)["input_ids"] == ([loaded.bos_token_id] if family in ADDS_BOS else [])


@pytest.mark.parametrize("family", tiny.tiny_families())
def test_merges_happen_and_special_tokens_are_single(family: str, folders: dict[str, Path]) -> None:
    from tokenizers import Tokenizer

    bare = Tokenizer.from_file(str(folders[family] / "tokenizer.json"))
    assert 1000 <= bare.get_vocab_size() <= 2000
    assert max(len(token) for token in bare.encode("There are red circles in the picture.").tokens) > 3
    settings = json.loads((folders[family] / "tokenizer_config.json").read_text())
    named = [value for name, value in settings.items() if name.endswith("_token")]
    assert named
    for token in (*named, *settings["extra_special_tokens"]):
        assert bare.encode(token, add_special_tokens=False).tokens == [token]


@pytest.mark.contract
@pytest.mark.parametrize("family", tiny.tiny_families())
def test_templates_take_strings_and_parts_and_a_system_message(family: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    loaded = load(folders[family])

    def render(messages: list[dict[str, Any]], **more: Any) -> str:
        return str(loaded.apply_chat_template(messages, tokenize=False, **more))

    turns = [("system", "Be brief."), ("user", "How many?"), ("assistant", "Two."), ("user", "And now?")]
    as_text = [{"role": role, "content": text} for role, text in turns]
    as_parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    rendered = render(as_text)
    assert rendered == render(as_parts)
    places = [rendered.index(text) for _, text in turns]
    assert places == sorted(places)
    asked = render(as_text, add_generation_prompt=True)
    assert asked.startswith(rendered)
    assert asked != rendered or "[INST]" in rendered, "only the [INST] style has no words that open an answer"
    assert "Be brief." not in render(as_text[1:])


def test_earlier_reasoning_is_hidden_and_the_last_is_kept(folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    tokenizer = load(folders["qwen3"])
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nYes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>\nsecond\n</think>\n\nNo."},
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert "first" not in whole
    assert "assistant\nYes.<|im_end|>" in whole
    assert "second" in whole
    assert "first" in tokenizer.apply_chat_template(turns[:2], tokenize=False)


def test_llava_templates_show_pictures_first(folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    rendered = load(folders["llava"]).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert rendered == "USER: <image>\nWhat is this? "


@pytest.mark.contract
@pytest.mark.parametrize("family", quick_or_full(tuple(f for f in tiny.tiny_families() if f != "nanovlm")))
def test_forward_pass_is_finite_and_sees_the_image(family: str, folders: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    loaded, model = load(folders[family]), build_model(folders[family])
    sees = family in VISION_FAMILIES
    inputs = [encode(loaded, conversation(image=picture(seed) if sees else None)) for seed in (0, 1)]
    with torch.no_grad():
        logits = [model(**batch).logits for batch in inputs]
    assert torch.isfinite(logits[0]).all()
    assert logits[0].dtype == torch.float32
    assert logits[0].shape == (*inputs[0]["input_ids"].shape, len(tokenizer_of(loaded)))
    assert logits[0].std() > 0.1, "weights are too small for a test to see anything"
    assert torch.equal(inputs[0]["input_ids"], inputs[1]["input_ids"])
    if sees:
        assert not torch.allclose(logits[0][:, -1], logits[1][:, -1], atol=1e-3), "another picture changes nothing"
    else:
        assert torch.equal(logits[0], logits[1])


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_video_forward_pass(family: str, folders: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    from transformers.video_utils import VideoMetadata

    processor, model = load(folders[family]), build_model(folders[family])
    frames = np.random.default_rng(0).integers(0, 256, (16, 64, 96, 3), dtype=np.uint8)
    metadata = VideoMetadata(
        total_num_frames=16, fps=4.0, duration=4.0, width=96, height=64, frames_indices=list(range(16))
    )
    parts = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    batch = processor(text=[text], videos=[[frames]], video_metadata=[[metadata]], return_tensors="pt")
    assert batch["input_ids"].shape[1] > 30
    batch.pop("video_metadata", None)
    with torch.no_grad():
        assert torch.isfinite(model(**batch).logits).all()


def test_models_depend_on_the_seed_only(folders: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights = [build_model(folders["llama"], seed=seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.rand(3), expected), "building a model must not move the caller's random numbers"


def test_bytes_are_the_same_in_another_process_without_torch(folders: dict[str, Path], tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from packtrain.families import tiny\n"
        "for family in tiny.tiny_families(): tiny.write(family, Path(sys.argv[1]) / family)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "17", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert digest(tmp_path) == digest(folders["llama"].parent)


def test_unknown_family_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiny:qwen3_vl'"):
        tiny.write("qwen3-vl", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'tiny:qwen3_vl'"):
        resolve_model("tiny:qwen3vl", tmp_path)


def test_nanovlm_has_no_model_yet(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="work without the model"):
        build_model(folders["nanovlm"])


def test_building_from_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_model(tmp_path)


def test_resolve_writes_a_tiny_model_once(tmp_path: Path, folders: dict[str, Path]) -> None:
    cache = tmp_path / "cache"
    folder = resolve_model("tiny:qwen2", cache)
    assert digest(folder) == digest(folders["qwen2"])
    stamp = (folder / "config.json").stat().st_mtime_ns
    (folder / "mark").touch()
    assert resolve_model("tiny:qwen2", cache) == folder
    assert (folder / "mark").exists()
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert resolve_model("tiny:qwen3", cache) != folder
    assert sorted(path.name[:10] for path in cache.iterdir()) == ["tiny-qwen2", "tiny-qwen3"]


def test_a_resolved_folder_is_known_by_its_name_again(tmp_path: Path) -> None:
    assert known_as(resolve_model("tiny:qwen3_vl", tmp_path)) == "tiny:qwen3_vl"
    snapshot = tmp_path / "models--Qwen--Qwen3-VL-2B-Instruct" / "snapshots" / "89fe1c0"
    assert known_as(snapshot) == "Qwen/Qwen3-VL-2B-Instruct"
    for own in ("tiny-mine-0123456789ab", "model", "models--a--b"):
        assert known_as(tmp_path / own) == str(tmp_path / own)
    assert known_as("") == ""


def test_resolve_never_reuses_a_folder_of_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model("tiny:qwen2", tmp_path)
    original = tiny._files
    monkeypatch.setattr(tiny, "_files", lambda family: {**original(family), "config.json": b"{}"})
    second = resolve_model("tiny:qwen2", tmp_path)
    assert first != second
    assert (second / "config.json").read_bytes() == b"{}"


def test_resolve_survives_another_process_being_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(source: str | Path, target: str | Path) -> None:
        tiny.write("llama", Path(target))
        raise OSError("directory not empty")

    monkeypatch.setattr(os, "replace", beaten)
    folder = resolve_model("tiny:llama", tmp_path)
    assert (folder / "tokenizer.json").is_file()
    assert list(tmp_path.iterdir()) == [folder]


def test_resolve_leaves_nothing_behind_when_it_cannot_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str | Path, target: str | Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        resolve_model("tiny:llama", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resolve_returns_local_folders_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="no folder of that name"):
        resolve_model(str(tmp_path / "absent"), tmp_path)
    with pytest.raises(ConfigError, match="did you mean tiny:qwen3_vl"):
        resolve_model("qwen3_vl", tmp_path)


def test_hub_models_come_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    import huggingface_hub

    asked: list[str] = []

    def downloaded(name: str, *, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    assert resolve_model("org/model-2B", tmp_path / "cache") == tmp_path
    name, *patterns = asked
    assert name == "org/model-2B"
    for wanted in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "processor_config.json"):
        assert any(fnmatch.fnmatch(wanted, pattern) for pattern in patterns)
    for weights in ("model.safetensors", "pytorch_model.bin", "model.gguf", "model.onnx"):
        assert not any(fnmatch.fnmatch(weights, pattern) for pattern in patterns)


def test_a_hub_that_cannot_be_reached_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(name: str, *, allow_patterns: list[str]) -> str:
        raise OSError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"(?s)org/model.*cannot reach the hub.*local model folder.*tiny:"):
        resolve_model("org/model", tmp_path)
