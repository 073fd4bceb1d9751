"""Samples of unlisted models: their processor's tensors, where the loss is among its tokens, how media are joined."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from unlisted_data import chat, encoder_of, folder_of, headers_of, request_for

from packtrain.core.errors import ConfigError, DataError, RecordError
from packtrain.core.values import Record, TokenIds
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, TEXT, EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.joins import TOKEN_KINDS, complete_contract
from packtrain.delivery.encode.processor import RealProcessor
from packtrain.delivery.encode.unlisted import ProcessorEncoder, ProcessorRule, find_tokens, sample_encoder
from packtrain.families import tiny
from packtrain.families.contracts import contract_for
from packtrain.families.encoder import SizedRecord
from packtrain.families.family import BatchContract
from packtrain.families.settings import read_settings
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore

STORE = MediaStore(".")
MEDIUM = 9

# ---- where tokens of the text are among those of the processor

words = st.lists(st.integers(1, 4), max_size=5)  # few words: what is looked for often occurs twice


@st.composite
def expanded(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A text with placeholders, what a processor makes of it, and the place of each token of the text in that."""
    text: list[int] = []
    ids: list[int] = []
    places: list[int] = []
    for number in range(draw(st.integers(1, 4))):
        if number:
            wrapped = draw(st.lists(st.sampled_from([MEDIUM, MEDIUM, MEDIUM, 1, 2, 7, 8]), max_size=6))
            text.append(MEDIUM)
            places.append(-1)
            ids += wrapped
        span = draw(words)
        places += range(len(ids), len(ids) + len(span))
        text += span
        ids += span
    return text, ids, places


@settings(max_examples=400, deadline=None)
@given(made=expanded(), data=st.data())
def test_tokens_are_found_where_they_are_or_not_at_all(
    made: tuple[list[int], list[int], list[int]], data: st.DataObject
) -> None:
    text, ids, places = made
    written = [at for at, place in enumerate(places) if place >= 0]
    chosen = sorted(data.draw(st.sets(st.sampled_from(written)))) if written else []
    wanted = np.array(chosen, dtype=np.int64)
    try:
        found = find_tokens(np.array(text, dtype=np.int64), np.array(ids, dtype=np.int64), {MEDIUM}, wanted)
    except RecordError:
        return
    assert found.tolist() == [places[at] for at in chosen]


@settings(max_examples=400, deadline=None)
@given(text=words, ids=words, media=st.booleans())
def test_of_any_other_text_only_the_same_tokens_are_found_each_once(
    text: list[int], ids: list[int], media: bool
) -> None:
    one, other = np.array(text, dtype=np.int64), np.array(ids, dtype=np.int64)
    try:
        found = find_tokens(one, other, {4} if media else set(), np.arange(len(text)))
    except RecordError:
        return
    assert (np.diff(found) > 0).all()
    assert other[found].tolist() == text


@pytest.mark.parametrize(
    ("text", "ids", "wanted", "found"),
    [
        ([5, 9, 6, 7], [5, 9, 9, 9, 6, 7], [2, 3], [4, 5]),
        ([1, 9, 2, 9, 3], [1, 9, 9, 2, 9, 9, 3], [0, 2, 4], [0, 3, 6]),
        ([1, 2, 3], [0, 1, 2, 3], [2], [3]),  # a processor that begins every text with a token of its own
        ([1, 9, 2, 9, 3], [1, 9, 2, 2, 9, 3], [2], None),  # which of the two 2 is it?
        ([1, 9, 6, 2, 7, 9, 3], [1, 9, 8, 2, 8, 9, 3], [3], [3]),  # spaces next to media
        ([1, 2, 3, 4], [1, 3, 2, 4], [1], None),
        ([1, 1], [1], [0, 1], None),
        ([5, 2, 9, 3], [6, 2, 9, 9, 3], [1], None),  # its beginning is next to no medium
        ([1, 9, 2, 9, 3], [1, 9, 9, 3], [1, 2], None),  # a placeholder is no text
    ],
)
def test_examples_of_found_tokens(text: list[int], ids: list[int], wanted: list[int], found: list[int] | None) -> None:
    arguments = (np.array(text), np.array(ids), {9}, np.array(wanted))
    if found is None:
        with pytest.raises(RecordError, match="not found among the processor's tokens"):
            find_tokens(*arguments)
    else:
        assert find_tokens(*arguments).tolist() == found


