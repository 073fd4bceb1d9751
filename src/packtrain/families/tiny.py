"""Small random models: `tiny:qwen3_vl` names one wherever a model is asked for. Families have them as data.

Vision geometry (patch, tile, merge, token counts) is that of real checkpoints, so that costs are realistic; only depth
and width are small. All share one byte-level BPE tokenizer, trained from a corpus generated here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.core.artifacts import make_folder_once
from packtrain.core.errors import ConfigError, nearest
from packtrain.families.registry import find_family, tiny_families
from packtrain.families.shape import Config

# Every template sees a message's content as one string or as a list of typed parts; `write` makes it text.
_WRITE = """\
{%- macro write(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{ @IMAGE }}
{%- elif part.type == 'video' -%}{{ @VIDEO }}
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
# The LLaVA templates show a message's pictures before its text, whatever the order of the parts.
_WRITE_MEDIA_FIRST = """\
{%- macro write(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content if part.type == 'image' -%}{{ @IMAGE }}{%- endfor -%}
{%- for part in content if part.type == 'video' -%}{{ @VIDEO }}{%- endfor -%}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
# Families without a system role put its text in front of the first turn that is not the system's.
FOLD_SYSTEM = """\
{%- set state = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set state.system = write(messages[0].content) + '\\n\\n' -%}{%- endif -%}
"""
CHATML = """\
{%- if @SYSTEM and messages[0].role != 'system' -%}
{{ '<|im_start|>system' + @GAP + @SYSTEM + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + @GAP + write(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + @GAP }}{%- endif -%}
"""
# [INST] ... [/INST]
INSTRUCTIONS = (
    FOLD_SYSTEM
    + """\
{%- if @BOS -%}{{ bos_token }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'assistant' -%}{{ ' ' + write(message.content) + eos_token }}
{%- else -%}{{ '[INST] ' + state.system + write(message.content) + ' [/INST]' }}{%- set state.system = '' -%}
{%- endif -%}
{%- endfor -%}
"""
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSpec:
    """Which dialect a family speaks and what it writes for a medium; families without media write nothing."""

    dialect: str  # a template that calls `write` for each message's content
    image: str = ""
    video: str = ""
    media_first: bool = False
    system: str = ""  # said where the conversation has no system message (chatml only)
    gap: str = "\n"  # between the role and the content (chatml only)
    bos: bool = True  # whether the template writes the first token (instructions only)


def chat_template(spec: TemplateSpec) -> str:
    """The text of chat_template.jinja."""
    text = (_WRITE_MEDIA_FIRST if spec.media_first else _WRITE) + spec.dialect
    values = {"IMAGE": spec.image, "VIDEO": spec.video, "SYSTEM": spec.system, "GAP": spec.gap}
    for name, value in values.items():
        text = text.replace(f"@{name}", _literal(value))
    return text.replace("@BOS", "true" if spec.bos else "false")


def _literal(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


@dataclass(frozen=True, slots=True)
class Id:
    """Stands in a config for the id of a token, known only once the tokenizer is made."""

    token: str


@dataclass(frozen=True, slots=True)
class VocabularySize:
    """Stands in a config for the number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySpec:
    """Everything that makes the folder of one tiny model."""

    tokens: Mapping[str, str]  # special tokens by the name that processors know them by
    special: tuple[str, ...] = ()  # further special tokens, without a name
    added: tuple[str, ...] = ()  # tokens that are never split, yet are not special
    adds_bos: bool = False  # the tokenizer itself puts bos in front
    template: TemplateSpec
    config: Config
    processor: Config = field(default_factory=dict)  # empty: a model of text only


def _mean_std(mean: list[float], std: list[float]) -> Config:
    return {"image_mean": mean, "image_std": std}


CLIP_PIXELS = _mean_std([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF_PIXELS = _mean_std([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
IMAGENET_PIXELS = _mean_std([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
QWEN_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
THINK = ("<think>", "</think>")

WIDTH = 64
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# Weights five times as large as usual: at this width attention is otherwise nearly uniform, and a sample that wrongly
# sees its neighbour would hardly show it.
WEIGHTS = {"initializer_range": 0.1}
_TEXT = {
    "vocab_size": VocabularySize(),
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    **_HEADS,
    **WEIGHTS,
    "max_position_embeddings": 32768,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TINY_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **WEIGHTS}


def token_ids(tokens: Mapping[str, str], *names: str) -> Config:
    """The config entries for the ids of some named tokens: bos -> bos_token_id."""
    return {f"{name}_token_id": Id(tokens[f"{name}_token"]) for name in names}


def text_config(model_type: str, tokens: Mapping[str, str], **more: Any) -> Config:
    """The config of a small decoder."""
    absent = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    present = [name for name in ("bos", "eos", "pad") if f"{name}_token" in tokens]
    return {
        "model_type": model_type,
        **_TEXT,
        "head_dim": 16,
        "rope_parameters": _ROPE,
        **absent,
        **token_ids(tokens, *present),
        "tie_word_embeddings": False,
        **more,
    }


def write(family: str, folder: Path) -> Path:
    """Write the model folder of one family; the same family always gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(family).items():
        (folder / name).write_bytes(content)
    return folder


def _files(family: str) -> dict[str, bytes]:
    """Every file of a family's folder, by name."""
    known = find_family(family)
    if known is None or known.tiny is None:
        raise ConfigError(
            f"tiny model {family!r}",
            got="an unknown family" if known is None else "a family without a tiny model",
            expected="one of " + ", ".join(tiny_families()),
            fix=nearest(f"tiny:{family}", [f"tiny:{name}" for name in tiny_families()]) or "use one of these",
        )
    spec = known.tiny
    tokenizer = build_tokenizer(
        (*spec.tokens.values(), *spec.special), spec.added, bos=spec.tokens["bos_token"] if spec.adds_bos else None
    )
    texts = {
        "config.json": _json(_fill({**spec.config, "dtype": "float32"}, tokenizer)),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": _json(_tokenizer_config(spec)),
        "chat_template.jinja": chat_template(spec.template),
    }
    if spec.processor:
        texts["processor_config.json"] = _json(spec.processor)
    return {name: text.encode() for name, text in texts.items()}


def _tokenizer_config(spec: TinySpec) -> Config:
    config = {
        # The class that takes tokenizer.json as it is, instead of rebuilding it by a family's own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        **spec.tokens,
        "extra_special_tokens": list(spec.special),
    }
    if spec.processor:
        config["processor_class"] = spec.processor["processor_class"]
    return config


def _fill(value: Any, tokenizer: Any) -> Any:
    """A config with its stand-ins replaced by what the tokenizer says."""
    if isinstance(value, Id):
        return tokenizer.token_to_id(value.token)
    if isinstance(value, VocabularySize):
        return tokenizer.get_vocab_size()
    if isinstance(value, Mapping):
        return {key: _fill(inner, tokenizer) for key, inner in value.items()}
    return value


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def cached(family: str, cache_dir: Path) -> Path:
    """The folder of a tiny model under the cache, named by its content and made at most once."""
    digest = hashlib.sha256()
    for name, content in sorted(_files(family).items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return make_folder_once(cache_dir / f"tiny-{family}-{digest.hexdigest()[:12]}", lambda fresh: write(family, fresh))


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
