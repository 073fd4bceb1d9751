"""An encoded sample is what the real processor makes of its record, and what was measured of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encoding import (
    IMAGE_FAMILIES,
    QWEN,
    TEXT_FAMILIES,
    TEXTS,
    VIDEO_FAMILIES,
    headers_of,
    medium,
    pricing,
    record,
    records_for,
    request_for,
    small_tiles,
    twice,
)
from PIL import Image

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, Message, Record, Text, TokenIds
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, TEXT, VIDEO, EncodedSample
from packtrain.delivery.encode.processor import RealProcessor
from packtrain.families import tiny
from packtrain.families.encoder import RecordEncoder
from packtrain.families.skeleton import Skeletons
from packtrain.modeling.load import build_model
from packtrain.records.media import MediaStore
from packtrain.records.open import iter_units, open_sources, read_unit
from packtrain.records.schemas.converters import SchemaOptions, to_record
from packtrain.records.source import Entry

pytestmark = pytest.mark.contract
Folder = Callable[[str], Path]
# What the whole processor returns and the sample holds in another form, or does not need.
ELSEWHERE = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "batch_num_images", "sampled_frames"}
NOT_FOR_THE_MODEL = {"video_metadata", "rows", "cols", "num_crops"}


def real_processor(encoder: SampleEncoder) -> RealProcessor:
    return RealProcessor(encoder.request, encoder.request.settings())


def assert_as_processed(sample: EncodedSample, made: dict[str, Any]) -> None:
    """Ids and every tensor, bit for bit."""
    assert sample.input_ids.tolist() == made["input_ids"]
    assert set(sample.media) == set(made) - ELSEWHERE - NOT_FOR_THE_MODEL
    many_frames = sample.num_videos > 1 and "pixel_attention_mask" in made
    for name, tensor in sample.media.items():
        theirs = made[name]
        if many_frames:  # as images of one sample, not as one sample for each video
            theirs = theirs.flatten(0, 1).unsqueeze(0)
        assert (tensor.dtype, tensor.shape) == (theirs.dtype, theirs.shape), name
        assert tensor.equal(theirs), name
    kinds = made.get("mm_token_type_ids", made.get("token_type_ids"))
    if kinds is not None:
        assert sample.token_kinds.tolist() == torch.as_tensor(kinds)[0].tolist()


def assert_as_measured(sample: EncodedSample, price: RecordEncoder, shown: Record, store: MediaStore) -> None:
    """The counts of the cost table, and what no label may be."""
    cost, _ = price.cost(shown, headers_of(shown, store))
    supervised = sample.labels != IGNORED
    kinds = sample.token_kinds
    assert len(sample) == cost.tokens
    assert int(supervised.sum()) == cost.supervised_tokens > 0
    assert (int((kinds == IMAGE).sum()), int((kinds == VIDEO).sum())) == (cost.image_tokens, cost.video_tokens)
    assert (sample.num_images, sample.num_videos) == (cost.images, cost.videos)
    assert not supervised[0]
    assert not (supervised & (kinds != TEXT)).any()
    assert sample.labels[supervised].equal(sample.input_ids[supervised])
    counted = torch.arange(len(sample))
    assert sample.position_ids[0].equal(counted)
    assert bool(cost.patches) == bool(sample.media)


def check_every_kind(family: str, media: Path, folder: Path) -> None:
    encoder = SampleEncoder(request_for(folder, media))
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(media))
    seen: set[str] = set()
    for name, shown in records_for(family).items():
        sample = encoder.encode(shown, store, row=3)
        made = real.outputs(shown, store)
        assert_as_processed(sample, made)
        assert_as_measured(sample, price, shown, store)
        assert sample.media.keys() <= encoder.contract.media.keys()
        assert (sample.id, sample.row) == ("r7", 3)
        assert real._patches(made)[0] == price.cost(shown, headers_of(shown, store))[0].patches, name
        seen |= sample.media.keys()
    assert seen == set(encoder.contract.media), "the records do not show everything that the contract names"


@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *TEXT_FAMILIES])
def test_every_kind_of_record(family: str, media: Path, model: Folder) -> None:
    check_every_kind(family, media, model(family))


@pytest.mark.more
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_every_kind_of_record_in_tiles_of_true_size(family: str, media: Path, tmp_path: Path) -> None:
    check_every_kind(family, media, tiny.write(family, tmp_path / "model"))


@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *TEXT_FAMILIES])
@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_what_carries_loss(loss_on: str, family: str, media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model(family), media, loss_on=loss_on, add_eos=True))
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(media))
    plain = replace(record("x"), messages=(Message(role="assistant", parts=(Text("running text é"),)),), plain=True)
    shown = [plain, TEXTS["turns"], twice(record("a"), record("wide.png" if family in IMAGE_FAMILIES else "b", "c"))]
    for one in shown:
        sample = encoder.encode(one, store)
        assert sample.input_ids.tolist() == real.outputs(one, store)["input_ids"]
        assert_as_measured(sample, price, one, store)
    last = encoder.encode(TEXTS["turns"], store)
    taught = last.labels != IGNORED
    everything = SampleEncoder(request_for(model(family), media, add_eos=True)).encode(TEXTS["turns"], store)
    fewer = int(taught.sum()) < int((everything.labels != IGNORED).sum())
    assert fewer if loss_on == "completion" else int(taught.sum()) == len(last) - 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_vl"])
@pytest.mark.parametrize(("prompt", "answer"), [("The sky is", " blue."), ("a\n", "\nb"), ("", "b"), ("a b", "<eos>")])
def test_a_prompt_and_its_completion_are_trained_as_trl_does(
    family: str, prompt: str, answer: str, media: Path, model: Folder
) -> None:
    """Joined, ended once; the completion begins where the prompt's own tokens and those of both depart."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model(family))
    answer = answer.replace("<eos>", tokenizer.eos_token)
    sample = SampleEncoder(request_for(model(family), media)).encode(
        replace(record(prompt, answer=answer), plain=True), MediaStore(str(media))
    )
    asked = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + answer.removesuffix(tokenizer.eos_token) + tokenizer.eos_token)["input_ids"]
    same = next((at for at, pair in enumerate(zip(asked, ids, strict=False)) if pair[0] != pair[1]), len(asked))
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == [IGNORED if at < max(same, 1) else one for at, one in enumerate(ids)]


