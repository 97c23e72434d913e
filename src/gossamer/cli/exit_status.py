"""The exit status of commands: exceptions become a headline, a message and an exit code.

0 done, 2 the user's input, 3 the run failed, 4 interrupted with a checkpoint.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import traceback

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError

from gossamer.cli.output import CommandFailure
from gossamer.spec.errors import BadInput, Interrupted, RunFailed
from gossamer.spec.extras import extra_with, install
from gossamer.spec.suggest import nearest

BAD_INPUT, FAILED, INTERRUPTED = 2, 3, 4
_EARLIER_OPTIONS = {  # each with the present one
    "--host": "--node-rank I --nnodes N",
    "--meet": "--rdzv-endpoint HOST:PORT",
    "--tokens": "--max-new-tokens N",
    "--between": "--inter-rate RATE",
    "--change": "--event EVENT",
}
_TAKE_KEYS = ("train", "resume", "config")  # commands


def failure_of(error: BaseException) -> CommandFailure:
    """Return the failure to report for an exception that ended a command."""
    if isinstance(error, BadInput):
        return CommandFailure(BAD_INPUT, "Invalid input:", str(error))
    if isinstance(error, CycloptsError):
        return CommandFailure(BAD_INPUT, "Invalid command line:", _usage(error))
    if isinstance(error, Interrupted):
        return CommandFailure(INTERRUPTED, "Interrupted, with a checkpoint saved:", str(error))
    if isinstance(error, KeyboardInterrupt):
        return CommandFailure(
            FAILED,
            "Stopped at once:",
            "nothing after the last checkpoint was saved; a run with a checkpoint continues with: "
            "gossamer resume RUN_DIR",
        )
    if isinstance(error, RunFailed):
        kind = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower()
        return CommandFailure(
            FAILED, f"The run failed ({kind}):" if kind != "run failed" else "The run failed:", str(error)
        )
    missing = _missing(error)
    if missing and (extra := extra_with(missing)):
        said = f"this command needs the package {missing}, which is not installed: {install(extra)}"
        return CommandFailure(BAD_INPUT, "Invalid input:", said)
    return _unexpected(error)


def _missing(error: BaseException | None) -> str | None:
    """Return the missing module that caused an error (loading a command wraps it); None for other errors."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return error.name if error is not None else None


def _usage(error: CycloptsError) -> str:
    chain = " ".join(("gossamer", *(error.command_chain or ())))
    said = _unknown_command(error) if isinstance(error, UnknownCommandError) else str(error).strip()
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        keys = [now] if (now := _EARLIER_OPTIONS.get(option)) else _as_keys(error)
        said = f"there is no option {option}: write {' or '.join(keys)}" if keys else said
    return f"{said}\nSee: {chain} --help"


def _as_keys(error: UnknownOptionError) -> list[str]:
    """Return the key=value overrides that an unknown option may have meant, for a command that takes them."""
    if (error.command_chain or ("",))[0] not in _TAKE_KEYS:
        return []
    option, _, value = (error.token.keyword or error.token.value).partition("=")
    if difflib.get_close_matches(option, [n for one in error.argument_collection for n in one.names], cutoff=0.8):
        return []  # a slip of the pen
    given = list(error.root_input_tokens or ())
    behind = given[given.index(option) + 1 :] if option in given else []
    if not value and behind and not behind[0].startswith("--"):
        value = behind[0]
    from gossamer.settings.flags import as_overrides

    return as_overrides(option, value)


def _unknown_command(error: UnknownCommandError) -> str:
    """Return our own message: that of the library imports every command to list them."""
    known = [name for name in error.app or () if not name.startswith("-")]
    given = (error.unused_tokens or ["(nothing)"])[0]
    return f"there is no command {given!r}: {nearest(given, known)}"


def _unexpected(error: BaseException) -> CommandFailure:
    lines = traceback.format_exception_only(type(error), error)
    where = _keep_traceback(error)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    at = f"in {last[0].name}, {last[0].filename}:{last[0].lineno}\n" if last else ""
    said = f"{''.join(lines).strip()}\n{at}The traceback is in {where}"
    return CommandFailure(FAILED, "Internal error (please report):", said, {"traceback": where})


def _keep_traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        descriptor, path = tempfile.mkstemp(prefix="gossamer-traceback-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return f"no file (nothing can be written in {tempfile.gettempdir()}), so here:\n{text}"
    return path
