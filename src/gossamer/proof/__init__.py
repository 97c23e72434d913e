"""Numerical parity proof: before the first step, compare the gradients of the parallel layout with those of one
process.

Both run the same micro-batches. Each `ProofSide` answers a `TrialSet` with a `FingerprintTable`: a row of a few numbers
per tensor, the losses, and digests of the initial values. `DividedSide` (`divided`) runs the layout as it will train;
`OneProcess` (`one_process`) runs the unsharded model on one rank. `judge` in `verdict` compares the two tables.
"""
