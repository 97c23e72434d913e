"""MarginMse: a retriever learns how much better one passage answers a query than another, from a teacher's scores.

Equation: L = mean_i ((s(q_i, p_i) - s(q_i, n_i)) - c (t(q_i, p_i) - t(q_i, n_i)))^2
          + w mean_ij ((s(q_i, p_i) - s(q_i, d_j)) - c (t(q_i, p_i) - t(q_i, d_j)))^2
Symbols: q query, p and n a better and a worse passage for it; s, t scores of student and teacher, the dot product of
two embeddings (of unit ones with `similarity: cosine`); c `teacher_scale`; w `in_batch`; d_j all passages of the
micro-batch that belong to other queries than q_i. A constant added to all scores of a query, on either side, changes
nothing.
S. Hofstaetter et al., Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation, 2020,
https://arxiv.org/abs/2010.02666, equation 3; the second term: Efficiently Teaching an Effective Dense Retriever with
Balanced Topic Aware Sampling, SIGIR 2021, https://arxiv.org/abs/2104.06967. Unlike that paper: one teacher for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.loss import Loss
from gossamer.loss.inputs.labels import labels_of
from gossamer.loss.inputs.model_output import logits_of
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import not_negative, positive

TEACHER, QUERY = "loss.teacher_embedding", "loss.query"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginMse(Loss):
    """The loss of triples: rows 3 i, 3 i + 1 and 3 i + 2 of a batch are a query, a better and a worse passage.

    in_batch       weight of the margins to the passages of other queries; they are those of the micro-batch, so that
                   this term depends on the number of ranks and micro-batches
    teacher_scale  multiplies the teacher's margins: unit embeddings cannot reach margins beyond 2
    similarity     of the student: dot, or cosine

    The model returns an embedding (B, D) per row. A batch holds `loss.teacher_embedding` (B, E), whose dot products are
    the teacher's scores, and `loss.query` (B,) int64, the same number on all rows that belong to one query.
    """

    together: ClassVar[int] = 3

    in_batch: float = 0.0
    teacher_scale: float = 1.0
    similarity: Literal["dot", "cosine"] = "dot"

    def __post_init__(self) -> None:
        not_negative("in_batch", self.in_batch)
        positive("teacher_scale", self.teacher_scale)

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        made = logits_of(output, dims=2, shape="(batch, embedding)").float()
        seen = labels_of(batch, TEACHER).float()
        if len(made) % 3 or len(made) != len(seen):
            raise bad_input(
                wanted="an embedding for each row of triples: query, better and worse passage",
                got=f"{len(made)} embeddings for {len(seen)} rows",
                do="give 3 rows per triple, and set train.batch to a multiple of 3",
                key="train.batch",
            )
        student = F.normalize(made, dim=1) if self.similarity == "cosine" else made
        ours, theirs = margins(student), self.teacher_scale * margins(seen)
        loss = (ours - theirs).square().mean()
        if not self.in_batch:
            return loss
        counts = other_queries(labels_of(batch, QUERY))
        gaps = (in_batch_margins(student) - self.teacher_scale * in_batch_margins(seen)).square()
        return loss + self.in_batch * (gaps * counts).sum() / counts.sum().clamp(min=1)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        rows = labels_of(batch, TEACHER)
        return rows.new_tensor(rows.shape[0] // 3).long()


def margins(rows: Tensor) -> Tensor:
    """Return s(q, p) - s(q, n) of every triple, (B / 3,), of embeddings (B, D)."""
    q, p, n = rows[0::3], rows[1::3], rows[2::3]
    return (q * (p - n)).sum(1)


def in_batch_margins(rows: Tensor) -> Tensor:
    """Return s(q_i, p_i) - s(q_i, d_j), (B / 3, 2 B / 3): d are all better passages, then all worse ones."""
    q, p, n = rows[0::3], rows[1::3], rows[2::3]
    own = (q * p).sum(1, keepdim=True)
    return own - q @ torch.cat([p, n]).T


def other_queries(query: Tensor) -> Tensor:
    """Return which passages belong to another query than each triple's, (B / 3, 2 B / 3), as 0 or 1."""
    own = query[0::3]
    return (own[:, None] != own.repeat(2)[None, :]).float()
