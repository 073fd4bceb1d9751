"""The light tokenizer gives the ids that transformers gives, whatever a folder's files say about added tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaLimits, Message, Record, Text
from packtrain.families import tiny
from packtrain.families.encoder import RecordEncoder
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.families.tokenizer import LightTokenizer

FRAGMENTS = (
    *(
        "The circle",
        "red",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "é",
        "e\u0301",
        "ﬁ",
        "İ",
        "北京",
        "한국어",
        "🙂",
        "👩‍👩‍👧",
        "🦄",
    ),
    *("\u2028", "\u00a0", "\ufeff", "\u200b", "\x00", "[INST]", "</s>", "<s>", "<b>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<end_of_turn>", "<think>", "don't", "12345", "...", "x" * 50, "ſ", "ß", "\U0001f1e9\U0001f1ea"),
)


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["", " ", *("".join(draw.choices(FRAGMENTS, k=draw.randint(1, 12))) for _ in range(count))]


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def changed(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> Path:
    path = folder / name
    merged = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return folder


def token_texts(tokenizer: LightTokenizer, ids: list[int]) -> list[str]:
    return [tokenizer._tokenizer.id_to_token(i) for i in ids]


@pytest.mark.contract
@pytest.mark.parametrize("family", tiny.tiny_families())
def test_the_ids_of_every_tiny_folder(family: str, tmp_path: Path) -> None:
    folder = tiny.write(family, tmp_path)
    light, real = LightTokenizer(read_settings(folder)), auto_tokenizer(folder)
    different: set[int] = set()
    for text in texts(150):
        for special in (True, False):
            ids = real(text, add_special_tokens=special)["input_ids"]
            assert light.encode(text, special=special).ids == ids, repr(text)
            different.update(ids)
    assert len(different) > 60
    batch = texts(20, seed=1)
    assert [found.ids for found in light.encode_batch(batch, special=True)] == real(batch)["input_ids"]


@pytest.mark.contract
@pytest.mark.parametrize("eos", [None, True, False])
@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_what_the_config_says_about_bos_and_eos(
    family: str, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    """A tokenizer.json has its own rule for what is put around a text, and transformers follows that one."""
    given = {name: value for name, value in (("add_bos_token", bos), ("add_eos_token", eos)) if value is not None}
    folder = changed(tiny.write(family, tmp_path), **given)
    light, real = LightTokenizer(read_settings(folder)), auto_tokenizer(folder)
    for text in texts(10):
        assert light.encode(text, special=True).ids == real(text)["input_ids"]


def token(content: str, **flags: bool) -> dict[str, Any]:
    defaults = {"lstrip": False, "rstrip": False, "single_word": False, "special": True, "normalized": False}
    return {"content": content, **defaults, **flags}


CONFIGS: dict[str, dict[str, Any]] = {
    "redeclared with other flags": {"added_tokens_decoder": {"1500": token("<s>", lstrip=True, rstrip=True)}},
    "new, stripping": {
        "added_tokens_decoder": {
            "9000": token("<new>", lstrip=True),
            "9001": token("<word>", rstrip=True, special=False, normalized=True, single_word=True),
        }
    },
    "extra, listed": {"extra_special_tokens": ["<x1>", "<x2>"]},
    "extra, with flags": {"extra_special_tokens": [{"__type": "AddedToken", **token("<x1>", lstrip=True)}]},
    "extra, by name": {"extra_special_tokens": {"foo_token": "<foo>", "bar": "<bar>"}},
    "additional": {"extra_special_tokens": None, "additional_special_tokens": ["<y1>"]},
    "named, with flags": {"mask_token": {"__type": "AddedToken", **token("<mask>", lstrip=True, rstrip=True)}},
    "named": {"mask_token": "<mask>", "sep_token": "<sep>"},
    "a word": {"mask_token": "circle"},
    "special tokens split": {"split_special_tokens": True},
}
TOKENS = "a <s> b <new> c <word>d <word> e<x1> <x2>f  <y1> <foo> <bar>\n<mask> <sep> circle <mask></s>"


@pytest.mark.contract
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_that_only_the_config_knows(name: str, tmp_path: Path) -> None:
    plain = LightTokenizer(read_settings(tiny.write("mistral", tmp_path))).encode(TOKENS, special=True).ids
    folder = changed(tmp_path, **CONFIGS[name])
    light, real = LightTokenizer(read_settings(folder)), auto_tokenizer(folder)
    ids = light.encode(TOKENS, special=True).ids
    assert ids != plain, "the config changes nothing, so nothing is tested"
    assert ids == real(TOKENS)["input_ids"]
    assert token_texts(light, ids) == real.convert_ids_to_tokens(ids)


def test_a_folder_without_a_tokenizer_file(tmp_path: Path) -> None:
    (tiny.write("llama", tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        LightTokenizer(read_settings(tmp_path))


# ---- add_eos


def with_eos(folder: Path) -> RecordEncoder:
    settings = read_settings(folder)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    return RecordEncoder(settings, family, add_eos=True)


def ends(encoder: RecordEncoder, record: Record) -> int:
    """How many end tokens stand at the end, white space aside; and the cost agrees with the ids."""
    layout = encoder.layout(record, ())
    ids = encoder.tokenizer.encode(layout.text, special=layout.special).ids
    assert encoder.cost(record, ())[0].tokens == len(ids)
    count = 0
    for i in reversed(ids):
        if i == encoder.tokenizer.eos_id:
            count += 1
        elif encoder.tokenizer._tokenizer.decode([i]).strip():
            break
    return count


def chat(*texts: str) -> Record:
    roles = ("user", "assistant")
    messages = [Message(role=roles[n % 2], parts=(Text(text),)) for n, text in enumerate(texts)]
    return Record(id="r", origin="here:1", source="s", messages=tuple(messages))


def plain(text: str) -> Record:
    messages = (Message(role="assistant", parts=(Text(text),)),)
    return Record(id="r", origin="here:1", source="s", messages=messages, plain=True)


def appending(folder: Path) -> Path:
    """The folder with a tokenizer that appends the end token itself."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    eos = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    added = next(t for t in content["added_tokens"] if t["content"] == eos)
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": eos, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {eos: {"id": eos, "ids": [added["id"]], "tokens": [eos]}},
    }
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama"])
def test_a_template_that_ends_with_it(family: str, tmp_path: Path) -> None:
    assert ends(with_eos(tiny.write(family, tmp_path)), chat("one", "two")) == 1


