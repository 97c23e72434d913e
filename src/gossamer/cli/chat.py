"""The command `gossamer chat`: a dialogue in the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.api import verbs
from gossamer.cli.output import write_line, write_note, write_piece
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest
from gossamer.spec.units import show_seconds

if TYPE_CHECKING:  # brings torch
    from gossamer.model.chat import Answer, Chat

COMMANDS = {  # what a line may begin with, and what it does
    "/reset": "forget the dialogue, but not the system message",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/undo": "forget the last message and its answer",
    "/save FILE": "append the dialogue to a file of JSON lines, which `data.source: chat:FILE` reads",
    "/help": "show this list",
    "/quit": "end, as Ctrl-D does",
}
HELP = "\n".join(f"  {name:14s}{said}" for name, said in COMMANDS.items()) + (
    "\n  //TEXT        a message that begins with /\n  Ctrl-C        end the answer"
)
Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="write one JSON object per answer, as a line")
]


def chat(
    model: Path,
    /,
    *,
    prompt: str | None = None,
    system: str = "",
    template: Path | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Speak with a model that was trained on chats, e.g. `gossamer chat runs/NAME`.

    In a pipe every line is a message, and answers alone are written. /help lists what else a line can be.

    Parameters
    ----------
    model
        The folder that `gossamer train` named, a Hugging Face folder, or a GGUF file.
    prompt
        One message: answer it and end.
    system
        The system message, which says how the model is to answer.
    template
        A file with a chat template (jinja), in place of the tokenizer's own.
    max_new_tokens
        The longest answer, in tokens.
    temperature
        0: always the likeliest token; 1: as likely as the model says.
    top_k
        Choose among so many likeliest tokens; 0: among all.
    top_p
        Choose among the fewest tokens whose probabilities add up to this; 1: among all.
    seed
        The same seed and messages give the same answers.
    """
    began = time.perf_counter()
    if max_new_tokens < 1:
        got = str(max_new_tokens)
        raise bad_input(wanted="a number >= 1", got=got, do="give 1 or more", key="--max-new-tokens")
    opened = verbs.chat(
        model,
        system=system,
        template=template,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    _say_who(opened, time.perf_counter() - began)
    terminal = _Terminal(opened, is_json=json)
    if prompt is not None:
        terminal.answer(prompt)
    elif sys.stdin.isatty():
        terminal.converse()
    else:
        terminal.read(sys.stdin)
    return 0


def _say_who(chat: Chat, seconds: float) -> None:
    step = "" if chat.step is None else f", step {chat.step}"
    write_note(f"{chat.name}{step}, loaded in {show_seconds(seconds)}; it sees {chat.window} tokens")
    if chat.logits.uncached:
        write_note(f"without a cache: {chat.logits.uncached}; every token reads the whole dialogue again")


@dataclass(frozen=True, slots=True)
class _Terminal:
    """A dialogue and where it is written."""

    chat: Chat
    is_json: bool

    def converse(self) -> None:
        """Ask for messages until Ctrl-D or /quit; errors end a turn alone."""
        with suppress(ImportError):
            importlib.import_module("readline")  # `input` edits lines with it
        write_note("/help lists commands; Ctrl-C ends an answer, Ctrl-D the dialogue")
        while True:
            try:
                line = input("> ")
            except EOFError:
                write_piece("\n")
                return
            except KeyboardInterrupt:  # drops the line, as in a shell
                write_piece("\n")
                continue
            try:
                if not self.turn(line):
                    return
            except BadInput as error:
                write_note(str(error))

    def read(self, lines: Iterator[str]) -> None:
        """Take every line as a message. Raises BadInput that names the line."""
        for number, line in enumerate(lines, start=1):
            try:
                if not self.turn(line.rstrip("\r\n")):
                    return
            except BadInput as error:
                raise BadInput(f"line {number}: {error.message}", key=error.key) from None

    def turn(self, line: str) -> bool:
        """Answer a message or obey a command; return whether the dialogue goes on. Raises BadInput."""
        if line.startswith("//"):
            line = line[1:]
        elif line.startswith("/"):
            return self._obey(line)
        if line.strip():
            self.answer(line)
        return True

    def answer(self, text: str) -> None:
        """Write the answer to a message. Ctrl-C ends it. Raises BadInput."""
        last = ""
        with closing(self.chat.stream(text)) as pieces:
            try:
                for piece in pieces:
                    if not self.is_json:
                        write_piece(piece)
                    last = piece
            except KeyboardInterrupt:
                pass
        answer = self.chat.last
        assert answer is not None
        if self.is_json:
            write_line(asdict(answer))
        elif not last.endswith("\n"):
            write_piece("\n")
        self._remark(answer)

    def _remark(self, answer: Answer) -> None:
        window = self.chat.window
        if answer.unseen:
            write_note(
                f"[the dialogue is longer than the {window} tokens the model sees: "
                f"its first {answer.unseen} messages are left out]"
            )
        if answer.has_slid:
            write_note(f"[the answer outgrew the {window} tokens the model sees: their beginning was left out]")
        if not answer.text and answer.ended == "turn":
            write_note("[the model ended its turn without a word]")
        if answer.ended == "interrupted":
            write_note("[interrupted]")
        if answer.ended == "length":
            write_note(f"[ended after {answer.tokens} tokens: --max-new-tokens]")

    def _obey(self, line: str) -> bool:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/help":
            write_note(HELP)
        elif name == "/reset":
            self.chat.reset()
        elif name == "/system":
            self.chat.system(rest)
        elif name == "/undo":
            if not self.chat.undo():
                write_note("there is no message to forget")
        elif name == "/save" and rest:
            self.chat.save(Path(rest).expanduser())
            write_note(f"appended to {rest}")
        else:
            known = [each.partition(" ")[0] for each in COMMANDS]
            do = f"{nearest(name, known)} A message that begins so is written /{line}"
            do = "give a file: /save FILE" if name == "/save" else do
            raise bad_input(wanted="a command such as /help", got=repr(line), do=do, key="chat")
        return True
