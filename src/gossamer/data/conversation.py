"""Conversations read from JSON records: turns of a user and answers of an assistant, in three dialects.

| dialect | record |
|---|---|
| messages | {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} |
| ShareGPT | {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."} |
| Alpaca | {"instruction": "...", "input": "...", "output": "..."} |

The dialect is found per record. The instruction and the input of an Alpaca record become one turn, with an empty line
between them; its system prompt and history are read where the record has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest

KEY = "data.source"
Role = Literal["system", "user", "assistant"]
_ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_FROM: Mapping[str, Role] = {**_ROLES, "human": "user", "gpt": "assistant"}
_NOT_READ = (  # would change what is learnt
    "tools",
    "functions",
    "tool_calls",
    "function_call",
    "weight",
    "train",
    "reasoning_content",
    "thinking",
)
_DIALECTS = {"messages": ("messages",), "conversations": ("conversations",), "instruction": ("instruction", "output")}
_EXPECTED = "one of messages (role, content), conversations (from, value), instruction with output"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: who speaks, and the text."""

    role: Role
    content: str


Conversation: TypeAlias = tuple[Message, ...]


def as_data(messages: Sequence[Message]) -> bytes:
    """Return a conversation as bytes: equal for equal conversations, whatever dialect they were written in."""
    return json.dumps([[one.role, one.content] for one in messages], ensure_ascii=False).encode("utf-8")


