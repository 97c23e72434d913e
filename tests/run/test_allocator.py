"""Freed memory is kept or given back: asked for in a process of its own, as the setting is for good."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from gossamer import sharding
from gossamer.run.process_settings import set_memory
set_memory(sharding.build("{states}"))
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        [torch.empty(10 << 20).fill_(1.0) for _ in range(2)]  # larger than glibc ever keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def held_mib():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) >> 10
before = held_mib()
faults(40)  # until the heap has grown to what is wanted
found = faults(20)
some = [torch.empty(3 << 19).fill_(1.0) for _ in range(40)]  # of 6 MiB
del some[:39]  # the last one lies above them
print(found, held_mib() - before)
"""


def measured(states: str) -> tuple[int, int]:
    """Page faults, and MiB more than before: of 80 and then 240, all but 6 were freed."""
    argv = [sys.executable, "-c", PROGRAM.format(states=states)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    return int(said[0]), int(said[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.nightly
def test_memory_is_kept_or_given_back() -> None:
    """40 times 40 MiB: ten thousand small pages each, if they are not kept."""
    faults, held_mib = measured("none")
    assert faults < 200 and held_mib > 70
    faults, held_mib = measured("zero1")
    assert held_mib < 40