@pytest.mark.full
@pytest.mark.more  # TRL is not there with the oldest versions
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_text_is_what_trl_itself_trains(family: str, media: Path, model: Folder, tmp_path: Path) -> None:
    """The same tokens; the same labels of plain text. Chats: TRL also trains white space after an end token."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Blue."}]
    pairs = [("The sky is", " blue."), ("a\n", "\nb"), ("", "b"), ("a b", " c<|eot_id|>")]
    rows = [{"text": "The sky is blue."}, {"text": "a "}, *({"prompt": p, "completion": c} for p, c in pairs)]
    rows += [{"prompt": chat[:1], "completion": chat[1:]}, {"messages": chat}]
    folder, store = model(family), MediaStore(str(media))
    built, tokenizer = build_model(folder), AutoTokenizer.from_pretrained(folder)
    arguments = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=None, packing=False
    )
    compared = 0
    for row in rows:
        trainer = SFTTrainer(
            model=built, args=arguments, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        )
        theirs = trainer.train_dataset[0]
        encoder = SampleEncoder(request_for(folder, media, loss_on="all" if "messages" in row else None))
        shown = to_record(Entry(origin="x:1", value=row), source="s", options=SchemaOptions())
        ours = encoder.encode(shown, store)
        assert ours.input_ids.tolist() == theirs["input_ids"], row
        for at, (label, expected) in enumerate(zip(ours.labels.tolist(), theirs["labels"], strict=True)):
            if at and (label != IGNORED or tokenizer.decode(theirs["input_ids"][at]).strip() or "text" in row):
                assert label == expected, (row, at)
                compared += 1
    assert compared > 50


def test_tokens_are_delivered_with_their_labels(media: Path, model: Folder) -> None:
    from transformers import AutoTokenizer

    encoder, store = SampleEncoder(request_for(model("qwen3_vl"), media)), MediaStore(str(media))
    shown = TEXTS["tokens"]
    sample = encoder.encode(shown, store)
    assert sample.input_ids.tolist() == list(range(40, 50))
    assert sample.labels.tolist() == [IGNORED, 41, IGNORED, IGNORED, IGNORED, 45, 46, 47, 48, 49]
    assert pricing(encoder).cost(shown, ())[0].tail_runs == "1,1,3,5"
    piece = encoder.encode(shown, store, start=6, tokens=3)
    assert (piece.input_ids.tolist(), piece.labels.tolist()) == ([46, 47, 48], [IGNORED, 47, 48])
    picture = AutoTokenizer.from_pretrained(model("qwen3_vl")).convert_tokens_to_ids("<|image_pad|>")
    for wrong, expected in ((10**6, "outside the vocabulary"), (picture, "a media placeholder")):
        for refused in (encoder.encode, lambda one, store: pricing(encoder).cost(one, ())):
            with pytest.raises(RecordError, match=expected):
                refused(replace(shown, tokens=TokenIds(ids=(5, wrong), supervised=((0, 2),))), store)


WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{% for p in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ (opening or '') }}{% endif %}"
)


def test_images_in_the_answers_of_tools(media: Path, model: Folder) -> None:
    """With tools, reasoning and an argument of the template, as the processor has it."""
    request = request_for(model("qwen2_5_vl"), media, chat_template=WITH_TOOLS)
    encoder = SampleEncoder(request)
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(media))
    call = {"function": {"name": "zoom", "arguments": {"times": 2}}}
    value = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "photo.png"}, {"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "closer"},
            {"role": "tool", "content": [{"type": "image", "image": "wide.png"}, {"type": "text", "text": "here"}]},
            {"role": "assistant", "content": "a square"},
        ],
        "tools": [{"type": "function", "function": {"name": "zoom", "parameters": {}}}],
        "chat_template_kwargs": {"opening": "<think>"},
    }
    shown = to_record(Entry(origin="x:1", value=value), source="s", options=SchemaOptions())
    sample = encoder.encode(shown, store)
    assert_as_processed(sample, real.outputs(shown, store))
    assert_as_measured(sample, price, shown, store)
    learned = real._tokenizer.decode(sample.labels[sample.labels != IGNORED].tolist())
    assert (
        "".join(learned.split()) == 'closer</think>{"name":"zoom","arguments":{"times":2}}<|im_end|>asquare<|im_end|>'
    )


def test_labels_are_the_answers(media: Path, model: Folder) -> None:
    """Spelled out once: the answer and the end of its turn, nothing of the question."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("qwen2_5_vl"))
    encoder = SampleEncoder(request_for(model("qwen2_5_vl"), media))
    shown = twice(record("photo.png", "what?", answer="a red circle"), record("who?", answer="nobody"))
    sample = encoder.encode(shown, MediaStore(str(media)))
    taught = sample.labels[sample.labels != IGNORED]
    assert tokenizer.decode(taught.tolist()) == "a red circle<|im_end|>nobody<|im_end|>"


IN_PARTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # family, medium, limits of the part, of the run, and those of a run that mean the same
    "fewest pixels": ("qwen3_vl", "photo.png", {"min_pixels": 90_000}, {}, {"min_pixels": 90_000}),
    "most pixels": ("qwen2_5_vl", "large.png", {"max_pixels": 9_000}, {"max_pixels": 40_000}, {"max_pixels": 9_000}),
    "beside the run's": (
        *("qwen3_vl", "large.png", {"max_pixels": 20_000}, {"min_pixels": 9_000}),
        {"min_pixels": 9_000, "max_pixels": 20_000},
    ),
    "frames for a rate": ("qwen3_vl", "slow.mkv", {"num_frames": 6}, {"fps": 1.0}, {"num_frames": 6}),
    "a rate for frames": ("internvl", "slow.mkv", {"fps": 1.0}, {"num_frames": 6}, {"fps": 1.0}),
    "pixels of frames": ("qwen2_vl", "slow.mkv", {"max_pixels": 2_000}, {}, {"video_max_pixels": 2_000}),
    "most frames": ("qwen2_5_vl", "slow.mkv", {"max_frames": 4}, {"fps": 8.0}, {"max_frames": 4, "fps": 8.0}),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_limit_of_one_medium_is_that_of_a_run_for_it_alone(name: str, media: Path, model: Folder) -> None:
    family, file, own, run, same = IN_PARTS[name]
    store = MediaStore(str(media))
    limited = SampleEncoder(request_for(model(family), media, limits=run))
    shown, plain = record(medium(file, **own), "?"), record(file, "?")
    sample = limited.encode(shown, store)
    again = SampleEncoder(request_for(model(family), media, limits=same)).encode(plain, store)
    assert (sample.input_ids.tolist(), sample.media.keys()) == (again.input_ids.tolist(), again.media.keys())
    assert all(tensor.equal(again.media[name]) for name, tensor in sample.media.items())
    assert_as_measured(sample, pricing(limited), shown, store)
    alone = limited.encode(plain, store)
    pixels = "pixel_values_videos" if "pixel_values_videos" in sample.media else "pixel_values"
    assert len(alone.media[pixels]) != len(sample.media[pixels]), "the limit does nothing"
    two = record(medium(file, **own), "and", file, "?")
    if family == "internvl":
        with pytest.raises(RecordError, match="equal sampled length"):
            limited.encode(two, store)
    else:
        both = limited.encode(two, store)
        assert both.media[pixels].equal(torch.cat([sample.media[pixels], alone.media[pixels]]))
        assert real_processor(limited).encode(two, store).tokens == len(both)


