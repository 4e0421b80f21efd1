"""The section `rewards`, and the settings of the built-in ones, which stand in `rewards.N.args`."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from cohort.config.objects import is_unnamed
from cohort.config.section import FunctionPath, InputPath, KeptPath, Section, must_be


class RewardConfig(Section):
    """One reward function."""

    use: FunctionPath = Field(
        description="A built-in reward (docs/rewards.md lists them), `file.py:function` or `package.module:function`."
    )
    weight: float = Field(1.0, description="Weight of this reward in the sum.")
    name: str | None = Field(None, min_length=1, description="Name in metrics. Default: the function's name.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Extra keyword arguments for the function. Those of a built-in reward may also stand beside `use`.",
        validate_default=True,
    )
    where: dict[str, str | int | float | bool | list[str | int | float | bool]] = Field(
        default_factory=dict,
        description="Rows that this reward is for, by columns, such as {source: math} or {source: [math, gsm8k]}. It "
        "does not score others.",
    )
    scale: float | tuple[float, float] = Field(
        1.0, description="Multiply the reward by this, before `clip`; [low, high]: map low to 0 and high to 1."
    )
    clip: tuple[float, float] | None = Field(None, description="Limit the scaled reward to [low, high].")
    gate: bool = Field(
        False,
        description="Rewards after this one are 0 for completions for which it is below 1, and are not computed. A "
        "completion that it does not score is not scored by them.",
    )
    timeout_s: float = Field(300.0, gt=0, description="Timeout in seconds for scoring one step's completions.")
    isolate: bool = Field(
        False,
        description="Run your own function in a child process. If it crashes, exits or misses `timeout_s`, the "
        "completions are not judged, and the process is started again.",
    )
    per_group: bool = Field(
        False,
        description="Your own function scores each group by itself: it is called once for each group, on the rank that "
        "the group is sent to, not once per step on rank 0. Its values must not depend on other groups or earlier "
        "calls. Built-in rewards that judge each completion by itself run on all ranks without this.",
    )

    @model_validator(mode="before")
    @classmethod
    def _collect_args(cls, values: Any) -> Any:
        """Move arguments of a built-in reward that are written beside `use` into `args`."""
        if callable(values):
            return {"use": values}
        if not isinstance(values, dict) or callable(values.get("use")) or ":" in str(values.get("use", ":")):
            return values
        keys = list(cls.model_fields)
        # a key like one of ours is a misspelling of it
        beside = {key: value for key, value in values.items() if not get_close_matches(str(key), keys, cutoff=0.8)}
        args = values.get("args", {})
        if not beside or not isinstance(args, dict):
            return values
        if both := sorted(beside.keys() & args.keys()):
            raise ValueError(f"{both[0]}: is given beside `use` and in args; remove one of the two")
        return {**{key: value for key, value in values.items() if key not in beside}, "args": {**beside, **args}}

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Check the arguments of a built-in reward, and make paths among them absolute."""
        kind = REWARD_SETTINGS.get(info.data.get("use", ""))
        if kind is None:
            return args
        settings = kind.model_validate(args, context=info.context)
        return {key: getattr(settings, key) if isinstance(value, str) else value for key, value in args.items()}

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        if self.isolate and ":" not in self.use:
            raise ValueError(
                f"isolate: true is for functions of your own, such as my_rewards.py:score, and {self.use!r} is built "
                "in; remove it"
            )
        if self.isolate and is_unnamed(self.use):
            raise ValueError(
                f"isolate: true needs a function that another process can import, and {self.use!r} is not one: define "
                "it at the top level of a file, or remove isolate"
            )
        if self.per_group and ":" not in self.use:
            raise ValueError(
                f"per_group: true is for functions of your own, such as my_rewards.py:score, and {self.use!r} is built "
                "in; remove it"
            )
        if self.per_group and is_unnamed(self.use):
            raise ValueError(
                f"per_group: true needs a function that another process can import, and {self.use!r} is not one: "
                "define it at the top level of a file, or remove per_group"
            )
        if self.per_group and self.isolate:
            raise ValueError(
                "per_group: true calls the function on every rank, and isolate: true in a child process of rank 0; "
                "remove one of the two"
            )
        for key in ("scale", "clip"):
            given = getattr(self, key)
            if isinstance(given, tuple) and not given[0] < given[1]:
                raise ValueError(f"{key}: [{given[0]:g}, {given[1]:g}] must be [low, high] with low below high")
        if self.scale == 0:
            raise ValueError("scale: 0 makes every reward 0; leave this reward out, or set weight: 0 to only log it")
        return self


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def _check_pattern(pattern: str) -> str:
    _compiled(pattern)
    return pattern


