"""The sections of what is trained and evaluated on: `data`, `rewards` and `eval`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import Section


class DataConfig(Section):
    """The training prompts."""

    path: str = Field(
        min_length=1,
        description="JSONL, JSON, Parquet or CSV file, a folder of such files or one saved by `datasets`, or a "
        "`datasets` id.",
    )
    split: str = Field("train", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    prompt: str = Field(
        "prompt",
        min_length=1,
        description="Column with the prompt: text or chat messages. All other columns reach the rewards.",
    )
    system_prompt: str | None = Field(None, description="System message put before every prompt that has none.")
    apply_chat_template: bool = Field(
        True, description="Render prompts with the model's chat template. false: text is fed as it is."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the chat template, such as {enable_thinking: false}."
    )
    shuffle: bool = Field(True, description="A new order every epoch, from `train.seed`. false: file order.")
    overlong_prompts: Literal["drop", "error"] = Field(
        "drop", description="What becomes of prompts over `rollout.max_prompt_tokens`: dropped and counted, or refused."
    )

    @model_validator(mode="after")
    def _no_chat_keys_without_a_template(self) -> Self:
        for key in ("system_prompt", "chat_template_kwargs"):
            if not self.apply_chat_template and getattr(self, key):
                raise ValueError(f"{key} has no effect with apply_chat_template: false; remove one of the two")
        return self


class RewardConfig(Section):
    """One reward function."""

    use: str = Field(
        min_length=1,
        description="`math`, `format`, `exact`, `overlong`, `file.py:function` or `package.module:function`.",
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    name: str | None = Field(None, min_length=1, description="Name in the metrics. Default: the function's name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments for the function.")
    timeout_s: float = Field(300.0, gt=0, description="Deadline in seconds for scoring the completions of one step.")


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling."""

    path: str = Field(min_length=1, description="Held-out data, as `data.path`.")
    split: str = Field("test", description="Split, for folders and `datasets` ids.")
    name: str | None = Field(None, description="Configuration name of a `datasets` id.")
    prompt: str | None = Field(None, min_length=1, description="Prompt column. Default: `data.prompt`.")
    every: int = Field(20, ge=0, description="Evaluate every so many steps; 0: only before and after the run.")
    before_training: bool = Field(True, description="Also evaluate the model as it comes.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first so many prompts.")
    num_samples: int = Field(1, ge=1, description="k, completions per prompt: mean@k and pass@k are reported.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Longest completion. Default: `rollout.max_completion_tokens`."
    )
    success_reward: str | None = Field(
        None, description="Name of the reward that decides success (accuracy, pass@k). Default: the first reward."
    )
    success_threshold: float = Field(1.0, description="A completion succeeds when that reward is at least this.")

    @model_validator(mode="after")
    def _greedy_has_one_answer(self) -> Self:
        if self.temperature == 0:
            if self.num_samples > 1:
                raise ValueError(
                    f"num_samples: {self.num_samples} with temperature: 0 gives the same completion "
                    f"{self.num_samples} times; set a temperature above 0 (such as 0.6), or num_samples: 1"
                )
            for key, off in (("top_p", 1.0), ("top_k", 0)):
                if getattr(self, key) != off:
                    raise ValueError(f"{key} has no effect with temperature: 0 (greedy); remove one of the two")
        return self
