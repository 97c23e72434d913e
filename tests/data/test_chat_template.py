from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.chats import TEMPLATES, tokenizer_folder, turns
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.kept import read_tokenizer, tokenizer_files
from gossamer.data.tokenizer import parse_tokenizer
from gossamer.spec.errors import BadInput

TALK = turns("Two  \n", " lines\n", "caf\u00e9 <b> & 'q'", system="Be brief. ")
ODD = {  # what transformers' environment has beyond plain jinja
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "date": "{{ strftime_now('%Y') }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ tools }}",
    "blocks": "  {% if true %}\n  {{- messages[0].content -}}\n  {% endif %}\n.\n",
    "dictionary": "{{ dict(a=1) | tojson }}{{ dict.fromkeys([1]) }}",
}


def of(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_it_renders_what_transformers_renders(kind: str, asks: bool, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / kind, kind)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))
    template = ChatTemplate.read(folder)
    assert template is not None
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=asks)
    assert template.render(TALK, add_generation_prompt=asks) == expected


@pytest.mark.parametrize("name", ODD)
def test_it_knows_what_transformers_templates_may_use(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", "zephyr")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))
    template = ChatTemplate.of(ODD[name], theirs.special_tokens_map)
    expected = theirs.apply_chat_template(TALK, chat_template=ODD[name], tokenize=False)
    assert template.render(TALK, add_generation_prompt=False) == expected


PLACES: dict[str, Any] = {
    "in the configuration": {"chat_template": "A", "bos_token": "<s>"},
    "named, in the configuration": {
        "chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}],
        "bos_token": {"content": "<s>", "lstrip": False},
    },
    "beside it": {"chat_template": "B", "bos_token": "<s>"},
}


@pytest.mark.parametrize("place", PLACES)
def test_where_it_is_read(place: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(PLACES[place]))
    if place == "beside it":
        (tmp_path / "chat_template.jinja").write_text("A")
    assert ChatTemplate.read(tmp_path) == ChatTemplate("A", bos_token="<s>")


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.read(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "B"}]}))
    with pytest.raises(BadInput, match=r"named default in .*got only rag"):
        ChatTemplate.read(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", r"got its error 'Roles must alternate': give other messages"),
        ("{% if %}", r"is no jinja template \(line 1\)"),
        ("{{ messages[0].content + none }}", "TypeError: "),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: "),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{{ 'a' * 10 ** 9 }}", "a product of more than"),
        ("{{ 9 ** 999999999 }}", "a power of more than"),
        ("{% for i in range(10 ** 6) %}{{ i }}{% endfor %}", "Range too big"),
        (
            "{% for i in range(9999) %}{% for j in range(999) %}...{% endfor %}{% endfor %}",
            "a text of more than 1",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
    ],
)
def test_what_a_template_may_not_do_is_one_error(source: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        of(source).render(TALK, add_generation_prompt=True)


@pytest.mark.parametrize("written", ["byte", "hf"])
def test_a_run_keeps_it_with_its_tokenizer(written: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "there", "llama3")
    words = parse_tokenizer(f"hf:{folder}" if written == "hf" else "byte").make(list, identity="", cache=tmp_path)
    template = ChatTemplate.read(folder)
    assert template is not None
    words = words.with_template(template)
    kept = tmp_path / "kept"
    kept.mkdir()
    for name, content in tokenizer_files(words).items():
        (kept / name).write_bytes(content)
    assert read_tokenizer(kept).template == template
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(kept))
    expected = template.render(TALK, add_generation_prompt=True)
    assert theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == expected
    (kept / "chat_template.jinja").write_text("another")
    with pytest.raises(BadInput, match=r"chat_template\.jinja has changed since the run wrote it"):
        read_tokenizer(kept)
