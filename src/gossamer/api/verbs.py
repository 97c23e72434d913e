"""The public verbs, which the command line and Python users call. Only this package imports all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gossamer.api.demo_run import demo_command as demo_command
from gossamer.api.phased_run import resume_command as resume_command
from gossamer.api.phased_run import train_command as train_command
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.spec.plan import Plan
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory, open_run
from gossamer.view.told_progress import ToldProgress

if TYPE_CHECKING:  # torch costs a second, and a supervisor does without
    from torch import nn

    from gossamer.job.trained_run import TrainedRun
    from gossamer.model.chat import Chat
    from gossamer.view.training_result import TrainingResult


def resume(
    run_dir: str | Path, overrides: Iterable[str] | Mapping[str, Any] = (), *, checkpoint: str | int = "latest"
) -> TrainingResult:
    """Resume a run from a checkpoint, in processes of its own; return its summary and records.

    overrides: settings to change from now on, ["train.steps=2000"] or {"train.steps": 2000}. checkpoint: "latest" (the
    newest good one), "best" or a step; from another one than the latest, the later ones are set aside. Call it from the
    main thread. Raises BadInput, RunFailed, Interrupted.
    """
    from gossamer.settings import written_overrides
    from gossamer.view.training_result import TrainingResult

    data = resume_command(Path(run_dir), written_overrides(overrides), checkpoint=checkpoint)
    return TrainingResult(data, run=open_run(Path(run_dir)))


def train(
    model: nn.Module | str | Mapping[str, Any],
    data: Any = None,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: str | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainingResult:
    """Train `model` on `data` in this process, or as one rank under torchrun; return the run's summary and records.

    A configuration with `train.phases` is trained in processes of its own, as `gossamer train` does: the model is named
    and not built, the data is text or `data.factory`, and there are no callbacks; call it from the main thread. The
    records of the result are those of the last phase.

    model:  an unmodified nn.Module (or what the `model` section of a configuration holds).
    data:   a source as in `data.source`, a Corpus, or a map-style dataset of dictionaries of tensors; None: the
            source of `config`.
    config: a RunConfig, a dictionary of its sections, or the path of a run.yaml.
    resume: "auto" resumes the newest run of the same configuration that has a checkpoint, where there is one;
            on several ranks (which need a run.name), the run of that name. Without "auto" a run of that name that is
            there already is refused.
    callbacks: functions of a record, or objects with on_step, on_evaluation, on_save and on_end, called on rank 0 with
            a copy of the record. One that returns "stop" ends the run after the next step, on all ranks.

    The result is a mapping with the figures of the run; `steps`, `losses` and `evaluations` are its records as arrays.
    After it the module has no hooks or wrappers, and its `.grad` are None. Raises BadInput, RunFailed, Interrupted.
    """
    from gossamer.job.in_process import check_resume, phases_asked, train_in_process
    from gossamer.settings import Resolved
    from gossamer.view.training_result import TrainingResult

    phased = phases_asked(model, data, config, callbacks)
    if phased is None:
        return train_in_process(model, data, config, resume, callbacks)
    check_resume(resume)
    done = train_command(Resolved.of(phased), resume=resume)
    return TrainingResult(done, run=open_run(Path(done["directory"])))


def distill(
    teacher: str | Path,
    to: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    by: str = "taid",
) -> dict[str, Any]:
    """Train the model of a configuration with a teacher (`gossamer distill`); return the run's summary.

    teacher:   a run directory, a Hugging Face folder or a GGUF file.
    to:        the run.yaml of the student. overrides: settings that win over it, as in `resume`.
    by:        the loss: taid, kl, reverse_kl, jsd, hidden (hidden states beside kl, or beside what the file says) or
               expert_distillation (of a pruned mixture of experts, whose teacher is the model that was pruned).
    `distillation` in the result has the losses of teacher and student on every validation set, before and after.
    Raises BadInput, RunFailed, Interrupted.
    """
    import json

    from gossamer import loss as loss_methods
    from gossamer.job.distillation_losses import losses_before
    from gossamer.job.found_teacher import refuse_elsewhere
    from gossamer.settings import load, written_overrides
    from gossamer.settings.methods import check_names
    from gossamer.spec.method_config import MethodConfig
    from gossamer.spec.records import Evaluation

    refuse_elsewhere(str(teacher))
    given = written_overrides(overrides)
    named = loss_methods.REGISTRY.read(load(Path(to), given).config.train.loss, key="train.loss")
    settings, learns = dict(named.parameters) if named.name == by else {}, {"teacher": str(teacher)}
    if by == "hidden":
        output = MethodConfig.parse(settings.get("output", "kl"), key="train.loss.hidden.output")
        settings["output"] = {output.name: {**output.parameters, **learns}}
    else:
        settings |= learns
    resolved = load(Path(to), [f"train.loss={json.dumps({by: settings})}", *given])
    check_names(resolved)
    loss_methods.build(resolved.config.train.loss, key="train.loss")  # what is wrong is told before minutes are spent
    display = open_display("quiet" if resolved.config.run.display == "quiet" else "plain")
    try:
        told = ToldProgress(display=display, whose="distill")
        losses: dict[str, dict[str, float]] = losses_before(resolved.config, str(teacher), told)
    finally:
        display.close()
    data = train_command(resolved)
    for one in RunDirectory(Path(data["directory"])).records():
        if isinstance(one, Evaluation) and one.name in losses:
            losses[one.name]["student_after"] = one.loss
    return {**data, "distillation": {"teacher": str(teacher), "by": by, "losses": losses}}


def teach(
    teacher: str | Path,
    address: str,
    *,
    token: str = "",
    clients: int = 64,
    stage: str = "",
    previous: str = "",
    cuts: str = "",
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Serve a teacher to runs on other hosts (`gossamer teach`) until Ctrl-C; return what was done.

    teacher: a run directory, a Hugging Face folder or a GGUF file. address: HOST:PORT to listen on, and on no other.
    token:   the shared secret; "": that of GOSSAMER_TEACHER_TOKEN. clients: ranks that may ask at a time.
    stage:   I/N serves the I-th of N stages alone, which asks the one before at `previous`, tcp://HOST:PORT.
    cuts:    the first unit of every stage, separated by commas; "": stages of equal bytes.
    tell:    takes lines for the user.
    Raises BadInput.
    """
    from gossamer.job.served_teacher import serve_teacher

    return serve_teacher(
        str(teacher), address, token=token, clients=clients, stage=stage, previous=previous, cuts=cuts, tell=tell
    )


def plan(model: nn.Module, config: RunConfig | Mapping[str, Any] | str | Path | None = None, *, ranks: int = 1) -> Plan:
    """Return the plan to train `model` on `ranks` processes: a value to read, change, save, or pass to `--plan`.

    Raises BadInput, NoPlan.
    """
    import torch

    from gossamer.job.in_process import config_from
    from gossamer.partition.plan_file import make_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return make_plan(config_from(config), model, ranks=ranks, device=device)


def load(run_dir: str | Path, module: nn.Module | None = None, *, checkpoint: str | int = "latest") -> TrainedRun:
    """Load the trained model, tokenizer and configuration of a run from its directory alone.

    module: for a run whose module was built in a program, one built alike, to load the weights into. checkpoint:
    "latest", "best" (of a run with train.keep_best) or a step. Returns a `gossamer.job.trained_run.TrainedRun`. Raises
    BadInput, CheckpointMismatch.
    """
    from gossamer.job.trained_run import read_trained

    return read_trained(Path(run_dir), module, checkpoint=checkpoint)


def sample(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> str:
    """Generate text with a model (`gossamer sample`); return the text after `prompt`, without it.

    run_dir: a run directory, a Hugging Face folder, a quantized folder or a GGUF file. checkpoint: of a run, "latest",
    "best" or a step, as in `load`. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.found_model import find_model
    from gossamer.model.generate import generate

    found = find_model(Path(run_dir), checkpoint)
    return generate(
        found.module.eval(), found.tokenizer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    )


def stream(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> Iterator[str]:
    """Yield the text that `sample` returns, in pieces, each as soon as it is final."""
    from gossamer.job.found_model import find_model
    from gossamer.model.generate import TokenChoice
    from gossamer.model.generate import stream as streamed

    found, choice = find_model(Path(run_dir), checkpoint), TokenChoice(temperature=temperature, top_k=top_k)
    yield from streamed(found.module.eval(), found.tokenizer, prompt, tokens=tokens, choice=choice, seed=seed)


def chat(
    model: str | Path,
    *,
    system: str = "",
    template: str | Path | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> Chat:
    """Begin a dialogue with the model of a run, of a Hugging Face folder or of a GGUF file (`gossamer chat`).

    template: a file with a chat template, in place of the tokenizer's own. checkpoint: of a run, as in `load`. The
    result, a `gossamer.model.chat.Chat`, answers: `chat.ask("Hello")` returns text, `chat.stream("Hello")` yields it in
    pieces; `reset`, `undo`, `system` and `save` change or keep the dialogue. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.chat_model import ChatSettings, open_chat
    from gossamer.model.generate import TokenChoice

    settings = ChatSettings(
        system=system,
        template=None if template is None else Path(template),
        max_new_tokens=max_new_tokens,
        choice=TokenChoice(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
    )
    return open_chat(Path(model), settings, checkpoint)


def export(
    run_dir: str | Path,
    target: str | Path,
    *,
    to: Literal["hf", "peft", "gguf", "side"] = "hf",
    type: Literal["f16", "q8_0"] | None = None,
    checkpoint: str | int = "latest",
) -> dict[str, Any]:
    """Write the model of a run as a folder that transformers loads, a folder of peft, or a GGUF file for llama.cpp.

    to: "hf" merges an adapter into the weights, and writes the weights alone of a model of your own; "peft" writes the
    adapter alone; "gguf" merges an adapter; "side" writes the side network alone. type: how "gguf" writes matrices, f16
    if None. `gossamer export RUN_DIR --to hf DIR` calls it. `load` in the result is the Python code that loads what was
    written, `notes` (GGUF) says what differs there in rare cases. checkpoint: "latest", "best" or a step, as in `load`.
    Raises BadInput (a target that exists; a model or tokenizer that llama.cpp has no equal of), CheckpointMismatch.
    """
    from gossamer.job.trained_run import read_chosen
    from gossamer.model.export import export_hf, export_peft
    from gossamer.model.export_gguf import export_gguf
    from gossamer.model.side_folder import export_side

    target = Path(target)
    if target.exists():
        new = "file" if to == "gguf" else "folder"
        raise BadInput(f"{target} exists already: nothing was written. Name a new {new}, or remove that one")
    if to != "gguf" and type is not None:
        raise bad_input(
            wanted="a type with --to gguf alone",
            got=f"{type} with --to {to}, which writes the type that the model has",
            do="leave it out, or export with --to gguf",
            key="--type",
        )
    if (Path(run_dir) / "quantized.json").is_file():
        from gossamer.job.quantization import export_quantized

        return export_quantized(Path(run_dir), target, to=to, type=type)
    found = read_chosen(Path(run_dir), checkpoint)
    if to == "peft":
        return {"exported": str(target), "load": export_peft(found.module, found.base, found.origin, target)}
    if to == "side":
        return {"exported": str(target), "load": export_side(found.module, found.config.model.side, found.base, target)}
    if to == "gguf":
        made = export_gguf(found.module, found.origin, found.tokenizer, target, kind=type or "f16")
        return {"exported": str(target), "load": f"llama_cpp.Llama({str(target)!r})", **made}
    return {"exported": str(target), "load": export_hf(found.module, found.origin, found.tokenizer, target)}


def grow(
    source: str | Path,
    to: str | Path,
    by: str | Mapping[str, Any] = "lemon",
    *,
    out: str | Path | None = None,
    checkpoint: str | int = "latest",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Make a larger model of a smaller one (`gossamer grow`); return what was done, in figures.

    source:     a run directory, a Hugging Face folder or a GGUF file.
    to:         the configuration file of the run that trains the large model.
    by:         a method of `gossamer methods grow`, as a configuration writes it ("lemon", {"lemon": {"depth": 2}}).
    out:        the start folder to write; None: grown-NAME in the current folder.
    checkpoint: of a run, as in `load`.
    dry_run:    compute and prove, and write nothing.
    `next` in the result is the command that goes on. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.growth import grow_model
    from gossamer.settings.written_method import written_method

    written = dict(by) if isinstance(by, Mapping) else written_method(by, key="--by")
    target = None if out is None else Path(out)
    return grow_model(Path(source), Path(to), written, out=target, checkpoint=checkpoint, dry_run=dry_run)


def evaluate(
    model: str | Path,
    files: Iterable[str | Path] = (),
    *,
    sequence: int | None = None,
    sequences: int | None = None,
    checkpoint: str | int = "latest",
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Return loss (nats/token), perplexity and bits per byte of a model on text or chat files (`gossamer eval`).

    model:      a run directory, a Hugging Face folder or a GGUF file.
    files:      files or patterns; none: the run's own validation sets, as training evaluates them.
    sequence:   tokens that the model sees at once; None: as in training, of other models 1024 at most.
    sequences:  at most so many of every text; None: all.
    checkpoint: of a run, as in `load`.
    progress:   called with the text's name, the sequences done, and all of them.
    Of chat files the answers alone count. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.text_evaluation import evaluate_model

    named = [str(file) for file in files]
    return evaluate_model(
        Path(model), named, sequence=sequence, sequences=sequences, checkpoint=checkpoint, progress=progress
    )


def evaluate_on_tasks(
    model: str | Path,
    tasks: Iterable[str],
    *,
    shots: int | None = None,
    examples: int | None = None,
    sequence: int | None = None,
    checkpoint: str | int = "latest",
) -> dict[str, Any]:
    """Return the figures of a model on tasks of lm-eval-harness (`gossamer eval --tasks`, extra `lm-eval`).

    model:      a run directory, a Hugging Face folder or a GGUF file.
    tasks:      the harness's names, or yaml files with a task.
    shots:      solved examples before each question; None: as the task says.
    examples:   at most so many of each task; None: all.
    sequence:   tokens that the model sees at once; None: as many as it can.
    checkpoint: of a run, as in `load`.
    Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.task_evaluation import evaluate_tasks

    return evaluate_tasks(
        Path(model), [*tasks], shots=shots, examples=examples, sequence=sequence, checkpoint=checkpoint
    )


def prune(
    source: str | Path,
    *,
    by: Written = "wanda",
    sparsity: float | None = None,
    pattern: str = "",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    data: Iterable[str | Path] = (),
    out: str | Path | None = None,
    calibration: int = 128,
    seed: int = 0,
    sequence: int | None = None,
    sequences: int = 256,
    checkpoint: str | int = "latest",
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Prune the linear layers of a trained model; return losses, sparsities and bytes (`gossamer prune`).

    source:      a run directory or a Hugging Face folder, in full precision.
    by:          a method of `gossamer methods prune`, with its settings or without.
    sparsity, pattern, include, exclude: its settings, unless `by` says them.
    data:        text files; none: the training text and the validation sets of the run.
    out:         a new folder for the pruned model and its masks; None: nothing is written.
    calibration: sequences that calibrate, drawn with `seed`; sequences: measured of each text, at most; sequence:
                 tokens of one.
    checkpoint:  of a run, as in `load`.
    Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.pruned_model import PruneRequest, prune_model

    method = MethodConfig.parse(by, key="--by")
    given: dict[str, Any] = {"sparsity": sparsity, "pattern": pattern, "include": [*include], "exclude": [*exclude]}
    known = {name: value for name, value in given.items() if value not in (None, "", [])}
    request = PruneRequest(
        source=Path(source),
        by={method.name: {**known, **method.parameters}},
        data=tuple(str(file) for file in data),
        calibration=calibration,
        seed=seed,
        sequence=sequence,
        sequences=sequences,
        checkpoint=checkpoint,
        out=None if out is None else Path(out),
    )
    return prune_model(request, progress)


def quantize(
    source: str | Path,
    *,
    by: Written = "gptq",
    bits: int | Sequence[int] = 4,
    group: int = 64,
    symmetric: bool = False,
    budget: float | None = None,
    data: Iterable[str | Path] = (),
    out: str | Path | None = None,
    calibration: int = 128,
    sequence: int | None = None,
    sequences: int = 1000,
    checkpoint: str | int = "latest",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Quantize the linear layers of a trained model; return sizes, losses and layer errors (`gossamer quantize`).

    source:      a run directory, a Hugging Face folder or a GGUF file, in full precision.
    by:          a method of `gossamer methods quantize`, with its settings or without.
    bits, group, symmetric: of its integers, unless `by` says them. Several bits, such as (2, 3, 4): `out` is a folder
                 of the integers of each, for the adapter qfa.
    budget:      average bits of the subnet of a run with the adapter qfa; nothing is quantized then.
    data:        text files; none: the training text and the validation sets of the run.
    out:         a new folder or FILE.gguf to write; None: nothing is written.
    calibration: sequences that calibrate; sequences: measured of each text, at most; sequence: tokens of one.
    checkpoint:  of a run, as in `load`.
    Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.quantization import QuantizeRequest, quantize_model
    from gossamer.job.width_quantization import quantize_widths

    method = MethodConfig.parse(by, key="--by")
    one = {"bits": bits} if isinstance(bits, int) else {}
    given = {**one, "group": group, "symmetric": symmetric, **method.parameters}
    request = QuantizeRequest(
        source=Path(source),
        by={method.name: given},
        data=tuple(str(file) for file in data),
        calibration=calibration,
        sequence=sequence,
        sequences=sequences,
        checkpoint=checkpoint,
        out=None if out is None else Path(out),
        budget=budget,
    )
    if isinstance(bits, int):
        return quantize_model(request, progress)
    return quantize_widths(request, tuple(bits), progress)
