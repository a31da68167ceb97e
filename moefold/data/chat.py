"""Chats: messages of records, in OpenAI's spelling ("messages": role, content) or in ShareGPT's ("conversations": from,
value). A malformed record is refused with a ValueError that completes "FILE, line N ...". Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ASSISTANT = "assistant"
SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "function": "tool", "observation": "tool"}  # others as they are
BEGIN, END = "\ufdd0", "\ufdd1"  # around what a template marks: code points that Unicode reserves for such uses

Message = Mapping[str, Any]


class Chat(NamedTuple):
    """Messages, and the descriptions of the tools that they may call."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None

    def before(self, count: int) -> Chat:
        """The first messages."""
        return self._replace(messages=self.messages[:count])


def read_chat(fields: Mapping[str, Any]) -> Chat:
    """The messages of a record, in OpenAI's spelling or in ShareGPT's."""
    if "messages" in fields:
        listed = require_list(fields, "messages")
        messages = [read_message(number, entry) for number, entry in enumerate(listed, start=1)]
    elif "conversations" in fields:
        listed = require_list(fields, "conversations")
        messages = [read_turn(number, entry) for number, entry in enumerate(listed, start=1)]
    else:
        names = ", ".join(map(str, fields))
        raise ValueError(f'has the fields {names}; expected a list in "messages" or "conversations"')
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise ValueError(f"has messages of {', '.join(roles)}; expected one of assistant, of which the model learns")
    return Chat(messages, fields.get("tools"))


def require_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    listed = fields[name]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'has {type(listed).__name__} in "{name}"; expected a list of messages, at least one')
    return listed


def read_message(number: int, entry: Any) -> dict[str, Any]:
    """A message with a role, and a content unless it calls tools. Other fields without a value are left out: a table
    gives them to all messages."""
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ValueError(f'has a message {number} without a text in "role"; expected such as "user"')
    message = {key: value for key, value in entry.items() if key == "content" or value is not None}
    content = message.get("content")
    if not isinstance(content, str | list) and "tool_calls" not in message:
        raise ValueError(f'has a message {number} without a text in "content"; expected one')
    if isinstance(content, str):
        refuse_marks(number, content)
    return message


def read_turn(number: int, entry: Any) -> dict[str, Any]:
    """A message in ShareGPT's spelling."""
    if not isinstance(entry, dict):
        raise ValueError(f'has a turn {number} that is no object; expected "from" and "value"')
    role, content = entry.get("from"), entry.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f'has a turn {number} without texts in "from" and "value"; expected both')
    refuse_marks(number, content)
    return {"role": SHAREGPT_ROLES.get(role, role), "content": content}


def refuse_marks(number: int, content: str) -> None:
    if BEGIN in content or END in content:
        raise ValueError(f"has U+FDD0 or U+FDD1 in message {number}, which are no characters; remove them")
