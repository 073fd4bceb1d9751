"""Templates and tokenizers as they are found in the wild, each with the fault that it once brought to light."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaHeader, MediaLimits, MediaRef, Message, Record, Text
from packtrain.delivery.encode import from_transformers as finishing
from packtrain.delivery.encode.from_transformers import finished_tokenizer
from packtrain.families.encoder import RecordEncoder
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.families.tiny import write

PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL_V3 = (
    "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if m is sameas last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)
TRIMMED_GENERATION = (
    "{% macro answer(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ answer(m) | trim if m.role == 'assistant' else m.content }}{{ '<|im_end|>\n' }}{% endfor %}"
)


def chat(*texts: str, system: str | None = None) -> Record:
    turns = [Message(role="system", parts=(Text(system),))] if system is not None else []
    roles = ("user", "assistant") * len(texts)
    turns += [Message(role=role, parts=(Text(text),)) for role, text in zip(roles, texts, strict=False)]
    return Record(id="1", origin="x:1", source="x", messages=tuple(turns))


def encoder(folder: Path, tokenizer: str | None = None, **options: Any) -> RecordEncoder:
    settings = read_settings(folder, tokenizer=tokenizer)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    return RecordEncoder(settings, family, **options)


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def supervised(made: RecordEncoder, record: Record) -> list[str]:
    layout = made.layouter.layout(record, ())
    assert layout.supervised is not None
    return [layout.text[start:end] for start, end in layout.supervised]


def test_a_closing_never_reaches_into_the_next_special_token(tmp_path: Path) -> None:
    """Phi-3: both what follows a turn and what ends the conversation begin with the same two characters."""
    folder = write("qwen2", tmp_path)
    special = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
    edited(folder, "tokenizer_config.json", lambda c: c.update(eos_token="<|endoftext|>", extra_special_tokens=special))
    (folder / "chat_template.jinja").write_text(PHI3)
    assert supervised(encoder(folder), chat("One", "Yes", "Two", "No")) == ["Yes<|end|>", "No<|end|>"]


def test_a_template_that_trims_answers_and_moves_the_system_text(tmp_path: Path) -> None:
    folder = write("mistral", tmp_path)
    (folder / "chat_template.jinja").write_text(MISTRAL_V3)
    record = chat("Hi", " Hello", "Bye", " See you ", system="Be brief.")
    assert [text.strip() for text in supervised(encoder(folder), record)] == ["Hello</s>", "See you</s>"]


def test_marks_do_not_change_what_a_template_computes(tmp_path: Path) -> None:
    folder = write("qwen2", tmp_path)
    (folder / "chat_template.jinja").write_text(TRIMMED_GENERATION)
    made = encoder(folder)
    text = made.layouter.layout(chat("a", "  Hi \n"), ()).text
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    assert supervised(made, chat("a", "  Hi \n"))[0].endswith("Hi<|im_end|>")


def test_blanks_count_where_offsets_are_trimmed(tmp_path: Path) -> None:
    """GPT-2's post-processor gives white space no offsets; the ids are the same."""
    counts = []
    for trim in (False, True):
        folder = write("qwen2", tmp_path / str(trim))
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim, "use_regex": False}
        edited(folder, "tokenizer.json", lambda c, p=byte_level: c.update(post_processor=p))
        counts.append(encoder(folder).cost(chat("a", " Hi"), ())[0].supervised_tokens)
    assert counts[0] == counts[1]


def test_a_placeholder_made_of_two_texts_is_seen_by_both_paths(tmp_path: Path) -> None:
    made = encoder(write("qwen2_5_vl", tmp_path))
    picture = Media("image", MediaRef(name=""))
    parts = (picture, Text("<|image"), Text("_pad|>"))
    record = Record(
        id="1",
        origin="x:1",
        source="x",
        messages=(Message(role="user", parts=parts), Message(role="assistant", parts=(Text("a"),))),
    )
    header = MediaHeader(kind="image", width=56, height=56)
    for _ in range(made.skeletons.patience + 2):  # the slow path first, then the fast one
        with pytest.raises(RecordError, match="do not match the media"):
            made.cost(record, [header])


def test_a_token_that_stands_for_embeddings_may_not_be_typed(tmp_path: Path) -> None:
    made = encoder(write("gemma3", tmp_path))
    with pytest.raises(RecordError, match="do not match the media"):
        made.cost(chat("what is <image_soft_token>?", "a token"), ())


def test_an_appended_end_token_carries_loss_and_the_line_break_before_it_does_not(tmp_path: Path) -> None:
    folder = write("gemma3_text", tmp_path)
    without, with_end = (encoder(folder, add_eos=add).cost(chat("a", "b"), ())[0] for add in (False, True))
    assert with_end.tokens - without.tokens == with_end.supervised_tokens - without.supervised_tokens == 1


@pytest.mark.contract
@pytest.mark.parametrize("name", [pytest.param("LlamaTokenizer", marks=pytest.mark.more), "GPT2Tokenizer"])
def test_tokenizers_that_rebuild_themselves_are_saved_as_they_end_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These classes take the vocabulary from tokenizer.json and bring their own rules."""
    transformers = pytest.importorskip("transformers")
    if name == "GPT2Tokenizer":  # one of them without the process, which takes long to load transformers
        monkeypatch.setattr(finishing, "in_another_process", lambda *arguments: finishing._save(*arguments))
    folder = write("llama", tmp_path / "model")
    edited(folder, "tokenizer_config.json", lambda c: c.update(tokenizer_class=name))
    settings = read_settings(folder)
    saved = finished_tokenizer(settings, tmp_path / "cache")
    assert saved is not None
    made, real = encoder(folder, saved), transformers.AutoTokenizer.from_pretrained(str(folder))
    differs = 0
    for record in (chat("Hello world", "  12  34"), chat("a\n\nb", "née 🙂"), chat(" x ", "y 1234567 z")):
        messages = [{"role": m.role, "content": m.parts[0].text} for m in record.messages]  # type: ignore[union-attr]
        ids = real.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert made.cost(record, ())[0].tokens == len(ids)
        differs += encoder(folder).cost(record, ())[0].tokens != len(ids)
    assert differs or name != "GPT2Tokenizer", "the file alone would have done, so nothing was tested"
    assert finished_tokenizer(settings, tmp_path / "cache") == saved, "saved once"
    assert finished_tokenizer(read_settings(write("llama", tmp_path / "plain")), tmp_path / "cache") is None
