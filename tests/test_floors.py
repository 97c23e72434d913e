"""The house stands on its floors, and the check that says so sees what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from floors import violations


def test_the_package_keeps_its_floors() -> None:
    found = violations()
    assert not found, "\n".join(map(str, found))


PLANTED = {
    "a room above": ("comm/a.py", "import gossamer.run", "comm (floor 2) imports gossamer.run"),
    "a room of the same floor": ("optimizer/a.py", "from gossamer import data", "a room on the same floor"),
    "inside a function": ("model/a.py", "def f():\n    from gossamer.sync import x", "a room above it"),
    "under TYPE_CHECKING": (
        "spec/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gossamer.comm import x",
        "spec (floor 0) imports",
    ),
    "relative": ("store/a.py", "from ..plan import x", "store (floor 1) imports gossamer.plan"),
    "by name at run time": (
        "loss/a.py",
        "import importlib\nimportlib.import_module('gossamer.run')",
        "a room above it",
    ),
    "the top from below": (
        "view/a.py",
        "from gossamer.api.verbs import train",
        "view (floor 6) imports gossamer.api.verbs (floor 12)",
    ),
    "the package from below": ("run/a.py", "from gossamer import __version__", "run (floor 7) imports gossamer"),
    "third party in spec": ("spec/a.py", "import numpy", "spec may import the standard library and pydantic"),
    "third party in ops": (
        "ops/a.py",
        "import scipy",
        "ops may import the standard library and llvmlite, numpy, torch",
    ),
    "a collective by name": (
        "run/a.py",
        "from torch.distributed import all_reduce",
        "distributed.all_reduce outside of comm",
    ),
    "a collective by alias": (
        "run/a.py",
        "import torch.distributed as d\nd.barrier()",
        "distributed.barrier outside of comm",
    ),
    "a collective in full": (
        "sync/a.py",
        "import torch\ntorch.distributed.broadcast(1, 0)",
        "broadcast outside of comm",
    ),
    "a collective from torch": ("sync/a.py", "from torch import distributed as d\nd.send(1)", "send outside of comm"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found_at_its_line(what: str, tmp_path: Path) -> None:
    file, text, said = PLANTED[what]
    root = _house(tmp_path, {file: text})
    (found,) = violations(root)
    assert said in str(found)
    assert str(found).startswith(f"src/gossamer/{file}:{len(text.splitlines())}: ")


def test_modules_that_import_each_other_are_a_cycle(tmp_path: Path) -> None:
    root = _house(
        tmp_path, {"run/a.py": "from gossamer.run import b", "run/b.py": "def f():\n    import gossamer.run.a"}
    )
    (found,) = violations(root)
    assert "gossamer.run.a <-> gossamer.run.b" in found.said and found.line == 1


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    root = _house(
        tmp_path,
        {
            "comm/a.py": "import torch.distributed as dist\nfrom gossamer.spec import x\ndist.all_reduce(1)",
            "run/a.py": "import json, torch, numpy\nfrom gossamer.comm import a\nfrom . import b",
            "run/b.py": "import torch.distributed as dist\ndist.is_available()",
            "api/verbs.py": "from gossamer.run import a\nfrom gossamer.view import b",
            "cli/x.py": "from gossamer import api, __version__",
            "spec/a.py": "import json\nfrom pydantic import BaseModel",
        },
    )
    assert violations(root) == []


def _house(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "src" / "gossamer"
    rooms = ("spec", "ops", "comm", "store", "optimizer", "data", "loss", "model", "sync", "plan", "run", "view")
    for file, text in {
        **{f"{room}/__init__.py": "" for room in rooms},
        "__init__.py": "",
        "api/__init__.py": "",
        "api/verbs.py": "",
        **files,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root
