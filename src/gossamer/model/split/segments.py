"""Segments: units for a model without blocks, made from its torch.export graph.

The model keeps its parameters and their names. It gets child modules without parameters, each of which runs a range of
graph nodes, and a forward that calls them one after the other. Ranges begin where the fewest tensors are alive. A graph
is what the forward did for one kind of batch. So every kind is exported on its own, and has to give the same graph
except for sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from gossamer.spec.errors import RunFailed, bad_input

_NAME = "segments"
_MOST = 64  # segments; a model has fewer stages
_KEY = "plan.mesh.pipe"


def with_segments(module: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """Give `module` segments, in place, and return their names, to be its units. `run` calls it once, as training does.

    Raises BadInput if torch.export cannot trace its forward, or there is no parameter to divide the graph by.
    """
    given = _arguments(module, run)
    driver = _Driver(module, module.forward, [])
    driver.graphs[driver.kind(given)] = graph = driver.export(given)
    driver.borders = _borders(graph)
    if len(driver.borders) < 2:
        raise _refused("a graph with one segment only", "give the model blocks: an nn.ModuleList of modules")
    module.add_module(_NAME, nn.ModuleList(Segment() for _ in driver.borders))
    module.forward = functools.wraps(module.forward)(driver)  # type: ignore[method-assign, assignment]
    return tuple(f"{_NAME}.{i}" for i in range(len(driver.borders)))


class Segment(nn.Module):
    """A module that runs a range of graph nodes. It owns no parameters, and reads those of the model."""

    def forward(self, stretch: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run `stretch`, a range of graph nodes, on the tensors that it takes."""
        return stretch(*inputs)


@dataclass(frozen=True)
class _Graph:
    """An exported forward: `nodes` compute, in order; `fixed` are the graph's own constants."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    reads: dict[str, str]  # node -> path of the parameter or buffer
    fixed: dict[str, Any]
    results: tuple[Any, ...]
    spec: TreeSpec

    @property
    def shape(self) -> tuple[str, ...]:
        """Return the operators, which graphs of other sizes have in common."""
        return tuple(str(node.target) for node in self.nodes)


@dataclass
class _Driver:
    """A forward that runs segments."""

    module: nn.Module
    original: Callable[..., Any]
    borders: list[int]  # first node of every segment

    def __post_init__(self) -> None:
        self.graphs: dict[Any, _Graph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (args, dict(sorted(kwargs.items())))
        kind = self.kind(given)
        if kind not in self.graphs:
            self.graphs[kind] = self._alike(self.export(given))
        graph = self.graphs[kind]
        values = dict(zip(graph.inputs, tree_flatten(given)[0], strict=True))
        ends = [*self.borders[1:], len(graph.nodes)]
        for segment, low, high in zip(getattr(self.module, _NAME), self.borders, ends, strict=True):
            stretch = _Stretch(self.module, graph, low, high)
            values.update(zip(stretch.gives, segment(stretch, *(values[n] for n in stretch.takes)), strict=True))
        found = [values[r.name] if isinstance(r, Node) else r for r in graph.results]
        return tree_unflatten(found, graph.spec)

    def kind(self, given: Any) -> Any:
        leaves, spec = tree_flatten(given)
        seen = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return self.module.training, str(spec), seen, torch.is_autocast_enabled("cpu")

    def export(self, given: Any) -> _Graph:
        args, kwargs = given
        override, self.module.forward = self.module.forward, self.original  # type: ignore[method-assign]
        try:
            exported = torch.export.export(self.module, args, dict(sorted(kwargs.items())), strict=False)
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise _refused(
                f"a forward that torch.export cannot follow: {said}", "name the modules to split between in plan.units"
            ) from None
        finally:
            self.module.forward = override  # type: ignore[method-assign]
        return _read(exported.module(), exported.call_spec.out_spec)  # type: ignore[arg-type]

    def _alike(self, graph: _Graph) -> _Graph:
        first = next(iter(self.graphs.values()))
        if graph.shape != first.shape and graph.inputs == first.inputs:
            raise RunFailed(
                "torch.export gives other operators for this batch than for the first one, so the stages do not fit: "
                "give all batches the same keys and shapes, or name the blocks of the model in plan.units"
            )
        return graph


class _Stretch:
    """A range of graph nodes, [low, high): the tensors that it takes, and those it gives to later ranges."""

    def __init__(self, module: nn.Module, graph: _Graph, low: int, high: int) -> None:
        self._module, self._graph, self._nodes = module, graph, graph.nodes[low:high]
        made = {node.name for node in self._nodes}
        known = set(graph.reads) | set(graph.fixed)
        takes = [n.name for node in self._nodes for n in node.all_input_nodes if n.name not in made | known]
        self.takes = tuple(dict.fromkeys(takes))
        later = {n.name for node in graph.nodes[high:] for n in node.all_input_nodes}
        later |= {r.name for r in graph.results if isinstance(r, Node)}
        self.gives = tuple(node.name for node in self._nodes if node.name in later)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[str, Any] = {**self._graph.fixed, **dict(zip(self.takes, inputs, strict=True))}

        def value(node: Node) -> Any:
            if node.name not in values:
                values[node.name] = _at(self._module, self._graph.reads[node.name])
            return values[node.name]

        for node in self._nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)  # type: ignore[attr-defined]
            values[node.name] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(values[name] for name in self.gives)


def _read(module: GraphModule, spec: TreeSpec) -> _Graph:
    inputs, nodes, reads, fixed, results = [], [], {}, {}, ()
    own = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr" and str(node.target) in own and not str(node.target).startswith("lifted_"):
            reads[node.name] = str(node.target)
        elif node.op == "get_attr":
            fixed[node.name] = _at(module, str(node.target))
        elif node.op == "call_function":
            nodes.append(node)
        elif node.op == "output":
            results = tuple(node.args[0])
    return _Graph(tuple(inputs), tuple(nodes), reads, fixed, results, spec)


def _borders(graph: _Graph) -> list[int]:
    """Return where segments begin: every range up to the next reads a parameter, and few tensors are alive there."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    last = dict(place)
    for i, node in enumerate(graph.nodes):
        last.update({n.name: i for n in node.all_input_nodes if n.name in place})
    last.update({r.name: len(place) for r in graph.results if isinstance(r, Node)})
    alive = [sum(place[n] < i <= at for n, at in last.items()) for i in range(len(graph.nodes))]
    narrow = min((count for count in alive[1:] if count), default=0)
    uses = [i for i, node in enumerate(graph.nodes) if any(n.name in graph.reads for n in node.all_input_nodes)]
    found = [0]
    for use in uses[1:]:
        before = [i for i in range(found[-1] + 1, use + 1) if alive[i] == narrow]
        if before and any(found[-1] <= u < before[-1] for u in uses):
            found.append(before[-1])
    step = -(-len(found) // _MOST)
    return found[::step]


def _arguments(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Return the arguments with which `run` calls the module."""
    seen: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, dict(sorted(kwargs.items()))))
        raise _Noted

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    except _Noted:
        pass
    finally:
        hook.remove()
    return tree_map_only(Tensor, torch.Tensor.detach, seen[0])


class _Noted(BaseException):
    """A signal that the call of the module has been seen."""


def _at(owner: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), owner)


def _refused(got: str, do: str) -> Exception:
    return bad_input(
        wanted="a model with repeated blocks, or with a graph that can be split into stages", got=got, do=do, key=_KEY
    )