def _check_group(pattern: str) -> str:
    """Check that a pattern has exactly one group."""
    if (number := _compiled(pattern).groups) != 1:
        raise ValueError(
            f"must have exactly 1 group, the answer, but has {number}; for example 'Answer: (\\d+)', with (?:...) for "
            "other groups"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
GroupPattern = Annotated[str, AfterValidator(_check_group)]


def _answer_column(meaning: str, default: str = "answer") -> Any:
    return Field(default, description=f"Dataset column with {meaning}.")


def _deadline() -> Any:
    return Field(10.0, gt=0, description="Seconds for each answer.")


class NoSettings(Section):
    """A reward without arguments."""


class ChoiceSettings(Section):
    """Settings of `choice`."""

    answer_column: str = _answer_column(
        "the letter, such as `B`, `(b)` or `B.`, or with the number of the choice (`1` or `1.0`)"
    )
    letters: str = Field("ABCDEFGHIJ", description="The choices.")
    first_number: int | None = Field(
        None,
        ge=0,
        description="Number of the first choice, for columns with numbers (0 in MMLU). Default: none.",
    )
    pattern: GroupPattern | None = Field(
        None,
        description="Regular expression with one group, the letter; the last match counts. Default: the stated letter.",
    )

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        if not re.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
            raise ValueError("must be different capital letters, such as ABCD")
        return letters


_LANGUAGE_RULE = 'python, or {name: {"compile": command, "run": command}}, where compile is optional'


def _is_language(value: Any) -> bool:
    if value == "python":
        return True
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    [(name, commands)] = value.items()
    is_right = isinstance(commands, Mapping) and set(commands) <= {"compile", "run"} and "run" in commands
    is_right = is_right and isinstance(name, str) and re.fullmatch(r"[\w+#-]+", name) is not None
    return is_right and all(isinstance(command, str) and command for command in commands.values())


class CodeSettings(Section):
    """Settings of `code`."""

    tests_column: str = Field("tests", description="Dataset column with the tests.")
    entry_point_column: str = Field(
        "entry_point", description="Column with the name of the function under test, read if there is one."
    )
    setup_column: str = Field(
        "test_setup_code",
        description="Column with statements to run before the code, such as imports, read if there is one.",
    )
    setup: str = Field("", description="Statements to run before the code of every row.")
    score: Literal["all", "fraction"] = Field(
        "all", description="`all`: 1.0 if every test passes, else 0.0. `fraction`: the share that passes."
    )
    language: Annotated[str | dict[str, dict[str, str]], must_be(_LANGUAGE_RULE, _is_language)] = Field(
        "python",
        description="`python`, or `{name: {compile: command, run: command}}` for stdin tests of `main.name`.",
    )
    case_s: float = Field(10.0, gt=0, description="Seconds for each run of a program.")
    max_tests: int | None = Field(None, ge=1, description="Run only the first N tests. Default: all.")

    @field_validator("setup")
    @classmethod
    def _check_setup(cls, setup: str) -> str:
        try:
            compile(setup, "setup", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is not Python ({error})") from error
        return setup

    @model_validator(mode="after")
    def _check_language(self) -> Self:
        if self.language != "python":
            self.refuse("setup", f"language: {next(iter(self.language))}", "remove it")
        return self


class ExactSettings(Section):
    """Settings of `exact`."""

    answer_column: str = _answer_column("the answer; numbers are compared as text")
    pattern: GroupPattern | None = Field(
        None,
        description="Regular expression with one group, the answer; the last match counts, and no match scores 0.0. "
        "Default: all of the text, stripped.",
    )


class ExactSetSettings(Section):
    """Settings of `exact_set`."""

    answer_column: str = _answer_column("a list, or with text that is split at the separator")
    separator: str = Field(",", min_length=1, description="Text between items.")
    pattern: GroupPattern | None = Field(
        None,
        description="Regular expression with one group, the list of items; the last match counts, and no match scores "
        "0.0. Default: all of the text.",
    )
    ignore_case: bool = Field(False, description="Compare without upper and lower case.")


# One think block, then a non-empty answer. The lookahead excludes other think tags and leaves only one way to match, so
# matching takes linear time.
THINK_PATTERN = r"<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+"


class FormatSettings(Section):
    """Settings of `format`."""

    pattern: Pattern = Field(
        THINK_PATTERN,
        description="Regular expression that must match the whole completion, stripped; a dot also matches a line "
        "break. Default: exactly one `<think>...</think>`, then a non-empty answer.",
    )


class RegexSettings(Section):
    """Settings of `regex`."""

    pattern: Pattern = Field(
        description="Regular expression; a dot does not match a line break, and `^` and `$` match at each line. Use "
        "the inline flags `(?s)` and `(?i)` for others."
    )
    whole: bool = Field(False, description="The pattern must match the whole completion, stripped.")
    negate: bool = Field(False, description="1.0 if the pattern does not match.")


class JsonSchemaSettings(Section):
    """Settings of `json_schema`: one of the two."""

    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The JSON schema, as YAML.")
    schema_column: str | None = Field(
        None, description="Dataset column with each row's schema, as JSON text or as a mapping."
    )

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.schema_ is None) == (self.schema_column is None):
            raise ValueError("give either schema or schema_column")
        return self


class MathSettings(Section):
    """Settings of `math`."""

    answer_column: str = _answer_column("the gold answer")
    deadline_s: float = _deadline()


class NumberSettings(Section):
    """Settings of `number`."""

    answer_column: str = _answer_column("the number, or with text such as GSM8K's `... #### 42`")
    rel_tol: float = Field(1e-6, ge=0, description="Tolerance relative to the gold answer.")
    abs_tol: float = Field(0.0, ge=0, description="Absolute tolerance.")
    pattern: GroupPattern | None = Field(
        None,
        description="Regular expression with one group, in whose last match the number is. Default: the stated number.",
    )


class OverlongSettings(Section):
    """Settings of `overlong`."""

    buffer_tokens: int = Field(
        ge=1, description="Tokens before the limit over which the penalty grows; at most the limit."
    )
    penalty: float = Field(1.0, gt=0, description="Penalty at the limit.")


class ReasoningGymSettings(Section):
    """Settings of `reasoning_gym`."""

    dataset: str | None = Field(
        None, description="Name of the scorer, such as `countdown`. Default: each row's `metadata.source_dataset`."
    )
    answer_tags: bool = Field(
        True,
        description="Score the text in the last `<answer>...</answer>`; false: the text after the last `</think>`.",
    )


# --- models -----------------------------------------------------------------------------------------------------------


class ServerSettings(Section):
    """Settings of rewards that ask a server."""

    api_key_env: str | None = Field(None, min_length=1, description="Environment variable with the server's key.")
    max_concurrent: int = Field(32, ge=1, description="Requests at a time.")
    request_timeout_s: float = Field(60.0, gt=0, description="Seconds for one attempt.")
    retries: int = Field(4, ge=0, description="Attempts after the first one.")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, values: Any) -> Any:
        is_mapping = isinstance(values, dict)
        return {key: value for key, value in values.items() if value is not None} if is_mapping else values


