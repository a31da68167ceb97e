"""Chats: messages of records, in OpenAI's spelling ("messages": role, content) or in ShareGPT's ("conversations": from,
value). A malformed record is refused with a ValueError that completes "FILE, line N ...". Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ASSISTANT = "assistant"
SHAREGPT_ROLES = {  # others as they are
    "human": "user",
    "gpt": ASSISTANT,
    "function": "tool",
    "observation": "tool",
}
BEGIN, END = "\ufdd0", "\ufdd1"  # around what a template marks: code points that Unicode reserves for such uses

Message = Mapping[str, Any]
ReadMessage = dict[str, Any]


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
        numbered = enumerate(listed, start=1)
        messages = [read_message(number, entry) for number, entry in numbered]
    elif "conversations" in fields:
        listed = require_list(fields, "conversations")
        numbered = enumerate(listed, start=1)
        messages = [read_turn(number, entry) for number, entry in numbered]
    else:
        names = ", ".join(map(str, fields))
        raise ValueError(f'has the fields {names}; expected a list in "messages" or "conversations"')
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        listed_roles = ", ".join(roles)
        raise ValueError(f"has messages of {listed_roles}; expected one of assistant, of which the model learns")
    tools = fields.get("tools")
    return Chat(messages, tools)


def compares_chats(fields: Mapping[str, Any]) -> bool:
    """Whether a preference has messages, rather than three texts."""
    if "messages" in fields or "conversations" in fields:
        return True
    chosen = fields.get("chosen")
    prompt = fields.get("prompt")
    return isinstance(chosen, list | dict) or isinstance(prompt, list | dict)


def read_compared_chats(fields: Mapping[str, Any]) -> tuple[Chat, Chat]:
    """The chats that end with the chosen and with the rejected answer of a preference. The messages before stand in
    "prompt", "messages" or "conversations", or in both responses."""
    before: list[ReadMessage] = []
    for name in ("prompt", "messages", "conversations"):
        listed = fields.get(name)
        if isinstance(listed, list):
            before = read_messages(listed)
    chosen = read_response(fields, "chosen")
    rejected = read_response(fields, "rejected")
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and len(chosen) == 1:
        before.append({"role": "user", "content": prompt})
    if chosen[:-1] != rejected[:-1]:
        raise ValueError('has other messages before the last in "chosen" than in "rejected"; expected the same')
    chosen = before + chosen
    rejected = before + rejected
    require_answer("chosen", chosen)
    require_answer("rejected", rejected)
    tools = fields.get("tools")
    return Chat(chosen, tools), Chat(rejected, tools)


def require_answer(name: str, messages: list[ReadMessage]) -> None:
    count = len(messages)
    role = messages[-1]["role"]
    if role != ASSISTANT or count < 2:
        said = f'has {count} messages in "{name}" with its prompt, the last of {role}'
        raise ValueError(f"{said}; expected a question and an answer of assistant, which is compared")


def read_response(fields: Mapping[str, Any], name: str) -> list[ReadMessage]:
    """The messages of a response: a list of them, one, or its text."""
    response = fields.get(name)
    if isinstance(response, str) and response:
        answer = {"role": ASSISTANT, "content": response}
        return [answer]
    if isinstance(response, dict):
        return read_messages([response])
    if not isinstance(response, list) or not response:
        shown = "an empty" if response in ("", []) else f"{type(response).__name__} in"
        raise ValueError(f'has {shown} "{name}"; expected a text, a message, or a list of messages')
    return read_messages(response)


def read_messages(entries: Sequence[Any]) -> list[ReadMessage]:
    """Messages in either spelling."""
    messages: list[ReadMessage] = []
    for number, entry in enumerate(entries, start=1):
        is_turn = isinstance(entry, dict) and "from" in entry
        read = read_turn if is_turn else read_message
        message = read(number, entry)
        messages.append(message)
    return messages


def require_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    listed = fields[name]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'has {type(listed).__name__} in "{name}"; expected a list of messages, at least one')
    return listed


def read_message(number: int, entry: Any) -> ReadMessage:
    """A message with a role, and a content unless it calls tools. Other fields without a value are left out: a table
    gives them to all messages."""
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(role, str):
        raise ValueError(f'has a message {number} without a text in "role"; expected such as "user"')
    message: ReadMessage = {}
    for key, value in entry.items():
        if key == "content" or value is not None:
            message[key] = value
    content = message.get("content")
    if not isinstance(content, str | list) and "tool_calls" not in message:
        raise ValueError(f'has a message {number} without a text in "content"; expected one')
    if isinstance(content, str):
        refuse_marks(number, content)
    return message


def read_turn(number: int, entry: Any) -> ReadMessage:
    """A message in ShareGPT's spelling."""
    if not isinstance(entry, dict):
        raise ValueError(f'has a turn {number} that is no object; expected "from" and "value"')
    role = entry.get("from")
    content = entry.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f'has a turn {number} without texts in "from" and "value"; expected both')
    refuse_marks(number, content)
    our_role = SHAREGPT_ROLES.get(role, role)
    return {"role": our_role, "content": content}


def refuse_marks(number: int, content: str) -> None:
    if BEGIN in content or END in content:
        raise ValueError(f"has U+FDD0 or U+FDD1 in message {number}, which are no characters; remove them")
