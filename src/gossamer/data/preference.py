"""Preference pairs read from JSON records: a prompt with a better and a worse answer.

| prompt | record |
|---|---|
| a text | {"prompt": "...", "chosen": "...", "rejected": "..."} |
| messages | {"prompt": [{"role": "user", "content": "..."}], "chosen": "...", "rejected": "..."} |
| in both answers | {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]} |

An answer is a text, or a list with one message of the assistant; a list that begins otherwise is the complete
conversation, which then holds the prompt. A text in "system" comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.data.conversation import (
    KEY,
    Conversation,
    Message,
    check_read,
    check_turns,
    messages_of,
    optional_text,
    text_of,
)
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that differ in their last answer: `chosen` is preferred to `rejected`."""

    chosen: Conversation
    rejected: Conversation


def pair_of(record: Mapping[str, Any], where: str) -> Pair:
    """Return the pair in a JSON record, checked; `where` ("file:line") is named in every error.

    Raises BadInput for a record without prompt, chosen or rejected, for two prompts that differ, for equal answers, for
    fields that mean something and are not read, and for conversations that `check_turns` refuses.
    """
    check_read(record, where)
    for name in ("chosen", "rejected"):
        if name not in record:
            raise bad_input(
                wanted=f"prompt, chosen and rejected at {where}",
                got=f"fields {', '.join(sorted(record)) or 'none'}",
                do="rename the fields, or leave the line out",
                key=KEY,
            )
    chosen, rejected = (_complete(record, name, where) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise bad_input(
            wanted=f"one prompt for both answers at {where}",
            got="chosen and rejected that differ before their last message",
            do="give both the same messages up to the answer",
            key=KEY,
        )
    if chosen[-1] == rejected[-1]:
        raise bad_input(
            wanted=f"two different answers at {where}",
            got="the same text as chosen and as rejected",
            do="remove the line",
            key=KEY,
        )
    return Pair(chosen, rejected)


def _complete(record: Mapping[str, Any], name: str, where: str) -> Conversation:
    """Return the complete conversation that ends in an answer."""
    answer = _answer(record[name], name, where)
    system = optional_text(record, "system", where)
    before = (Message("system", system),) if system else ()
    if len(answer) > 1:
        _check_same_prompt(record, answer, where)
        messages = (*before, *answer)
    else:
        messages = (*before, *_prompt(record, where), *answer)
    check_turns(messages, f"{name} of {where}")
    if messages[-1].role != "assistant":
        raise bad_input(
            wanted=f"an answer (role assistant) at the end of {name} at {where}",
            got=f"role {messages[-1].role}",
            do="end with the answer",
            key=KEY,
        )
    return messages


def _answer(value: Any, name: str, where: str) -> Conversation:
    if isinstance(value, list):
        return messages_of(value, f"{name} of {where}")
    return (Message("assistant", text_of(value, f"{name} at {where}")),)


def _prompt(record: Mapping[str, Any], where: str) -> Conversation:
    prompt = record.get("prompt")
    if isinstance(prompt, list) and prompt:
        return messages_of(prompt, f"prompt of {where}")
    if not isinstance(prompt, str) or not prompt.strip():
        raise bad_input(
            wanted=f"a prompt at {where}",
            got="none" if not prompt or isinstance(prompt, str) else type(prompt).__name__,
            do="add it, as a text or as messages",
            key=KEY,
        )
    return (Message("user", text_of(prompt, f"prompt at {where}")),)


def _check_same_prompt(record: Mapping[str, Any], answer: Conversation, where: str) -> None:
    """Raise BadInput for a prompt beside complete conversations that does not stand in them."""
    prompt = record.get("prompt")
    said = [one.content for one in answer[:-1]] if isinstance(prompt, str) else None
    if prompt is None or (said is not None and prompt in said):
        return
    if isinstance(prompt, list) and messages_of(prompt, f"prompt of {where}") == answer[: len(prompt)]:
        return
    raise BadInput(
        f"the prompt at {where} is not in the conversation that ends in the answer: leave the prompt out, or give the "
        "answer alone",
        key=KEY,
    )