# ---- joins, read off the processor

JOINS = {
    "aya_vision": {"pixel_values": "rows"},
    "mistral3": {"pixel_values": "padded", "image_sizes": "rows"},
    "llava_next_video": {"pixel_values": "tiles", "image_sizes": "rows"},
    "idefics2": {"pixel_values": "images", "pixel_attention_mask": "images"},
    "gemma4": {TOKEN_KINDS: "text", "pixel_values": "rows", "image_position_ids": "rows"},
    "glm4v": {TOKEN_KINDS: "text", "pixel_values": "rows", "image_grid_thw": "rows"},
}
POSITIONS = {"glm4v": "mrope"}


@pytest.mark.parametrize("model_type", JOINS)
def test_joins_are_read_off_the_processor(model_type: str) -> None:
    packed, padded = (encoder_of(model_type, packing=packing).contract for packing in (True, False))
    assert packed.media == padded.media == JOINS[model_type]
    assert packed.unlisted
    assert padded.unlisted
    assert (packed.positions, padded.positions) == (POSITIONS.get(model_type, "restart"), "own")
    assert set(packed.small_media) <= set(JOINS[model_type])
    assert "pixel_values" in packed.small_media


def test_what_belongs_to_a_whole_sample_is_not_packed() -> None:
    with pytest.raises(ConfigError, match="cross_attention_mask") as refused:
        ProcessorEncoder(request_for("mllama"))
    assert "data.packing=false" in refused.value.fix
    assert encoder_of("mllama", packing=False).contract.media["cross_attention_mask"] == "samples"


# ---- what cannot be joined says what is missing

Outputs = Callable[[Any], Any]


def _changed(monkeypatch: pytest.MonkeyPatch, change: Outputs) -> None:
    """What every processor returns, changed."""
    from transformers.processing_utils import ProcessorMixin

    right = ProcessorMixin.apply_chat_template

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = right(self, *args, **kwargs)
        return change(dict(outputs)) if kwargs.get("tokenize") else outputs

    monkeypatch.setattr(ProcessorMixin, "apply_chat_template", apply)


def _refusal(model_type: str = "mistral3", **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        ProcessorEncoder(request_for(model_type), **options)
    error = refused.value
    assert error.expected
    assert error.fix
    return error


def test_a_list_instead_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, lambda outputs: {**outputs, "image_sizes": outputs["image_sizes"].tolist()})
    for packing in (True, False):
        error = _refusal(packing=packing)
        assert "image_sizes" in error.where
        assert "list instead of one tensor" in error.got
        assert "family of its own" in error.fix


def test_a_processor_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, lambda outputs: {"input_ids": outputs["input_ids"], "patches": outputs["pixel_values"]})
    error = _refusal()
    assert "no pixel_values" in error.got
    assert "patches" in error.got


def test_a_processor_whose_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(outputs: Any) -> Any:
        raise ImportError("this processor requires the librosa library but it was not found")

    _changed(monkeypatch, needs)
    error = _refusal()
    assert "librosa" in error.got
    assert "package" in error.fix


def test_a_processor_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ImportError("NemotronProcessor requires the librosa library")

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", load)
    error = _refusal()
    assert "librosa" in error.got
    assert "install that package" in error.fix


