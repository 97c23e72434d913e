"""The components whose state the checkpoints of a run hold, each in a file of its own, and the list of them.

`assembly` has the list: a new component that keeps state is a `Stateful` class in one file, and a line there.

Names: "model/<parameter or buffer>", "optim/<slot>/<parameter>", "exchange/<path>@<parameter>" (one per rank),
"precision/<field>", "rng/torch" (one per rank). All tensors are keyed by canonical names, so a run with another number
of ranks or other split points reads the same file. Replicated tensors are written once: each rank of a host writes some
of them.

In local-update training, "model/<parameter>" holds the global parameters and "outer/..." the other state that all ranks
share; "island/..." and "optim/..." are one per rank. With sharded optimizer states each rank writes its rows of
"optim/...", with sharded parameters also its rows of "model/...". Where not all ranks see the same disk, each rank
writes its rows as "states/..." (one per rank). Where every island shards its own states, "optim/..." is one per island,
under the number of its first rank.
"""

from __future__ import annotations

from gossamer.run.checkpoint.assembly import contents_of
from gossamer.run.checkpoint.contents import CheckpointContents
from gossamer.run.checkpoint.exchange_state import owing_in
from gossamer.run.checkpoint.weights import named_state, read_model, read_part, trainable

__all__ = ["CheckpointContents", "contents_of", "named_state", "owing_in", "read_model", "read_part", "trainable"]
