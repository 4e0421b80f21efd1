"""The sections `data` and `eval`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.objects import is_unnamed
from cohort.config.section import DataPath, MinP, RepetitionPenalty, Section


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
    stream: bool = Field(
        False,
        description="Read rows as they are sampled, of a file, a Hub id or an `IterableDataset`; needs `train.steps` "
        "([data.md](data.md#streams)).",
    )
    buffer_size: int = Field(
        1000, ge=1, description="With `stream`: rows that are read at a time and shuffled among each other."
    )
    sampling: Literal["uniform", "by_success"] = Field(
        "uniform",
        description="`uniform`: every epoch samples each prompt once. `by_success`: an epoch passes over prompts whose "
        "completions would likely be all right or all wrong, judging by their results so far "
        "([data.md](data.md#prompts-worth-sampling)).",
    )
    exploration: float = Field(
        0.1, gt=0, le=1, description="With `by_success`: the least probability that an epoch samples a prompt."
    )
    pass_rate: str | None = Field(
        None,
        min_length=1,
        description="With `by_success`: column with the share of right answers of a similar model, from 0 to 1, which "
        "counts as much as a group.",
    )
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

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.sampling == "uniform":
            for key in ("exploration", "pass_rate"):
                self.refuse(key, "sampling: uniform", "remove it, or set sampling: by_success")
        if not self.stream:
            self.refuse("buffer_size", "stream: false", "remove it, or set stream: true")
        elif self.sampling == "by_success":
            raise ValueError(
                "sampling: by_success needs rows that are seen again, and stream: true reads each once; use sampling: "
                "uniform, or leave out stream"
            )
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
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
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
            for key in ("top_p", "top_k", "min_p"):
                self.refuse(key, "temperature: 0 (greedy)")
        return self
