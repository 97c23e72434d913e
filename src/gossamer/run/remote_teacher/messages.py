"""What a teacher and a student on two hosts say to each other. Tensors travel beside the messages (`frames`).

    teacher                         student
    Challenge                  ->
                               <-   Hello      proves that the student knows the secret, with a random number of its own
    Welcome                    ->              proves that the teacher knows it, before any token is sent
    Facts                      ->              the student compares them with its own data and vocabulary
                               <-   Terms      with a first batch
    Ready                      ->              with the head, once, where rows of hidden states are asked for
                               <-   Ask        with a micro-batch, as often as there is one
    Rows                       ->              in the order of the questions
Refusal: the teacher's last message of a connection, at any place.

Of a teacher in stages, the student is the last stage's, and every stage is, in the same words, a student of the stage
before: its `Terms` have a `part`, and `Border` takes the place of `Rows`.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from gossamer.process.json_lines import Said

PROTOCOL = 3
_MOST = 1 << 40
MOST_BLOCKS = 512  # whose states a student may ask for
MOST_ASKED_BYTES = 1 << 28  # of a question's tensors
Count = Annotated[int, Field(ge=0, le=_MOST)]
Name = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=4096)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Challenge(Said):
    """A random number, in hexadecimal, that a student is to sign."""

    kind: Literal["challenge"] = "challenge"
    protocol: Count = PROTOCOL
    nonce: Hash


class Hello(Said):
    """A student's signature of both random numbers, `nonce` its own, in hexadecimal."""

    kind: Literal["hello"] = "hello"
    protocol: Count = PROTOCOL
    nonce: Hash
    proof: Hash


class Welcome(Said):
    """A teacher's signature of both random numbers."""

    kind: Literal["welcome"] = "welcome"
    proof: Hash


class TeacherPart(Said):
    """Which part of a teacher a process has: its number, from 1, of so many stages.

    cuts: the first unit of every stage; source: a hash of the model's configuration and of its files. Both are equal
    in all stages of one teacher.
    """

    stage: Annotated[int, Field(ge=1, le=1 << 16)]
    stages: Annotated[int, Field(ge=1, le=1 << 16)]
    cuts: Annotated[tuple[Text, ...], Field(max_length=1 << 12)]
    source: Name

    @property
    def named(self) -> str:
        """Return its name for people."""
        return f"stage {self.stage} of {self.stages} of the teacher"


class Facts(Said):
    """What is compared of a teacher.

    parameters: how many it has; positions: tokens that it sees at most; width: logits of its declared head, None where
    it declares none; tokens: those of a known text, None without a tokenizer, for the reason `without`; digest: of all
    its weights, in stages of those up to this one; blocks: whose states it can send, none for the reason
    `without_blocks`; part: None for a teacher that is whole.
    """

    kind: Literal["facts"] = "facts"
    parameters: Count
    positions: Count | None = None
    width: Count | None = None
    tokens: tuple[Count, ...] | None = None
    without: Text = ""
    digest: Digest = "0" * 12
    blocks: Annotated[tuple[Text, ...], Field(max_length=1 << 12)] = ()
    without_blocks: Text = ""
    part: TeacherPart | None = None


class ExpertLayer(Said):
    """The experts of a student at `path`. `shapes`: a hash of the names and shapes of their parameters."""

    path: Text
    shapes: Hash


class Terms(Said):
    """What a student asks for, at all its questions.

    top_k: words of each token, 0: rows of hidden states; words: logits that count, None: all; tile_tokens: tokens whose
    logits are held at a time; dims: of the logits; isolates: whether documents must not see each other; wants_head:
    whether the head is to be sent; blocks: whose states are to be sent; experts: whose outputs are asked for, and
    nothing else, in the type `dtype`; part: the stage that asks for what it receives from the one before, None of a
    student.
    """

    kind: Literal["terms"] = "terms"
    top_k: Count
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    words: Count | None
    tile_tokens: Annotated[int, Field(ge=1)]
    precision: Literal["fp32", "bf16", "fp16"]
    dims: Annotated[int, Field(ge=2, le=8)]
    isolates: bool
    wants_head: bool
    blocks: Annotated[tuple[Text, ...], Field(max_length=MOST_BLOCKS)] = ()
    experts: Annotated[tuple[ExpertLayer, ...], Field(max_length=MOST_BLOCKS)] = ()
    dtype: Name = ""
    part: TeacherPart | None = None


class BlockState(Said):
    """What the rows of the states of a block are: their width, and the type in which they are computed and sent."""

    block: Text
    width: Annotated[int, Field(ge=1, le=_MOST)]
    dtype: Literal["float64", "float32", "bfloat16", "float16"]


class Ready(Said):
    """The teacher's consent. width: its logits; hidden: numbers of a row, 0 where words were asked for; names: entries
    of a batch that it is to be sent; states: of the blocks that were asked for, of a stage those that it has with the
    stages before. Tensors: `weight` (V, D) and perhaps `bias` (V,) where the head was asked for.
    """

    kind: Literal["ready"] = "ready"
    width: Count
    hidden: Count
    compute: Name
    names: tuple[Name, ...]
    states: Annotated[tuple[BlockState, ...], Field(max_length=MOST_BLOCKS)] = ()


class Ask(Said):
    """A question. Tensors: entries of the micro-batch; `loss.rows`, bits of the tokens that count, unless all do.

    Of experts: `inputs.0` (n, D), what the student's router sends to those of the first layer, call after call, and
    `calls.0` (m, 2), the number of the expert of each call and how many rows it has; `inputs.1`, ... of other layers.
    """

    kind: Literal["ask"] = "ask"
    number: int


class Rows(Said):
    """The answer to the question of that number. Tensors: `hidden` (n, D), or `words` (n, k) with `log_probabilities`
    (n, k + 1), of the tokens that count, and `state.0` (n, E), `state.1`, ... of the blocks that were asked for.
    inner, is_capped, outer: what the model does to its head's output. Of experts: `outputs.0` (n, E), ...
    """

    kind: Literal["rows"] = "rows"
    number: int
    inner: float = 1.0
    is_capped: bool = False
    outer: float = 1.0


class Border(Said):
    """The answer of a stage to the next one. Tensors: those that the next one receives, by "call.place" of the traced
    forward, and the states as in `Rows`.
    """

    kind: Literal["border"] = "border"
    number: int


class Refusal(Said):
    """Why the teacher does not go on. `is_input`: whether the student's configuration is the reason."""

    kind: Literal["refusal"] = "refusal"
    message: Text
    is_input: bool = True


Message: TypeAlias = Annotated[
    Challenge | Hello | Welcome | Facts | Terms | Ready | Ask | Rows | Border | Refusal, Field(discriminator="kind")
]


def signed(token: str, who: Literal["student", "teacher"], teachers: str, students: str) -> str:
    """Return the signature of the teacher's and the student's random number: HMAC-SHA256 with the secret as the key.

    It names who signs, so that what one side has signed is no proof of the other one.
    """
    return hmac.new(token.encode(), f"{who} {teachers} {students}".encode(), hashlib.sha256).hexdigest()
