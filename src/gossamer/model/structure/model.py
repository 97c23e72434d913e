"""The structure of one model: dimensions of its parameters and their roles, norms, who reads and who writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.side_effects import untouched
from gossamer.model.split.meta_init import without_storage
from gossamer.model.structure.dimension import Dimension
from gossamer.model.structure.trace import DimensionTrace, plain_attention
from gossamer.model.structure.uses import (
    ADDED,
    INDEXED,
    NORM_SCALE,
    NORM_SHIFT,
    READS,
    WRITES,
    TracedNorm,
)
from gossamer.model.token_logits import logits_of
from gossamer.model.units import block_names
from gossamer.spec.errors import BadInput, bad_input

# Roles of a dimension.
STREAM, VOCABULARY, POSITIONS, HEADS, HEAD_SIZE, HIDDEN, FIXED = (
    *("residual stream", "vocabulary", "positions", "heads", "head size", "hidden units", "fixed"),
)
_ROWS, TOKENS = 3, 11  # of the batch that is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization of a model. `kind`: layer or rms; `weight`, `bias`: its parameters, "" for none."""

    kind: str
    eps: float
    dim: Dimension
    weight: str
    bias: str

    @property
    def name(self) -> str:
        """The name of the module that holds its weight, or of the norm without a weight."""
        return self.weight.rpartition(".")[0] or f"a {self.kind} norm without a weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """What the forward of a model says of its parameters.

    dims: by parameter (tied ones once); uses: how each dim is used (see `trace`); reads: which norms' outputs a
    parameter reads, None for anything else; blocks: the repeated ones, in order; stream: the dimensions that the blocks
    hand on; span: the numbers of the first and the last operator of the forward that takes a parameter, for those that
    it uses; token_ids: of the table that they look up, 2 without one; buffers: shapes of the persistent ones, by name;
    module: its outline, without data.
    """

    dims: Mapping[str, tuple[Dimension, ...]]
    uses: Mapping[tuple[str, int], frozenset[str]]
    reads: Mapping[str, frozenset[Norm | None]]
    norms: tuple[Norm, ...]
    blocks: tuple[str, ...]
    stream: frozenset[int]  # ids of roots
    limits: Mapping[int, tuple[str, ...]]  # id of a root without a form -> operators that forbid to resize it
    vocabulary: frozenset[int]  # ids of roots: of tables of token ids, and of logits
    span: Mapping[str, tuple[int, int]]
    token_ids: int
    buffers: Mapping[str, tuple[int, ...]]
    module: nn.Module

    def how(self, name: str, dim: int) -> frozenset[str]:
        """Return how a dim of a parameter is used; empty where the forward never does."""
        return self.uses.get((name, dim), frozenset())

    def role(self, leaf: Dimension) -> str:
        """Return the role of a dimension without a form."""
        root = leaf.root
        if id(root) in self.stream:
            return STREAM
        if id(root) in self.vocabulary:
            return VOCABULARY
        if any(INDEXED in self.how(*place) for place, _ in self._places(root)):
            return POSITIONS
        if any("queries and keys" in why or "two activations" in why for why in self.limits.get(id(root), ())):
            return HEAD_SIZE
        factors = [factors for _, factors in self._places(root) if len(factors) > 1]
        if factors and all(one[-1] is root for one in factors):
            return HEAD_SIZE
        if id(root) in self.limits or not self._places(root):
            return FIXED
        return HEADS if factors else HIDDEN

    def _places(self, root: Dimension) -> list[tuple[tuple[str, int], list[Dimension]]]:
        """Return where a dimension is: (parameter, dim), and the factors of that dim, or of the part that has it."""
        return [
            ((name, place), part.factors())
            for name, dims in self.dims.items()
            for place, dim in enumerate(dims)
            for part in dim.parts()
            if any(leaf is root for leaf in part.leaves())
        ]

    def shared(self) -> frozenset[str]:
        """Return the parameters that are both looked up (or added) and read: tied heads."""
        found = []
        for name, dims in self.dims.items():
            hows = [self.how(name, dim) for dim in range(len(dims))]
            if any(READS in how and WRITES in how for how in hows):
                found.append(name)
        return frozenset(found)


def structure_of(module: nn.Module, *, tokens: int = TOKENS) -> ModelStructure:
    """Trace the forward of `module` on shapes alone, in evaluation mode; the module itself is left as it is.

    tokens: of a sequence, for models that take one length alone.

    Raises BadInput for an operator that cannot be followed, and for a forward that takes no tokens.
    """
    blocks = block_names(module)
    outputs: list[Any] = []
    with untouched(module):
        outline = without_storage(module).eval()
        hooks = [
            outline.get_submodule(name).register_forward_hook(lambda _, __, out: outputs.append(out)) for name in blocks
        ]
        caller = caller_of(outline)
        batch = {"input_ids": torch.arange(_ROWS * tokens).reshape(_ROWS, tokens) % 2}
        with torch.no_grad(), plain_attention(outline), DimensionTrace(outline, batch["input_ids"]) as trace:
            output = caller(outline, batch)
        for hook in hooks:
            hook.remove()
    stream = {id(leaf.root) for one in _first_tensors(outputs) for leaf in trace.dims_of(one)[-1].leaves()}
    if not stream:
        stream = {id(leaf) for leaf in _table_width(trace).leaves()}
    logits = [trace.dims_of(one)[-1] for one in _logits(output)]
    indexed = (name for (name, _), how in trace.uses.of.items() if INDEXED in how)
    first = next(iter((*trace.uses.tables, *indexed)), None)
    vocabulary = [*logits, *([trace.parameters[first][0]] if first is not None else [])]
    limits: dict[int, tuple[str, ...]] = {}
    for dim, why in trace.limits:
        for leaf in dim.leaves():
            limits[id(leaf)] = (*limits.get(id(leaf), ()), why)
    norms = {id(one): _norm(one) for one in trace.uses.norms}
    return ModelStructure(
        dims=dict(trace.parameters),
        uses={place: frozenset(how) for place, how in trace.uses.of.items()},
        reads={
            name: frozenset(None if one is None else norms[id(one)] for one in read)
            for name, read in trace.uses.norms_read.items()
        },
        norms=tuple(norms.values()),
        blocks=blocks,
        stream=frozenset(stream),
        limits=limits,
        vocabulary=frozenset(id(leaf) for dim in vocabulary for leaf in dim.leaves()),
        span=trace.uses.span,
        token_ids=2 if first is None else trace.parameters[first][0].size,
        buffers=_persistent(module),
        module=outline,
    )


def _persistent(module: nn.Module) -> dict[str, tuple[int, ...]]:
    held = module.state_dict(keep_vars=True).keys()
    return {name: tuple(buffer.shape) for name, buffer in module.named_buffers() if name in held}


def _first_tensors(outputs: Sequence[Any]) -> Iterator[Tensor]:
    for out in outputs:
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor):
            yield first


def _logits(output: Any) -> list[Tensor]:
    try:
        return [logits_of(output)]
    except BadInput:  # an encoder without a head
        return []


def _table_width(trace: DimensionTrace) -> Dimension:
    for (name, dim), how in trace.uses.of.items():
        if INDEXED in how:
            return trace.parameters[name][1 - dim]
    raise bad_input(
        wanted="a model with repeated blocks, or an embedding",
        got="neither in its forward",
        do="name a model whose blocks are in an nn.ModuleList",
        key="model",
    )


def _norm(one: TracedNorm) -> Norm:
    return Norm(
        kind=one.kind, eps=one.eps, dim=one.dim, weight=one.names.get("weight", ""), bias=one.names.get("bias", "")
    )


__all__ = [
    "ADDED",
    "FIXED",
    "HEADS",
    "HEAD_SIZE",
    "HIDDEN",
    "INDEXED",
    "NORM_SCALE",
    "NORM_SHIFT",
    "POSITIONS",
    "READS",
    "STREAM",
    "VOCABULARY",
    "WRITES",
    "ModelStructure",
    "Norm",
    "structure_of",
]
