"""Text models: decoders by their model types, published sizes, tiny models, and those that cannot be packed."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.families.contracts import HYBRID
from packtrain.families.shape import Decoder, decoder, decoder_sizes
from packtrain.families.tiny import (
    CHATML,
    INSTRUCTIONS,
    LLAMA_TOKENS,
    QWEN_TOKENS,
    THINK,
    TemplateSpec,
    TinySpec,
    text_config,
)

QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_MISTRAL_SIZES = (4096, 14336, 32, 32, 8, 32000, 131072)
DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(defaults=decoder_sizes(4096, 11008, 32, 32, None, 32000, 2048), mlp_bias="config"),
    "mistral": Decoder(
        defaults=decoder_sizes(*_MISTRAL_SIZES, sliding_window=4096),
        query_bias="never",
        output_bias="never",
        windows="always",
    ),
    "mixtral": Decoder(
        defaults=decoder_sizes(*_MISTRAL_SIZES, num_local_experts=8, num_experts_per_tok=2),
        query_bias="never",
        output_bias="never",
        windows="always",
        experts=True,
    ),
    "smollm3": Decoder(
        defaults=decoder_sizes(
            2048,
            11008,
            36,
            16,
            4,
            128256,
            32768,
            tie_word_embeddings=True,
            use_sliding_window=False,
            no_rope_layer_interval=4,
        ),
        mlp_bias="config",
        windows="no_rope",
    ),
    "qwen2": Decoder(
        defaults=decoder_sizes(4096, 22016, 32, 32, 32, 151936, 32768, **QWEN_WINDOW, max_window_layers=28),
        query_bias="always",
        output_bias="never",
        windows="optional",
    ),
    "qwen3": Decoder(
        defaults=decoder_sizes(
            4096, 22016, 32, 32, 32, 151936, 32768, **QWEN_WINDOW, max_window_layers=28, head_dim=128
        ),
        head_norms=True,
        windows="optional",
    ),
    "qwen3_moe": Decoder(
        defaults=decoder_sizes(
            2048,
            6144,
            24,
            32,
            4,
            151936,
            32768,
            **QWEN_WINDOW,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
        ),
        head_norms=True,
        windows="always",
        experts=True,
    ),
    "gemma": Decoder(
        defaults=decoder_sizes(3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, tie_word_embeddings=True),
        fp32_scales=True,
    ),
    "gemma2": Decoder(
        defaults=decoder_sizes(
            2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, tie_word_embeddings=True, sliding_window=4096
        ),
        norms=4,
        fp32_scales=True,
        windows="period",
        window_period=2,
    ),
}
# For a decoder that is not known: a Llama. What a config must then say itself has no default.
GENERIC = Decoder(
    defaults={
        "num_key_value_heads": None,
        "max_position_embeddings": 8192,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    mlp_bias="config",
)

PUBLISHED = {
    "llama": {
        "llama-1b": {
            "model_type": "llama",
            "tie_word_embeddings": True,
            **decoder(2048, 8192, 16, 32, 8, 64, 128_256),
        },
        "small-text": {"model_type": "llama", "tie_word_embeddings": True, **decoder(96, 256, 3, 6, 2, 16, 768)},
    },
    "qwen3": {"qwen3-8b": {"model_type": "qwen3", **decoder(4096, 12_288, 36, 32, 8, 128, 151_936)}},
}

_UNSEEN = "it does not separate samples in a row (its mask or positions ignore position_ids)"
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "xlm"),
    *("xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
)
_DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
            *("lfm2", "lfm2_moe", "lfm2_vl", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm"),
            *("zamba", "zamba2", "zaya"),
        ),
        HYBRID,
    ),
    **dict.fromkeys(("afmoe", "biogpt", "bloom", "cpmant", "falcon", "mpt", "openai-gpt", "opt", "xglm"), _UNSEEN),
    **dict.fromkeys(_ENCODERS, "it is an encoder, or the decoder of one"),
    "blt": "it groups bytes of a row into patches across samples",
    **dict.fromkeys(_DRAFTS, "it is only a draft model"),
}
NOT_CAUSAL = frozenset((*_ENCODERS, *_DRAFTS))  # refused on padded rows as well

# <|start_header_id|>user<|end_header_id|>
_HEADERS = """\
{{ bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + write(message.content) | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
# Reasoning is kept (and an empty block written where there is none) after the last user turn only: earlier answers
# are shown without it. The text of an answer therefore depends on the turns that follow it.
_CHATML_THINKING = """\
{%- set state = namespace(last_user=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set state.last_user = state.last_user + 1 -%}{%- endfor -%}
{%- set seen = namespace(users=-1) -%}
{%- for message in messages -%}
{%- set text = write(message.content) -%}
{%- if message.role == 'user' -%}{%- set seen.users = seen.users + 1 -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{%- set final = seen.users == state.last_user -%}
{%- if '</think>' in text and not final -%}{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- elif '</think>' not in text and final and loop.last -%}{%- set text = '<think>\\n\\n</think>\\n\\n' + text -%}
{%- endif -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""
_LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
TINY: Mapping[str, TinySpec] = {
    "qwen2": TinySpec(
        tokens=QWEN_TOKENS,
        special=("<|im_start|>",),
        template=TemplateSpec(dialect=CHATML, system="You are a helpful assistant."),
        config=text_config("qwen2", QWEN_TOKENS),
    ),
    "qwen3": TinySpec(
        tokens=QWEN_TOKENS,
        special=("<|im_start|>",),
        added=THINK,
        template=TemplateSpec(dialect=_CHATML_THINKING),
        config=text_config("qwen3", QWEN_TOKENS),
    ),
    "llama": TinySpec(
        tokens=_LLAMA3_TOKENS,
        special=("<|start_header_id|>", "<|end_header_id|>"),
        adds_bos=True,
        template=TemplateSpec(dialect=_HEADERS),
        config=text_config("llama", _LLAMA3_TOKENS),
    ),
    "mistral": TinySpec(
        tokens=LLAMA_TOKENS,
        special=("[INST]", "[/INST]"),
        adds_bos=True,
        template=TemplateSpec(dialect=INSTRUCTIONS),
        config=text_config("mistral", LLAMA_TOKENS, sliding_window=None),
    ),
    "smollm3": TinySpec(
        tokens=QWEN_TOKENS,
        special=("<|im_start|>",),
        added=THINK,
        template=TemplateSpec(dialect=CHATML, system="You are a small and careful assistant."),
        config=text_config("smollm3", QWEN_TOKENS),
    ),
}
