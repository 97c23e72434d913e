"""Modules that people write, a page for each part of one."""

from proof.pages import (
    constructors,
    containers,
    corners,
    edges,
    effects,
    idioms,
    lists,
    losses,
    memories,
    operations,
    state,
    together,
    transformers_tiny,
    values,
    ways,
)

PAGES = tuple(
    page.__name__.rpartition(".")[2]
    for page in (
        constructors, values, effects, state, edges, corners, containers, transformers_tiny, ways, memories, losses,
        idioms, operations, together, lists
    )
)  # fmt: skip