@pytest.mark.parametrize("packing", [True, False])
def test_code_in_the_models_folder_is_not_run(packing: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("mistral3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ConfigError) as refused:
        ProcessorEncoder(Request(specs=(), model=str(folder)), packing=packing)
    assert "code is in its own folder" in str(refused.value.got)
    assert "docs/guides/extending.md" in refused.value.fix


def test_positions_of_three_dimensions_that_no_method_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.glm4v.modeling_glm4v import Glm4vModel

    monkeypatch.delattr(Glm4vModel, "get_rope_index")
    error = _refusal("glm4v")
    assert "three dimensions" in error.got
    assert "get_rope_index" in error.got
    assert ProcessorEncoder(request_for("glm4v"), packing=False).contract.positions == "own"


def test_positions_of_another_kind_are_refused_before_any_record() -> None:
    error = _refusal("hunyuan_vl")
    assert "'hunyuan_vl': the model has positions of another kind (4 rows)" in error.got
    assert "data.packing=false" in error.fix


@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm2_vl", "llama4", "paligemma"])
def test_layers_that_see_the_whole_row_are_refused_by_name_and_taken_on_padded_rows(model_type: str) -> None:
    error = _refusal(model_type)
    assert f"{model_type!r}, which cannot be packed" in error.got
    assert "data.packing=false" in error.fix
    assert encoder_of(model_type, packing=False).contract.unlisted


# ---- samples and their costs

QUESTION = ("user", [(96, 64), "what is this?"])
RECORDS = {
    "text": chat(("user", ["hello there"]), ("assistant", ["a red circle"]), name="text"),
    "image": chat(QUESTION, ("assistant", ["a red circle"]), name="image"),
    "images": chat(
        ("user", [(96, 64), "and ", (64, 160), "?"]), ("assistant", ["two naïve bars 🙂"]), name="images", seed=1
    ),
    "turns": chat(
        ("user", [(96, 64), "this?"]),
        ("assistant", ["a circle"]),
        ("user", ["and ", (64, 96), " this?"]),
        ("assistant", ["a circle"]),  # the same words as before, between other media
        name="turns",
        seed=2,
    ),
}
ENCODED = ("mistral3", "aya_vision", "llava_next_video", "idefics2", "gemma4", "glm4v")


def _answers(record: Record) -> list[str]:
    texts = ["".join(part.text for part in m.parts if hasattr(part, "text")) for m in record.messages]
    return [text for text, m in zip(texts, record.messages, strict=True) if m.role == "assistant"]


def _spans(labels: torch.Tensor) -> list[list[int]]:
    """Labels in a row, one list for each stretch that carries loss."""
    spans: list[list[int]] = []
    before = IGNORED
    for label in labels.tolist():
        if label != IGNORED:
            spans += [[]] if before == IGNORED else []
            spans[-1].append(label)
        before = label
    return spans


@pytest.mark.parametrize("model_type", ENCODED)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_costs_what_its_sample_is_and_learns_its_answers(model_type: str, name: str) -> None:
    encoder, record = encoder_of(model_type), RECORDS[name]
    sample = encoder.encode(record, STORE)
    (price,) = ProcessorRule(encoder.request).compute_costs([SizedRecord(record, headers_of(record))], STORE)
    assert not isinstance(price, RecordError)
    cost, media = price[0], sample.token_kinds != TEXT
    assert cost.tokens == len(sample) == cost.text_tokens + cost.image_tokens
    assert cost.image_tokens == int((sample.token_kinds == IMAGE).sum())
    assert (cost.image_tokens > 0) == (cost.images > 0) == (name != "text")
    assert cost.supervised_tokens == int((sample.labels != IGNORED).sum())
    assert cost.images == sample.num_images == len(headers_of(record))
    assert sample.vision is not None
    assert cost.patches == sample.vision.patches
    assert (cost.patches > 0) == (cost.images > 0)
    assert cost.tail_tokens == len(sample) - (int(media.nonzero()[-1]) + 1 if media.any() else 0)
    learned = sample.labels != IGNORED
    assert torch.equal(sample.labels[learned], sample.input_ids[learned])
    tokenizer = Tokenizer.from_file(str(folder_of(model_type) / "tokenizer.json"))
    spans = [tokenizer.decode(span, skip_special_tokens=False) for span in _spans(sample.labels)]
    assert [span.removesuffix("<|im_end|>").strip() for span in spans] == _answers(record)
    assert all(span.rstrip().endswith("<|im_end|>") for span in spans)


def test_a_sample_is_what_the_processor_returns() -> None:
    from transformers import AutoProcessor

    record, encoder = RECORDS["images"], encoder_of("mistral3")
    sample = encoder.encode(record, STORE, row=3)
    outputs = encoder._records.real.outputs(record, STORE)
    assert AutoProcessor.from_pretrained(folder_of("mistral3")).__class__.__name__ == "PixtralProcessor"
    assert sample.input_ids.tolist() == outputs["input_ids"]
    assert set(sample.media) == {"pixel_values", "image_sizes"}
    assert all(torch.equal(tensor, outputs[name]) for name, tensor in sample.media.items())
    assert sample.position_ids.tolist() == [list(range(len(sample)))]
    assert (sample.row, sample.id, sample.first) == (3, record.id, True)


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_where_loss_is_taken_follows_the_setting(loss_on: Any) -> None:
    encoder = ProcessorEncoder(request_for("mistral3", loss_on=loss_on))
    sample = encoder.encode(RECORDS["turns"], STORE)
    learned = sample.labels != IGNORED
    if loss_on == "all":
        assert torch.equal(learned[1:], (sample.token_kinds == TEXT)[1:])
    else:
        assert len(_spans(sample.labels)) == 2


def test_positions_in_three_dimensions_are_the_models_own() -> None:
    sample = encoder_of("glm4v").encode(RECORDS["images"], STORE)
    assert sample.position_ids.shape == (4, len(sample))
    assert sample.position_ids[0].tolist() == list(range(len(sample)))
    assert not torch.equal(sample.position_ids[1], sample.position_ids[2])
    text = encoder_of("glm4v").encode(RECORDS["text"], STORE)
    assert (text.position_ids == torch.arange(len(text))).all()


def test_pieces_of_a_sample_are_the_sample() -> None:
    encoder, record = encoder_of("gemma4"), RECORDS["image"]
    whole = encoder.encode(record, STORE)
    cut = int((whole.labels != IGNORED).nonzero()[1])  # in the answer
    first = encoder.encode(record, STORE, start=0, tokens=cut)
    later = encoder.encode(record, STORE, start=cut, tokens=len(whole) - cut)
    assert torch.equal(torch.cat([first.input_ids, later.input_ids]), whole.input_ids)
    assert torch.equal(first.labels, whole.labels[:cut])
    assert int(later.labels[0]) == IGNORED
    assert torch.equal(later.labels[1:], whole.labels[cut + 1 :])
    assert (first.num_images, later.num_images, first.first, later.first) == (1, 0, True, False)
    assert torch.equal(first.media["pixel_values"], whole.media["pixel_values"])
    assert set(later.media) == {TOKEN_KINDS}  # as long as the text, so it is cut with it
    kinds = torch.cat([first.media[TOKEN_KINDS], later.media[TOKEN_KINDS]], dim=1)
    assert torch.equal(kinds, whole.media[TOKEN_KINDS])
    assert later.position_ids[0, 0] == 0
    with pytest.raises(Exception, match="cuts its media"):
        encoder.encode(record, STORE, start=int((whole.token_kinds != TEXT).nonzero()[0]), tokens=4)


@pytest.mark.parametrize("packing", [True, False])
def test_a_pickled_encoder_makes_the_same_samples(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of("mistral3", packing=packing)
    monkeypatch.setattr("packtrain.delivery.encode.unlisted.complete_contract", None)  # a worker does not ask again
    again = pickle.loads(pickle.dumps(encoder))
    one, other = (each.encode(RECORDS["turns"], STORE) for each in (encoder, again))
    assert repr(again.contract) == repr(encoder.contract)
    assert again.pad_id == encoder.pad_id
    for name in ("input_ids", "labels", "position_ids", "token_kinds"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert all(torch.equal(tensor, other.media[name]) for name, tensor in one.media.items())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (chat(("user", ["draw"]), ("assistant", [(96, 64), "here"])), "media in an assistant message"),
        (chat(("user", ["no image: <image>"]), ("assistant", ["none"])), "media placeholders in the text"),
        (chat(("user", [(96, 64), "what?"]), ("assistant", ["an <image>"])), "media placeholders in the text"),
        (chat(("user", [(96, 64), "look"])), "no supervised tokens"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(record: Record, reason: str) -> None:
    (price,) = ProcessorRule(request_for("aya_vision")).compute_costs([SizedRecord(record, headers_of(record))], STORE)
    assert isinstance(price, RecordError)
    assert reason in price.reason


def test_records_that_came_as_tokens_learn_what_they_say() -> None:
    encoder = encoder_of("mistral3")
    ids = TokenIds(ids=tuple(range(40, 52)), supervised=((0, 2), (5, 10)))
    record = Record(id="tokens", origin="data.jsonl:1", source="s", messages=(), tokens=ids)
    rule, sample = ProcessorRule(encoder.request), encoder.encode(record, STORE)
    (price,) = rule.compute_costs([SizedRecord(record, ())], STORE)
    assert not isinstance(price, RecordError)
    assert sample.input_ids.tolist() == list(ids.ids)
    assert (sample.labels != IGNORED).nonzero().flatten().tolist() == [1, 5, 6, 7, 8, 9]
    assert (price[0].tokens, price[0].supervised_tokens) == (12, 6)
    (image,) = encoder._records.real.token_ids("image")
    held = replace(record, tokens=TokenIds(ids=(40, image, 41), supervised=((0, 3),)))
    (refused,) = rule.compute_costs([SizedRecord(held, ())], STORE)
    assert isinstance(refused, RecordError)
    assert refused.reason == "a media placeholder id"


def test_listed_models_keep_their_encoder_and_text_models_need_no_processor(tmp_path: Path) -> None:
    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.families import tiny

    folder = tiny.write("llama", tmp_path)
    assert isinstance(sample_encoder(Request(specs=(), model=str(folder))), SampleEncoder)
    assert isinstance(sample_encoder(request_for("mistral3")), ProcessorEncoder)


# ---- rows


def _row(*samples: EncodedSample) -> list[PackedRow]:
    return [PackedRow(key=PackKey(0, 0), samples=samples)]


def _sample(tokens: int, media: Mapping[str, torch.Tensor], *, kinds: Sequence[int] = ()) -> EncodedSample:
    ids = torch.arange(1, tokens + 1)
    labels = ids.clone()
    labels[0] = IGNORED
    return EncodedSample(
        id=f"s{tokens}",
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(tokens)[None],
        token_kinds=torch.tensor([*kinds, *[TEXT] * (tokens - len(kinds))]),
        media=media,
        num_images=len(media),
    )


def _full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value)


@pytest.mark.parametrize(
    ("join", "one", "other", "packed", "padded"),
    [
        ("rows", (2, 3), (1, 3), (3, 3), (3, 3)),
        ("padded", (2, 3, 4), (1, 5, 2), (3, 5, 4), (3, 5, 4)),
        ("tiles", (1, 2, 3), (2, 4, 3), (3, 4, 3), (3, 4, 3)),
        ("images", (1, 2, 3), (1, 1, 4), (1, 3, 4), (2, 2, 4)),
        ("text", (1, 5), (1, 7), (1, 14), (3, 7)),
        ("text", (1, 5, 2), (1, 7, 2), (1, 14, 2), (3, 7, 2)),
    ],
)
def test_rows_of_each_join(
    join: Any, one: tuple[int, ...], other: tuple[int, ...], packed: tuple[int, ...], padded: tuple[int, ...]
) -> None:
    contract = BatchContract(media={"pixel_values": join}, unlisted=True)
    samples = [
        _sample(5, {"pixel_values": _full(1.0, *one)}),
        _sample(2, {}),
        _sample(7, {"pixel_values": _full(2.0, *other)}),
    ]
    made = PackCollator(contract, pad_id=0)(_row(*samples))["pixel_values"]
    assert tuple(made.shape) == packed
    rows = PaddedCollator(contract, pad_id=0)(_row(*samples))["pixel_values"]
    assert tuple(rows.shape) == (padded if join != "images" else (3, *padded[1:]))
    for tensor in (made, rows):  # everything is there once, the rest is padding
        assert tensor.sum() == _full(1.0, *one).sum() + _full(2.0, *other).sum()
    expected = _parts(join, made)
    assert torch.equal(expected[0], _full(1.0, *one))
    assert torch.equal(expected[1], _full(2.0, *other))
    if join == "text":
        assert not made[:, 5:7].any()  # of the sample that has none
        assert not rows[0, 5:].any()
        assert not rows[1].any()
        assert (rows[2] == 2).all()


def _parts(join: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What both samples gave, cut out of a packed row."""
    return {
        "rows": lambda: (tensor[:2], tensor[2:]),
        "padded": lambda: (tensor[:2, :3, :4], tensor[2:, :5, :2]),
        "tiles": lambda: (tensor[:1, :2], tensor[1:]),
        "images": lambda: (tensor[:, :2, :3], tensor[:, 2:]),
        "text": lambda: (tensor[:, :5], tensor[:, 7:]),
    }[join]()


def test_what_belongs_to_whole_samples_has_the_width_of_the_batch() -> None:
    contract = BatchContract(media={"cross_attention_mask": "samples"}, unlisted=True)
    samples = [_sample(5, {"cross_attention_mask": _full(1.0, 1, 5, 2)}), _sample(7, {})]
    rows = PaddedCollator(contract, pad_id=0)(_row(*samples))["cross_attention_mask"]
    assert tuple(rows.shape) == (2, 7, 2)
    assert rows[0, :5].all()
    assert not rows[0, 5:].any()
    assert not rows[1].any()


def test_positions_that_the_model_computes_are_not_given() -> None:
    contract = BatchContract(positions="own", unlisted=True)
    rows = PaddedCollator(contract, pad_id=0)(_row(_sample(5, {}), _sample(2, {})))
    assert "position_ids" not in rows
    assert rows["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["token_type_ids", TOKEN_KINDS])
def test_images_that_touch_are_refused_where_the_model_is_told_which_tokens_are_images(name: str) -> None:
    contract = BatchContract(media={name: "text", "pixel_values": "rows"}, unlisted=True)
    shown = {name: _full(1.0, 1, 3), "pixel_values": _full(1.0, 1, 2)}
    ends = _sample(3, shown, kinds=(TEXT, IMAGE, IMAGE))
    starts = _sample(3, shown, kinds=(IMAGE, IMAGE))
    collate = PackCollator(contract, pad_id=0)
    collate(_row(starts, ends))
    with pytest.raises(DataError, match="would see as one image"):
        collate(_row(ends, starts))


def test_a_batch_of_packs_is_what_the_model_takes() -> None:
    """The names of a real batch, and the samples in it."""
    encoder = encoder_of("llava_next_video")
    samples = [encoder.encode(RECORDS[name], STORE) for name in ("image", "text", "images")]
    batch = PackCollator(encoder.contract, pad_id=encoder.pad_id, pad_to_multiple=16)(_row(*samples))
    assert {"input_ids", "labels", "position_ids", "pixel_values", "image_sizes"} <= set(batch)
    assert batch["image_sizes"].tolist() == [[64, 96], [64, 96], [160, 64]]
    assert batch["input_ids"].shape[1] % 16 == 0
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert starts[:3] == [0, len(samples[0]), len(samples[0]) + len(samples[1])]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "internvl", "gemma3"])
def test_contracts_of_listed_families_are_what_their_processors_say(family: str, tmp_path: Path) -> None:
    """They are written down because the model's side, trials and calibration have no processor to ask."""
    folder = tiny.write(family, tmp_path / family)
    of_folder = read_settings(folder)
    real = RealProcessor(Request(specs=(), model=str(folder)), of_folder)
    unlisted = BatchContract(model_type=family, unlisted=True)
    read, written = complete_contract(unlisted, real, of_folder, packing=True), contract_for(of_folder)
    assert read.positions == written.positions
    shared = read.media.keys() & written.media.keys()
    assert "pixel_values" in shared
    assert {name: read.media[name] for name in shared} == {name: written.media[name] for name in shared}
    assert read.media.keys() - shared <= {"mm_token_type_ids", written.token_types}
