"""An 8-bit float for one number: a sign, five bits of exponent, two of mantissa.

Values: (1 + m/4) 2^(e - 16) for e = 1 to 31, and m/4 2^-15 for e = 0: from 2^-17 to 57344, neighbors at most a quarter
apart. Stochastic rounding makes the expectation of the decoded number exact; larger numbers saturate. All values are
exact in float32, so every rank decodes the same. Minus zero stands for a non-finite number.
"""

from __future__ import annotations

import math
from bisect import bisect_right

_VALUES = tuple(m / 4 * 2.0**-15 if e == 0 else (1 + m / 4) * 2.0 ** (e - 16) for e in range(32) for m in range(4))
_SIGN = NOT_FINITE = 0x80


def encode(value: float, draw: float) -> int:
    """Return the code of a number, rounded up or down at random. `draw`: a uniform random number in [0, 1)."""
    if not math.isfinite(value):
        return NOT_FINITE
    size = abs(value)
    code = bisect_right(_VALUES, size) - 1
    if code < len(_VALUES) - 1:
        code += draw < (size - _VALUES[code]) / (_VALUES[code + 1] - _VALUES[code])
    return code | _SIGN if value < 0 and code else code


def decode(code: int) -> float:
    """Return the number of a code; nan for a non-finite one."""
    if code == NOT_FINITE:
        return math.nan
    size = _VALUES[code & ~_SIGN]
    return -size if code & _SIGN else size
