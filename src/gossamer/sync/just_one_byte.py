"""JustOneByte: two losses per direction in place of a backward pass, and one byte per direction on the wire.

Paper: Zelikman, Huang, Liang, Haber, Goodman, Just One Byte (per gradient), arXiv 2306.10015. After: Malladi et al.,
Fine-Tuning Language Models with Just Forward Passes (MeZO), arXiv 2305.17333; Spall (SPSA), IEEE TAC 1992.
Equations, for rank r of n with its share w_r of the step's labels, and its direction s of g:
    z     = random signs, by counting from (seed, step, g r + s, name of the parameter)
    rho   = (L_r(x + epsilon z) - L_r(x - epsilon z)) / (2 epsilon)
    x    <- x - a sum_r w_r / g sum_s decode(byte(rho_rs)) z_rs
Symbols: x parameters; L_r mean loss of the rank's rows; a rate of `sgd` times the schedule's factor.
Byte:    sign, five bits of exponent, two of mantissa, rounded at random: unbiased, no scale to agree on; saturates.
Wire:    one gather of g bytes per rank; beside it the weights (8 bytes) and votes (40) that every step has.
State:   none. While a step's forwards run, a copy of what is trained (none of half types: their float32 copies are
         there), from which it is put back bit for bit. No gradients, no buckets, no graph.
Work:    2 g forwards; n g directions are made again by every rank, some 3 ns per parameter and direction.
Log:     the bytes of all steps lie beside the checkpoints: whoever has an older one takes the steps again, bit for bit.
Good when: a trained model is tuned over a line of some kbit/s.   Not for: training from scratch. The estimate has d
times the gradient's squared length over n g directions (d numbers trained), so the rate must be as much smaller.
Unlike the paper: signs in place of normal numbers (of Spall's kind: a little less variance, exact on all devices); one
byte in fact, where its code sends JSON. `train.max_grad_norm` bounds every |rho|, whose mean square is the gradient's.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.sync import OuterLoopConfig, Sync, ZerothOrderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JustOneByte(Sync):
    """A zeroth-order method: `directions` random directions per rank and step, the loss at +-`epsilon` along each."""

    directions: int = 1
    epsilon: float = 1e-3

    @property
    def loop(self) -> OuterLoopConfig | None:
        return None

    @property
    def probe(self) -> ZerothOrderConfig:
        return ZerothOrderConfig(directions=self.directions, epsilon=self.epsilon)
