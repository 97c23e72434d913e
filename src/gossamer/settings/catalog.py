"""The catalog of method categories, read from their source without importing it, so that listing them needs no torch.

A category is a package whose `__init__.py` holds `REGISTRY = Registry(...)`; its methods are the modules beside it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.registry import unknown_method
from gossamer.spec.suggest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a method (a field of its dataclass). `default` is its source text; None: it must be given."""

    name: str
    annotation: str
    default: str | None


@dataclass(frozen=True, slots=True)
class Method:
    """A method, or a preset (`is_` names its method and fields). `doc` is the complete docstring of its file."""

    name: str
    doc: str
    parameters: tuple[Parameter, ...]
    is_: str = ""

    @property
    def summary(self) -> str:
        """The first line of the docstring, without the method's own name in front."""
        first = self.doc.strip().partition("\n")[0]
        name, colon, rest = first.partition(": ")
        same = "".join(c for c in name if c.isalnum()).lower() == self.name.replace("_", "")
        return rest if colon and same else first


@dataclass(frozen=True, slots=True)
class Category:
    """A category of methods: `name` is its folder ("optimizer/lr_schedule"), `base` the name of its abstract class."""

    name: str
    doc: str
    base: str
    methods: Mapping[str, Method]

    @property
    def summary(self) -> str:
        return self.doc.strip().partition("\n")[0]

    def method(self, name: str) -> Method:
        """Return the method called `name`; raises BadInput with the nearest names."""
        if name not in self.methods:
            raise unknown_method(name, base=self.base, names=self.methods)
        return self.methods[name]


def categories(package: Path = PACKAGE) -> dict[str, Category]:
    """Return all method categories, by name."""
    found = {}
    for file in sorted(package.rglob("__init__.py")):
        text = file.read_text("utf-8")
        if "REGISTRY" in text and (base := _base(tree := ast.parse(text, str(file)))):
            name = file.parent.relative_to(package).as_posix()
            found[name] = Category(name, ast.get_docstring(tree) or "", base, dict(_methods(file.parent)))
    return found


def category(name: str) -> Category:
    """Return a category by name, "optimizer/lr_schedule" (or with "."); raises BadInput with the nearest names."""
    found = categories()
    wanted = name.replace(".", "/").strip("/")
    if wanted not in found:
        raise BadInput(f"there is no category {name!r}: {nearest(wanted, found)}")
    return found[wanted]


def _base(tree: ast.Module) -> str:
    """Return the second argument of `REGISTRY = Registry(__name__, Base)`; "" where there is none."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Call):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "REGISTRY" in map(ast.unparse, targets) and len(node.value.args) > 1:
            return ast.unparse(node.value.args[1])
    return ""


def _methods(folder: Path) -> Iterator[tuple[str, Method]]:
    found = {}
    for file in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(file.read_text("utf-8"), str(file))
        found[file.stem] = Method(file.stem, ast.get_docstring(tree) or "", tuple(_parameters(tree)))
    presets = folder / "presets.toml"
    for name, preset in tomllib.loads(presets.read_text("utf-8")).items() if presets.exists() else ():
        choice = MethodConfig.parse(preset["base"])
        said = f"{choice.name} with " + ", ".join(f"{k} = {v!r}" for k, v in choice.parameters.items())
        paper = f"\n\nPaper: {preset['paper']}" if preset.get("paper") else ""
        known = found[choice.name].parameters
        given = {k: repr(v) for k, v in choice.parameters.items()}
        fields = tuple(Parameter(p.name, p.annotation, given.get(p.name, p.default)) for p in known)
        found[name] = Method(name, said + paper, fields, is_=said)
    yield from sorted(found.items())


def _parameters(tree: ast.Module) -> Iterator[Parameter]:
    """Yield the fields of the module's one public class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    annotation = ast.unparse(item.annotation)
                    if not annotation.startswith("ClassVar"):
                        yield Parameter(item.target.id, annotation, _default(item.value))


def _default(value: ast.expr | None) -> str | None:
    """Return the default in source text: of `field(default=3)` 3, of `field(default_factory=dict)` dict()."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        given = {k.arg: ast.unparse(k.value) for k in value.keywords}
        made = given.get("default_factory", "")
        made = made.removeprefix("lambda: ") if made.startswith("lambda: ") else f"{made}()" if made else ""
        return given.get("default") or made or None
    return ast.unparse(value) if value is not None else None
