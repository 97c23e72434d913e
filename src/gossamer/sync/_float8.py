"""One byte for a number: a sign, five bits of exponent, two of mantissa.

Values: (1 + m/4) 2^(e - 16) for e = 1 to 31, and m/4 2^-15 for e = 0: from 2^-17 to 57344, neighbours at most a quarter
apart. Rounded up or down at random, so that the mean of what is decoded is the number; what is larger saturates.
All values are exact in float32: every rank decodes the same. Minus zero stands for what is not finite.
"""

from __future__ import annotations

import math
from bisect import bisect_right

_VALUES = tuple(m / 4 * 2.0**-15 if e == 0 else (1 + m / 4) * 2.0 ** (e - 16) for e in range(32) for m in range(4))
_SIGN = NOT_FINITE = 0x80


def encode(value: float, draw: float) -> int:
    """`draw`: a random number from 0 on, below 1."""
    if not math.isfinite(value):
        return NOT_FINITE
    size = abs(value)
    code = bisect_right(_VALUES, size) - 1
    if code < len(_VALUES) - 1:
        code += draw < (size - _VALUES[code]) / (_VALUES[code + 1] - _VALUES[code])
    return code | _SIGN if value < 0 and code else code


def decode(code: int) -> float:
    """nan for what was not finite."""
    if code == NOT_FINITE:
        return math.nan
    size = _VALUES[code & ~_SIGN]
    return -size if code & _SIGN else size
