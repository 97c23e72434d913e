"""Chat templates: the jinja text with which a tokenizer turns messages into the text that its model reads."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from gossamer.spec.errors import BadInput, bad_input

_KEY = "data.tokenizer"
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FACTOR, _LEAST = 64, 1 << 20  # letters that a template may make: so many for each of the messages, and at least


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: its jinja text, and the special tokens that it may name ("": undefined in the template).

    Templates run in a sandbox: they reach neither files nor Python's internals. `origin`: where it was read, for
    errors. It renders what transformers' `apply_chat_template` renders of messages alone (no tools, no documents).
    """

    TOKENS_FILE: ClassVar[str] = "special_tokens_map.json"

    source: str
    bos_token: str = ""
    eos_token: str = ""
    unk_token: str = ""
    sep_token: str = ""
    pad_token: str = ""
    cls_token: str = ""
    mask_token: str = ""
    origin: str = field(default="", compare=False, repr=False)

    @staticmethod
    def of(source: str, tokens: Mapping[str, Any], *, origin: str = "") -> ChatTemplate:
        """Return the template with this text, and the tokens of a tokenizer: their names -> the texts, or {content}.

        Other keys of `tokens` are left out.
        """
        texts = {name: _content(tokens.get(name)) for name in _NAMES}
        return ChatTemplate(source, **texts, origin=origin)

    @staticmethod
    def read(folder: Path) -> ChatTemplate | None:
        """Return the template among a tokenizer's files; None where there is none.

        It is chat_template.jinja, else `chat_template` in tokenizer_config.json: a text, or a list of named ones, of
        which it is the "default". Raises BadInput for files that cannot be read, and for names without a default.
        """
        config = _object(folder / _CONFIG)
        source, file = _named_default(config.get("chat_template"), folder / _CONFIG), folder / _CONFIG
        if (folder / _FILE).is_file():
            source, file = _text(folder / _FILE), folder / _FILE
        if source is None:
            return None
        # as transformers reads them: the map counts only beside a config that lists no added tokens, and then first
        tokens = (
            config if "added_tokens_decoder" in config else {**config, **_object(folder / ChatTemplate.TOKENS_FILE)}
        )
        return ChatTemplate.of(source, tokens, origin=str(file))

    @property
    def tokens(self) -> dict[str, str]:
        """Return the special tokens that are defined: name -> text."""
        return {name: text for name in _NAMES if (text := getattr(self, name))}

    def files(self) -> dict[str, bytes]:
        """Return name -> content: the files from which `read`, and transformers, read this template."""
        tokens = json.dumps(self.tokens, indent=2, ensure_ascii=False) + "\n"
        return {_FILE: self.source.encode("utf-8"), self.TOKENS_FILE: tokens.encode("utf-8")}

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Return the text of `messages` ({role, content} each), with the start of an answer where asked.

        Raises BadInput, with what the template says, where it refuses the messages, is no template, reaches out of its
        sandbox, or makes a text of more than 64 letters for each of theirs (1 Mi letters are always allowed).
        """
        given = [{key: value for key, value in one.items() if value is not None} for one in messages]
        values: dict[str, Any] = {"tools": None, "documents": None, **self.tokens}
        values |= {"messages": given, "add_generation_prompt": add_generation_prompt}
        limit = max(_LEAST, _FACTOR * sum(len(str(value)) for one in given for value in one.values()))
        sandbox = importlib.import_module("gossamer.data._template_sandbox")
        try:
            return str(sandbox.rendered(self._compiled, values, limit=limit))
        except (Exception, RecursionError) as error:  # a template's expressions raise whatever Python raises
            raise self._refusal(error, len(given)) from None

    @cached_property
    def _compiled(self) -> Any:
        return importlib.import_module("gossamer.data._template_sandbox").compiled(self.source)

    def _refusal(self, error: Exception, count: int) -> BadInput:
        said = " ".join((getattr(error, "message", None) or str(error) or type(error).__name__).split())[:500]
        kind, line = type(error).__name__, getattr(error, "lineno", None)
        at = f" (line {line})" if line else ""
        named = f"the chat template {self.origin}" if self.origin else "the chat template"
        if kind == "TemplateSyntaxError":
            return BadInput(f"{named} is no jinja template{at}: {said}: correct it, or give another one", key=_KEY)
        said = said if kind == "TemplateError" else f"{kind}: {said}"
        return bad_input(
            wanted=f"{count} messages that {named} renders",
            got=f"its error {said!r}",
            do="give other messages, or another template",
            key=_KEY,
        )


def _content(token: Any) -> str:
    """Return the text of a token as tokenizer files write it: the text, {content: text}, or null."""
    said = token.get("content") if isinstance(token, Mapping) else token
    return "" if said is None else str(said)


def _named_default(said: Any, file: Path) -> str | None:
    """Return the template that a configuration holds: of several named ones, the default."""
    if said is None or isinstance(said, str):
        return said or None
    named = said
    if isinstance(said, list):
        named = {one.get("name"): one.get("template") for one in said if isinstance(one, dict)}
    found = named.get("default") if isinstance(named, dict) else None
    if not isinstance(found, str):
        raise bad_input(
            wanted=f"a chat template named default in {file}",
            got=f"only {', '.join(sorted(map(str, named)))}" if named else f"a {type(said).__name__}",
            do=f"write the one to use to {file.with_name(_FILE)}",
            key=_KEY,
        )
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"cannot read {file}: {said}: repair it, or name another tokenizer", key=_KEY) from None


def _object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except ValueError as error:
        raise BadInput(f"{file} is not JSON ({error}): replace it by an intact file", key=_KEY) from None
    if not isinstance(found, dict):
        got = type(found).__name__
        raise bad_input(wanted=f"a JSON object in {file}", got=got, do="replace it by an intact file", key=_KEY)
    return found
