"""The memory that torch's allocator gives while a profiler watches."""

from __future__ import annotations

from torch.profiler import profile


def allocator_peak(seen: profile) -> int:
    """Return the largest sum of the bytes that the allocator has given and taken."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    records = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for one in sorted(records, key=lambda record: record.start_ns()):
        held += one.nbytes()
        most = max(most, held)
    return most
