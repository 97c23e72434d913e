"""The worker process of a run: `python -m gossamer.job.worker RUN_DIR`, one per rank.

Gossamer's supervisor, torchrun, srun or mpirun starts it. It reads all it needs from the run directory and from the
launcher's environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gossamer.comm.channel.store import join_store
from gossamer.comm.patience import PatientStore
from gossamer.data import Corpus
from gossamer.job.data_files import check_data_files, keep_data_files
from gossamer.job.rank_inputs import JobCallbacks, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.job.run_files import keep
from gossamer.job.trainer_parts import parts_of
from gossamer.job.training_data import TrainingData, training_data
from gossamer.launch.environment import LauncherRank
from gossamer.launch.port import owner
from gossamer.launch.worker import Ready, run_worker
from gossamer.model.input_checks import check_sequence, check_vocabulary
from gossamer.model.origin import origin_of
from gossamer.model.source import ModelSource
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.plan_file import read_plan
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.process import DONE, INTERRUPTED
from gossamer.recipe import PlanMethods, Recipe
from gossamer.run.process_settings import set_memory, set_threads
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.spec.records import Record
from gossamer.view.run_directory import RunDirectory

Show = Callable[[Record], None]
_LATER_S = 30.0  # a waiting rank times out this much later than its supervisor, which knows which rank hangs
_CODES = {"done": DONE, "interrupted": INTERRUPTED}


def main() -> int:
    """Run the worker of the run directory in the first argument; return the exit code of `run_worker`."""
    directory = RunDirectory(Path(sys.argv[1]).absolute())
    if folder := os.environ.get("GOSSAMER_FOLDER"):  # of a run that is resumed from another one
        os.chdir(folder)
    resume = os.environ.get("GOSSAMER_RESUME") == "1"
    return run_worker(lambda ready: run_rank(ready, directory, directory.config(), resume=resume))


def run_rank(
    ready: Ready,
    directory: RunDirectory,
    config: RunConfig,
    *,
    resume: bool,
    show: Show | None = None,
    store: dist.Store | None = None,
    is_last: bool = True,
) -> None:
    """Build the model and the data of the configuration and train, as one rank.

    store: of this run alone, where the ranks are connected already; None: they meet. is_last: whether this process ends
    with the run.
    """
    place = ready.place
    ready.heartbeat.at(phase="build")
    set_memory(PlanMethods.asked(config.plan).sharding)
    set_threads(config, place.local_ranks)
    is_resumed = resume or place.start.resume_step >= 0
    data = _data(directory, config, is_resumed=is_resumed)
    origin = origin_for(config, data.corpus)
    device = device_of(place)
    given = read_plan(directory.plan_file, ranks=place.ranks) if directory.plan_file.exists() else None
    asked = PartitionRequest(
        config=config,
        ranks=place.ranks,
        rank=place.rank,
        batches=data.train,
        objective=Recipe.loss_of(config),
        device=device,
        local_ranks=place.local_ranks,
    )
    model = planned(OriginSource(origin, config.train.seed), asked, given)
    base = origin.base_digest(config.train.seed)
    parts = parts_of(asked, model.outline, validation=data.validation, words=data.tokenizer, base=base)
    ready.heartbeat.at(phase="connect")
    timeout_s = time_limit_s(place, config)
    run_job(
        RankJob(
            parts=parts,
            planned=model,
            where=_context(place, joined(place, timeout_s) if store is None else store, timeout_s),
            directory=directory,
            described=origin.describe(),
            data=data.description,
            resume=is_resumed,
            resume_step=place.start.resume_step,
            checkpoint=int(os.environ.get("GOSSAMER_CHECKPOINT") or -1) if place.start.generation == 0 else -1,
            at=lambda step, phase: ready.heartbeat.at(step=step, phase=phase),
            asked_to_stop=lambda: ready.stop.is_set,
            callbacks=JobCallbacks(
                keep=lambda: _keep(directory, data, origin),
                moves=ready.heartbeat.at,
                sealed=(lambda outcome: ready.heartbeat.leave(_CODES[outcome], for_all=place.rank == 0))
                if is_last
                else None,
                observe=lambda op, sequence: ready.heartbeat.at(op=op, sequence=sequence),
                show=show if place.rank == 0 else None,
            ),
        )
    )


def _data(directory: RunDirectory, config: RunConfig, *, is_resumed: bool) -> TrainingData:
    """Return the data of a run. Raises BadInput for a resumed run whose files of text are others now."""
    data = training_data(config)
    if is_resumed and data.corpus is not None:
        check_data_files(directory.data_file, data.corpus)
    return data


def _keep(directory: RunDirectory, data: TrainingData, origin: ModelSource) -> None:
    keep(directory, data.tokenizer, origin)
    if data.corpus is not None:
        keep_data_files(directory.data_file, data.corpus)


def origin_for(config: RunConfig, corpus: Corpus | None) -> ModelSource:
    """Return the configured model source, fitted to the corpus (None: the data is no text).

    Raises BadInput if the two do not match.
    """
    if corpus is None:
        return origin_of(config.model)
    words = corpus.tokenizer
    origin = origin_of(config.model).fitted_to_tokenizer(words.vocabulary, words.separator)
    check_vocabulary(origin.vocabulary(), words.vocabulary, tokenizer=str(config.data.tokenizer))
    check_sequence(origin.positions(), config.data.sequence)
    return origin


def device_of(place: LauncherRank) -> torch.device:
    """Return the device of this process: one GPU per process if there are any, else the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time_limit_s(place: LauncherRank, config: RunConfig) -> float:
    """Return how long a message of a run may take."""
    return config.machines.timeout_s + (_LATER_S if place.supervisor.heartbeat else 0.0)


