"""Freed memory is kept or given back: asked for in a process of its own, as the setting is for good."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from gossamer.run import allocator
told = allocator.{told}()
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
print(told, found, held_mib() - before)
"""


def measured(told: str) -> tuple[bool, int, int]:
    """What the C library said, page faults, and MiB more than before: of 80 and then 240, all but 6 were freed."""
    argv = [sys.executable, "-c", PROGRAM.format(told=told)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    return said[0] == "True", int(said[1]), int(said[2])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_or_given_back() -> None:
    """40 times 40 MiB: ten thousand small pages each, if they are not kept."""
    told, faults, held_mib = measured("keep_freed_memory")
    assert told and faults < 200 and held_mib > 70
    told, _, held_mib = measured("give_freed_memory_back")
    assert told and held_mib < 20
