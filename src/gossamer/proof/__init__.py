"""The proof that a model which is divided has the gradients of one process: both are run on the same micro-batches
before the first step, and compared.

A `Side` makes a `FingerprintTable` of a `TrialSet`: rows of a few numbers for every tensor, losses, digests of initial
values. One side is the layout as it will train (`divided`), the other the whole model on one rank (`one_process`);
`verdict` compares.
"""
