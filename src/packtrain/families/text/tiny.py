"""The tiny text models."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.families.tiny.parts import LLAMA_TOKENS, QWEN_TOKENS, THINK, TinySpec, text_config
from packtrain.families.tiny.templates import CHATML, INSTRUCTIONS, TemplateSpec

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
