"""The pane of the ranks: host, part, rows of a batch, forecast of memory and bytes, and the last line of each log."""

from __future__ import annotations

from rich.text import Text

from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes, show_gib
from gossamer.view.watch.canvas import Canvas, Column, table
from gossamer.view.watch.watched_run import WatchedRun


def ranks(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """A row per rank: its host, its part, its rows of a batch, what it holds and sends by forecast, its log."""
    count = run.ranks
    if not count:
        return [canvas.line(("no rank is known yet: the run has not started", "dim"))]
    plan = run.plan if run.plan is not None and run.plan.ranks == count else None
    columns = [column for column in _columns(run, plan, count) if column.cells]
    lines = table(columns, canvas)
    hosts = {run.host_of(rank) for rank in range(count)} - {None}
    where = f" on {len(hosts)} host{'s' * (len(hosts) != 1)}" if hosts else "; hosts are not in the records"
    said = f"{count} rank{'s' * (count != 1)}{where}"
    notes = [
        "memory, sends: by forecast, between steps and per step",
        f"measured on rank 0: {show_gib(run.progress.peak_bytes)} peak" if run.progress.peak_bytes else "",
    ]
    return [canvas.line(said), *lines, Text(), *(canvas.line((note, "dim")) for note in notes if note)]


def _columns(run: WatchedRun, plan: Plan | None, count: int) -> list[Column]:
    """Return the columns of the table; one that has nothing to say has no cells."""
    everyone = range(count)
    hosts, logs = [run.host_of(rank) for rank in everyone], [run.log(rank).lines for rank in everyone]
    losses = [_loss_of(run, rank) for rank in everyone]
    forecast = plan.forecast if plan is not None else Cost()
    memory, sends = forecast.state_bytes, forecast.sent_bytes
    places = [plan.axes.place(rank) for rank in everyone] if plan is not None else []
    return [
        Column("rank", [f"{rank}" for rank in everyone], 9),
        Column("host", ["?" if host is None else f"{host}" for host in hosts], 8),
        Column("part", [_part(place, plan is not None and plan.mesh.in_stages) for place in places], 4, is_text=True),
        Column("rows", [f"{plan.rows[replica]}" for replica, _ in places] if plan is not None else [], 3),
        Column("loss", losses if any(losses) else [], 6),
        Column("memory", [show_gib(one) for one in memory] if len(memory) == count else [], 5),
        Column("sends", [show_bytes(one) for one in sends] if len(sends) == count else [], 5),
        Column("log", [lines[-1] if lines else "-" for lines in logs] if any(logs) else [], 1, is_text=True),
    ]


def _part(place: tuple[int, int], in_stages: bool) -> str:
    replica, stage = place
    return f"replica {replica}, stage {stage}" if in_stages else f"replica {replica}"


def _loss_of(run: WatchedRun, rank: int) -> str:
    """Return the loss of the replica group of a rank in local-update training; "" in other runs."""
    plan, islands = run.plan, run.islands
    if plan is None or islands is None:
        return ""
    groups = plan.islands or tuple((one,) for one in range(plan.ranks))
    at = next((index for index, group in enumerate(groups) if rank in group), -1)
    if not 0 <= at < len(islands.losses):
        return ""
    rejected = f" ({islands.rejected[at]} rejected)" if islands.rejected[at] else ""
    return f"{islands.losses[at]:.3f}{rejected}"
