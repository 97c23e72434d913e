"""A dialogue with a model: messages rendered by its chat template, answers as they are generated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gossamer.data.answer_end import AnswerEnd
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Tokenizer
from gossamer.model.generate import TokenChoice, check_prompt, continued
from gossamer.model.text_stream import pieces, until
from gossamer.model.token_logits import TokenLogits
from gossamer.spec.errors import BadInput, bad_input

Messages = list[dict[str, str]]

_KEY = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. `ended`: "turn" (the model ended it), "length" (of max_new_tokens), "interrupted".

    `first_token_s`: seconds until the first token, those of reading the dialogue included; `tokens_per_s`: from then
    on. `unseen`: messages that the model does not see any more; `has_slid`: the answer itself outgrew the window.
    """

    text: str
    tokens: int
    ended: str
    seconds: float
    first_token_s: float
    tokens_per_s: float
    unseen: int
    has_slid: bool


@dataclass(slots=True, kw_only=True)
class Chat:
    """A dialogue with a model in evaluation mode.

    `end` says where an answer ends; `window` counts the tokens that the model sees. Only what is new in a dialogue is
    computed, where the model has a cache. If the dialogue outgrows the window, its oldest turns are left out; if an
    answer does, the window slides by a quarter. The same seed and messages give the same answers.
    """

    logits: TokenLogits
    tokenizer: Tokenizer
    template: ChatTemplate
    end: AnswerEnd
    window: int
    choice: TokenChoice
    max_new_tokens: int
    seed: int
    name: str = ""
    step: int | None = None
    messages: Messages = field(default_factory=list)
    last: Answer | None = None
    _generator: torch.Generator | None = None

    def ask(self, text: str) -> str:
        """Return the answer to a user's message; `last` says more about it. Raises BadInput."""
        return "".join(self.stream(text))

    def stream(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to a user's message in pieces that are final; `last` then says more about it.

        Closing the iterator early ends the answer, and the dialogue keeps what there is of it; an empty answer leaves
        the dialogue as it was. Raises BadInput.
        """
        self._check(text)
        asked = [*self.messages, {"role": "user", "content": text}]
        ids, unseen = self._seen(asked)
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.seed)
        generator, run = self._generator, _Run(len(ids), self.window)
        tokens = continued(
            ids,
            lambda seen: self.choice.draw(self.logits.after(seen), generator),
            tokens=self.max_new_tokens,
            window=self.window,
            stops=self.end.tokens,
            stride=max(1, self.window // 4),
        )
        said: list[str] = []
        ended = "interrupted"
        try:
            for piece in until(pieces(self.tokenizer, ids, run.counted(tokens)), self.end.text):
                said.append(piece)
                yield piece
            ended = "length" if run.is_exhausted and run.tokens == self.max_new_tokens else "turn"
        finally:
            self.last = run.answer("".join(said), ended, unseen)
            if self.last.text:
                self.messages = [*asked, {"role": "assistant", "content": self.last.text}]

    def reset(self) -> None:
        """Forget the dialogue, but not the system message."""
        self.messages = [one for one in self.messages if one["role"] == "system"]

    def undo(self) -> bool:
        """Forget the last message of the user and its answer; return whether there was one."""
        asked = [n for n, one in enumerate(self.messages) if one["role"] == "user"]
        if asked:
            self.messages = self.messages[: asked[-1]]
        return bool(asked)

    def system(self, text: str) -> None:
        """Set the system message, or remove it if `text` is empty. Raises BadInput if the template takes none."""
        self._check(text)
        others = [one for one in self.messages if one["role"] != "system"]
        found = [{"role": "system", "content": text}, *others] if text else others
        self.template.render([*found, {"role": "user", "content": "?"}], add_generation_prompt=True)
        self.messages = found

    def save(self, file: Path) -> None:
        """Append the dialogue to a file of JSON lines, {"messages": [...]}, as `data.source: chat:FILE` reads it.

        Raises BadInput for a dialogue without an answer, and if the file cannot be written.
        """
        if not any(one["role"] == "assistant" for one in self.messages):
            raise bad_input(wanted="a dialogue to save", got="no answer yet", do="ask something first", key=_KEY)
        line = json.dumps({"messages": self.messages}, ensure_ascii=False)
        try:
            with file.open("ab+") as out:
                if out.tell() and out.seek(-1, 2) >= 0 and out.read(1) != b"\n":  # of an editor that ends no last line
                    line = "\n" + line
                out.write(line.encode() + b"\n")
        except OSError as error:
            said = error.strerror or str(error)
            raise BadInput(f"cannot write {file}: {said}: name a file in a folder you can write to", key=_KEY) from None

    def _check(self, text: str) -> None:
        """Raise BadInput for text that would be read as a mark of the template: it would end its own turn."""
        check_prompt(text, key=_KEY)
        if (found := next((mark for mark in self.tokenizer.special if mark in text), None)) is not None:
            do = "write it otherwise"
            got = f"{found!r}, which the tokenizer reads as a mark of its own"
            raise bad_input(wanted="a message without special tokens", got=got, do=do, key=_KEY)

    def _seen(self, messages: Messages) -> tuple[list[int], int]:
        """Return the ids that the model sees of a dialogue, and how many of its messages are left out.

        A quarter of the window is kept free for the answer, or less if it cannot need as much.
        """
        room = self.window - min(self.max_new_tokens, self.window // 4)
        begin = 1 if messages[0]["role"] == "system" else 0
        asked = [n for n, one in enumerate(messages) if one["role"] == "user"]
        for start in asked:
            ids = self._ids([*messages[:begin], *messages[start:]])
            if len(ids) <= room:
                return ids, start - begin
        if len(ids) < self.window:  # the last message alone: it fits, and the answer slides
            return ids, asked[-1] - begin
        raise bad_input(
            wanted=f"a message that fits into the {self.window} tokens the model sees",
            got=f"{len(ids)} tokens, rendered",
            do="write a shorter one",
            key=_KEY,
        )

    def _ids(self, messages: Messages) -> list[int]:
        text = self.template.render(messages, add_generation_prompt=True)
        return [int(one) for one in self.tokenizer.rendered_spans([text])[0].ids]


@dataclass(slots=True)
class _Run:
    """The counts and times of one answer."""

    given: int
    window: int
    tokens: int = 0
    is_exhausted: bool = False
    clock: Callable[[], float] = time.perf_counter
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None

    def counted(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self.tokens += 1
            if self.first is None:
                self.first = self.clock()
            yield token
        self.is_exhausted = True

    def answer(self, text: str, ended: str, unseen: int) -> Answer:
        now = self.clock()
        first = now if self.first is None else self.first
        return Answer(
            text=text,
            tokens=self.tokens,
            ended=ended,
            seconds=now - self.began,
            first_token_s=first - self.began,
            tokens_per_s=(self.tokens - 1) / (now - first) if self.tokens > 1 and now > first else 0.0,
            unseen=unseen,
            has_slid=self.given + self.tokens > self.window,
        )