def test_a_template_that_does_not(tmp_path: Path) -> None:
    folder = tiny.write("gemma3_text", tmp_path)
    assert ends(with_eos(folder), chat("one", "two")) == 1
    settings = read_settings(folder)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    assert ends(RecordEncoder(settings, family), chat("one", "two")) == 0, "the template itself writes the end token"


def test_the_end_token_after_an_answer_carries_loss(tmp_path: Path) -> None:
    folder = tiny.write("qwen2", tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}")
    settings = read_settings(folder)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    without = RecordEncoder(settings, family).cost(chat("one", "two"), ())[0]
    cost = with_eos(folder).cost(chat("one", "two"), ())[0]
    assert (cost.tokens, cost.supervised_tokens) == (without.tokens + 1, without.supervised_tokens + 1)


@pytest.mark.parametrize("text", ["one two", "one two\n", "one two<|im_end|>", "one two<|im_end|>\n"])
def test_plain_text(text: str, tmp_path: Path) -> None:
    assert ends(with_eos(tiny.write("qwen2", tmp_path)), plain(text)) == 1


def test_a_tokenizer_that_appends_it(tmp_path: Path) -> None:
    encoder = with_eos(appending(tiny.write("qwen2", tmp_path)))
    assert encoder.tokenizer.appends_eos
    assert ends(encoder, plain("one two")) == 1
    assert ends(encoder, chat("one", "two")) == 1


def test_a_tokenizer_that_appends_it_only_where_it_is_asked_to(tmp_path: Path) -> None:
    """A chat is tokenized without the tokenizer's own additions, so there the end token is still missing."""
    encoder = with_eos(appending(tiny.write("gemma3_text", tmp_path)))
    assert encoder.tokenizer.appends_eos
    assert ends(encoder, plain("one two")) == 1
    assert ends(encoder, chat("one", "two")) == 1


def test_without_an_end_token(tmp_path: Path) -> None:
    folder = tiny.write("qwen2", tmp_path)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="EOS token"):
        with_eos(folder)
