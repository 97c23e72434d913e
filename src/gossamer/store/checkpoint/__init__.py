"""Checkpoints: directories of safetensors shards and one sealed manifest, committed by a rename.

    checkpoints/
        step-00000100/              committed: complete, read back, durable
            manifest.json           format, global shapes, dtypes, slices, byte ranges, checksums, meta; sealed
            rank-00000.safetensors  the tensors of rank 0
        step-00000150.partial/      in progress, or of a run that died: never read, removed at the next start

Ranks coordinate through the directory alone: each writes its shard, reads it back, and publishes its part of the
manifest. The leader (rank 0) waits for all parts, merges them, renames the folder, and only then removes what is older
than `keep`.
At any instant the newest committed checkpoint is complete. No network, no pickle.
"""

from gossamer.store.checkpoint.commit import latest_step, list_checkpoints, set_aside
from gossamer.store.checkpoint.read import Checkpoint, latest_good, open_checkpoint
from gossamer.store.checkpoint.source import CheckpointSource
from gossamer.store.checkpoint.write import CheckpointWriter, SaveResult, SaveStatus

__all__ = [
    "Checkpoint",
    "CheckpointSource",
    "CheckpointWriter",
    "SaveResult",
    "SaveStatus",
    "latest_good",
    "latest_step",
    "list_checkpoints",
    "open_checkpoint",
    "set_aside",
]
