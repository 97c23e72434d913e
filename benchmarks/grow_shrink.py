"""What growing, pruning, distilling and quantizing are worth, measured here: one file per method in
benchmarks/grow_shrink, found by its name.

    python benchmarks/grow_shrink.py [METHOD ...] [--rows PATTERN ...] [--hours H] [--quick] [--list] [--json]

PATTERN is of METHOD.STUDY, such as 'lemon.*'. Studies run in the order of their worth. Everything else is as with
benchmarks/claims.py: trials are kept by commit and a sweep goes on where it was ended, both sides get the same number
of trials, rows that do not run stay, and `left_out` says which studies have none, and why. A `ratio` of flop counts
what the source took to train; `ratio_without_source` does not.
"""

from claims._main import main

if __name__ == "__main__":
    main(__doc__, folder="grow_shrink", unit="METHOD", hours=8.0)
