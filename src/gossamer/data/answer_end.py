"""The end of an answer, as a chat template writes it: the token or the text at which generation stops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Tokenizer
from gossamer.spec.errors import BadInput

_ASKED, _ANSWERED = "question 7", "answer 8"


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What ends an answer: any of `tokens`, or `text` ("": none), which the tokenizer writes in several tokens."""

    tokens: frozenset[int]
    text: str = ""


def answer_end(template: ChatTemplate, tokenizer: Tokenizer, named: Iterable[int] = ()) -> AnswerEnd:
    """Return the end of answers: the tokenizer's separator, the `named` ids, and the template's end of a turn.

    The end of a turn is what the template writes behind an answer. If that is nothing, it is what stands between an
    answer and the next message of the user. `named`: eos_token_id of a generation_config.json, from which only special
    tokens of this tokenizer are taken.
    """
    spelled = {number: tokenizer.spell([number]) for number in named if 0 <= number < tokenizer.vocabulary}
    tokens = {number for number, text in spelled.items() if text in tokenizer.special} | {tokenizer.separator}
    closing = _closing(template)
    if not closing:
        return AnswerEnd(frozenset(tokens))
    ids = tokenizer.rendered_spans([closing.lstrip()])[0].ids
    if tokenizer.spell([int(ids[0])]) in tokenizer.special:
        return AnswerEnd(frozenset(tokens | {int(ids[0])}))
    return AnswerEnd(frozenset(tokens), closing)


def _closing(template: ChatTemplate) -> str:
    dialogue = [
        {"role": "user", "content": "question 5"},
        {"role": "assistant", "content": _ANSWERED},
        {"role": "user", "content": _ASKED},
    ]
    try:
        alone = template.render(dialogue[:2], add_generation_prompt=False).rpartition(_ANSWERED)
        followed = template.render(dialogue, add_generation_prompt=True).rpartition(_ANSWERED)
    except BadInput:  # a template for one turn only
        return ""
    if not (alone[1] and followed[1]):  # it rewrites answers
        return ""
    between = followed[2].partition(_ASKED)[0]
    shared = next((n for n, (a, b) in enumerate(zip(alone[2], between, strict=False)) if a != b), None)
    return alone[2][:shared].rstrip() or between.rstrip()  # some templates begin the next turn always
