"""Habits of training loops that people write, a page for each part of a loop. What must come of them: loops/habit.py.

A loop is written as its author has it; `wrap` is the only thing that is ours. It returns what is compared.
"""

from habits import batches, grads, launches, loaders, losses, mixtures, models, optimizers, ranks, steps

PAGES = tuple(
    page.__name__.rpartition(".")[2]
    for page in (steps, grads, losses, mixtures, batches, loaders, models, optimizers, ranks, launches)
)
