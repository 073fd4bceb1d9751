"""Text models whose samples cannot be packed, and why."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.families.contracts import HYBRID

_UNSEEN = "it does not separate samples in a row (its mask or positions ignore position_ids)"
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
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "xlm"),
            *("xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
        ),
        "it is an encoder, or a decoder that does not separate samples in a row",
    ),
    "blt": "it groups bytes of a row into patches across samples",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it is only a draft model"),
}
