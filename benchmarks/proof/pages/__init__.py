"""Modules that people write, a page for each part of one."""

from proof.pages import constructors, edges, effects, state, values

PAGES = tuple(page.__name__.rpartition(".")[2] for page in (constructors, values, effects, state, edges))
