"""Places read from the variables of every launcher, and what is said when one is missing."""

from __future__ import annotations

import pytest

from gossamer.launch import launcher_of, read_environment
from gossamer.launch.environment import expand_counts, expand_hosts
from gossamer.spec.errors import BadInput

OURS = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29401",
    "GOSSAMER_NODE_RANK": "1",
    "GOSSAMER_NNODES": "2",
    "GOSSAMER_GENERATION": "5",
    "GOSSAMER_HEARTBEAT": "127.0.0.1:4000",
    "GOSSAMER_TOKEN": "t",
    "GOSSAMER_HEARTBEAT_S": "2.5",
    "GOSSAMER_BOX": "7",
    "GOSSAMER_ERRORS": "/run/errors",
    "GOSSAMER_RESUME_STEP": "40",
    "GOSSAMER_SHARED": "0",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gpu[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prte-host-99@1",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


def test_ours() -> None:
    place = read_environment(OURS)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (3, 4, 1, 2)
    assert (place.host, place.hosts, place.master.host, place.master.port) == (1, 2, "10.0.0.1", 29401)
    above, start = place.supervisor, place.start
    assert (start.generation, above.heartbeat, above.token, above.heartbeat_s) == (5, "127.0.0.1:4000", "t", 2.5)
    assert (above.box, above.errors, start.resume_step, start.shared) == (7, "/run/errors", 40, False)


def test_torchrun() -> None:
    place = read_environment(TORCHRUN)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (5, 8, 1, 4)
    assert (place.host, place.hosts, place.master.host, place.master.port) == (1, 2, "node1", 29500)
    assert (place.launcher, place.supervisor.heartbeat) == ("torchrun", "")


def test_srun_meets_at_the_first_host_and_a_port_of_the_job() -> None:
    place = read_environment(SRUN)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (4, 5, 0, 1)
    assert (place.host, place.hosts, place.master.host) == (2, 3, "gpu08")
    assert place.launcher == "srun"
    other_rank = read_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert other_rank.master.port == place.master.port
    assert other_rank.local_ranks == 2
    assert read_environment({**SRUN, "SLURM_JOB_ID": "78"}).master.port != place.master.port


def test_srun_with_its_fewest_variables() -> None:
    few = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODELIST": "a,b"}
    place = read_environment({**few, "MASTER_PORT": "29500"})
    assert (place.host, place.hosts, place.local_ranks, place.master.host) == (1, 2, 2, "a")
    with pytest.raises(BadInput, match="MASTER_PORT"):
        read_environment(few)


def test_mpirun_of_openmpi() -> None:
    place = read_environment(OPENMPI)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (1, 2, 1, 2)
    assert (place.master.host, place.launcher) == ("127.0.0.1", "mpirun")
    assert (
        read_environment({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master.port
        == place.master.port
    )


def test_mpirun_over_hosts_needs_an_address() -> None:
    place = read_environment(HYDRA)
    assert (place.rank, place.host, place.hosts, place.master.host, place.master.port) == (3, 1, 2, "n1", 29500)
    with pytest.raises(BadInput, match="MASTER_ADDR is not set"):
        read_environment({name: value for name, value in HYDRA.items() if name != "MASTER_ADDR"})


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        (SRUN, "SLURM_LOCALID"),
        (SRUN, "SLURM_NTASKS"),
        (SRUN, "SLURM_NODELIST"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_a_missing_variable_is_named(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(BadInput, match=missing):
        read_environment({name: value for name, value in environ.items() if name != missing})


def test_numbers_that_are_none_or_impossible() -> None:
    with pytest.raises(BadInput, match="RANK: wanted a whole number, got 'first'"):
        read_environment({**TORCHRUN, "RANK": "first"})
    with pytest.raises(BadInput, match="0 <= rank < 8, got 8"):
        read_environment({**TORCHRUN, "RANK": "8"})
    with pytest.raises(BadInput, match="GOSSAMER_NODE_RANK: wanted a whole number, got '1/2'"):
        read_environment({**OURS, "GOSSAMER_NODE_RANK": "1/2"})
    with pytest.raises(BadInput, match="GOSSAMER_HEARTBEAT_S"):
        read_environment({**OURS, "GOSSAMER_HEARTBEAT_S": "soon"})


def test_no_launcher() -> None:
    assert launcher_of({"PATH": "/bin"}) == ""
    with pytest.raises(BadInput, match="torchrun, srun or mpirun"):
        read_environment({})


def test_a_batch_script_is_not_a_task_of_srun() -> None:
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert launcher_of(batch) == ""
    assert launcher_of(SRUN) == "srun"


def test_ours_win_inside_another_launcher() -> None:
    assert read_environment({**SRUN, **OURS}).launcher == "gossamer"


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("a", ["a"]),
        ("a,b.c", ["a", "b.c"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("r[1-2]n[08-09]x", ["r1n08x", "r1n09x", "r2n08x", "r2n09x"]),
    ],
)
def test_host_lists(written: str, hosts: list[str]) -> None:
    assert expand_hosts(written) == hosts


def test_a_host_list_nobody_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match=r"SLURM_NODELIST: cannot read the host list 'gpu\[a"):
        expand_hosts("gpu[a-b]")


def test_tasks_per_node() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
