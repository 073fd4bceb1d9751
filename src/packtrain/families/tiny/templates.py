"""Chat templates in the style of each family, put together from a few dialects and the family's placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
_FOLD_SYSTEM = """\
{%- set state = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set state.system = write(messages[0].content) + '\\n\\n' -%}{%- endif -%}
"""
_CHATML = """\
{%- if @SYSTEM and messages[0].role != 'system' -%}
{{ '<|im_start|>system' + @GAP + @SYSTEM + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + @GAP + write(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + @GAP }}{%- endif -%}
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
_UTTERANCES = """\
{{ bos_token }}
{%- for message in messages -%}
{%- set tight = message.content is not string and message.content and message.content[0].type == 'image' -%}
{{ message.role | capitalize + (':' if tight else ': ') + write(message.content) + '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""
_USER_ASSISTANT = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ write(message.content) + ' ' }}
{%- elif message.role == 'assistant' -%}{{ 'ASSISTANT: ' + write(message.content) + eos_token }}
{%- else -%}{{ message.role | upper + ': ' + write(message.content) + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""
_INSTRUCTIONS = (
    _FOLD_SYSTEM
    + """\
{%- if @BOS -%}{{ bos_token }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'assistant' -%}{{ ' ' + write(message.content) + eos_token }}
{%- else -%}{{ '[INST] ' + state.system + write(message.content) + ' [/INST]' }}{%- set state.system = '' -%}
{%- endif -%}
{%- endfor -%}
"""
)
_TURNS = (
    _FOLD_SYSTEM
    + """\
{{ bos_token }}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + state.system + write(message.content) | trim + '<end_of_turn>\\n' }}
{%- set state.system = '' -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
)
_HEADERS = """\
{{ bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + write(message.content) | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
_DIALECTS: Mapping[str, str] = {
    "chatml": _CHATML,
    "chatml_thinking": _CHATML_THINKING,
    "utterances": _UTTERANCES,  # User: ...<end_of_utterance>
    "user_assistant": _USER_ASSISTANT,  # USER: ... ASSISTANT: ...
    "instructions": _INSTRUCTIONS,  # [INST] ... [/INST]
    "turns": _TURNS,  # <start_of_turn>user
    "headers": _HEADERS,  # <|start_header_id|>user<|end_header_id|>
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSpec:
    """Which dialect a family speaks and what it writes for a medium; families without media write nothing."""

    dialect: str  # a key of _DIALECTS
    image: str = ""
    video: str = ""
    media_first: bool = False
    system: str = ""  # said where the conversation has no system message (chatml only)
    gap: str = "\n"  # between the role and the content (chatml only)
    bos: bool = True  # whether the template writes the first token (instructions only)


def chat_template(spec: TemplateSpec) -> str:
    """The text of chat_template.jinja."""
    text = (_WRITE_MEDIA_FIRST if spec.media_first else _WRITE) + _DIALECTS[spec.dialect]
    values = {"IMAGE": spec.image, "VIDEO": spec.video, "SYSTEM": spec.system, "GAP": spec.gap}
    for name, value in values.items():
        text = text.replace(f"@{name}", _literal(value))
    return text.replace("@BOS", "true" if spec.bos else "false")


def _literal(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
