"""A worktree of one commit, and the commands that train with its source."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from golden.artifacts import Artifacts, read_run, read_wrap_ranks
from golden.renames import RENAMES, Renames, apply_all
from golden.runs import Run, write_corpus

BEFORE = "922c35c"  # the last commit before the redraw of the code base
ROOT = Path(__file__).parent.parent.parent
GOSSAMER = (sys.executable, "-m", "gossamer")
WRAP_LOOP = Path(__file__).parent / "wrap_loop.py"
WORKING_TREE = "."
WRAP_RANKS = 2
ERROR_LINES = 12


class TrainingFailed(Exception):
    """A command failed or timed out; the message ends with its last lines of output."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """The tree of one commit that trains in processes of its own.

    role: "before" or "after". commit: short hash; "+" marks uncommitted changes. timeout_s: limit of one command.
    """

    role: str
    commit: str
    tree: Path
    timeout_s: float
    _running: set[subprocess.Popen[str]] = field(default_factory=set)

    def known_renames(self) -> list[Renames]:
        """Return the renames that this commit already contains."""
        reference = "".join(page.read_text() for page in (self.tree / "docs" / "reference").glob("*.md"))
        return [each for each in RENAMES if each.marker in reference]

    def check_import(self) -> None:
        """Exit if Python imports the gossamer of another tree."""
        argv = [sys.executable, "-c", "import gossamer; print(gossamer.__file__)"]
        imported = subprocess.run(argv, env=self._env(self.tree), capture_output=True, text=True, check=True).stdout
        if self.tree / "src" not in Path(imported.strip()).parents:
            sys.exit(f"Python imports {imported.strip()} instead of {self.tree}/src. Check how gossamer is installed.")

    def train(self, run: Run, folder: Path, before: Checkout) -> Artifacts:
        """Train a run in a new folder and read its artifacts.

        before: trains the first part of a run with `resumes_before`. Raises TrainingFailed.
        """
        folder.mkdir(parents=True)
        if run.is_wrapped:
            return self._train_wrapped(run, folder)
        directory = (before if run.resumes_before else self)._train(run, folder)
        if run.resume:
            self._resume(run, directory, folder)
        known = self.known_renames()
        return read_run(directory, [each for each in RENAMES if each not in known], is_async=run.is_async)

    def stop(self) -> None:
        """Kill the running commands; the thread that waits for them gets TrainingFailed."""
        for process in list(self._running):
            kill_group(process)

    def _train(self, run: Run, folder: Path) -> Path:
        write_corpus(folder / "corpus")
        (folder / "run.yaml").write_text(json.dumps(apply_all(self.known_renames(), run.config())))
        self._wait([self._start([*GOSSAMER, "train", "run.yaml"], folder)])
        (directory,) = (folder / "runs").iterdir()
        return directory

    def _resume(self, run: Run, directory: Path, folder: Path) -> None:
        sections = apply_all(self.known_renames(), run.resume)
        overrides = [f"{name}.{key}={json.dumps(value)}" for name in sections for key, value in sections[name].items()]
        self._wait([self._start([*GOSSAMER, "resume", str(directory), *overrides], folder)])

    def _train_wrapped(self, run: Run, folder: Path) -> Artifacts:
        """Start the ranks of a user's loop with the environment variables that a launcher sets."""
        sections = apply_all(self.known_renames(), run.config())
        arguments = json.dumps({key: value for section in sections.values() for key, value in section.items()})
        world = {"WORLD_SIZE": WRAP_RANKS, "LOCAL_WORLD_SIZE": WRAP_RANKS}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
        ranks = [{**world, **address, "RANK": rank, "LOCAL_RANK": rank} for rank in range(WRAP_RANKS)]
        self._wait([self._start([sys.executable, str(WRAP_LOOP), arguments], folder, **env) for env in ranks])
        return read_wrap_ranks(folder)

    def _start(self, argv: Sequence[str], folder: Path, **env: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**self._env(folder), **{key: str(value) for key, value in env.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # kill_group then reaches what the command has started
        )
        self._running.add(process)
        return process

    def _env(self, folder: Path) -> dict[str, str]:
        """Return an environment with this tree's source, one thread (one order of sums) and an empty cache."""
        own = {"PYTHONPATH": str(self.tree / "src"), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        return {**os.environ, **own}

    def _wait(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Wait for all processes; raise TrainingFailed for the first that fails, or at the timeout."""
        try:
            outputs = [process.communicate(timeout=self.timeout_s)[0] for process in processes]
        except subprocess.TimeoutExpired:
            raise TrainingFailed(f"the command did not end within {self.timeout_s:g} s") from None
        finally:
            for process in processes:
                kill_group(process)
                process.communicate()
                self._running.discard(process)
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode != 0:
                lines = "\n".join(output.splitlines()[-ERROR_LINES:])
                raise TrainingFailed(f"the command ended with exit code {process.returncode}: {lines}")


@contextmanager
def open_checkouts(before: str, after: str, folder: Path, timeout_s: float) -> Iterator[tuple[Checkout, Checkout]]:
    """Add a worktree for each commit; remove both at the end."""
    with _open("before", before, folder, timeout_s) as one, _open("after", after, folder, timeout_s) as other:
        yield one, other


@contextmanager
def _open(role: str, commit: str, folder: Path, timeout_s: float) -> Iterator[Checkout]:
    if commit == WORKING_TREE:
        changed = "+" if _git("status", "--porcelain", "--", "src") else ""
        yield Checkout(role, _git("rev-parse", "--short", "HEAD") + changed, ROOT, timeout_s)
        return
    tree = folder / f"tree-{role}"
    _git("worktree", "add", "--detach", str(tree), commit)
    try:
        yield Checkout(role, _git("rev-parse", "--short", commit), tree, timeout_s)
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and its group, if they are alive."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find_free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