def joined(place: LauncherRank, timeout_s: float) -> dist.Store:
    """Connect to the TCPStore of rank 0. Raises PeerLost, BadInput."""
    try:
        return join_store(
            place.master.host,
            place.master.port,
            place.ranks,
            is_keeper=place.rank == 0 and not place.master.has_store,
            timeout_s=timeout_s,
            listener=place.master.listener,
        )
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0].rstrip(".")
        if "address already in use" in said:  # never of our own supervisor's: that listens before it starts anybody
            raise BadInput(
                f"rank 0 cannot listen on port {place.master.port}, which is in use{owner(place.master.port)}: "
                "end that process, or set MASTER_PORT to another port on all ranks"
            ) from None
        raise PeerLost(
            f"rank {place.rank} cannot connect to rank 0 at {place.master.host}:{place.master.port}: {said}. "
            "Check that rank 0 has started, and that this host can reach that address"
        ) from None


def rendezvous(place: LauncherRank, timeout_s: float) -> RankContext:
    """Connect to the TCPStore of rank 0 and return this rank's context. Raises PeerLost, BadInput."""
    return _context(place, joined(place, timeout_s), timeout_s)


def _context(place: LauncherRank, store: dist.Store, timeout_s: float) -> RankContext:
    host, hosts = _host_of(place, store, timeout_s)
    first = place.local_rank if place.own_directory else place.rank
    writers = place.local_ranks if place.own_directory else place.ranks
    return RankContext(
        rank=place.rank,
        ranks=place.ranks,
        hosts=hosts,
        host=host,
        writer=first,
        writers=writers,
        store=store,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        generation=place.start.generation,
        timeout_s=timeout_s,
        is_supervised=bool(place.supervisor.heartbeat),
    )


def _host_of(place: LauncherRank, store: dist.Store, timeout_s: float) -> tuple[int, int]:
    """Return the number of this rank's host, and the number of hosts.

    mpirun tells neither, and may put unequal numbers of ranks on hosts, or one after the other: ranks tell each other
    the names of their hosts. Raises PeerLost.
    """
    if place.launcher != "mpirun" or place.local_ranks == place.ranks:
        return place.host, place.hosts
    keys, everyone = PatientStore(store, timeout_s).under("hostname"), [str(rank) for rank in range(place.ranks)]
    try:
        keys.set(str(place.rank), place.hostname)
        keys.wait(everyone)
        names = list(dict.fromkeys(keys.get(one) for one in everyone))
    except RuntimeError as error:
        raise PeerLost(f"rank {place.rank} waits for the host names of all {place.ranks} ranks: {error}") from error
    if len(names) == 1:  # of containers that all have one name
        return place.host, place.hosts
    return names.index(place.hostname.encode()), len(names)


if __name__ == "__main__":
    sys.exit(main())
