"""Split backward: first the gradients of the tensors a stage received (B_INPUT), later those of its parameters
(B_WEIGHT).

Paper: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241.

The chain is every node of the autograd graph from which a received tensor can be reached. B_INPUT runs the chain, and
of its nodes only the part that continues along it. A chain node that also leads to parameters (the matmul of a linear
layer) is a use: the gradients that arrive there are kept, and B_WEIGHT starts from them. No chain node is run twice.

A parameter's gradient is computed in B_INPUT instead, complete and once, where to defer it would do work twice:
    it has several uses on the chain (a shared block): from the first, the chain leads to the others
    its use is a Function written in Python: that computes all of its gradients together
    a tensor saved for its use has hooks (checkpointing): unpacking it later would recompute the region again
A graph that holds compiled code or a reentrant checkpoint, which torch runs only in a full backward, is run in B_INPUT
entirely. Roots off the chain (all of them, if nothing was received) wait for B_WEIGHT.

Gradients are added in place to an existing `.grad` by the parameters' own accumulators, so their hooks fire, in B_INPUT
or B_WEIGHT, and perhaps in both: average gradients only when all are done (REDUCE_GRADS). Hooks on tensors within the
model are called again in B_WEIGHT, on the same gradients; what they return then is not used.

Memory: activations of the chain stay until B_WEIGHT; autograd cannot free some nodes of a graph and keep others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

Grads = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Use:
    """A chain node, and the parameters off the chain that it leads to."""

    node: Node
    parameters: set[Node]  # their accumulators
    arrived: Grads = ()


@dataclass(slots=True)
class Later:
    """The parameter gradients that B_INPUT defers to B_WEIGHT.

    It holds the graph: drop other references to it, so that `run` frees it.
    """

    uses: list[_Use] = field(default_factory=list)  # first to run first
    roots: list[GradientEdge] = field(default_factory=list)  # off the chain
    gradients: list[Tensor] = field(default_factory=list)  # of these

    def run(self) -> None:
        """Accumulate the deferred parameter gradients. Call it once."""
        while self.uses:
            _run(self.uses.pop(0), keep_graph=bool(self.roots))
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
        self.roots, self.gradients = [], []


def backward_input(roots: Sequence[Tensor], gradients: Sequence[Tensor], received: Sequence[Tensor]) -> Later:
    """Accumulate into `.grad` of the leaves `received`, and return the deferred work for the parameters.

    `gradients` are those of `roots`, each of its shape. Neither they nor the gradients of the leaves may be written to
    before the deferred work has run: they may share memory.
    """
    edges = [get_gradient_edge(root) for root in roots]
    nodes = _nodes([edge.node for edge in edges])
    leaves = {get_gradient_edge(x).node: x for x in received if x.requires_grad}
    chain = _chain(nodes, leaves)
    if chain and any(_is_compiled(node) or _is_reentrant(node) for node in nodes):
        torch.autograd.backward(list(roots), list(gradients))
        return Later()
    uses, at_once = _divided(chain)
    on, off = ([i for i, edge in enumerate(edges) if (edge.node in chain) is wanted] for wanted in (True, False))
    inputs = [x for node, x in leaves.items() if node in chain] + [_variable(node) for node in at_once]
    if on:
        with _kept(uses) as arrived:
            torch.autograd.backward(
                [edges[i] for i in on], [gradients[i] for i in on], inputs=inputs, retain_graph=bool(uses or off)
            )
        uses = arrived
    return Later(uses, [edges[i] for i in off], [gradients[i] for i in off])


def _nodes(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of the graph, each after those that it leads to."""
    found: dict[Node, None] = {}
    entered: set[Node] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found[node] = None
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in entered]
    return list(found)


def _chain(nodes: Sequence[Node], leaves: dict[Node, Tensor]) -> dict[Node, None]:
    chain: dict[Node, None] = {}
    for node in nodes:
        if node in leaves or any(following in chain for following, _ in node.next_functions):
            chain[node] = None
    return chain


def _beside(node: Node, chain: dict[Node, None]) -> list[list[Node]]:
    """Return the nodes off the chain that `node` leads to, in one list for each of its edges."""
    return [_nodes([n]) for n, _ in node.next_functions if n is not None and n not in chain]


def _divided(chain: dict[Node, None]) -> tuple[list[_Use], list[Node]]:
    """Return the uses whose parameters can be deferred, and the accumulators that cannot."""
    counts: dict[Node, int] = {}
    groups: list[set[Node]] = []  # of accumulators with nodes between them and the chain that run once for all of them
    uses, at_once = [], set[Node]()
    for node in chain:
        ways = _beside(node, chain)
        use = _Use(node, {n for way in ways for n in way if _is_accumulator(n)})
        if not use.parameters:
            continue
        uses.append(use)
        groups += [group for way in ways if len(group := {n for n in way if _is_accumulator(n)}) > 1]
        for one in use.parameters:
            counts[one] = counts.get(one, 0) + 1
        if isinstance(node, BackwardCFunction) or any(map(_has_hooks, [node, *(n for way in ways for n in way)])):
            at_once |= use.parameters
    at_once |= {node for node, count in counts.items() if count > 1}
    while more := [group for group in groups if group & at_once and group - at_once]:
        at_once = at_once.union(*more)
    later = [_Use(use.node, use.parameters - at_once) for use in uses]
    return [use for use in later if use.parameters], [node for node in counts if node in at_once]


@contextmanager
def _kept(uses: Sequence[_Use]) -> Iterator[list[_Use]]:
    """Yield a list that collects the uses as a backward reaches them, with the gradients that arrive."""
    reached: list[_Use] = []
    handles = [use.node.register_prehook(_keeper(use, reached)) for use in uses]
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def _keeper(use: _Use, reached: list[_Use]) -> Callable[[Grads], None]:
    def keep(arrived: Grads) -> None:
        use.arrived = arrived
        reached.append(use)

    return keep


def _run(use: _Use, *, keep_graph: bool) -> None:
    ways = [(GradientEdge(use.node, i), g) for i, g in enumerate(use.arrived) if g is not None]
    if not ways:
        return
    # What arrived has been through the hooks on the node's tensors, and autograd calls them again.
    handle = use.node.register_prehook(lambda _: use.arrived)
    try:
        inputs = [_variable(node) for node in use.parameters]
        torch.autograd.backward([e for e, _ in ways], [g for _, g in ways], inputs=inputs, retain_graph=keep_graph)
    finally:
        handle.remove()


def _is_accumulator(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def _variable(accumulator: Node) -> Tensor:
    variable: Tensor = accumulator.variable  # type: ignore[attr-defined]
    return variable


def _is_compiled(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and node.name().startswith("CompiledFunction")


def _is_reentrant(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and getattr(node, "_forward_cls", None) is CheckpointFunction


def _has_hooks(node: Node) -> bool:
    """Return whether a tensor saved for `node` has saved-tensor hooks."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            if one is not None and one.unpack_hook is not None:
                return True
    return False


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
