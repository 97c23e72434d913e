"""Gossamer trains one model on the machines and links you have.

    gossamer.train(model, data, config)          # train, from Python
    gossamer.wrap(model, optimizer, loader)      # the same inside your own training loop; rank(), ranks()
    gossamer.plan(model, config, ranks=4)        # how the work would be split
    gossamer.resume(run_dir, {"train.steps": 2000})
    gossamer.sample(run_dir, "The ")             # text of a trained model
    gossamer.chat(run_dir).ask("Hello")          # a dialogue with a model trained on chats
    gossamer.evaluate(run_dir, ["a.txt"])        # loss, perplexity, bits per byte
    gossamer.evaluate_on_tasks(run_dir, ["arc_easy"])  # tasks of lm-eval-harness
    gossamer.export(run_dir, "my-model")         # a folder that transformers loads
    gossamer.load(run_dir)                       # its module, tokenizer and configuration

Every import is lazy: `import gossamer` alone does not even import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.api.verbs import chat, evaluate, evaluate_on_tasks, export, load, resume, sample, train
    from gossamer.own_loop import wrap
    from gossamer.own_loop.process_group import rank, ranks
    from gossamer.spec.config import RunConfig
    from gossamer.spec.plan import Plan

    __version__: str

_VERBS = ("chat", "evaluate", "evaluate_on_tasks", "export", "load", "resume", "sample", "train")
__all__ = [
    "Plan",
    "RunConfig",
    "__version__",
    "chat",
    "evaluate",
    "evaluate_on_tasks",
    "export",
    "load",
    "plan",
    "rank",
    "ranks",
    "resume",
    "sample",
    "train",
    "wrap",
]

_HOME = {
    **dict.fromkeys(_VERBS, "api.verbs"),
    "wrap": "own_loop",
    "rank": "own_loop.process_group",
    "ranks": "own_loop.process_group",
    "RunConfig": "spec.config",
    "Plan": "spec.plan",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"gossamer.{_HOME[name]}"), name)
    if name == "plan":
        return importlib.import_module("gossamer.plan")
    if name == "__version__":
        from importlib.metadata import version

        return version("gossamer")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _PlanVerb(ModuleType):
    """The module `gossamer.plan`, which can also be called: a subpackage and a verb under one name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("gossamer.api.verbs").plan(*args, **kwargs)


class _Package(ModuleType):
    """This package: makes `gossamer.plan` callable when Python sets the imported subpackage as an attribute here."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "plan" and type(value) is ModuleType:
            value.__class__ = _PlanVerb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
