"""The sections `data`, `rewards` and `eval`."""

from difflib import get_close_matches
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cohort.config.objects import is_unnamed
from cohort.config.section import DataPath, FunctionPath, Section, find_argument_paths


def _refuse_choice_of_split(section: "DataConfig | EvalConfig", field: str) -> None:
    for key in ("split", "name"):
        if section.path is None:
            section.refuse(key, "no path", f"remove it, or set {field}")
        elif is_unnamed(section.path):
            section.refuse(key, "rows that are a Python object", f"remove it, or give a path as {field}")


class DataConfig(Section):
    """The training prompts."""

    path: DataPath | None = Field(
        None,
        description="JSONL, JSON, Parquet or CSV file, a folder of such files or one saved by `datasets`, or a "
        "`datasets` id. Only runs with `rollout.environment` or `rollout.agent` can do without data.",
    )
    split: str = Field("train", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    prompt: str = Field(
        "prompt",
        min_length=1,
        description="Column with the prompt: text or chat messages. All other columns are passed to the rewards.",
    )
    system_prompt: str | None = Field(None, description="System message for prompts that have none.")
    apply_chat_template: bool = Field(
        True, description="Render prompts with the model's chat template. false: use the text as is."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the chat template, such as {enable_thinking: false}."
    )
    shuffle: bool = Field(True, description="Shuffle every epoch, seeded by `train.seed`. false: file order.")
    overlong_prompts: Literal["drop", "error"] = Field(
        "drop",
        description="What to do with prompts longer than `rollout.max_prompt_tokens`: drop and count them, or raise "
        "an error.",
    )

    @model_validator(mode="after")
    def _check_chat_keys(self) -> Self:
        _refuse_choice_of_split(self, "data.path")
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, key) and not self.apply_chat_template:
                self.refuse(key, "apply_chat_template: false")
        return self


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
    def _find_paths(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return find_argument_paths(info.data.get("use", ""), args, info)

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
        for key in ("scale", "clip"):
            given = getattr(self, key)
            if isinstance(given, tuple) and not given[0] < given[1]:
                raise ValueError(f"{key}: [{given[0]:g}, {given[1]:g}] must be [low, high] with low below high")
        if self.scale == 0:
            raise ValueError("scale: 0 makes every reward 0; leave this reward out, or set weight: 0 to only log it")
        return self


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling."""

    path: DataPath | None = Field(
        None,
        description="Held-out data; same formats as `data.path`. Environments that need no data can do without, for "
        "`max_prompts` trajectories.",
    )
    split: str = Field("test", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    prompt: str | None = Field(None, min_length=1, description="Prompt column. Default: `data.prompt`.")
    every: int = Field(20, ge=0, description="Evaluate every N steps (0: only before and after training).")
    before_training: bool = Field(True, description="Also evaluate the initial model.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first N prompts.")
    num_samples: int = Field(1, ge=1, description="Completions per prompt (k); mean@k and pass@k are reported.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens; 0 is off.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest completion of a model call in tokens. Default: `rollout.max_completion_tokens`.",
    )
    success_reward: str | None = Field(
        None, description="Name of the reward that defines success (accuracy, pass@k). Default: the first reward."
    )
    success_threshold: float = Field(1.0, description="A completion succeeds if that reward is at least this.")

    @model_validator(mode="after")
    def _check_greedy(self) -> Self:
        _refuse_choice_of_split(self, "eval.path")
        if self.temperature == 0:
            if self.num_samples > 1:
                raise ValueError(
                    f"num_samples: {self.num_samples} with temperature: 0 gives the same completion "
                    f"{self.num_samples} times; set a temperature above 0 (such as 0.6), or num_samples: 1"
                )
            for key in ("top_p", "top_k"):
                self.refuse(key, "temperature: 0 (greedy)")
        return self
