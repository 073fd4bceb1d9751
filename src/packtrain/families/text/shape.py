"""Decoders of text models, and the one that stands for those that are not known."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.families.shape import Decoder, decoder_sizes

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
        defaults=decoder_sizes(3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, tie_word_embeddings=True)
    ),
    "gemma2": Decoder(
        defaults=decoder_sizes(
            2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, tie_word_embeddings=True, sliding_window=4096
        ),
        norms=4,
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