def _is_device(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"train|cpu|cuda(:\d+)?", value) is not None


class ModelSettings(ServerSettings):
    """Settings of `model`: of a model in this process with `path`, and of a server with `url`."""

    path: InputPath | None = Field(None, description="Model folder, or Hugging Face id.")
    url: str | None = Field(None, min_length=1, description="Address of a server.")
    label: Annotated[str | int | None, must_be("a name or an index", lambda x: type(x) in (str, int, type(None)))] = (
        Field(
            None,
            description="Which output is the score, by name or index. Default: the only one; of a server, the first.",
        )
    )
    truncate: Literal["left", "right"] = Field(
        "left", description="From which side longer texts are cut; `left` keeps the completion."
    )
    device: Annotated[str, must_be("train, cpu, cuda or cuda:N", _is_device)] = Field(
        "train", description="`path` only: `train` (that of the policy), `cpu`, `cuda` or `cuda:1`."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`path` only: `auto` is that of the files on a GPU, and float32 on a CPU."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="`path` only: longest text in tokens. Default: the model's limit."
    )
    batch_tokens: int = Field(16384, ge=1, description="`path` only: tokens of a batch, padding included.")
    trust_remote_code: bool = Field(False, description="`path` only: run model code from the folder.")
    api: Literal["pooling", "json"] = Field("pooling", description="`url` only: `pooling` is vLLM's.")
    model: str | None = Field(
        None,
        min_length=1,
        description="`url` with `api: pooling` only: name of the model, as the server has it. Default: the only one.",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("path or url: give one of them, a model folder or the address of a server")
        if self.path is not None:
            self._refuse_all("path", ("api", "model", *ServerSettings.model_fields))
            return self
        self._refuse_all("url", ("device", "dtype", "max_tokens", "batch_tokens", "trust_remote_code"))
        if self.api == "json":
            self._refuse_all("api: json", ("model", "label", "truncate"))
        elif isinstance(self.label, str) or (self.label or 0) < 0:
            raise ValueError(f"label: {self.label!r} must be an index of at least 0 for a server")
        return self

    def _refuse_all(self, because: str, keys: tuple[str, ...]) -> None:
        for key in keys:
            if key in self.model_fields_set:
                raise ValueError(f"{key}: has no effect with {because}; remove it")


def _check_words(values: Any) -> Any:
    """YAML reads yes and no as booleans."""
    for word in values if isinstance(values, Mapping) else ():
        if not isinstance(word, str):
            raise ValueError(f"{word!r} must be a word; put it in quotes")
    return values


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(x) in (int, float) for x in value)
    return value is None or (is_pair and value[0] < value[1])


