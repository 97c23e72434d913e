"""Text forms of figures and records for displays, and their colors."""

from __future__ import annotations

from gossamer.spec.records import Best, Evaluation, Event, Sample, Saved, Start
from gossamer.spec.units import show_bytes
from gossamer.spec.validation_sets import HELD_OUT

# Of the 256 terminal colors, those of middle lightness: readable on a white and on a black ground alike.
ACCENT = "color(31)"  # blue-green
SECOND = "color(98)"  # purple
GOOD = "color(64)"
WARN = "color(166)"
BAD = "color(160)"
LEVELS = {"info": ACCENT, "warning": WARN, "error": BAD}


def show_count(count: float) -> str:
    """Return a count as text: 12345 -> "12.3k"; below 1000 without a suffix."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 999.5:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def show_share(share: float) -> str:
    """Return a fraction in percent: 0.0312 -> "3.1%"; above a tenth without decimals."""
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def model_words(start: Start) -> str:
    """Return the model of a run and its number of parameters as text."""
    trained = f", {show_count(start.trained)} of them trained" if 0 < start.trained < start.parameters else ""
    return f"{start.model}, {show_count(start.parameters)} parameters{trained}"


def setting_words(start: Start) -> str:
    """Return the data, ranks and exchange of a run as text."""
    ranks = f"{start.ranks} rank" + ("s" if start.ranks != 1 else "")
    return f"{start.data} on {ranks}, {start.exchange} exchange"


def format_evaluation(evaluation: Evaluation) -> str:
    """Return the result of an evaluation as text: the loss, in the unit of steps' losses, bits per byte, metrics."""
    bits = evaluation.bits_per_byte
    first = [f"loss {evaluation.loss:.4f}", *([] if bits is None else [f"{bits:.3f} bits/byte"])]
    return ", ".join([*first, *(f"{name} {value:.4g}" for name, value in evaluation.metrics.items())])


def loss_and_bits(evaluation: Evaluation) -> tuple[str, str]:
    """Return the loss of an evaluation, as steps tell theirs, and what there is besides: bits per byte, or its step."""
    bits = evaluation.bits_per_byte
    beside = [f"at {evaluation.step:,}" if bits is None else f"{bits:.3f} bits/byte"]
    return f"{evaluation.loss:.4f}", ", ".join(
        [*beside, *(f"{name} {value:.4g}" for name, value in evaluation.metrics.items())]
    )


def set_name(evaluation: Evaluation) -> str:
    """Return the name of a validation set after a space; "" for the one that a fraction of the text makes."""
    return "" if evaluation.name == HELD_OUT else f" {evaluation.name}"


def best_words(best: Best) -> str:
    """Return the best evaluation so far as text."""
    return f"best {best.name} {best.figure} so far: {best.value:.4f} at step {best.step}, whose checkpoint is kept"


def saved_words(saved: Saved) -> str:
    """Return the step and size of a checkpoint as text, or the error of one that was not saved."""
    if saved.error:
        return f"not saved at step {saved.step}: {saved.error}"
    return f"step {saved.step}, {show_bytes(saved.bytes)}"


def format_event(event: Event) -> str:
    """Return the message of an event, after its step and rank where it has them."""
    where = [f"step {event.step}"] * (event.step >= 0) + [f"rank {event.rank}"] * (event.rank >= 0)
    return f"{', '.join(where)}: {event.message}" if where else event.message


def format_sample(sample: Sample, width: int) -> str:
    """Return a generated sample on one line of at most `width` characters; line ends are shown as a slash."""
    text = " / ".join((sample.prompt + sample.text).split("\n"))
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable if len(printable) <= width else printable[: width - 3] + "..."
