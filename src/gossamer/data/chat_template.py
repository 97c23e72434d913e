"""Chat templates: the jinja text with which a tokenizer turns messages into the text that its model reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gossamer.spec.errors import BadInput

_KEY = "data.tokenizer"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: its jinja text, and the special tokens that it may name."""

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Return the text of `messages`, with the start of an answer where asked. Raises BadInput."""
        import jinja2

        try:
            return str(
                self._compiled.render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.bos_token,
                    eos_token=self.eos_token,
                )
            )
        except jinja2.TemplateError as error:
            raise BadInput(f"the chat template says: {error.message}: give other messages", key=_KEY) from None

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.source)

    @staticmethod
    def read(folder: Path) -> ChatTemplate | None:
        """Read the template among a tokenizer's files; None where there is none."""
        config = folder / "tokenizer_config.json"
        said = json.loads(config.read_text("utf-8")) if config.is_file() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else said.get("chat_template")
        return ChatTemplate(source, said.get("bos_token") or "", said.get("eos_token") or "") if source else None