Range = Annotated[tuple[float, float] | None, must_be("[low, high] with low below high, such as [1, 10]", _is_range)]
Words = Annotated[dict[str, float] | None, Field(min_length=1), BeforeValidator(_check_words)]
_RANGE = "[low, high] of the scores, mapped to 0 and 1; a score outside is not valid. Default: scores as they are."
_VALUES = "{word: number}, if the group is a word."


class CriterionSettings(Section):
    """One of several scores in a judge's reply. What it leaves out is as for all of them."""

    weight: float = Field(1.0, gt=0, description="Weight in the mean.")
    pattern: GroupPattern | None = Field(
        None, description="As for the judge. Default: the number in a line that begins with the criterion's name."
    )
    range: Range = Field(None, description=_RANGE)
    values: Words = Field(None, description=_VALUES)


REPLY = "reply"  # the detail with the judge's text


class JudgeSettings(ServerSettings):
    """Settings of `judge`."""

    url: str = Field(
        min_length=1, description="Address of the server, such as http://host:8000; a path other than /v1 is kept."
    )
    model: str = Field(min_length=1, description="Name of the model, as the server has it.")
    prompt: InputPath = Field(
        description="File with the prompt. `{prompt}`, `{completion}` and `{column}` are filled in."
    )
    pattern: GroupPattern | None = Field(
        None,
        description="Regular expression with one group, whose last match in the reply is the score. Default: the "
        "number in a line such as `Score: 7`.",
    )
    range: Range = Field(None, description=_RANGE)
    values: Words = Field(None, description=_VALUES)
    criteria: dict[str, CriterionSettings | None] | None = Field(
        None, min_length=1, description="{name: {weight, pattern, range, values}}. Default: one score."
    )
    sampling: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keys of the request, beside {temperature: 0, max_tokens: 1024}.",
    )
    cache: KeptPath | None = Field(
        None, description="File of the replies. Default: in the run folder, if there is one."
    )

    @model_validator(mode="after")
    def _check_criteria(self) -> Self:
        for key in ("model", "messages", "stream", "n"):
            if key in self.sampling:
                raise ValueError(f"sampling.{key}: is set by this reward; remove it")
        if self.pattern is not None and len(self.criteria or ()) > 1:
            raise ValueError("pattern: would find the same score for all criteria; set criteria.NAME.pattern instead")
        if REPLY in (self.criteria or ()):
            raise ValueError(f"criteria.{REPLY}: is the name of the column with the judge's text; use another name")
        for name, criterion in (self.criteria or {"": None}).items():
            own = criterion or CriterionSettings()
            field = f"criteria.{name}." if criterion else ""
            if (own.range or self.range) is not None and (own.values or self.values) is not None:
                raise ValueError(f"{field}range: has no effect with values; remove one of them")
        return self


