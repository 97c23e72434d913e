"""Pipeline schedules: one list of actions per rank, in the order in which the rank runs them.

`schedule` holds the schedule builders, `passes` lower their lists, `validate.check` proves them legal, `execute` is the
one loop that runs them, in any `ScheduleBackend`: `RankBackend` (one rank of a real run), or the writer of
`schedule_tasks`, whose tasks the clock plays (time, bubble and memory without a model).
"""
