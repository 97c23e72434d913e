"""`gossamer chat` with a run that learnt two answers, far from its data; with folders; in a pipe, in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gossamer
from data.chats import chat_file, tokenizer_folder, turns
from gossamer.cli import main
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from system.command import GOSSAMER, SIZES

SKY, GRASS = ("sky", "blue"), ("grass", "green")
SAID = [turns(*SKY), turns(*GRASS), *(turns(*one, *other) for one in (SKY, GRASS) for other in (SKY, GRASS))]
CONFIG = {**SIZES, "hidden_size": 64, "vocab_size": 259, "max_position_embeddings": 256}
PIPED = "sky\ngrass\n/undo\n\nsky\n/save said.jsonl\n/quit\nnever read\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that answers; the folder that it began in, with its text and its tokenizer, is gone."""
    home, away = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("away") / "run"
    before = Path.cwd()
    try:
        os.chdir(home)
        chat_file(home / "chats.jsonl", *SAID)
        tokenizer_folder(home / "words", "chatml")
        config = {
            "data": {"tokenizer": "hf:words", "sequence": 192, "validation": 0, "cache": "cache"},
            "train": {"steps": 80, "batch": 2, "optimizer": {"adamw": {"lr": 5e-3}}, "evaluate_sequences": 2},
            "run": {"display": "quiet"},
        }
        said = gossamer.train({"hf": "llama", "config": CONFIG}, "chat:chats.jsonl", config)
        shutil.move(said["directory"], away)
    finally:
        os.chdir(before)
    shutil.rmtree(home)
    return away


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a model that seldom ends its turn: it has learnt nothing."""
    folder = tmp_path_factory.mktemp("endless")
    tokenizer_folder(folder / "words", "chatml")
    origin = origin_of(ModelSection(hf="llama", config=CONFIG))
    export_hf(origin.build(0), origin, None, folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "words" / name, folder / "model" / name)
    return folder / "model"


def spoken(capsys: pytest.CaptureFixture[str], *arguments: Any, lines: str = "", code: int = 0) -> str:
    """What a command writes to standard output."""
    before, sys.stdin = sys.stdin, io.StringIO(lines)
    try:
        assert main(["chat", *map(str, arguments), "--temperature", "0"]) == code
    finally:
        sys.stdin = before
    return capsys.readouterr().out


@pytest.mark.nightly
def test_a_run_speaks_far_from_its_data(run: Path, tmp_path: Path) -> None:
    shutil.move(shutil.copytree(run, tmp_path / "copied"), tmp_path / "moved")
    command = [*GOSSAMER, "chat", "moved", "--temperature", "0"]
    done = subprocess.run(command, input=PIPED, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "blue\ngreen\nblue\n"), done.stderr
    assert "moved (LlamaForCausalLM, 0.1M parameters), step 80, loaded in " in done.stderr
    assert "it sees 256 tokens" in done.stderr and "cache" not in done.stderr
    saved = json.loads((tmp_path / "said.jsonl").read_text())
    assert saved == {"messages": turns("sky", "blue", "sky", "blue")}


def test_answers_are_json_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = spoken(capsys, run, "--json", lines="sky\ngrass\n")
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["text"], first["tokens"], first["ended"], second["text"]) == ("blue", 4, "turn", "green")
    assert 0 < first["first_token_s"] <= first["seconds"] and first["tokens_per_s"] > 0
    cut = json.loads(spoken(capsys, run, "--json", "--prompt", "sky", "--max-new-tokens", "2"))
    assert (cut["text"], cut["ended"]) == ("bl", "length")


def test_an_export_speaks_alike(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gossamer.export(run, tmp_path / "out")
    assert spoken(capsys, tmp_path / "out", "--prompt", "grass") == "green\n"
    chat = gossamer.chat(run, temperature=0)
    assert chat.ask("sky") == "blue" and chat.step == 80


def test_what_has_no_template_is_refused_or_gets_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(run, tmp_path / "bare"))
    identity = bare / "tokenizer" / "identity.json"  # as of a run whose tokenizer came without a template
    (bare / "tokenizer" / "chat_template.jinja").unlink()
    known = json.loads(identity.read_text())
    del known["sha256"]["chat_template.jinja"]
    identity.write_text(json.dumps(known))
    said = f"a chat template with the tokenizer of {bare}, got none.*--template FILE, .*: gossamer sample {bare} PROMPT"
    with pytest.raises(BadInput, match=said):
        gossamer.chat(bare)
    with pytest.raises(BadInput, match=r"--template: cannot read the chat template none\.jinja"):
        gossamer.chat(bare, template="none.jinja")
    shutil.copy(run / "tokenizer" / "chat_template.jinja", tmp_path / "given.jinja")
    given = ("--template", tmp_path / "given.jinja", "--prompt", "sky")
    assert spoken(capsys, bare, *given) == "blue\n"


def test_what_is_wrong_is_told_with_its_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lines, said in (
        ("sky\n/rest\n", "line 2: wanted a command such as /help, got '/rest': did you mean '/reset'"),
        ("/save\n", "line 1: wanted a command such as /help, got '/save': give a file: /save FILE"),
        ("a <|im_end|>\n", "line 1: wanted a message without special tokens"),
    ):
        before, sys.stdin = sys.stdin, io.StringIO(lines)
        try:
            assert main(["chat", str(run), "--temperature", "0"]) == 2
        finally:
            sys.stdin = before
        assert said in " ".join(capsys.readouterr().err.split())
    for arguments, said in (
        (("--max-new-tokens", "0"), "--max-new-tokens: wanted a number >= 1, got 0"),
        (("--top-p", "2"), "top_p: wanted top_p above 0 and at most 1, got 2"),
    ):
        assert main(["chat", str(run), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["chat", "runs/none"]) == 2
    assert "wanted a run directory at runs/none, got no such folder" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*GOSSAMER, "chat", str(endless), "--max-new-tokens", "1000000", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        shown = _until(ours, "> ")
        assert "/help lists commands" in shown
        os.write(ours, b"hello\n")
        _until(ours, "hello\r\n")  # the terminal's own echo
        assert select.select([ours], [], [], 60)[0], "it answers: greedily, this model goes on and on"
        process.send_signal(signal.SIGINT)
        assert "[interrupted]" in _until(ours, "> ")
        os.write(ours, b"/undo\n/undo\n")
        _until(ours, "there is no message to forget\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _until(terminal: int, text: str, within_s: float = 180) -> str:
    """What a terminal shows until it shows `text`."""
    shown, end = "", time.monotonic() + within_s
    while text not in shown:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], shown
        shown += os.read(terminal, 4096).decode("utf-8", "replace")
    return shown
