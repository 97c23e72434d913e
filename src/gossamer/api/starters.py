"""The files that `gossamer init` writes: a commented configuration, or a program, that runs as it is.

The files lie in gossamer/starters as people get them; Python programs end in .py.txt there, since they are no modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gossamer.spec.errors import BadInput
from gossamer.spec.suggest import nearest

_TEMPLATES = Path(__file__).parent.parent / "starters"
_PRETRAIN = {"run.yaml": "pretrain/run.yaml", "model.py": "pretrain/model.py.txt"}


@dataclass(frozen=True, slots=True)
class Starter:
    """One kind of start: what it is for, its files (name -> template), what it needs, and the command to run then.

    `beside`: files that are written only where there is no run.yaml yet, since the start works with any.
    """

    said: str
    files: Mapping[str, str]
    then: str
    needs: str = "nothing but Gossamer"
    beside: Mapping[str, str] | None = None


STARTERS: Mapping[str, Starter] = {
    "pretrain": Starter(
        "train a small language model from random weights", files=_PRETRAIN, then="gossamer train run.yaml"
    ),
    "finetune": Starter(
        "fine-tune a model on conversations, with a LoRA adapter",
        files={
            "run.yaml": "finetune/run.yaml",
            "chats.jsonl": "finetune/chats.jsonl",
            "chat.jinja": "finetune/chat.jinja",
        },
        then="gossamer train run.yaml",
        needs="the extra hf; a model folder, to be filled in at [1] to [3] (until then a small stand-in is trained)",
    ),
    "two_sites": Starter(
        "train on two sites with a slow link between them",
        files={**_PRETRAIN, "run.yaml": "two_sites/run.yaml"},
        then="gossamer train run.yaml",
        needs="nothing but Gossamer; two processes stand for the sites until machines.hosts is set",
    ),
    "own_loop": Starter(
        "keep your own training loop (gossamer.wrap)",
        files={"train.py": "own_loop/train.py.txt"},
        then="torchrun --nproc-per-node 2 train.py",
    ),
    "classify": Starter(
        "train a classifier on a dataset of your own (gossamer.train)",
        files={"train.py": "classify/train.py.txt"},
        then="python train.py",
    ),
    "kubernetes": Starter(
        "run run.yaml on two pods of a Kubernetes cluster",
        files={"job.yaml": "kubernetes/job.yaml", "Dockerfile": "kubernetes/Dockerfile"},
        then="kubectl apply -f job.yaml",
        needs="a cluster and a registry, whose name is to be filled in",
        beside=_PRETRAIN,
    ),
    "skypilot": Starter(
        "run run.yaml on two machines that SkyPilot starts",
        files={"task.yaml": "skypilot/task.yaml"},
        then="sky launch -c gossamer task.yaml",
        needs="SkyPilot and a cloud account",
        beside=_PRETRAIN,
    ),
}


def write_starter(kind: str, folder: Path) -> tuple[Path, ...]:
    """Write the files of a kind of start into `folder`, all or none; return their paths.

    Raises BadInput for an unknown kind, a file that exists already, and a folder that cannot be written.
    """
    if kind not in STARTERS:
        raise BadInput(f"there is no start {kind!r}: {nearest(kind, STARTERS)}")
    starter = STARTERS[kind]
    wanted = dict(starter.files)
    if starter.beside and not (folder / "run.yaml").exists():
        wanted = {**starter.beside, **wanted}
    there = [name for name in wanted if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        verb = "exists" if len(there) == 1 else "exist"
        raise BadInput(
            f"{' and '.join(there)} {verb} already in {folder.resolve()}: nothing was written. "
            "Move away what is there, or start in an empty folder"
        )
    written: list[Path] = []
    try:
        for name, template in wanted.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                written.append(folder / name)
                file.write((_TEMPLATES / template).read_text("utf-8"))
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise BadInput(
            f"cannot write {error.filename or folder}: {error.strerror}: nothing was written. "
            "Start in a folder that can be written"
        ) from None
    return tuple(written)
