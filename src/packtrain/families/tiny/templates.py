"""Chat templates in the style of each family, put together from a dialect and the family's placeholders."""

from __future__ import annotations

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
