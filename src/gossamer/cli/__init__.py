"""The command line. Every command is loaded when it is called: `gossamer --help` imports no torch.

A command is a function that returns a `CommandResult` or raises; `main` alone writes, and turns exceptions into exit
codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported in `main`, which handles a Ctrl-C during the import
    from cyclopts import App

COMMANDS = {  # name: (where, what `gossamer --help` says, an example)
    "demo": ("train:demo", "Train a small model on text this machine has, sample it, and say what to try next.", ""),
    "init": (
        "init:init",
        "Write a run.yaml or a program to start from into the current folder, or list what there is.",
        "init pretrain",
    ),
    "train": (
        "train:train",
        "Train the model that a run.yaml describes, on the machines it names.",
        "train run.yaml train.batch=32",
    ),
    "resume": (
        "train:resume",
        "Resume a run from its newest valid checkpoint.",
        "resume runs/NAME train.steps=2000",
    ),
    "watch": (
        "watch:watch",
        "Watch a run in the terminal, while it goes on or after its end; reads its folder alone.",
        "watch runs/NAME",
    ),
    "sample": (
        "sample_export:sample",
        "Generate text from a prompt with the model of a run.",
        'sample runs/NAME "def " --max-new-tokens 100',
    ),
    "chat": (
        "chat:chat",
        "Speak with the model of a run, of a Hugging Face folder or of a GGUF file.",
        'chat runs/NAME --system "You are brief."',
    ),
    "export": (
        "sample_export:export",
        "Export the model of a run to a Hugging Face directory or a GGUF file.",
        "export runs/NAME --to hf DIR",
    ),
    "grow": (
        "grow:grow",
        "Make a larger model of a smaller one, from which a run starts where the small one ended.",
        "grow runs/NAME --to large.yaml --by lemon",
    ),
    "runs": (
        "look_at_runs:runs",
        "List runs, the newest first: outcome, steps, result, model, data.",
        "runs --outcome done --since 7d",
    ),
    "compare": (
        "look_at_runs:compare",
        "Compare runs: what differs, figures at the last common step, loss curves on one axis.",
        "compare latest runs/NAME",
    ),
    "report": (
        "look_at_runs:report",
        "Write the report of a run: one HTML file that needs no network, and the same as Markdown.",
        "report latest --out report.html",
    ),
    "eval": (
        "evaluate:evaluate",
        "Measure loss, perplexity and bits per byte of a run, a Hugging Face folder or a GGUF file on texts or chats.",
        "eval runs/NAME notes.txt",
    ),
    "prune": (
        "prune:prune",
        "Prune a trained model by magnitude, Wanda or MoE-Pruner, in rows or 2:4; its loss before and after.",
        "prune runs/NAME --by wanda --sparsity 0.5 --out FOLDER",
    ),
    "quantize": (
        "quantize:quantize",
        "Quantize a trained model to 2 to 8 bits: round to nearest or GPTQ; its size and loss before and after.",
        "quantize runs/NAME --bits 4 --out DIR",
    ),
    "distill": (
        "distill:distill",
        "Train the model of a run.yaml with a larger one as its teacher, and say the losses of both.",
        "distill runs/LARGE --to run.yaml --by taid",
    ),
    "teach": (
        "teach:teach",
        "Serve a teacher to runs on other hosts, which send it their tokens.",
        "teach runs/LARGE --listen 10.0.0.1:29600",
    ),
    "sweep": (
        "sweep:sweep",
        "Train a configuration with several values of its keys, and compare the results.",
        "sweep run.yaml train.optimizer.adamw.lr=1e-4,3e-4 --seeds 3",
    ),
    "recommend": (
        "recommend:recommend",
        "Predict which combinations to try next, by a regression on the results of sweeps.",
        "recommend runs/sweep-NAME --for run.yaml --top 3",
    ),
    "methods": (
        "methods:methods",
        "List the available methods by category, or describe one.",
        "methods exchange dense",
    ),
    "config": ("config:app", "Show, check, upgrade or describe configuration files.", ""),
    "doctor": ("doctor:doctor", "Check this machine: what works, what is missing, how to install it.", ""),
    "completion": (
        "completion:completion",
        "Print the script with which bash, zsh, fish or powershell completes commands and options.",
        "completion bash",
    ),
    "lab": ("lab:app", "Real hosts and shaped links on this machine (Linux, root).", ""),
}
EPILOGUE = (
    "Every command takes --json: its last line is then one JSON object. "
    "Exit codes: 0 done, 2 your input, 3 the run failed, 4 interrupted with a checkpoint."
)


def _version() -> str:
    from gossamer import __version__

    return __version__


def make_app() -> App:
    """Return the command-line application; no command is imported yet."""
    from cyclopts import App

    app = App(
        name="gossamer",
        help="Gossamer trains one model on the machines and links you have.",
        help_epilogue=EPILOGUE,
        help_format="plaintext",
        version=_version,
        suppress_keyboard_interrupt=False,
    )
    for name, (where, said, example) in COMMANDS.items():
        more = f"\n\nExample: gossamer {example}" if example else ""
        app.command(f"gossamer.cli.{where}", name=name, help=said + more)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Never raises, and writes at most one block about an error."""
    given = [_as_utf8(one) for one in sys.argv[1:]] if argv is None else list(argv)
    _open_streams()
    own = given[: given.index("--")] if "--" in given else given
    try:
        return _run(given, is_json="--json" in own)
    except KeyboardInterrupt:  # outside of `_run`, which reports it better
        return _stopped(is_json="--json" in own)
    finally:
        _settle_streams()


def _stopped(*, is_json: bool) -> int:
    """Report a Ctrl-C while the program itself is being loaded, in the words of later ones, without imports."""
    with suppress(OSError):
        sys.stderr.write("Stopped at once: nothing after the last checkpoint was saved\n")
    if is_json:
        sys.stdout.write('{"error": "nothing after the last checkpoint was saved", "exit": 3}\n')
    return 3


def _run(given: list[str], *, is_json: bool) -> int:
    from gossamer.cli.exit_status import BAD_INPUT, failure_of
    from gossamer.cli.output import CommandResult, OutputWriter, ReaderGone
    from gossamer.spec.errors import RunFailed

    output = OutputWriter(json=is_json)
    try:
        result = make_app()(given, exit_on_error=False, print_error=False, result_action="return_value")
        if not given:  # the help was shown, for want of a command
            return BAD_INPUT
        if isinstance(result, CommandResult):
            try:
                return output.answer(result)
            except ReaderGone:  # `gossamer methods | head`
                return result.exit_code
            except OSError as error:
                return output.unheard(result, error)
        return result if isinstance(result, int) else 0  # a command that wrote by itself; help
    except ReaderGone:  # of a command that only prints, piece by piece; any other broken pipe is a failure
        return 0
    except SystemExit as left:
        if not left.code:  # no command of ours exits so: a library did, before the work was done
            said = (
                f"the model, the data or a library ended the process (SystemExit: {left.code}): "
                "remove or catch its call of sys.exit"
            )
            return output.failure(failure_of(RunFailed(said)))
        return left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        return output.failure(failure_of(error))


def _as_utf8(argument: str) -> str:
    """Return an argument decoded as UTF-8 where the locale (C, in cron jobs) could not; keep one that names a path."""
    if argument.isprintable() or os.path.lexists(argument):
        return argument
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def _settle_streams() -> None:
    """Let go of what a stream cannot write any more: Python would exit with a code of its own for that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Replace closed standard output or error by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as we live)
