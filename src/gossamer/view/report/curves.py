"""The curves of a report: loss, evaluations, learning rate and gradient norm, seconds, bytes and memory over steps."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.spec.records import Step
from gossamer.spec.units import show_bytes, show_gib, show_seconds
from gossamer.view.format import show_count, show_share
from gossamer.view.report.blocks import Block, Facts, Folded, Paragraph
from gossamer.view.report.chart import Chart, Curve
from gossamer.view.report.thinning import Points
from gossamer.view.run_history import RunHistory

_LINKS = 6  # drawn, at most: those that carry most


def loss(run: RunHistory) -> list[Block]:
    """Return the losses of training and validation, the bits per byte, and the learning rate behind them."""
    unit = (run.start.loss_unit if run.start else "") or "as the model's own loss gives it"
    training = _over_steps(run, "training", lambda step: step.loss, is_noisy=True)
    steps = [one.step for one in run.evaluations]
    validation = Curve.of("validation", Points.of(steps, [one.loss for one in run.evaluations]))
    dropped = len(run.steps) - len(training.points)
    remark = f"Losses that are not finite, and not drawn: {dropped}." if dropped else ""
    found: list[Block] = _chart("Loss", unit, [training, validation], _four, remark=remark)
    known = [one for one in run.evaluations if one.bits_per_byte is not None]
    bits = Curve.of("validation", Points.of([one.step for one in known], [one.bits_per_byte or 0.0 for one in known]))
    found += _chart("Validation", "bits per byte", [bits], _four) if len(known) > 1 else []
    more = _chart("Learning rate", "", [_over_steps(run, "learning rate", lambda step: step.lr)], _three)
    more += _chart(
        "Gradient norm", "", [_over_steps(run, "gradient norm", lambda s: s.grad_norm, is_noisy=True)], _three
    )
    return [*found, Folded("Learning rate and gradient norm", more)] if more else found


def speed(run: RunHistory) -> list[Block]:
    """Return the seconds of a step and their parts, and the tokens per second."""
    if not run.steps:
        return []
    told = run.summary
    shares = Facts(
        [
            ("Median throughput", f"{show_count(told['tokens_per_s'])} tokens/s" if told["tokens_per_s"] else ""),
            ("Of the measured matmul peak", show_share(told["of_peak"]) if told["of_peak"] is not None else ""),
            ("Exposed communication", _exposed(told["exposed_share"])),
            ("Steps, in all", show_seconds(sum(step.step_s for step in run.steps))),
        ]
    )
    curves = [
        _over_steps(run, "step", lambda step: step.step_s, is_noisy=True),
        _over_steps(run, "computing", lambda step: step.compute_s, is_noisy=True),
        _over_steps(run, "exposed communication", lambda step: step.exposed_s, is_noisy=True),
    ]
    return [shares, *_chart("Time of a step", "seconds", curves, show_seconds, from_zero=True)]


def _exposed(share: float | None) -> str:
    return f"{show_share(share)} of the time of steps" if share is not None else ""


def traffic(run: RunHistory) -> list[Block]:
    """Return the bytes that the first rank sent in each step, by link."""
    sent = run.summary["wire_bytes"]
    links = sorted(sent, key=lambda link: -sent[link])[:_LINKS]
    curves = [_over_steps(run, link, _sent_on(link), is_noisy=True) for link in links]
    found: list[Block] = _chart("Sent in a step", "bytes", curves, show_bytes, from_zero=True)
    left = len(sent) - len(links)
    return [*found, Paragraph(f"{left} more links are in the table alone.", "note")] if left > 0 else found


def _sent_on(link: str) -> Callable[[Step], float]:
    return lambda step: step.wire_bytes.get(link, 0)


def memory(run: RunHistory) -> list[Block]:
    """Return the peak of the first rank's resident memory."""
    curve = _over_steps(run, "peak so far", lambda step: step.peak_bytes or float("nan"))
    return _chart("Resident memory of rank 0", "peak so far", [curve], show_gib, from_zero=True)


def _over_steps(run: RunHistory, name: str, of: Callable[[Step], float], *, is_noisy: bool = False) -> Curve:
    points = Points.of([step.step for step in run.steps], [of(step) for step in run.steps])
    return Curve.of(name, points, is_noisy=is_noisy)


def _chart(
    title: str,
    unit: str,
    curves: list[Curve],
    show: Callable[[float], str],
    *,
    remark: str = "",
    from_zero: bool = False,
) -> list[Block]:
    """Return a chart of the curves that have points; no chart where none has."""
    drawn = [curve for curve in curves if len(curve.points)]
    if not drawn:
        return [Paragraph(remark, "note")] if remark else []
    return [Chart(title, unit, drawn, show, remark, from_zero)]


def _four(value: float) -> str:
    return f"{value:.4g}"


def _three(value: float) -> str:
    return f"{value:.3g}"
