"""Answers about steps, groups, completions and evaluations, as in `cohort_view.records`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cohort.health.explain import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A step of which completions are kept."""

    step: int
    kinds: Sequence[str]
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepList:
    """Steps around one."""

    steps: Sequence[StepFile]
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    """A completion in the list of a group."""

    row: int
    reward: float | None
    advantage: float | None
    length: int | None
    end: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group in the list of a step."""

    index: int
    prompt_id: Any
    prompt: str
    size: int
    reward_mean: float | None
    reward_std: float | None
    equal: bool
    length_mean: float | None
    length_max: int | None
    clipped: int | None
    staleness: int | None
    broken: int
    rows: Sequence[CompletionRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The groups of a step."""

    step: int
    kind: str
    metrics: Mapping[str, float]
    explanation: Explanation | None
    num_groups: int
    groups: Sequence[GroupRow]
    reward_names: Sequence[str]
    environment_names: Sequence[str]
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompletion:
    """A completion as compared within its group."""

    row: int
    text: str = ""
    cut: bool = False  # whether texts are incomplete because they are too long
    messages: Any = None
    calls: Any = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    advantage: float | None = None
    length: int | None = None  # tokens sampled
    end: str | None = None
    policy_version: int | None = None
    error: str | None = None
    environment: Mapping[str, float | None] = field(default_factory=dict)
    model_s: float | None = None
    environment_s: float | None = None
    tool_calls: int | None = None
    same_prefix: int = 0  # characters shared with the group's first completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group's prompt and completions."""

    step: int
    kind: str
    index: int
    prompt: Any  # text or chat messages
    completions: Sequence[GroupCompletion]
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDiff:
    """Differences between two completions, word by word."""

    step: int
    kind: str
    a: int  # rows
    b: int
    ops: Sequence[tuple[str, str, str]]  # "equal", "replace", "delete" or "insert"; text of a; text of b
    cut: bool  # whether texts are incomplete because they are too long
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Consecutive tokens. Texts are null without a tokenizer."""

    ids: Sequence[int]
    texts: Sequence[str | None] | None
    special: Sequence[bool] | None
    bytes: Sequence[bool] | None  # texts that show bytes of a character that several tokens form, such as "\\xf0\\x9f"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTokens:
    """A sequence of a completion after its prompt, with what is known per token. Null: not known, or not trained."""

    prompt_tokens: int  # tokens before the first sampled one
    prompt: TokenColumns  # the last of them
    num_tokens: int  # after the prompt, sent or not
    offset: int  # of the first token sent
    tokens: TokenColumns
    loss_mask: Sequence[bool]
    sampling_logprobs: Sequence[float | None] | None
    logprobs: Sequence[float | None] | None
    ratios: Sequence[float | None] | None  # trainer's probability / sampler's
    entropies: Sequence[float | None] | None  # nats
    reference_logprobs: Sequence[float | None] | None
    advantages: Sequence[float | None] | None
    loss_weights: Sequence[float | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(GroupCompletion):
    """One completion, token by token."""

    step: int
    kind: str
    group: int | None = None
    prompt: Any = ""  # text or chat messages
    sequences: Sequence[ShownTokens] = ()
    num_tokens: int = 0  # of all sequences after their prompts
    offset: int  # tokens left out before, counted over the sequences
    limit: int  # most tokens sent
    tokenizer: str | None = None  # file that the texts of tokens come from
    recorded: bool = False  # whether there is a file of `run.record_tokens` for the step
    trained: bool | None = None  # whether the recorded tokens have a gradient; None if it is not known
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """An evaluation's accuracy with its 95% Wilson interval."""

    step: int
    accuracy: float | None
    low: float | None
    high: float | None
    num: int | None  # completions counted
    num_questions: int | None
    pass_at: Mapping[str, float]  # by k


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Held-out questions whose answers changed between two evaluations."""

    from_: int
    to: int
    num_gained: int
    num_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalQuestion:
    """A held-out question, and whether it was answered right at each evaluation."""

    prompt_id: Any
    prompt: str
    kind: str  # "never" right, "lost": right before and wrong now, "gained": wrong before and right now, or "always"
    right: Sequence[bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Held-out accuracy over the run."""

    points: Sequence[AccuracyPoint]
    flips: Sequence[Flips]
    questions: Sequence[EvalQuestion]
    num_questions: Mapping[str, int]  # by kind, also those that are not listed
    problems: Sequence[str]