def written_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return the messages as dictionaries of role and content, as chat templates read them."""
    return [{"role": one.role, "content": one.content} for one in messages]


def conversation_of(record: Mapping[str, Any], where: str) -> Conversation:
    """Return the conversation in a JSON record, checked; `where` ("file:line") is named in every error.

    Raises BadInput for a record of no dialect, an unknown role, a text that is no string, a turn out of order (two
    answers or two questions in a row, an answer before any question), an empty answer, and no answer at all.
    """
    messages = _read(record, where)
    check_turns(messages, where)
    if not any(one.role == "assistant" for one in messages):
        raise bad_input(
            wanted=f"an answer (role assistant) at {where}",
            got=f"roles {', '.join(one.role for one in messages) or 'none'}",
            do="add an answer, or remove the line",
            key=KEY,
        )
    return messages


def check_turns(messages: Sequence[Message], where: str) -> None:
    """Raise BadInput unless users and assistants take turns, after one system message at most, and nobody is silent."""
    before: Role | None = None
    for number, one in enumerate(messages, start=1):
        at = f"message {number} (role {one.role}) at {where}"
        if one.role == "system" and number > 1:
            raise bad_input(wanted="a system message in the first place alone", got=at, do="move or remove it", key=KEY)
        if one.role == before:
            word = "answers" if one.role == "assistant" else "questions"
            raise bad_input(
                wanted="turns of user and assistant one after the other",
                got=f"two {word} in a row, {at}",
                do="merge the two messages, or remove one",
                key=KEY,
            )
        if one.role == "assistant" and before != "user":
            raise bad_input(
                wanted="a question (role user) before every answer",
                got=at,
                do="add the question, or remove the answer",
                key=KEY,
            )
        if not one.content.strip() and one.role != "system":
            raise bad_input(
                wanted=f"text in {at}", got="an empty message", do="write the text, or remove the line", key=KEY
            )
        before = one.role


def messages_of(value: Any, where: str, *, who: str = "role", what: str = "content") -> Conversation:
    """Return the messages in a list of {role, content}, or {from, value}. Raises BadInput that names file and line."""
    if not isinstance(value, list) or not value:
        raise bad_input(
            wanted=f"a list of messages {{{who}, {what}}} at {where}",
            got=f"{_kind(value)}",
            do="write at least a question and an answer",
            key=KEY,
        )
    return tuple(_message(one, f"message {n} at {where}", who, what) for n, one in enumerate(value, start=1))


def _read(record: Mapping[str, Any], where: str) -> Conversation:
    check_read(record, where)
    several = [name for name, least in _DIALECTS.items() if all(record.get(field) is not None for field in least)]
    if len(several) > 1:
        raise bad_input(
            wanted=f"one conversation at {where}",
            got=f"the fields {' and '.join(several)}, each of which holds one",
            do="remove the fields that are not meant",
            key=KEY,
        )
    if "messages" in record and several != ["conversations"]:
        return (*_system(record, where), *messages_of(record["messages"], where))
    if "conversations" in record:
        return (*_system(record, where), *messages_of(record["conversations"], where, who="from", what="value"))
    if "instruction" in record and "output" in record:
        return _alpaca(record, where)
    raise bad_input(
        wanted=f"a conversation at {where}, {_EXPECTED}",
        got=f"fields {', '.join(sorted(record)) or 'none'}",
        do="rename the fields, or read the file as text: jsonl:GLOB",
        key=KEY,
    )


def _message(value: Any, where: str, who: str, what: str) -> Message:
    if not isinstance(value, Mapping) or who not in value or what not in value:
        got = f"fields {', '.join(map(str, sorted(value))) or 'none'}" if isinstance(value, Mapping) else _kind(value)
        raise bad_input(wanted=f"{{{who}, {what}}} in {where}", got=got, do=f"write {who} and {what}", key=KEY)
    check_read(value, where)
    role = value[who]
    known = _ROLES if who == "role" else _FROM
    if not isinstance(role, str) or role not in known:
        raise BadInput(
            f"wanted {who} {', '.join(known)} in {where}, got {role!r}: {_nearest(role, known)}",
            key=KEY,
        )
    return Message(known[role], text_of(value[what], f"{what} of {where} (role {role})"))


def check_read(value: Mapping[str, Any], where: str) -> None:
    """Raise BadInput for a field that means something here which is not read: leaving it out would be silence."""
    if found := [name for name in _NOT_READ if value.get(name) not in (None, [], {})]:
        raise bad_input(
            wanted=f"messages of text alone at {where}",
            got=f"the field {found[0]!r}, which is not read",
            do="remove the field, or leave the line out",
            key=KEY,
        )


def text_of(value: Any, where: str) -> str:
    """Return a text that is valid Unicode. Raises BadInput that names the place."""
    if not isinstance(value, str):
        raise bad_input(wanted=f"a text as {where}", got=_kind(value), do="write a text", key=KEY)
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise bad_input(
            wanted=f"valid Unicode text as {where}",
            got="an unpaired surrogate (half of a surrogate pair, U+D800 to U+DFFF)",
            do="repair or remove the line",
            key=KEY,
        )
    return value


def optional_text(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a field; "" where there is none. Raises BadInput that names the place."""
    value = record.get(name)
    return "" if value is None else text_of(value, f"{name} at {where}")


def _alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    asked = text_of(record["instruction"], f"instruction at {where}")
    more = optional_text(record, "input", where)
    answer = text_of(record["output"], f"output at {where}")
    past: list[Message] = []
    history = record.get("history")
    for pair in history if isinstance(history, list) else [history] if history else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise bad_input(
                wanted=f"history as a list of [question, answer] at {where}", got=_kind(pair), do="correct it", key=KEY
            )
        past += [
            Message("user", text_of(pair[0], f"history at {where}")),
            Message("assistant", text_of(pair[1], f"history at {where}")),
        ]
    question = f"{asked}\n\n{more}" if asked and more else asked or more
    return (*_system(record, where), *past, Message("user", question), Message("assistant", answer))


def _system(record: Mapping[str, Any], where: str) -> Conversation:
    said = optional_text(record, "system", where)
    return (Message("system", said),) if said else ()


def _nearest(role: Any, known: Mapping[str, Role]) -> str:
    return nearest(role, known) if isinstance(role, str) else "write one of them"


def _kind(value: Any) -> str:
    return "nothing" if value is None else "an empty list" if value == [] else type(value).__name__
