"""One attempt to save the checkpoint of one step: the work of each rank in the `.partial` folder, up to the commit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.errors import CheckpointMismatch, RunFailed
from gossamer.spec.units import show_bytes
from gossamer.store.checkpoint.commit import (
    commit,
    discard,
    partial_folder,
    prune,
    step_folder,
    sweep,
    synced,
    wait_until,
)
from gossamer.store.checkpoint.manifest import (
    MANIFEST,
    RankManifest,
    decode_part,
    encode_manifest,
    encode_part,
    merge,
    read_manifest,
    seal,
    unseal,
)
from gossamer.store.checkpoint.shard import ShardReader, write_shard
from gossamer.store.slices import NamedSlice

_SETTLE_S = 2.0  # a shared file system may show the end of the old name before the new one


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """The ranks that save a checkpoint together: rank `rank` of `ranks`, all of one run (`token`), led by rank 0."""

    directory: Path
    rank: int
    ranks: int
    keep: int
    token: str
    deadline_s: float
    abort: Callable[[], bool]

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class SaveAttempt:
    """One attempt of the ranks in `crew` to save the checkpoint of `step`; those of the `pinned` steps stay."""

    crew: SaveGroup
    step: int
    pinned: frozenset[int] = frozenset()

    def run(self, pieces: Sequence[NamedSlice], meta: Mapping[str, Any]) -> None:
        """Write this rank's shard, read it back, publish its manifest, and wait for the commit; raises the error of a
        failure.

        A failed attempt leaves nothing on disk, with one exception. A follower never removes what it has published, as
        the leader may be committing it at that moment; the next sweep removes it with the folder.
        """
        if self.crew.is_leader:
            self._lead(pieces, meta)
        else:
            self._follow(pieces, meta)

    def refuse(self, reason: str) -> None:
        """Announce to the other ranks that this rank does not save. Best effort: else they wait until the deadline."""
        try:
            self._partial.mkdir(exist_ok=True)
            note = self._own("writing")
            with suppress(OSError):  # on a full disk the bare fact must do
                note.write_text(reason)
            note.rename(self._own("failed"))
        except OSError:
            return

    def explain(self, error: BaseException, pieces: Sequence[NamedSlice]) -> str:
        """Return the message for the user about a checkpoint that was not saved because of `error`."""
        return f"the checkpoint of step {self.step} was not saved: {self._say(error, pieces)}"

    @property
    def _partial(self) -> Path:
        return partial_folder(self.crew.directory, self.step, self.crew.token)

    @property
    def _target(self) -> Path:
        return step_folder(self.crew.directory, self.step)

    def _rank_file(self, rank: int, suffix: str) -> Path:
        return self._partial / f"rank-{rank:05d}.{suffix}"

    def _own(self, suffix: str) -> Path:
        return self._rank_file(self.crew.rank, suffix)

    def _write(self, pieces: Sequence[NamedSlice], meta: Mapping[str, Any]) -> RankManifest:
        self._partial.mkdir(exist_ok=True)
        self._forget_earlier()
        info = {"format": "pt", "step": str(self.step), "rank": str(self.crew.rank)}
        shard = write_shard(self._own("safetensors"), pieces, info)
        ShardReader(self._partial, shard).check_all()  # every rank reads back its own: in parallel, from the disk
        part = RankManifest(self.step, self.crew.rank, self.crew.ranks, shard, meta)
        self._publish(seal(encode_part(part)), self._own("json"))
        return part

    def _forget_earlier(self) -> None:
        """Remove this rank's files of an attempt of this start that failed; the leader has swept those of others."""
        for suffix in ("json", "writing", "safetensors", "failed"):
            self._own(suffix).unlink(missing_ok=True)

    def _publish(self, data: bytes, path: Path) -> None:
        """Write `data` atomically and durably: the reader sees all of it or nothing."""
        written = path.with_suffix(".writing")
        with written.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with synced(path.parent):
            written.rename(path)

    def _lead(self, pieces: Sequence[NamedSlice], meta: Mapping[str, Any]) -> None:
        crew = self.crew
        try:
            self._write(pieces, meta)
            wait_until(self._all_there, deadline_s=crew.deadline_s, abort=crew.abort, what=self._missing)
            parts = [self._read_part(rank) for rank in range(crew.ranks)]
            manifest = merge(parts)
            _check_shards(self._partial, parts)
            self._publish(seal(encode_manifest(manifest)), self._partial / MANIFEST)
            for rank in range(crew.ranks):
                self._rank_file(rank, "json").unlink()
            commit(self._partial, self._target)
        except Exception as error:
            # ranks that share a full disk fail in any order: the small one may be first, for want of what another took
            told = self._told_by_others() if _is_full(error) else []
            explained = self._say(error, pieces)
            discard(self._partial)
            if told:
                raise RunFailed("; ".join([explained, *told])) from error
            raise
        _check_shards(self._target, parts)  # the older ones go only when this one stands
        prune(crew.directory, self.step, crew.keep, self.pinned)
        sweep(crew.directory, below=self.step)

    def _all_there(self) -> bool:
        names = self._names()
        failed = self._failed(names)
        if failed:
            raise RunFailed(failed[0])
        return all(self._rank_file(rank, "json").name in names for rank in range(self.crew.ranks))

    def _names(self) -> frozenset[str]:
        """Return the names in the partial folder: one listing, however many ranks there are."""
        return frozenset(path.name for path in self._partial.iterdir())

    def _failed(self, names: frozenset[str]) -> list[str]:
        """Return what each rank whose failure is among `names` says of it, in rank order."""
        notes = [(rank, self._rank_file(rank, "failed")) for rank in range(self.crew.ranks)]
        return [f"rank {rank}: {note.read_text()}" for rank, note in notes if note.name in names]

    def _told_by_others(self) -> list[str]:
        """Wait a moment until each other rank has written its shard or failed, and return what those that failed say.

        This rank's own files go first, so that only a rank that does not fit even then fails.
        """
        if not self._partial.is_dir():  # there was no room even for the folder
            return []
        with suppress(OSError):
            self._forget_earlier()
        with suppress(RunFailed):
            wait_until(self._others_ended, deadline_s=_SETTLE_S, abort=self.crew.abort, what=lambda: "the other ranks")
        return self._failed(self._names())

    def _others_ended(self) -> bool:
        names = self._names()
        others = (rank for rank in range(self.crew.ranks) if rank != self.crew.rank)
        return all(any(self._rank_file(rank, end).name in names for end in ("json", "failed")) for rank in others)

    def _missing(self) -> str:
        late = [rank for rank in range(self.crew.ranks) if not self._rank_file(rank, "json").exists()]
        return f"the shards of rank(s) {', '.join(map(str, late))} of {self.crew.ranks}"

    def _read_part(self, rank: int) -> RankManifest:
        path = self._rank_file(rank, "json")
        part = decode_part(unseal(path), path)
        if (part.step, part.rank, part.ranks) != (self.step, rank, self.crew.ranks):
            raise CheckpointMismatch(
                f"{path}: wanted step {self.step}, rank {rank} of {self.crew.ranks}, "
                f"got step {part.step}, rank {part.rank} of {part.ranks}"
            )
        return part

    def _follow(self, pieces: Sequence[NamedSlice], meta: Mapping[str, Any]) -> None:
        """Wait for the leader's result: the partial folder disappears, and the final one has this shard or not."""
        crew = self.crew
        try:
            part = self._write(pieces, meta)
        except Exception as error:
            with suppress(OSError):
                self._forget_earlier()
            if self._partial.is_dir():
                self.refuse(self._say(error, pieces))  # the leader need not wait
            raise
        wait_until(self._is_over, deadline_s=crew.deadline_s, abort=crew.abort, what=lambda: "rank 0 to commit")
        wait_until(
            lambda: self._is_committed(part),
            deadline_s=_SETTLE_S,
            abort=crew.abort,
            what=lambda: "the committed checkpoint to appear: rank 0 did not save it, see the log of rank 0",
        )

    def _is_over(self) -> bool:
        if self._leader_refused():
            raise RunFailed("rank 0 did not save this step, see the log of rank 0")
        return not self._partial.exists()

    def _leader_refused(self) -> bool:
        return self._rank_file(0, "failed").exists()

    def _is_committed(self, part: RankManifest) -> bool:
        try:
            return part.shard in (each.shard for each in read_manifest(self._target, self.step).parts)
        except CheckpointMismatch:
            return False

    def _say(self, error: BaseException, pieces: Sequence[NamedSlice]) -> str:
        if isinstance(error, FileNotFoundError) and not self.crew.is_leader:
            return "rank 0 did not save this step, see the log of rank 0"
        if _is_full(error):
            needed = sum(tensor.nbytes for _, tensor in pieces)
            return (
                f"the disk is full: rank {self.crew.rank} needs {show_bytes(needed)} under {self.crew.directory}, "
                f"{show_bytes(_free_bytes(self.crew.directory))} are free. "
                f"Checkpoints already there stay: free space, or keep fewer than {self.crew.keep}"
            )
        return str(error)


def _check_shards(folder: Path, parts: Sequence[RankManifest]) -> None:
    """Check lengths and headers as the leader sees them; each rank has read back the data that it wrote."""
    for part in parts:
        ShardReader(folder, part.shard)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
