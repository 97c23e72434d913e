"""The pages against the program: links, keys, commands, blocks, and the messages they quote, figures left out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gossamer
from gossamer.api import verbs
from gossamer.api.started_run import planned_by
from gossamer.cli import main, make_app
from gossamer.settings import load
from gossamer.settings.describe import leaves
from gossamer.settings.read import read_yaml
from gossamer.settings.resolve import resolve
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = [
    page for page in PAGES if page.name != "journal.md" and page.parent.name != "methods"
]  # what people follow today
COLUMNS = ("tutorials", "howto", "reference", "explanation")
HEADINGS = ("Tutorials", "How-to guides", "Reference", "Explanation")
AT_THE_TOP = ("index.md", "architecture.md", "journal.md")  # the last two are listed under Explanation
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_KEY = re.compile(r"`((?:model|data|train|machines|plan|run)\.[a-z_]+(?:\.[a-z_0-9]+)*)(?:[:=][^`]*)?`")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text("utf-8")) if kind == language]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", page.read_text("utf-8"))):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading, there are {sorted(anchors(target))}"


def test_every_page_is_in_the_navigation() -> None:
    def files(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for inner in part if isinstance(part, list) else part.values():
                yield from files(inner)

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    index = [link.partition("#")[0] for link in _LINK.findall((DOCS / "index.md").read_text())]
    assert {"index.md", *index} >= set(listed), "each is also linked from the first page"


def test_every_page_is_of_one_kind_and_listed_under_it() -> None:
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name in AT_THE_TOP or name.split("/")[0] in COLUMNS, f"{name}: move it below one of {COLUMNS}"
    parts = re.split(r"^## (.+)$", (DOCS / "index.md").read_text("utf-8"), flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert tuple(sections) == HEADINGS
    for folder, heading in zip(COLUMNS, HEADINGS, strict=True):
        links = {link.partition("#")[0] for link in _LINK.findall(sections[heading])} - set(AT_THE_TOP)
        assert links == {page.relative_to(DOCS).as_posix() for page in (DOCS / folder).rglob("*.md")}, heading


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_keys_exist(page: Path) -> None:
    known = [key for key, _ in leaves()]
    if page.name == "architecture.md":  # speaks of the plan as a value, too
        known += [f"plan.{name}" for name in Plan.model_fields]
    for key in _KEY.findall(page.read_text("utf-8")):
        if key.endswith((".yaml", ".py", ".md", ".json", ".safetensors")):
            continue
        inside = any(f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}.") for one in known)
        assert inside, f"{key}: there is no such key"


def commands(page: Path) -> list[str]:
    """Every `gossamer ...` of the page's blocks, one inside another (a laboratory's, torchrun's) by itself."""
    found = []
    for _, text in _BLOCK.findall(page.read_text("utf-8")):
        for line in text.replace("\\\n", " ").splitlines():
            words = re.sub(r"^\s*(\$ |srun )?", "", line)
            if re.match(r"(gossamer|torchrun|mpirun|\.venv/bin/gossamer) ", words) and "..." not in words:
                found += re.split(r" -- |\bpython -m | -m ", words)
    return [one for one in found if one.startswith("gossamer ")]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_commands_are_understood(page: Path) -> None:
    app = make_app()
    for command in commands(page):
        words = shlex.split(command, comments=True)[1:]
        words = words[: next((n for n, word in enumerate(words) if word in ("|", ">", "&", "&&", ";")), len(words))]
        if words[:2] == ["lab", "run"]:
            words += ["--", "true"]  # what follows is a command of its own
        if words == ["resume"] or "=" in "".join(words[:1]):
            continue
        app.parse_args(words, exit_on_error=False, print_error=False)
        if words[0] in ("train", "resume", "config"):
            given = [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]
            load(None, [one for one in given if "train.stpes" not in one])  # which is there to be refused


def configurations(page: Path) -> list[str]:
    """The YAML blocks; of one that lists alternatives, `plan: ...` in every line, each by itself."""
    found = []
    for text in blocks(page, "yaml"):
        heads = re.findall(r"^([a-z]+):", text, re.M)
        found += [text] if len(set(heads)) == len(heads) else [line for line in text.splitlines() if line.strip()]
    return found


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_configurations_and_programs_are_ones(page: Path) -> None:
    for text in configurations(page):
        values = yaml.safe_load(text)
        if isinstance(values, dict) and set(values) <= set(RunConfig.model_fields):
            resolve(read_yaml(text, name_of(page)), [])
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gossamer"):
                known = names_in(node.module or "")
                assert all(alias.name in known for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gossamer":
                assert node.attr in gossamer.__all__, ast.unparse(node)


def names_in(module: str) -> set[str]:
    """The names of a module of ours; of one for a framework that is not installed, those that its source defines."""
    try:
        return set(dir(importlib.import_module(module)))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gossamer"):
            raise
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        return {node.name for node in ast.parse(Path(found.origin).read_text()).body if hasattr(node, "name")}


def masked(text: str) -> str:
    return re.sub(r"\d+", "N", " ".join(text.split()))


def quoted(page: Path) -> list[tuple[str, str]]:
    """(command, what the page says it prints) of every `$ gossamer` that is quoted."""
    found = []
    for text in blocks(page, ""):
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, said = part.partition("\n")
            found.append((command, said))
    return found


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tutorial's reader stands after its first three sections: its text, its run.yaml."""
    monkeypatch.chdir(tmp_path)
    make_corpus = blocks(DOCS / "tutorials/first_model.md", "python")[0]
    exec(make_corpus, {})
    (tmp_path / "run.yaml").write_text(blocks(DOCS / "tutorials/first_model.md", "yaml")[0])
    return tmp_path


def test_messages_are_those_that_the_pages_quote(
    tutorial: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def up_to_the_model(resolved: Any, **rest: Any) -> dict[str, Any]:
        """What `gossamer train` does before it trains, here and in its workers."""
        from gossamer.job.training_data import corpus_of
        from gossamer.job.worker import origin_for

        planned_by(resolved, rest["plan"], len(rest["hosts"] or ()))
        origin_for(resolved.config, corpus_of(resolved.config.data.model_copy(update={"cache": str(tutorial / "c")})))
        raise AssertionError("the page says that this is refused")

    monkeypatch.setattr(verbs, "train_command", up_to_the_model)
    (tutorial / "my-model").mkdir()
    failures = quoted(DOCS / "howto/diagnose_a_failed_run.md")
    refused = [(command, said) for command, said in failures if "Invalid input:" in said]
    checked = [(command, said) for command, said in quoted(DOCS / "tutorials/first_model.md") if " config " in command]
    assert len(refused) >= 5 and checked
    for command, said in refused + checked:
        code = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        assert code == (2 if "Invalid input:" in said else 0), (command, out, err)
        assert masked(out + err) == masked(said), command


def test_readme_trains_what_the_tutorial_does() -> None:
    """The first configuration that anybody sees is one, and an unknown key in it would be told."""
    text, chats = blocks(ROOT / "README.md", "yaml")
    assert resolve(read_yaml(chats, "chats.yaml"), []).config.model.adapter == "lora"
    assert resolve(read_yaml(text, "run.yaml"), []).config.machines.processes == 2
    with pytest.raises(ValueError, match="there is no such key"):
        resolve(read_yaml(text.replace("batch:", "bach:"), "run.yaml"), [])
