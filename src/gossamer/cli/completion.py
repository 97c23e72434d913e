"""The command `gossamer completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

from typing import Literal

from gossamer.cli.output import CommandResult, Json

_USES = {
    "bash": 'eval "$(gossamer completion bash)"   # in ~/.bashrc',
    "zsh": "gossamer completion zsh > FOLDER/_gossamer   # a folder of $fpath, before compinit",
    "fish": "gossamer completion fish > ~/.config/fish/completions/gossamer.fish",
    "powershell": "gossamer completion powershell | Out-String | Invoke-Expression   # in $PROFILE",
}


def completion(shell: Literal["bash", "zsh", "fish", "powershell"], /, *, json: Json = False) -> CommandResult:
    """Print the completion script of a shell, e.g. `eval "$(gossamer completion bash)"`; no file is changed.

    Parameters
    ----------
    shell
        The shell that is to complete.
    """
    from gossamer.cli import make_app

    script = make_app().generate_completion(prog_name="gossamer", shell=shell)
    return CommandResult({"shell": shell, "use": _USES[shell], "script": script}, script)