@pytest.mark.parametrize(("family", "side"), [("qwen2_5_vl", 28), ("qwen3_vl", 32)])
def test_an_image_is_resized_before_the_processor_sees_it(family: str, side: int, media: Path, model: Folder) -> None:
    store, encoder = MediaStore(str(media)), SampleEncoder(request_for(model(family), media))
    shown = record(medium("large.png", resized_height=290, resized_width=9), "?")
    sample = encoder.encode(shown, store)
    picture = Image.open(media / "large.png").resize((side, round(290 / side) * side))
    made = real_processor(encoder)._processor.image_processor([[picture]], return_tensors="pt")
    assert sample.media["pixel_values"].equal(made["pixel_values"])
    assert_as_measured(sample, pricing(encoder), shown, store)
    assert real_processor(encoder).encode(shown, store).tokens == len(sample)


@pytest.mark.parametrize(
    ("family", "shown", "expected"),
    [
        ("idefics3", medium("photo.png", max_pixels=9_000), "max_pixels of image; idefics3 takes max_img_size"),
        ("internvl", medium("photo.png", resized_height=56, resized_width=56), "they are Qwen-VL's"),
        ("qwen3_vl", medium("slow.mkv", max_pixels=9_000), "max_pixels of video; qwen3_vl takes num_frames, fps"),
        ("gemma3", medium("photo.png", min_pixels=9_000), "min_pixels of image; gemma3 takes none"),
    ],
)
def test_a_limit_that_a_processor_does_not_have_is_refused(
    family: str, shown: Media, expected: str, media: Path, model: Folder
) -> None:
    store, encoder = MediaStore(str(media)), SampleEncoder(request_for(model(family), media))
    for refused in (
        lambda: encoder.encode(record(shown, "?"), store),
        lambda: pricing(encoder).cost(record(shown, "?"), headers_of(record(shown), store)),
    ):
        with pytest.raises(RecordError, match=expected):
            refused()


LIMITS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl pixels": ("qwen3_vl", {"min_pixels": 4096, "max_pixels": 16_384}),
    "qwen2_5_vl pixels and frames": ("qwen2_5_vl", {"max_pixels": 12_544, "num_frames": 6}),
    "qwen3_vl rate": ("qwen3_vl", {"fps": 3.0}),
    "smolvlm edge and frames": ("smolvlm", {"max_img_size": 128, "num_frames": 2}),
    "idefics3 edge": ("idefics3", {"max_img_size": 100}),
    "llava_onevision frames": ("llava_onevision", {"num_frames": 3}),
    "internvl frames": ("internvl", {"num_frames": 5}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, media: Path, model: Folder) -> None:
    family, limits = LIMITS[name]
    encoder = SampleEncoder(request_for(model(family), media, limits=limits))
    free = SampleEncoder(request_for(model(family), media))
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(media))
    bites = 0
    for shown in records_for(family).values():
        sample = encoder.encode(shown, store)
        assert_as_processed(sample, real.outputs(shown, store))
        assert_as_measured(sample, price, shown, store)
        bites += len(sample) != len(free.encode(shown, store))
    assert bites > 1, "the limits change hardly anything"


