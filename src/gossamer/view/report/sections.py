"""The sections of a report, from a run's history: what ran and why, how it went, and how to run it again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import yaml

from gossamer.spec import records as kinds
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes, show_gib, show_seconds
from gossamer.view.format import format_event, show_count
from gossamer.view.report import curves
from gossamer.view.report.blocks import Block, Code, Facts, Folded, Paragraph, Section, Table, Tiles
from gossamer.view.report.forecast import forecast
from gossamer.view.report.reproduce import reproduce
from gossamer.view.run_history import RunHistory, written

_EVENTS = 100  # shown, at most: the last ones
_ROWS = 64  # of a table, at most
_LOG_LINES = 20
_LOGS = 4  # ranks whose log is shown of a run that did not end well
_SAMPLES = 3


def sections(run: RunHistory) -> Iterator[Section]:
    """Yield the sections of the report in order; those that have nothing to say are left out."""
    yield Section("result", "Result", _result(run))
    for name, title, blocks in (
        ("loss", "Loss", curves.loss(run)),
        ("run", "What ran", _what(run)),
        ("plan", "Why it ran this way", _plan(run)),
        ("speed", "Speed", curves.speed(run)),
        ("traffic", "Bytes per link", [*curves.traffic(run), *_links(run)]),
        ("memory", "Memory", [*curves.memory(run), *_memory(run)]),
        ("forecast", "Forecast and measurement", forecast(run)),
        ("events", "Events and failures", _events(run)),
        ("checkpoints", "Checkpoints", _checkpoints(run)),
        ("samples", "What it wrote", _samples(run)),
        ("again", "Run it again", reproduce(run)),
        ("settings", "Configuration", _configuration(run)),
    ):
        if blocks:
            yield Section(name, title, blocks)


def _result(run: RunHistory) -> list[Block]:
    told = run.summary
    wanted = told["steps_wanted"]
    tiles = [
        ("outcome", run.outcome),
        ("steps", f"{told['steps']:,} of {wanted:,}" if wanted is not None else f"{told['steps']:,}"),
    ]
    if told["validation_bits_per_byte"] is not None:
        tiles.append(("validation", f"{told['validation_bits_per_byte']:.3f} bits/byte"))
    if told["validation_loss"] is not None:
        tiles.append(("validation loss", f"{told['validation_loss']:.4f}"))
    if told["final_loss"] is not None:
        tiles.append(("last loss", f"{told['final_loss']:.4f}"))
    if told["tokens_per_s"]:
        tiles.append(("throughput", f"{show_count(told['tokens_per_s'])} tokens/s"))
    tiles.append(("time", show_seconds(told["seconds"])))
    if told["wire_bytes"]:
        tiles.append(("sent by rank 0", show_bytes(sum(told["wire_bytes"].values()))))
    blocks: list[Block] = [Tiles(tiles)]
    if run.outcome == "running" and run.holder is not None:
        blocks.append(Paragraph(f"Still being trained, by {run.holder.told()}: this is its state up to now.", "note"))
    if run.outcome == "unfinished" and run.start is not None:
        blocks.append(
            Paragraph("The records have no end, and nobody trains in the folder: its process was lost.", "bad")
        )
    if told["message"]:
        blocks.append(Paragraph(str(told["message"]), "bad" if run.outcome == "failed" else "note"))
    return [*blocks, *(Paragraph(note, "note") for note in run.notes)]


def _what(run: RunHistory) -> list[Block]:
    start, said = run.start, run.configuration
    if start is None:
        return [Paragraph("The run has not begun: it has no record of a start.", "note")]
    trained = f", {start.trained:,} of them trained" if 0 < start.trained < start.parameters else ""
    machine = start.machine
    return [
        Facts(
            [
                ("Model", f"{start.model}, {start.parameters:,} parameters{trained}"),
                ("Data", f"{start.data}, {start.tokens_per_step:,} tokens per step"),
                ("Fingerprint of the data", run.fingerprint[:16]),
                ("Tokenizer", written(said["data.tokenizer"]) if "data.tokenizer" in said else ""),
                ("Optimizer", _method_in(run, "train.optimizer")),
                ("Learning rate", _method_in(run, "train.lr_schedule")),
                ("Ranks", str(start.ranks)),
                ("Exchange", start.exchange),
                ("Precision", start.precision),
                ("Machine of rank 0", ", ".join(filter(None, (machine.get(k, "") for k in ("host", "processor"))))),
                ("Cores, device", ", ".join(filter(None, (machine.get(k, "") for k in ("cores", "device"))))),
                ("System", machine.get("system", "")),
                ("Measured peak", f"{show_count(start.peak_flop_per_s)} FLOP/s" if start.peak_flop_per_s else ""),
                ("Versions", ", ".join(f"{name} {version}" for name, version in start.versions.items())),
                ("Begun", _moment(run.records[0].time_s)),
                ("Starts", f"{run.summary['starts']}, resumes included" if run.summary["starts"] > 1 else ""),
            ]
        )
    ]


def _moment(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
    except (ValueError, OverflowError, OSError):
        return ""


def _method_in(run: RunHistory, key: str) -> str:
    """Return a method of the configuration on one line: adamw(lr=0.002)."""
    if key in run.configuration:
        return written(run.configuration[key])
    inside = {name.removeprefix(f"{key}."): v for name, v in run.configuration.items() if name.startswith(f"{key}.")}
    if not inside:
        return ""
    name = next(iter(inside)).partition(".")[0]
    fields = ", ".join(f"{part.removeprefix(f'{name}.')}={written(value)}" for part, value in inside.items())
    return f"{name}({fields})"


def _plan(run: RunHistory) -> list[Block]:
    plan = run.plan
    if plan is None:
        return []
    blocks: list[Block] = [Facts(_layout(plan))]
    if plan.reasons:
        rows = [(name.replace("_", " "), reason) for name, reason in plan.reasons.items()]
        blocks.append(Table("Decisions of the plan", ("decision", "reason"), rows))
    return blocks


def _layout(plan: Plan) -> list[tuple[str, str]]:
    activation = plan.activation_compression
    return [
        ("Replicas", str(plan.mesh.replica)),
        ("Pipeline stages", str(plan.mesh.pipe) if plan.mesh.in_stages else ""),
        ("Sequences per step", f"{plan.batch}: {_numbers(plan.rows)} per replica"),
        ("Micro-batches", _numbers(plan.microbatches)),
        ("Pipeline schedule", written(plan.pipeline_schedule) if plan.mesh.in_stages else ""),
        ("First units of the stages", ", ".join(plan.cuts)),
        ("Activation compression", written(activation) if plan.mesh.in_stages else ""),
        ("Exchange", written(plan.exchange)),
        ("Changed during the run from", written(plan.adapted_from) if plan.adapted_from else ""),
        ("Synchronization", written(plan.sync)),
        ("Sharding", written(plan.sharding)),
        ("Islands", f"{len(plan.islands)}: {written(plan.islands)}" if plan.islands else ""),
        ("Gradient buckets", str(len(plan.buckets)) if plan.buckets else f"of {show_gib(plan.bucket_bytes)}"),
        ("Backend", plan.backend),
    ]


def _numbers(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return str(values[0])
    return ", ".join(map(str, values[:_ROWS])) + (", ..." if len(values) > _ROWS else "")


def _links(run: RunHistory) -> list[Block]:
    told = run.summary
    if not told["wire_bytes"]:
        return []
    planned = run.plan.forecast.wire_bytes if run.plan is not None else {}
    rows = [
        (
            link,
            show_bytes(told["wire_bytes_per_step"].get(link, 0)),
            show_bytes(planned[link]) if link in planned else "",
            show_bytes(sent),
        )
        for link, sent in sorted(told["wire_bytes"].items(), key=lambda pair: -pair[1])
    ]
    return [
        Paragraph("Payload that the first rank sent; 0>1 is the link from rank 0 to rank 1."),
        Table("Bytes per link", ("link", "per step, median", "forecast", "in all"), rows[:_ROWS], figures_from=1),
        *_left_out(len(rows) - _ROWS, "links"),
    ]


def _left_out(count: int, what: str) -> list[Block]:
    return [Paragraph(f"{count} more {what} are left out.", "note")] if count > 0 else []


def _memory(run: RunHistory) -> list[Block]:
    plan, peak = run.plan, run.summary["peak_bytes"]
    states = plan.forecast.state_bytes if plan is not None else ()
    if not states and not peak:
        return []
    planned_peak = plan.forecast.peak_bytes if plan is not None else ()
    head = ("rank", "parameters, gradients, states (plan)", "peak (plan)", "peak (measured)")
    rows = [
        (
            str(rank),
            show_gib(states[rank]) if rank < len(states) else "",
            show_gib(planned_peak[rank]) if rank < len(planned_peak) else "",
            show_gib(peak) if rank == 0 and peak else "",
        )
        for rank in range(max(len(states), len(planned_peak), 1))
    ]
    return [
        Table("Memory per rank", head, rows[:_ROWS], figures_from=1),
        *_left_out(len(rows) - _ROWS, "ranks"),
        Paragraph(
            "Only the first rank writes what it measured: the resident memory of its process, libraries included."
        ),
    ]


def _events(run: RunHistory) -> list[Block]:
    blocks = _starts(run)
    rejected = run.summary["rejected_steps"]
    if rejected:
        blocks.append(Paragraph(f"{rejected} steps were rejected: they changed no parameter.", "bad"))
    blocks += [
        Paragraph(f"Proof: {one.outcome}. {one.message}", "" if one.is_proved else "bad")
        for one in run.records
        if isinstance(one, kinds.Proof)
    ][-_SAMPLES:]
    if run.events:
        shown = deque(run.events, maxlen=_EVENTS)
        if len(run.events) > _EVENTS:
            blocks.append(Paragraph(f"The last {_EVENTS} of {len(run.events)} events:", "note"))
        rows = [(_moment(one.time_s), one.level, format_event(one)) for one in shown]
        blocks.append(Table("Events", ("time", "level", "event"), rows))
    if run.outcome in ("failed", "unfinished", "interrupted"):
        blocks += _logs(run)
    return blocks


def _starts(run: RunHistory) -> list[Block]:
    """Return the starts of a run that was resumed."""
    found = [one for one in run.records if isinstance(one, kinds.Start)]
    if len(found) < 2:
        return []
    rows = [
        (_moment(one.time_s), str(one.step), str(one.ranks), one.exchange, one.versions.get("torch", ""))
        for one in found[-_ROWS:]
    ]
    return [Table("Starts", ("started", "after step", "ranks", "exchange", "torch"), rows)]


def _logs(run: RunHistory) -> list[Block]:
    """Return the last lines of what the first ranks wrote, of a run that did not end well."""
    files = sorted((run.run.path / "logs").glob("rank-*.log"))[:_LOGS]
    found = [(file.name, tail) for file in files if (tail := _last_lines(file))]
    return [Folded(f"Last lines of {name}", [Code(name, tail)]) for name, tail in found]


def _last_lines(file: Path) -> str:
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - 20_000))
            text = source.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LOG_LINES:])


def _checkpoints(run: RunHistory) -> list[Block]:
    saves = [one for one in run.records if isinstance(one, kinds.Saved)]
    if not saves:
        return []
    rows = [
        (
            str(one.step),
            show_bytes(one.bytes),
            show_seconds(one.copy_s),
            show_seconds(one.write_s),
            one.error or "saved",
        )
        for one in saves[-_ROWS:]
    ]
    head = ("step", "bytes", "the step waited", "writing took", "result")
    return [Table("Checkpoints", head, rows, figures_from=0), *_left_out(len(saves) - _ROWS, "earlier ones")]


def _samples(run: RunHistory) -> list[Block]:
    found = [one for one in run.records if isinstance(one, kinds.Sample)][-_SAMPLES:]
    return [Code(f"Sample after step {one.step}", one.prompt + one.text) for one in found]


def _configuration(run: RunHistory) -> list[Block]:
    if not run.configuration:
        return []
    try:
        text = run.run.config_file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        text = yaml.safe_dump(dict(run.configuration))
    given = [
        (key, written(run.configuration[key]), where)
        for key, where in run.provenance.items()
        if where != "default" and key in run.configuration
    ]
    blocks: list[Block] = []
    if given:
        blocks.append(Table("Values that were set", ("key", "value", "set in"), given))
    return [*blocks, Folded("run.yaml, every key", [Code("run.yaml", text)])]
