"""The house's floors, checked on the source text: who imports whom, and who may touch what.

A module imports floors below its own, and its own room; imports inside functions and under TYPE_CHECKING count.
Run as a script it prints file:line of each violation and exits 1; `violations(root)` is the same for a test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "gossamer"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
FLOORS = (
    ("spec", "ops"),
    ("process", "store"),
    ("comm", "netlab"),
    ("exchange", "optimizer", "loss", "data", "launch"),
    ("sharding", "model", "p2p"),
    ("sync", "pipeline", "policy", "loss_reader", "saver", "prune", "grow", "quantize"),
    ("recipe", "view"),
    ("plan", "run"),
    ("partition", "settings"),
    ("autotune", "proof"),
    ("job",),
    ("own_loop",),
)
TOP = len(FLOORS)  # api/verbs.py, cli/, settings/, __init__.py, ...: the only places that see every room
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
THIRD_PARTY = {
    "spec": {"pydantic", "tomli"},
    "ops": {"torch", "numpy", "triton", "llvmlite"},
}  # beside the standard library
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "scatter", "gather"),
    *("send", "recv", "isend", "irecv", "barrier", "monitored_barrier", "batch_isend_irecv", "P2POp"),
    *("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "all_gather_coalesced"),
    *("all_reduce_coalesced", "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "_functional_collectives", "nn"),
}


@dataclass(frozen=True, order=True)
class Violation:
    file: str
    line: int
    said: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.said}"


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its syntax tree, and whether it is a package's __init__."""

    name: str
    path: Path
    tree: ast.Module
    is_package: bool

    @property
    def room(self) -> str:
        """The folder under the package; everything on the top floor is one room, called ""."""
        parts = self.name.split(".")
        return room_of(parts)


def room_of(parts: list[str]) -> str:
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else ""


def modules(root: Path = SOURCE) -> dict[str, Module]:
    """Every module under `root`, the folder of the package, by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path, ast.parse(path.read_text("utf-8"), str(path)), is_package)
    return found


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the module imports, anywhere in it; `from a import b` gives a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if _is_text(arg))


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = module.name.split(".")
    kept = here[: len(here) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_text(arg: ast.expr) -> bool:
    return isinstance(arg, ast.Constant) and isinstance(arg.value, str)


def _target(name: str, known: dict[str, Module]) -> str | None:
    """The module of ours that `name` (a module, or a thing in one) refers to."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def violations(root: Path = SOURCE) -> list[Violation]:
    """Every breach of the floors under `root`, sorted by place."""
    known = modules(root)
    edges: dict[str, set[str]] = {name: set() for name in known}
    found: list[Violation] = []
    for module in known.values():
        where = str(module.path.relative_to(root.parent.parent))
        for line, name in imports(module):
            target = _target(name, known) if name.split(".")[0] == PACKAGE else None
            if target is None:
                said = _third_party(module, name)
            else:
                if target != module.name and module.name != PACKAGE:  # the package's own names are resolved on use
                    edges[module.name].add(target)
                said = _floor(module, name if target == PACKAGE else target)
            found += [Violation(where, line, said)] if said else []
        found += [Violation(where, line, said) for line, said in _collectives(module)]
    return sorted([*found, *_cycles(known, edges, root)])


def _floor(module: Module, target: str) -> str | None:
    mine, other = module.room, room_of(target.split("."))
    if mine == other:
        return None
    low, high = FLOOR_OF.get(mine, TOP), FLOOR_OF.get(other, TOP)
    if high < low:
        return None
    relation = "a room on the same floor" if high == low else "a room above it"
    return f"{mine} (floor {low}) imports {target} (floor {high}): {relation}"


def _third_party(module: Module, name: str) -> str | None:
    allowed = THIRD_PARTY.get(module.room)
    first = name.split(".")[0]
    if allowed is None or first in allowed or first in sys.stdlib_module_names:
        return None
    return f"{module.room} may import the standard library and {', '.join(sorted(allowed))} only, not {first}"


def _collectives(module: Module) -> Iterator[tuple[int, str]]:
    """Uses of torch.distributed's collectives outside of comm, by import or by attribute."""
    if module.room == "comm":
        return
    aliases = {"torch.distributed"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            names = [*(node.module or "").split(".")[2:], *(a.name for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [p for a in node.names if a.name.startswith("torch.distributed.") for p in a.name.split(".")[2:]]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            names = [node.attr]
        for name in names:
            if name in COLLECTIVES:
                yield node.lineno, f"torch.distributed.{name} outside of comm: collectives are called in comm alone"


def _cycles(known: dict[str, Module], edges: dict[str, set[str]], root: Path) -> Iterator[Violation]:
    """One violation per group of modules that import each other, at the import that opens it."""
    reach = {name: _reachable(name, edges) for name in edges}
    seen: set[str] = set()
    for name in sorted(edges):
        ring = sorted(other for other in reach[name] if name in reach[other])
        if ring and name not in seen:
            seen |= set(ring)
            where = str(known[name].path.relative_to(root.parent.parent))
            inside = (line for line, n in imports(known[name]) if _target(n, known) in ring)
            yield Violation(where, next(inside), f"modules import each other: {' <-> '.join(ring)}")


def _reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(edges[name])
    while ahead:
        at = ahead.pop()
        if at not in seen:
            seen.add(at)
            ahead += edges[at]
    return seen


def main() -> int:
    found = violations()
    for violation in found:
        print(violation)
    print(f"floors: {len(modules())} modules, {len(found)} violation{'s' * (len(found) != 1)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
