"""Freed memory stays with the process, where the C library can be told so.

glibc gives large blocks back to the system as they are freed, and every new tensor of some megabytes is then paid for
in page faults: an exchange that encodes a bucket of 7 MB took 15 ms on one core, and 6 ms with memory kept.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h> of glibc
_KEPT_BYTES, _PAD_BYTES = (1 << 31) - 1, 64 << 20


def keep_freed_memory() -> bool:
    """Tell the C library; False where it is another one, which is left as it is. For this process, from now on."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        tell, _ = libc.mallopt, libc.gnu_get_libc_version  # musl has no such settings
    except (OSError, AttributeError):
        return False
    tell.argtypes, tell.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    told = [tell(_M_MMAP_THRESHOLD, 1 << 30), tell(_M_TRIM_THRESHOLD, _KEPT_BYTES), tell(_M_TOP_PAD, _PAD_BYTES)]
    return all(told)
