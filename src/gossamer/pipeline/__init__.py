"""Pipelines: who computes what, when. A schedule is one list of actions per rank, and that list is what runs.

`schedule` holds the makers, `passes` lower their lists, `check` proves them legal, `play` is the one loop that obeys
them, in any `World`: `Clock` (time, bubble and memory without a model), `RankWorld` (one rank of a real run).
"""
