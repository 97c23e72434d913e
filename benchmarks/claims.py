"""What papers claim, measured here: one file per paper in benchmarks/claims, found by its name.

    python benchmarks/claims.py [PAPER ...] [--rows PATTERN ...] [--hours H] [--quick] [--json]

PATTERN is of PAPER.STUDY, such as 'muon.*'; --list names them. Without names, all of them. Rows of studies that do not
run stay as they were, with the commit that they were measured at; `left_out` says which ones have none, and why.
Trials are kept in the user's cache by commit: a sweep that was ended, or whose hours were over, goes on there, and
--commit goes on with the trials of another commit, which the rows then name. Both sides of a row get the same number of
trials. A claim that does not hold here is a row like any other.

Some papers need root and iproute2 (see `gossamer doctor`). --quick takes under 10 minutes and has a record of its own.
"""

from claims._main import main

if __name__ == "__main__":
    main(__doc__, folder="claims", unit="PAPER", hours=6.0)
