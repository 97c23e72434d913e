"""The real command in a folder of its own: tiny models, a few small files as corpus, and nobody left afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli import main
from gossamer.process.spawn import process_state
from system import warm

GOSSAMER = (sys.executable, "-m", "gossamer")
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
WORDS = [
    "stone",
    "river",
    "lamp",
    "seven",
    "green",
    "under",
    "walks",
    "slowly",
    "because",
    "light",
    "house",
    "paper",
    "winter",
    "bread",
]

# A model that the test can watch and hold by files in the working directory. `hold`: wait after so many training
# forwards while the file is there; `nan`: from then on give logits that are not finite.
WATCHED = f"""
import os, time
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

RANK = os.environ.get("RANK", "0")

def limit(name):
    try:
        return int(Path(name).read_text() or 0)
    except (OSError, ValueError):
        return 10**9

def make():
    model = LlamaForCausalLM(LlamaConfig(**{SIZES!r}))
    calls = [0]

    def before(module, args, kwargs):
        calls[0] += module.training
        Path(f"pid-{{RANK}}").write_text(str(os.getpid()))
        while calls[0] > limit("hold"):
            Path(f"held-{{RANK}}").touch()
            time.sleep(0.01)

    def after(module, args, kwargs, output):
        if module.training and calls[0] > limit("nan"):
            for name in ("logits", "loss"):
                if output.get(name) is not None:
                    output[name] = output[name] * float("nan")
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    return model
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def last(self) -> dict[str, Any]:
        """The object that --json promises as the last line."""
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


@dataclass(frozen=True)
class Place:
    """A working directory with a corpus; its path stands in the arguments of everything that is started in it."""

    folder: Path
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    @staticmethod
    def make(folder: Path) -> Place:
        place = Place(folder)
        (folder / "corpus").mkdir(parents=True)
        for index in range(6):
            place.text(f"corpus/{index}.txt", words=600, seed=index)
        (folder / "watched.py").write_text(WATCHED)
        return place

    def text(self, name: str, *, words: int, seed: int = 0) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(random.Random(seed).choices(WORDS, k=words)))
        return file

    def config(self, name: str = "run", **changes: Mapping[str, Any]) -> Path:
        """Write NAME.yaml: the tiny run with whole sections updated; `model` is replaced."""
        sections: dict[str, dict[str, Any]] = {
            "model": {"hf": "llama", "config": SIZES},
            "data": {"source": "text:corpus/*.txt", "sequence": 32, "validation": 0.3, "cache": "cache"},
            "train": {
                "steps": 4,
                "batch": 4,
                "optimizer": {"adamw": {"lr": 1e-3}},
                "evaluate_every": 0,
                "evaluate_sequences": 4,
                "checkpoint_every": 2,
                "keep_checkpoints": 3,
            },
            "machines": {"processes": 1, "threads": 1},
            "run": {"display": "plain"},
        }
        for section, values in changes.items():
            sections[section] = {**({} if section == "model" else sections.get(section, {})), **values}
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(sections))
        return file

    def start(
        self, *argv: str | Path, program: tuple[str, ...] = GOSSAMER, is_fresh: bool = False, **env: object
    ) -> subprocess.Popen[str]:
        """Start it as the leader of a group, as a terminal does. is_fresh: in an interpreter of its own."""
        process = self._opened([*map(str, argv)], program, {k: str(v) for k, v in env.items()}, is_fresh=is_fresh)
        self._started.append(process)
        return process

    def _opened(
        self, argv: list[str], program: tuple[str, ...], env: dict[str, str], *, is_fresh: bool
    ) -> subprocess.Popen[str]:
        whole = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
        if program == GOSSAMER and not is_fresh and warm.can_start(env):
            return warm.command(argv, folder=self.folder, env=whole)
        return subprocess.Popen(
            [*program, *argv],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=whole,
        )

    def end_all(self) -> None:
        """Kill what a failed test left."""
        for process in self._started:
            process.kill()
            process.communicate()

    def run(
        self, *argv: str | Path, program: tuple[str, ...] = GOSSAMER, is_fresh: bool = False, **env: object
    ) -> Done:
        return ended(self.start(*argv, program=program, is_fresh=is_fresh, **env))

    def good(self, *argv: str | Path, **env: object) -> Done:
        """As `run`, for what must succeed."""
        done = self.run(*argv, **env)
        assert done.code == 0, done.out[-3000:] + done.err[-3000:]
        return done

    def runs(self, under: str = "runs") -> list[Path]:
        """Run directories, oldest first."""
        folder = self.folder / under
        return sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def living(self) -> set[int]:
        """Processes that have this folder among their arguments."""
        return {pid for pid in _processes() if str(self.folder).encode() in _arguments(pid)}


@dataclass(frozen=True)
class InThisProcess:
    """The command in the tests' own process: to start another takes longer than most commands do."""

    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def run(self, place: Place, *argv: str | Path) -> Done:
        with self.monkeypatch.context() as changed:
            changed.chdir(place.folder)
            changed.setenv("COLUMNS", "200")
            changed.setattr(sys, "path", [*sys.path])  # the command adds the working directory
            self.capfd.readouterr()
            try:
                return Done(main([*map(str, argv)]), *self.capfd.readouterr())
            finally:
                for name, module in [*sys.modules.items()]:
                    if str(getattr(module, "__file__", None) or "").startswith(str(place.folder)):
                        del sys.modules[name]

    def good(self, place: Place, *argv: str | Path) -> Done:
        """As `run`, for what must succeed."""
        done = self.run(place, *argv)
        assert done.code == 0, done.out[-3000:] + done.err[-3000:]
        return done


def ended(process: subprocess.Popen[str], *, within_s: float = 300.0) -> Done:
    """Wait for the end; longer than machines.timeout_s, after which a run itself names a rank that hangs."""
    out, err = process.communicate(timeout=within_s)
    return Done(process.returncode, out, err)


def under_torchrun(rank: int, ranks: int, port: int) -> dict[str, object]:
    """What torchrun tells a process."""
    return {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind."""
    found = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Loss by step; of steps that were taken twice, the last."""
    return {record["step"]: record["loss"] for record in records(run, "step")}


def eventually(is_so: Callable[[], bool], what: str, *, within_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"it never came: {what}"
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if process_state(int(p.name)) not in ("Z", "")]


def _arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
