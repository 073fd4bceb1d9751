"""Record -> the typed messages that a chat template renders."""

from __future__ import annotations

from typing import Any

from packtrain.core.values import Record, Text


def to_messages(record: Record, *, string_content: bool = False) -> list[dict[str, Any]]:
    """Each message as {"role", "content"}; media are {"type": kind} without a reference.

    With `string_content`, messages that hold text alone have it as one string, for templates of text models.
    """
    messages: list[dict[str, Any]] = []
    for message in record.messages:
        content: str | list[dict[str, str]]
        if string_content and all(isinstance(part, Text) for part in message.parts):
            content = "".join(part.text for part in message.parts if isinstance(part, Text))
        else:
            content = [
                {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": part.kind}
                for part in message.parts
            ]
        messages.append({"role": message.role, "content": content})
    return messages
