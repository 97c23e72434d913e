"""Freed memory is kept: asked for in a process of its own, as the setting is for good."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from gossamer.run.allocator import keep_freed_memory
KEEP = {keep}
told = keep_freed_memory() if KEEP else False
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        [torch.empty(10 << 20).fill_(1.0) for _ in range(2)]  # larger than glibc ever keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(40)  # until the heap has grown to what is wanted
print(told, faults(20))
"""


def measured(keep: bool) -> tuple[bool, int]:
    program = PROGRAM.format(keep=keep)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return said[0] == "True", int(said[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_tensors_as_large_as_some_before_costs_no_page_faults() -> None:
    """Two tensors of 40 MiB at a time: thousands of faults without, hardly any with."""
    (_, without), (told, kept) = measured(False), measured(True)
    assert told and kept < 200 and kept < without / 10
