"""Modules that people write, a page for each part of one."""

from proof.pages import state

PAGES = tuple(page.__name__.rpartition(".")[2] for page in (state,))
