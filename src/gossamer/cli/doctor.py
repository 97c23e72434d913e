"""The command `gossamer doctor`: working and missing parts of this machine, and the commands that install them."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gossamer.cli.output import CommandResult, Json, table
from gossamer.netlab import lab_unavailable
from gossamer.run.resources import cores, memory
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.extras import extras, install, version_of
from gossamer.spec.units import show_gib

RANKS = 2  # of the wire check
TIMEOUT_S = 30.0
OK, NOTE, BAD = "ok", "note", "bad"
_SIGN = {OK: "green ", NOTE: "yellow", BAD: "RED   "}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One check of this machine. `level`: ok; note (not needed to train, or unknown); bad (training will not work)."""

    name: str
    level: str
    said: str


def doctor(*, json: Json = False) -> CommandResult:
    """Check this machine: versions, cores, memory, gloo, folders, GPUs, network emulation, optional packages."""
    found = list(look())
    bad = [f for f in found if f.level == BAD]
    rows = [(_SIGN[f.level], f.name, f.said) for f in found]
    closing = f"{len(bad)} of these must be put right before training" if bad else _ready()
    data = {"ok": not bad, "findings": [asdict(f) for f in found]}
    return CommandResult(data, f"{table(rows)}\n\n{closing}", exit_code=3 if bad else 0)


def _ready() -> str:
    """Return the command to try next with the installed packages."""
    if all(version_of(name) for name in extras().get("hf", ())):
        return "Ready. Try: gossamer demo"
    return f"Ready for models of your own (model.factory). For the demo, model.hf and model.gguf: {install('hf')}"


def look() -> Iterator[Diagnosis]:
    """Run all checks of this machine, one after the other."""
    yield from _versions()
    count, why = cores()
    yield Diagnosis("cores", OK, f"{count:g}{why}")
    total, free = memory()
    yield Diagnosis("memory", OK if free > 2 * 2**30 else NOTE, f"{show_gib(total)}, {show_gib(free)} free")
    yield _threads()
    yield _wire()
    yield from _folders()
    yield _accelerator()
    reason = lab_unavailable()
    yield Diagnosis("laboratory", NOTE if reason else OK, reason or "works: gossamer lab run --hosts 4 -- COMMAND")
    yield from _extras()


def _versions() -> Iterator[Diagnosis]:
    supported = sys.version_info >= (3, 10)
    yield Diagnosis("python", OK if supported else BAD, f"{platform.python_version()} on {platform.system()}")
    tested = platform.system() == "Linux"
    if not tested:
        yield Diagnosis("system", NOTE, "only Linux is tested; the rest should work, network emulation does not")
    for name in ("gossamer", "torch"):
        version = version_of(name)
        yield Diagnosis(name, OK if version else BAD, version or f"not installed for {sys.executable}")


def _threads() -> Diagnosis:
    import torch

    return Diagnosis("threads", OK, f"torch computes with {torch.get_num_threads()}")


def _wire() -> Diagnosis:
    """Check that two processes can exchange one message over gloo."""
    with tempfile.TemporaryDirectory(prefix="gossamer-doctor-") as folder:
        command = [sys.executable, "-m", "gossamer.cli.gloo_check"]
        pair = [
            subprocess.Popen([*command, str(rank), folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(RANKS)
        ]
        try:
            said = [process.communicate(timeout=2 * TIMEOUT_S)[0] for process in pair]
        except subprocess.TimeoutExpired:
            return Diagnosis(
                "wire (gloo)",
                BAD,
                f"two processes could not connect in {2 * TIMEOUT_S:g} s: set machines.interface to a working device",
            )
        finally:
            for process in pair:
                process.kill()
                process.communicate()
    failed = next((rank for rank, process in enumerate(pair) if process.returncode), None)
    if failed is None:
        return Diagnosis("wire (gloo)", OK, "two processes exchanged a message")
    last = (said[failed].strip().splitlines() or ["no output"])[-1]
    return Diagnosis("wire (gloo)", BAD, f"process {failed} of two failed: {last}")


def _folders() -> Iterator[Diagnosis]:
    from gossamer.data.cache import open_cache  # brings torch, which help does without

    try:
        yield Diagnosis("cache", OK, f"{open_cache(None)} can be written")
    except BadInput as error:
        yield Diagnosis("cache", NOTE, str(error))
    runs = Path(RunConfig().run.directory)
    near = runs if runs.is_dir() else Path(".")
    try:
        with tempfile.TemporaryFile(dir=near):
            yield Diagnosis("runs", OK, f"{runs.absolute()} can be written")
    except OSError as error:
        yield Diagnosis("runs", NOTE, f"{near.absolute()} cannot be written ({error.strerror}): set run.directory")


def _accelerator() -> Diagnosis:
    import torch
    from torch import distributed

    if not torch.cuda.is_available():
        return Diagnosis("GPU", NOTE, "none that torch sees: training runs on the processor")
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    nccl = "with NCCL" if distributed.is_nccl_available() else "without NCCL"
    return Diagnosis("GPU", OK, f"{torch.cuda.device_count()} x {', '.join(names)}, {nccl}")


def _extras() -> Iterator[Diagnosis]:
    for extra, names in extras().items():
        if extra == "dev":
            continue
        versions = {name: version_of(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            yield Diagnosis(f"[{extra}]", NOTE, f"{', '.join(missing)} not installed: {install(extra)}")
        else:
            yield Diagnosis(f"[{extra}]", OK, ", ".join(f"{name} {version}" for name, version in versions.items()))