def test_pan_and_scan(media: Path, tmp_path: Path) -> None:
    folder = tiny.write("gemma3", tmp_path / "gemma3")
    path = folder / "processor_config.json"
    asked = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32}
    path.write_text(json.dumps({**json.loads(path.read_text()), "images_kwargs": asked}))
    encoder = SampleEncoder(request_for(folder, media))
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(media))
    shown = record("wide.png", "then", "photo.png", "and", "tall.png")
    sample = encoder.encode(shown, store)
    assert sample.media["pixel_values"].shape[0] > 3, "nothing was cropped"
    assert_as_processed(sample, real.outputs(shown, store))
    assert_as_measured(sample, price, shown, store)


# ---- positions


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_the_models_own(family: str, media: Path, model: Folder) -> None:
    encoder = SampleEncoder(request_for(model(family), media))
    store = MediaStore(str(media))
    whole = build_model(model(family)).model
    different = 0
    for shown in records_for(family).values():
        sample = encoder.encode(shown, store)
        grids = {name: sample.media[name] for name in sample.media if name.endswith(("_thw", "_ts"))}
        kinds = sample.token_kinds.unsqueeze(0)
        theirs, _ = whole.get_rope_index(sample.input_ids.unsqueeze(0), mm_token_type_ids=kinds, **grids)
        assert sample.position_ids.shape == (4, len(sample))
        assert sample.position_ids.dtype == torch.int64
        assert sample.position_ids[1:].equal(theirs[:, 0])
        different += not sample.position_ids[1].equal(sample.position_ids[2])
    assert different > 3, "hardly any record has positions in space"


@pytest.mark.parametrize("family", [f for f in IMAGE_FAMILIES if f not in QWEN])
def test_other_positions_are_counted(family: str, media: Path, model: Folder) -> None:
    sample = SampleEncoder(request_for(model(family), media)).encode(
        records_for(family)["image, images"], MediaStore(str(media))
    )
    assert sample.position_ids.tolist() == [list(range(len(sample)))]


# ---- many records


def check_conversations(family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conversations import conversations, write_images, write_jsonl

    monkeypatch.setattr(Skeletons, "patience", 1)  # both ways of laying out: template and filling in
    folder = small_tiles(tiny.write(family, tmp_path / "model"), family)
    images = write_images(tmp_path) if family in IMAGE_FAMILIES else ()
    data = write_jsonl(tmp_path / "data.jsonl", conversations(count, images=images, shapes=count // 4, seed=5))
    specs = tuple(open_sources(str(data)))
    encoder = SampleEncoder(request_for(folder, tmp_path))
    real, price, store = real_processor(encoder), pricing(encoder), MediaStore(str(tmp_path))
    lengths = set()
    for unit in iter_units(specs):
        for entry in read_unit(specs, unit):
            shown = to_record(entry, source="s", options=SchemaOptions(), formatting=None)
            sample = encoder.encode(shown, store)
            assert_as_processed(sample, real.outputs(shown, store))
            assert_as_measured(sample, price, shown, store)
            lengths.add(len(sample))
    assert len(lengths) > count // 4, "the records hardly differ"


@pytest.mark.more
@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *TEXT_FAMILIES])
def test_conversations(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_conversations(family, 16, tmp_path, monkeypatch)


@pytest.mark.more
@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *TEXT_FAMILIES])
def test_many_conversations(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_conversations(family, 80, tmp_path, monkeypatch)


def test_the_families_are_all_here() -> None:
    from packtrain.families.family import TextOnly
    from packtrain.families.registry import all_families

    known = {name for name, one in all_families().items() if one.rule not in (None, TextOnly)}
    assert known - {"nanovlm"} == set(IMAGE_FAMILIES) >= set(VIDEO_FAMILIES)
