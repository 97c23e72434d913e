"""Pipelines: who computes what, when. A schedule is one list of actions per rank, and that list is what runs.

`schedule` holds the makers, `passes` lower their lists, `check` proves them legal, `play` is the one loop that obeys
them, in any `ScheduleBackend`: `ScheduleSimulator` (time, bubble and memory without a model), `RankBackend` (one rank
of a real run).
"""
