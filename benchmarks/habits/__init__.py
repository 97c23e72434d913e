"""Habits of training loops that people write, a page for each part of a loop. What must come of them: loops/habit.py.

A loop is written as its author has it; `wrap` is the only thing that is ours. It returns what is compared.
"""

from habits import (
    batches,
    contrasts,
    grads,
    launches,
    loaders,
    losses,
    methods,
    mixtures,
    models,
    optimizers,
    practice,
    ranks,
    steps,
    tasks,
    tools,
)

_PAGES = (
    *(
        steps,
        grads,
        losses,
        mixtures,
        tasks,
        methods,
        contrasts,
        batches,
        loaders,
        practice,
        models,
        optimizers,
        tools,
        ranks,
    ),
    launches,
)
PAGES = tuple(page.__name__.rpartition(".")[2] for page in _PAGES)