# --- those of Open-R1 and TRL -----------------------------------------------------------------------------------------


class AccuracySettings(Section):
    """Settings of `open_r1.accuracy`, `open_r1.len` and `trl.accuracy`."""

    answer_column: str = _answer_column("the gold answer, as LaTeX or a number", "solution")
    deadline_s: float = _deadline()


class ReasoningAccuracySettings(AccuracySettings):
    """Settings of `trl.reasoning_accuracy`."""

    reasoning_delimiters: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("</think>",),
        min_length=1,
        description="Texts that end the reasoning; the answer follows the last occurrence of the first one that the "
        "completion has.",
    )


class CosineSettings(AccuracySettings):
    """Settings of `trl.cosine`."""

    max_len: int = Field(ge=1, description="Length at which the schedule ends.")
    min_value_wrong: float = Field(-1.0, description="Reward of the shortest wrong answer.")
    max_value_wrong: float = Field(-0.5, description="Reward of the longest wrong answer.")
    min_value_correct: float = Field(0.5, description="Reward of the longest correct answer.")
    max_value_correct: float = Field(1.0, description="Reward of the shortest correct answer.")


class CharacterCosineSettings(CosineSettings):
    """Settings of `open_r1.cosine`."""

    max_len: int = Field(1000, ge=1, description="Length in characters at which the schedule ends.")


class CodeFormatSettings(Section):
    """Settings of `open_r1.code_format`."""

    language: Pattern = Field("python", description="Regular expression for the language after the opening fence.")
    language_column: str | None = Field(
        None, description="Dataset column with each row's language, instead of `language`."
    )


class RepetitionSettings(Section):
    """Settings of `trl.repetition_penalty`."""

    ngram_size: int = Field(3, ge=1, description="Tokens of an n-gram.")
    max_penalty: float = Field(-1.0, le=0, description="The limit for a text that only repeats itself.")


class WordRepetitionSettings(Section):
    """Settings of `open_r1.repetition_penalty`."""

    ngram_size: int = Field(ge=1, description="Words of an n-gram.")
    max_penalty: float = Field(le=0, description="The limit for a text that only repeats itself.")
    language: Literal["en", "zh"] = Field(
        "en", description="`en` splits words at white space; `zh` needs the package jieba."
    )


class SoftOverlongSettings(Section):
    """Settings of `open_r1.soft_overlong` and `trl.soft_overlong`."""

    max_completion_len: int = Field(
        ge=1, description="Tokens at which the penalty is -1.0; longer completions get no more."
    )
    soft_punish_cache: int = Field(ge=0, description="Tokens before that over which the penalty grows.")

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.soft_punish_cache > self.max_completion_len:
            raise ValueError(
                f"soft_punish_cache: {self.soft_punish_cache} must be at most max_completion_len, "
                f"{self.max_completion_len}"
            )
        return self


REWARD_SETTINGS: Mapping[str, type[Section]] = {
    "choice": ChoiceSettings,
    "code": CodeSettings,
    "exact": ExactSettings,
    "exact_set": ExactSetSettings,
    "format": FormatSettings,
    "json_schema": JsonSchemaSettings,
    "judge": JudgeSettings,
    "math": MathSettings,
    "model": ModelSettings,
    "number": NumberSettings,
    "open_r1.accuracy": AccuracySettings,
    "open_r1.code_format": CodeFormatSettings,
    "open_r1.cosine": CharacterCosineSettings,
    "open_r1.format": NoSettings,
    "open_r1.len": AccuracySettings,
    "open_r1.reasoning_steps": NoSettings,
    "open_r1.repetition_penalty": WordRepetitionSettings,
    "open_r1.soft_overlong": SoftOverlongSettings,
    "open_r1.tag_count": NoSettings,
    "overlong": OverlongSettings,
    "reasoning_gym": ReasoningGymSettings,
    "regex": RegexSettings,
    "trl.accuracy": AccuracySettings,
    "trl.cosine": CosineSettings,
    "trl.reasoning_accuracy": ReasoningAccuracySettings,
    "trl.repetition_penalty": RepetitionSettings,
    "trl.soft_overlong": SoftOverlongSettings,
    "trl.think_format": NoSettings,
}
