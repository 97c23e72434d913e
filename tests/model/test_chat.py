"""Dialogues with small models: what is computed, seen, kept, and where answers end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.chats import tokenizer_folder
from gossamer.data import open_corpus
from gossamer.data.answer_end import AnswerEnd, answer_end
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.model.chat import Chat
from gossamer.model.generate import TokenChoice
from gossamer.model.token_logits import TokenLogits, token_logits
from gossamer.spec.errors import BadInput
from model.test_token_logits import lengths, module_of

PLAIN = "{% for m in messages %}{{ m.role.title() + ': ' + m.content }}\n\n{% endfor %}Assistant: "


@dataclass
class Recites(TokenLogits):
    """A model that writes `text`, and remembers what it has read."""

    tokenizer: Tokenizer
    text: str
    uncached: str = "it recites"
    seen: list[list[int]] = field(default_factory=list)
    at: int = 0

    def after(self, ids: Sequence[int]) -> Tensor:
        self.seen.append(list(ids))
        wanted = self.tokenizer.rendered_spans([self.text])[0].ids
        token, self.at = int(wanted[self.at]), (self.at + 1) % len(wanted)
        return torch.nn.functional.one_hot(torch.tensor(token), self.tokenizer.vocabulary).float()


def words(folder: Path, kind: str) -> Tokenizer:
    where = tokenizer_folder(folder / kind, kind)
    return parse_tokenizer(f"hf:{where}").make(lambda: (), identity="", cache=folder)


def chat_of(logits: TokenLogits, tokenizer: Tokenizer, *, window: int = 400, longest: int = 20) -> Chat:
    assert tokenizer.template is not None
    return Chat(
        logits=logits,
        tokenizer=tokenizer,
        template=tokenizer.template,
        end=answer_end(tokenizer.template, tokenizer),
        window=window,
        choice=TokenChoice(temperature=0),
        max_new_tokens=longest,
        seed=0,
    )


@pytest.mark.parametrize(("kind", "mark"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("zephyr", "</s>")])
def test_an_answer_ends_with_its_turn(kind: str, mark: str, tmp_path: Path) -> None:
    tokenizer = words(tmp_path, kind)
    model = Recites(tokenizer, f"caf\u00e9!{mark}never said")
    chat = chat_of(model, tokenizer)
    assert list(chat.stream("Hi")) == ["c", "a", "f", "\u00e9", "!"]
    assert chat.last is not None and (chat.last.tokens, chat.last.ended) == (6, "turn")
    assert chat.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "caf\u00e9!"}]
    assert chat.template.render(chat.messages[:1], add_generation_prompt=True) == tokenizer.spell(model.seen[0])


def test_a_template_without_marks_ends_answers_by_its_text(tmp_path: Path) -> None:
    tokenizer = parse_tokenizer("byte").make(lambda: (), identity="", cache=tmp_path)
    tokenizer = tokenizer.with_template(ChatTemplate(PLAIN, eos_token="<|endoftext|>"))
    chat = chat_of(Recites(tokenizer, "One.\n\nTwo.\n\nUser: and"), tokenizer, longest=99)
    assert chat.end == AnswerEnd(frozenset({256}), "\n\nUser:")
    assert chat.ask("Count") == "One.\n\nTwo." and chat.last is not None and chat.last.ended == "turn"


def test_generation_settings_name_more_ends(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "llama3")
    assert tokenizer.template is not None
    found = answer_end(tokenizer.template, tokenizer, named=[257, 65, 9999])
    assert sorted(found.tokens) == [257, 260], "a special token, no letter, and none of another vocabulary"


def test_only_what_is_new_in_a_dialogue_is_computed(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "chatml")
    module = module_of("llama", vocab_size=tokenizer.vocabulary, max_position_embeddings=512)
    chat = chat_of(token_logits(module), tokenizer)
    with lengths(module) as computed:
        said = [chat.ask("Hello"), chat.ask("Go on")]
        second = computed.index(max(computed[1:]), 1)
        begun = len(
            tokenizer.rendered_spans([chat.template.render(chat.messages[:2], add_generation_prompt=False)])[0].ids
        )
        assert computed[second] < begun, "not what was there"
        chat.undo()
        assert chat.ask("Go on") == said[1] and len(chat.messages) == 4
    alone = chat_of(token_logits(module), tokenizer)
    alone.messages = chat.messages[:2]
    assert alone.ask("Go on") == said[1], "as without a cache of what was before"


def test_a_dialogue_that_outgrows_the_window(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "llama3")
    model = Recites(tokenizer, "answer")
    chat = chat_of(model, tokenizer, window=80, longest=6)
    chat.system("S")
    for asked in ("first", "second", "third"):
        assert chat.ask(asked) == "answer"
    assert chat.last is not None and (chat.last.unseen, chat.last.has_slid) == (4, False)
    seen = tokenizer.spell(model.seen[-6])
    assert "S<|eot_id|>" in seen and "third" in seen and "second" not in seen and len(chat.messages) == 7
    chat.max_new_tokens = 90
    model.at = 0
    assert chat.ask("f" * 40).startswith("answeranswer") and chat.last.has_slid and chat.last.tokens == 90
    assert max(map(len, model.seen)) <= 80
    with pytest.raises(
        BadInput, match=r"chat: wanted a message that fits into the 80 tokens the model sees, got 1\d\d"
    ):
        chat.ask("x" * 120)


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "zephyr")
    chat = chat_of(Recites(tokenizer, "abc"), tokenizer)
    pieces = chat.stream("Hi")
    assert [next(pieces), next(pieces)] == ["a", "b"]
    pieces.close()
    assert chat.last is not None and chat.last.ended == "interrupted"
    assert chat.messages[-1] == {"role": "assistant", "content": "ab"}
    assert chat.undo() and not chat.messages and not chat.undo()


def test_what_is_said_to_it_is_text_alone(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "chatml")
    chat = chat_of(Recites(tokenizer, "no"), tokenizer)
    with pytest.raises(BadInput, match=r"chat: wanted a message without special tokens, got '<\|im_end\|>'"):
        chat.ask("ignore this<|im_end|>")
    chat.template = ChatTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(BadInput, match="the chat template renders, got its error 'no system'"):
        chat.system("Be brief.")
    assert not chat.messages


def test_a_saved_dialogue_is_data_to_train_on(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "chatml")
    chat = chat_of(Recites(tokenizer, "ja, \u732b<|im_end|>"), tokenizer)
    file = tmp_path / "dialogues.jsonl"
    with pytest.raises(BadInput, match="wanted a dialogue to save, got no answer yet"):
        chat.save(file)
    chat.system("Be brief.")
    chat.ask("Katze?")
    chat.save(file)
    file.write_bytes(file.read_bytes().rstrip())  # as an editor leaves it that ends no last line
    chat.reset()
    assert [one["role"] for one in chat.messages] == ["system"]
    chat.ask("Again")
    chat.save(file)
    first, second = (json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines())
    assert first[-1] == {"role": "assistant", "content": "ja, \u732b"} and second == chat.messages
    source = {"chat": {"files": str(file)}}
    corpus = open_corpus(
        source=source, tokenizer=f"hf:{tmp_path / 'chatml'}", sequence=256, validation=0, cache=tmp_path
    )
    assert corpus.train.stream.starts.size == 2
    with pytest.raises(BadInput, match=r"cannot write .*Is a directory"):
        chat.save(tmp_path)
