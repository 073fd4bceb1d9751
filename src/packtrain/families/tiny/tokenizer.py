"""Trains the small byte-level BPE tokenizer that all tiny models share, from a corpus generated here."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Words to build sentences from; enough different ones that about a thousand merges are worth making.
_WORDS: Mapping[str, str] = {
    "shape": (
        "circle square triangle rectangle hexagon pentagon octagon star heart arrow cross ring cube sphere cylinder "
        "cone pyramid spiral diamond crescent oval line curve dot polygon"
    ),
    "colour": (
        "red orange yellow green blue purple pink brown black white grey silver golden turquoise crimson violet olive "
        "navy beige scarlet"
    ),
    "number": (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand"
    ),
    "place": (
        "above below beside behind inside outside between under over near left right top bottom middle corner edge "
        "background foreground"
    ),
    "thing": (
        "picture image photograph drawing chart table diagram video frame scene figure page document sign label "
        "window street garden kitchen mountain river bridge tower market harbour library station"
    ),
    "animal": (
        "dog cat horse bird fish elephant giraffe rabbit turtle butterfly penguin dolphin tiger lion monkey sheep "
        "goat cow duck eagle"
    ),
    "verb": (
        "shows contains holds carries follows touches covers crosses reaches counts compares describes explains "
        "measures repeats answers changes moves turns rests"
    ),
    "adjective": (
        "large small bright dark round narrow striped dotted empty crowded quiet heavy light smooth rough transparent "
        "colourful different similar identical"
    ),
    "question": "What Which Where When Why How Who Whose",
    "person": (
        "teacher farmer doctor painter driver writer singer builder sailor baker student engineer neighbour brother "
        "sister mother father children people friend system user assistant model tool"
    ),
    "material": (
        "paper wood glass metal stone plastic cotton leather rubber concrete marble copper wool clay wax porcelain "
        "bamboo velvet granite aluminium"
    ),
    "time": (
        "yesterday today tomorrow morning evening afternoon midnight winter spring summer autumn Monday Tuesday "
        "Wednesday Thursday Friday Saturday Sunday January February March April June July August September October "
        "November December"
    ),
    "food": (
        "apple banana bread cheese tomato potato pepper onion carrot orange strawberry chocolate coffee sandwich "
        "pancake noodle mushroom pineapple lemon butter honey sugar"
    ),
    "deed": (
        "walking running sitting standing reading writing cooking painting climbing swimming dancing waiting talking "
        "sleeping looking pointing holding wearing playing throwing"
    ),
}
_VERBATIM = (
    "system\nuser\nassistant\nmodel\ntool\nSystem: User: Assistant: USER: ASSISTANT:",
    "You are a helpful assistant. Please answer the question about the picture in a short sentence.",
    "Let us think step by step: first we look, then we count, and finally we give the answer.",
    "def area(width, height):\n    return width * height\n\nprint(area(12, 30))  # 360",
    '{"label": "circle", "bbox_2d": [10, 20, 110, 220], "score": 0.75}',
    "| name | count |\n|---|---|\n| circles | 12 |\n| squares | 7 |",
    "Größe, naïve café, façade, señor, Übung, Ærø, Łódź, œuvre — “quoted” text … done.",
    "Москва и Санкт-Петербург, красный круг и синий квадрат.",
    "北京 東京 図形 红色的圆形 蓝色的正方形 日本語 한국어 العربية עברית हिन्दी ไทย",
    "Smiles 🙂 🎉 🚀 and arrows → ← ↑ ↓, sums ∑ and ≤ ≥ ≠ ±, prices 5 € or 7 £.",
)
# Letters, single digits, punctuation and white space are separate words. These are the splitting rules of the Qwen
# tokenizers: transformers rebuilds those from vocabulary and merges alone, so ours must split in the same way.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGED_VOCABULARY = 1500
_SENTENCES = 900


def corpus() -> Iterator[str]:
    """The training text: sentences from word lists chosen by fixed strides, so that it never changes."""
    words = {kind: text.split() for kind, text in _WORDS.items()}
    for i in range(_SENTENCES):
        # A different stride for each list, coprime to its length or drifting, so that all words meet.
        w = {
            kind: choices[((2 * place + 3) * i + i // (place + 3)) % len(choices)]
            for place, (kind, choices) in enumerate(words.items())
        }
        yield f"The {w['adjective']} {w['thing']} {w['verb']} {w['number']} {w['colour']} {w['shape']}s."
        yield f"{w['question']} is the colour of the {w['shape']} {w['place']} the {w['animal']}? It is {w['colour']}."
        yield f"There are {i} {w['shape']}s and {i * 37 % 1009} {w['animal']}s in this {w['thing']}!"
        yield f"{w['time']} the {w['person']} was {w['deed']} with {w['material']} and {w['food']}."
        yield f"{w['animal'].capitalize()}s: the {w['colour']} one {w['verb']} at {i % 24}:{i * 7 % 60:02d}."
    yield from _VERBATIM * 20


@functools.cache
def _trained() -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGED_VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer=trainer)
    return str(tokenizer.to_str())


def build_tokenizer(special: Sequence[str], added: Sequence[str], *, bos: str | None) -> Any:
    """A `tokenizers.Tokenizer` with these special tokens and these added ones that are not special.

    With `bos`, that token is put in front of every text that is encoded with special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None:
        tokenizer.post_processor = byte_level
    else:
        put_bos = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, put_bos])
    return tokenizer


def tokenizer_json(tokenizer: Any) -> str:
    """The text of tokenizer.json, with the vocabulary in the order of its ids."""
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = dict(sorted(content["model"]["vocab"].items(), key=lambda item: item[1]))
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
