"""Shell completion: a script for every shell, and what bash completes with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gossamer.cli import COMMANDS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_every_shell_gets_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "fish" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["sw"], ["sweep"]),
        (["sweep", "--ha"], ["--halving"]),
        (["export", "a", "b", "--to", ""], ["hf", "peft", "gguf", "side"]),
    ],
)
def test_bash_completes_commands_options_and_their_values(
    words: list[str], completed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    quoted = " ".join(f"'{word}'" for word in ["gossamer", *words])
    program = f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _gossamer; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed
