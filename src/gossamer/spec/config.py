"""The configuration of a run: one file, every key with its default, unknown keys are errors.

These models are the reference for `run.yaml` (docs/reference/config.md is generated from them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gossamer.spec.earlier_recompute import as_saver
from gossamer.spec.method_config import Exchanges, MethodOf, Written
from gossamer.spec.validation_sets import check_sets, sets_of
from gossamer.spec.watched_figure import Watched

Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]


def _broken(value: Any) -> str | None:
    """The first text anywhere in a value that holds a surrogate."""
    if isinstance(value, str):
        return value if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value) else None
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return next((found for part in parts if (found := _broken(part)) is not None), None)


class Section(BaseModel):
    """A section of the configuration: frozen, and strict about its keys.

    `gone`: keys of earlier versions that nothing read, with their defaults. The run.yaml of an older run may hold them
    with that value; any other value is an unknown key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")
    gone: ClassVar[Mapping[str, object]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_gone(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if key not in cls.gone or value != cls.gone[key]}

    @field_validator("*", mode="after")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Half a letter (bytes that are no UTF-8, on the command line) could be neither tokenized nor written down."""
        if (broken := _broken(value)) is not None:
            raise ValueError(f"wanted text, got {broken!a}, in which some bytes are not UTF-8: save the text as UTF-8")
        return value


class ModelSection(Section):
    """The model to train, whose code stays unmodified.

    At most one of `hf`, `gguf`, `factory` is set; none where Python passes the module.
    """

    hf: str | None = Field(None, description="local directory of a Hugging Face model, or a model type with `config`")
    gguf: str | None = Field(None, description="path of a GGUF file")
    factory: str | None = Field(None, description='"package.module:function" that returns an nn.Module')
    config: dict[str, Any] = Field({}, description="keys of the model's own config, or arguments of the factory")
    start: str | None = Field(
        None,
        description="start folder with the initial weights, and perhaps moments (`gossamer grow` writes one)",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type the parameters are held in")
    compile: bool = Field(False, description="run the forward through torch.compile")
    adapter: Annotated[Written, MethodOf("model/adapter")] = Field(
        "none",
        description="none, or a method of `gossamer methods model/adapter`: trains a few numbers beside frozen weights",
    )
    side: Annotated[Written, MethodOf("model/side")] = Field(
        "none",
        description="none, or a method of `gossamer methods model/side`: trains a small network beside the frozen "
        "model, through which nothing is back-propagated",
    )
    base: Literal["full", "bf16", "int8", "int4", "gguf"] = Field(
        "full",
        description="how the frozen linear layers under an adapter or side network are held: as `dtype`, or in blocks; "
        "gguf: those of the file",
    )
    freeze: list[str] = Field(
        [], description="regular expressions: parameters in whose name one is found stay as they are"
    )
    unfreeze: list[str] = Field(
        [], description="regular expressions: parameters that are trained although an adapter or `freeze` holds them"
    )

    @model_validator(mode="after")
    def _base_is_frozen(self) -> ModelSection:
        if self.adapter != "none" and self.side != "none":
            raise ValueError(
                "wanted an adapter or a side network, got model.adapter and model.side: no gradient reaches an adapter "
                "in a model beside which a side network is trained; set one of them to none"
            )
        if self.base != "full" and self.adapter == "none" and self.side == "none":
            raise ValueError(
                f"wanted an adapter on a base in {self.base}, whose layers cannot be trained, got model.adapter none: "
                "set model.adapter to lora or model.side to unipt, or model.base to full"
            )
        return self

    @model_validator(mode="after")
    def _start_of_weights(self) -> ModelSection:
        if self.start is not None and self.base == "gguf":
            raise ValueError(
                "wanted the weights of one place, got model.start beside model.base gguf, the blocks of a file: "
                "set model.base to int8 or int4, or leave model.start out"
            )
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        given = [k for k in ("hf", "gguf", "factory") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of hf, gguf, factory; got {' and '.join(given)}")
        return self


class DataSection(Section):
    """The training text, its tokenizer, and the length and packing of the sequences cut from it.

    Or, with `factory`, a dataset that Python code builds.
    """

    source: Annotated[Written, MethodOf("data/source")] = Field(
        "stdlib", description="a method of `gossamer methods data/source`: stdlib, text:GLOB, chat:GLOB, ..."
    )
    tokenizer: Annotated[Written, MethodOf("data/tokenizer")] = Field(
        "byte", description="a method of `gossamer methods data/tokenizer`: byte, bpe:N, hf:DIR"
    )
    sequence: Annotated[int, Field(ge=2)] = Field(256, description="tokens per sequence")
    pack: bool = Field(True, description="fill sequences from the stream of documents; false: one document piece each")
    isolate: bool = Field(False, description="restart positions at document borders, so that none attends to another")
    validation: float | dict[str, float | Written] = Field(
        0.05,
        description="fraction held out, by hash of the file; or validation sets by name, each a source as "
        "`data.source` or (one of them) a fraction",
    )
    factory: str | None = Field(
        None,
        description='"package.module:function" that returns a map-style dataset of dictionaries of tensors, instead '
        "of a source",
    )
    config: dict[str, Any] = Field({}, description="arguments of the factory")
    cache: str | None = Field(None, description="folder of tokenized corpora; default: the user's cache directory")

    @field_validator("validation", mode="after")
    @classmethod
    def _is_validation(cls, value: float | dict[str, float | Written]) -> float | dict[str, float | Written]:
        check_sets(value)
        return value

    @property
    def held_out(self) -> float:
        """Return the fraction of the training text that is held out for validation."""
        return sets_of(self.validation).fraction

    @property
    def validation_sources(self) -> Mapping[str, Written]:
        """Return the sources of the validation sets that have one, by name."""
        return sets_of(self.validation).sources


class VerifySection(Section):
    """Verification by redundant execution: replicas recompute each other's steps, for machines that are not trusted."""

    every: Annotated[int, Field(ge=0)] = Field(
        0,
        description="two other ranks recompute a rank's step, once in this many steps on average, at random; 0: never",
    )
    tolerance_factor: Annotated[float, Field(ge=1)] = Field(
        8.0,
        description="largest accepted difference of two gradients of the same samples, as a multiple of the measured "
        "noise",
    )
    on_failure: Literal["stop", "warn"] = Field(
        "stop", description="action when a rank is found wrong: stop the run, or warn"
    )


class EarlyStopSection(Section):
    """The end of a run before its last step, once evaluations show no improvement."""

    patience: Annotated[int, Field(ge=0)] = Field(
        0, description="evaluations in a row without an improvement after which the run ends; 0: never"
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="a change that is not larger than this is no improvement"
    )
    monitor: Watched = Field(
        "",
        description="the figure that is to improve, as in `keep_best`; default: the loss of the first validation set",
    )


class AdversarialSection(Section):
    """Adversarial training for large batches (ConAdv): the loss on a batch plus that on the same batch, perturbed.

    The perturbation follows the gradient of the loss by the inputs, which must be real numbers: images, features.
    """

    epsilon: Annotated[float, Field(ge=0, lt=float("inf"))] = Field(
        0.0, description="largest change of an element of the inputs; 0: no adversarial training"
    )
    alpha: Annotated[float, Field(gt=0, lt=float("inf"))] | Auto = Field(
        "auto", description="length of the perturbation before it is clipped to epsilon; auto: epsilon"
    )
    direction: Literal["sign", "normalized"] = Field(
        "sign", description="direction of the perturbation: the gradient's signs, or each row's gradient over its norm"
    )
    delay: Literal[0, 1] = Field(
        0,
        description="compute the perturbation with the present weights (0) or those before the last step (1), as "
        "where it is computed ahead",
    )
    ahead: bool = Field(
        False,
        description="a companion process of each rank computes the perturbation of the next batch while the rank "
        "computes this step; wants delay 1",
    )
    inputs: list[str] = Field(
        [], description="keys of a batch to perturb; default: the one real-valued input of the model's forward"
    )

    @property
    def has_companion(self) -> bool:
        """Return whether every rank has a companion process."""
        return self.epsilon > 0 and self.ahead


class PhaseSection(Section):
    """One phase of a run (`train.phases`): where its weights come from, and the keys that differ from the run's."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(description="end of its folder's name")
    by: Written | None = Field(
        None,
        description="a method of `gossamer methods grow`, `prune` or `quantize` that makes its weights of those of the "
        "phase before; none: they are the same",
    )
    model: dict[str, Any] = Field({}, description="keys of `model` that differ, as `hf: ...` or `config.x: ...`")
    data: dict[str, Any] = Field({}, description="keys of `data` that differ")
    train: dict[str, Any] = Field({}, description="keys of `train` that differ")
    machines: dict[str, Any] = Field({}, description="keys of `machines` that differ")
    plan: dict[str, Any] = Field({}, description="keys of `plan` that differ")


class TrainSection(Section):
    """The training settings: steps, batch, optimizer, learning-rate schedule, evaluation and checkpoints."""

    steps: Positive = 1000
    batch: Positive = Field(64, description="sequences per step, over all replicas")
    optimizer: Annotated[Written, MethodOf("optimizer")] = Field(
        {"adamw": {"lr": 3e-4}}, description="a method of `gossamer methods optimizer`"
    )
    lr_schedule: Annotated[Written, MethodOf("optimizer/lr_schedule")] = Field(
        {"cosine": {"warmup": 0.02}}, description="a method of `gossamer methods optimizer/lr_schedule`"
    )
    loss: Annotated[Written, MethodOf("loss")] = Field("next_token", description="a method of `gossamer methods loss`")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global gradient norm; 0: no clipping"
    )
    accumulate: Positive | Auto = Field("auto", description="micro-batches per replica and step")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "fp32", description="type the forward and backward compute in; auto: bf16 where it is measured to be faster"
    )
    seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="train about so long at most: `steps` become fewer, and the schedule with them; 0: no limit"
    )
    seed: Annotated[int, Field(ge=0)] = 0
    evaluate_every: Annotated[int, Field(ge=0)] = Field(200, description="steps; 0: only at the end")
    evaluate_sequences: Positive = Field(256, description="validation sequences per evaluation, at most")
    sample_prompt: str = Field("", description="prompt to continue after every evaluation; empty: none")
    sample_max_new_tokens: Positive = Field(40, description="tokens to generate at most")
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(500, description="steps; 0: only at the end")
    keep_checkpoints: Positive = 2
    keep_best: bool | Watched = Field(
        False,
        description="keep the checkpoint with the lowest loss on the first validation set beside the newest ones; or "
        "the figure to look at: SET, METRIC or SET/METRIC, of which {highest: METRIC} takes the highest",
    )
    early_stop: EarlyStopSection = EarlyStopSection()
    metrics: list[str] = Field(
        [],
        description='"package.module:function" of (logits, labels), which returns a sum and a count, for every '
        "evaluation",
    )
    on_nonfinite: Literal["retry_skip_stop", "skip", "stop"] = Field(
        "retry_skip_stop", description="action on a loss or gradient that is not finite"
    )
    prove: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether the gradients of the layout are compared with those of one process before the first step; "
        "auto: where the model is in stages, or replicas have unequal parts of the batch or buffers that are saved",
    )
    verify: VerifySection = VerifySection()
    adversarial: AdversarialSection = AdversarialSection()
    phases: list[PhaseSection] = Field(
        [],
        description="phases that follow each other, each with a name, the method `by` that makes its weights of those "
        "before, and the keys that differ in it; empty: the run is one",
    )

    @field_validator("phases", mode="after")
    @classmethod
    def _names_differ(cls, value: list[PhaseSection]) -> list[PhaseSection]:
        names = [phase.name for phase in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"wanted a name of its own for every phase, got {', '.join(twice)} twice: rename one")
        return value


class MachinesSection(Section):
    """The hosts, processes, links and timeouts of the run."""

    gone = {"cluster": None}
    processes: Positive = Field(1, description="local processes, on every host")
    hosts: list[str] = Field([], description="names ssh knows; empty: this machine")
    islands: list[list[int]] | Auto = Field("auto", description="ranks behind one fast link; auto: measured if needed")
    interface: str = Field("auto", description="network device for the exchange; auto: the fastest that reaches all")
    threads: Positive | Auto = Field(
        "auto", description="compute threads per process; auto: OMP_NUM_THREADS, else the cores shared"
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="seconds that others wait for a rank before it has failed"
    )
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = Field(
        5.0, description="seconds without a heartbeat after which a rank is reported"
    )


class MeshSection(Section):
    """The sizes of the mesh axes; their product is the number of processes, unless `plan.stage_ranks` is set."""

    gone = {"shard": 1, "tensor": 1, "sequence": 1, "expert": 1}
    replica: Positive | Auto = "auto"
    pipe: Positive | Auto = 1


class PlanSection(Section):
    """The plan values that the user fixes; the planner chooses those that are `auto`."""

    mesh: MeshSection = MeshSection()
    batch_fractions: list[Annotated[float, Field(gt=0)]] | Auto = Field(
        "auto", description="part of the batch per replica; with `stage_ranks`, of its stage's work per rank"
    )
    stage_ranks: list[list[int]] | Auto = Field(
        "auto", description="the ranks of every stage, as many as each needs; auto: one of every replica"
    )
    cuts: list[int | str] | Auto = Field(
        "auto", description="first unit of every stage: its name, or the number of a block; the first stage's is 0"
    )
    units: list[str] | Auto = Field("auto", description="the modules to cut between; auto: the repeated blocks")
    pipeline_schedule: Annotated[Written, MethodOf("pipeline/schedule")] = Field(
        "auto", description="a method of `gossamer methods pipeline/schedule`"
    )
    activation_compression: Annotated[Written | list[Written], MethodOf("p2p/activation")] = Field(
        "none",
        description="compression of activations and their gradients between stages: a method of "
        "`gossamer methods p2p/activation`, or a list with one per stage boundary",
    )
    exchange: Annotated[Exchanges, MethodOf("exchange")] = Field(
        "auto",
        description="a method of `gossamer methods exchange`; or lines, of which the first whose pattern (a regular "
        "expression) is found in a parameter's name holds; level: all, or lines for both intra and inter",
    )
    sync: Annotated[Written, MethodOf("sync")] = Field(
        "every_step", description="a method of `gossamer methods sync`; auto: from the links, with exchange auto"
    )
    sharding: Annotated[Written, MethodOf("sharding")] = Field(
        "none",
        description="a method of `gossamer methods sharding`: which ranks hold optimizer states, gradients and "
        "parameters",
    )
    savers: Annotated[Written | list[Written], MethodOf("saver")] = Field(
        "auto",
        description="what saves memory for seconds: a list of methods of `gossamer methods saver`; none; auto: none "
        "where the run fits its machines, else the recompute or cut_cross_entropy with which it does",
    )
    lossy: bool = Field(False, description="whether `auto` may choose exchanges that lose information")
    residuals_on_resume: Literal["redistribute", "reset"] = Field(
        "redistribute",
        description="error-feedback residuals, when a run resumes on another number of processes: redistribute "
        "them, or reset to 0",
    )
    adapt: Annotated[Written, MethodOf("policy")] = Field(
        "none",
        description="none, or a method of `gossamer methods policy`, which changes the exchanges during the run",
    )
    adapt_every: Positive = Field(100, description="steps from one choice of `adapt` to the next")
    adapt_window: Annotated[int, Field(ge=2)] = Field(
        10, description="steps before each choice whose mean gradients the policy measures"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_recompute_as_saver(cls, values: Any) -> Any:
        return as_saver(values)

    @model_validator(mode="after")
    def _window_fits(self) -> PlanSection:
        if self.adapt_window > self.adapt_every:
            raise ValueError(
                f"wanted adapt_window of at most adapt_every, which is {self.adapt_every} steps, "
                f"got {self.adapt_window} steps: lower adapt_window or raise adapt_every"
            )
        return self

    @property
    def adapts(self) -> bool:
        """Return whether a policy adapts the compression of exchanges or activations."""
        return bool(self.adapt != "none")

    @property
    def named_savers(self) -> tuple[Written, ...]:
        """Return the savers that are asked for by name."""
        asked = self.savers if isinstance(self.savers, list) else [self.savers]
        return () if asked in (["auto"], ["none"]) else tuple(asked)

    @property
    def chooses_schedule(self) -> bool:
        """Return whether the planner chooses the pipeline schedule."""
        return bool(self.pipeline_schedule == "auto")


class RunSection(Section):
    """The run directory, the trackers and the display of a run."""

    directory: str = "runs"
    name: str | None = Field(
        None,
        description="end of the name of the run's folder, after date and time (under a launcher, all of that name); "
        "default: the model's name",
    )
    trackers: Annotated[list[Written], MethodOf("view/tracker")] = Field(
        [], description="methods of `gossamer methods view/tracker`"
    )
    display: Literal["auto", "live", "plain", "quiet"] = "auto"


class RunConfig(Section):
    """The complete configuration of a run (run.yaml)."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    machines: MachinesSection = MachinesSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()
