"""The `Config` schema: type, default and bounds of every key. `docs/config.md` is generated from it."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from cohort.config.algorithm import AlgorithmConfig
from cohort.config.checks import check_sections
from cohort.config.critic import CriticConfig
from cohort.config.data import DataConfig, EvalConfig, RewardConfig
from cohort.config.hardware import HardwareConfig
from cohort.config.model import ModelConfig
from cohort.config.optim import AdamwConfig, OptimConfig
from cohort.config.paths import expand_home
from cohort.config.quantization import Quantization
from cohort.config.reference import ReferenceConfig
from cohort.config.rollout import AutoRolloutConfig, RolloutConfig
from cohort.config.sandbox import SandboxConfig
from cohort.config.section import Section, must_be, number_or
from cohort.config.sizes import Size


class TrainConfig(Section):
    """Batch size, learning rate and schedule."""

    steps: int | None = Field(
        None, ge=1, description="Number of rollout steps. Default: computed from `epochs`, rounded up."
    )
    epochs: float | None = Field(
        None, gt=0, description="Passes over the prompts, as an alternative to `steps`. Default: 1."
    )
    prompts_per_step: int = Field(16, ge=1, description="P, prompts per step; a step has P x G completions.")
    micro_batch_tokens: Annotated[
        int | Literal["auto"],
        number_or("auto", rule="a whole number of at least 1, or auto (the most that fits)", is_valid=lambda n: n >= 1),
    ] = Field(
        8192,
        description="Token budget: maximum tokens in a forward/backward pass. A longer sequence runs alone. auto: the "
        "most that fits, measured before the first step. Out of memory at least halves it. Changes memory, never the "
        "gradient.",
    )
    gradients_in_forward: bool = Field(
        False,
        description="Compute the LM head's gradient together with the logprobs instead of recomputing its logits in "
        "backward (fused or chunked loss, as in Liger). Faster with large vocabularies; needs memory for one more "
        "float32 copy of the head.",
    )
    updates_per_rollout: int = Field(
        1, ge=1, description="Optimizer steps per rollout, each on all of its completions (GRPO's mu)."
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Schedule after warmup: constant, or decay to `min_lr_ratio` at the end of the run.",
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Learning rate at the end of a linear or cosine schedule, as a fraction of `learning_rate`.",
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warmup steps.")
    warmup_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Linear warmup as a fraction of all steps, rounded up; an alternative to `warmup_steps`.",
    )
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the experts' load-balancing loss (arXiv:2101.03961, equation 4), computed over "
        "all tokens of an optimizer step. 0.001 is common; above 0 it costs one more forward pass per update. 0: off.",
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Maximum gradient norm (clipping).")
    seed: int = Field(
        0,
        ge=0,
        description="Random seed of the data order and of sampling; a run is reproducible from it "
        "(on GPUs up to rounding).",
    )

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both set the length of the run; remove one of the two")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} is more than steps: {self.steps}; use at most {self.steps}"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both set the warmup; remove one of the two")
        if self.lr_schedule == "constant":
            self.refuse("min_lr_ratio", "lr_schedule: constant", "remove it, or use lr_schedule: cosine or linear")
        return self

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the warmup steps of a run of `num_steps` steps."""
        return self.warmup_steps or math.ceil(round(self.warmup_ratio * num_steps, 6))


# What `run.record_tokens: auto` keeps.
RECENT_STEPS = 20
RECENT_TOKENS_SIZE = "200MB"


class RunConfig(Section):
    """Run folder, checkpoints and logging."""

    dir: str = Field(
        "runs/run", min_length=1, validate_default=True, description="Run folder; created if it does not exist."
    )
    checkpoint_every: int = Field(50, ge=0, description="Save a checkpoint every N steps (0: never).")
    keep_checkpoints: int = Field(3, ge=1, description="Keep the last N checkpoints and delete older ones.")
    max_shard_size: Size = Field(
        "5GB",
        description="Maximum size of a file of saved model weights, such as 500MB. A larger tensor gets its own file.",
    )
    completions_every: int = Field(1, ge=0, description="Write completions to the run folder every N steps (0: never).")
    record_tokens: Annotated[
        bool | Literal["auto"],
        must_be("true, false or auto", lambda x: isinstance(x, bool) or x == "auto"),
    ] = Field(
        "auto",
        description="Also write each token's logprob, entropy, advantage and loss weight in training (tokens/), for "
        "`cohort view`. Costs no computation, only disk: about 10 bytes per token that is trained on. auto: of the "
        f"last {RECENT_STEPS} steps, at most {RECENT_TOKENS_SIZE}.",
    )
    record_tokens_max_size: Size = Field(
        "1GB",
        description="With record_tokens: true, maximum size of these files. Beyond it, files are deleted so that the "
        "newest and evenly spread steps remain.",
    )
    show_completions_every: int = Field(0, ge=0, description="Print two completions every N steps (0: never).")
    ignore_plan: bool = Field(False, description="Start even if the plan says that GPU memory is too small.")
    view: bool = Field(
        False,
        description="Start the page that shows the run (`cohort view`) with the run, and print its address.",
    )
    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="Also send metrics to these trackers. Their packages must be installed."
    )

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot contain a null character; remove it")
        if any(len(os.fsencode(part)) > 255 for part in value.split("/")):
            raise ValueError("a folder name is limited to 255 bytes; use a shorter one")
        return str(Path(expand_home(value)).absolute())

    @model_validator(mode="after")
    def _check_keys_without_effect(self) -> Self:
        if self.checkpoint_every == 0:
            self.refuse("keep_checkpoints", "checkpoint_every: 0")
        if self.completions_every == 0 and self.record_tokens is True:
            self.refuse("record_tokens", "completions_every: 0")
        if self.record_tokens is not True:
            shown = str(self.record_tokens).lower()
            self.refuse("record_tokens_max_size", f"record_tokens: {shown}", "remove it, or use record_tokens: true")
        return self


class Config(Section):
    """Configuration of a run."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    rewards: tuple[RewardConfig, ...] = ()
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    rollout: RolloutConfig = Field(default_factory=AutoRolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig | None = None
    critic: CriticConfig | None = None
    train: TrainConfig = Field(default_factory=TrainConfig)
    optim: OptimConfig = Field(default_factory=AdamwConfig)
    eval: EvalConfig | None = None
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @property
    def eval_max_new_tokens(self) -> int:
        """Maximum tokens after a prompt in evaluations. With turns, `eval.max_completion_tokens` limits one call."""
        if self.eval is None or self.eval.max_completion_tokens is None or self.rollout.has_turns:
            return self.rollout.max_new_tokens
        return self.eval.max_completion_tokens

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference's weights stay on the GPU along with the policy's."""
        return self.algorithm.beta > 0 and (self.reference is None or self.reference.device == "auto")

    @property
    def single_process_key(self) -> str | None:
        """The key (with its value) that limits the run to one process; None if there is none."""
        for field, kind in self.quantized():
            return f"{field}: {kind}"
        if self.reference is not None and self.reference.device == "cpu":
            return "reference.device: cpu"
        if self.optim.name == "adafactor":
            return "optim.name: adafactor"
        return f"hardware.device: {self.hardware.device}" if ":" in self.hardware.device else None

    @field_validator("optim", mode="before")
    @classmethod
    def _default_to_adamw(cls, value: Any) -> Any:
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @field_validator("rollout", mode="before")
    @classmethod
    def _default_to_auto(cls, value: Any) -> Any:
        return {"engine": "auto", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _resolve_and_check(self) -> Self:
        if self.hardware.processes == "auto" and self.single_process_key is not None:
            # bypasses `frozen`: `Config(...)` ignores another object returned from here
            object.__setattr__(self, "hardware", self.hardware.model_copy(update={"processes": 1}))
        check_sections(self)
        return self

    def quantized(self) -> list[tuple[str, Quantization]]:
        """Return the keys that quantize weights, with their values."""
        reference = None if self.reference is None else self.reference.quantization
        keys = (("model.quantization", self.model.quantization), ("reference.quantization", reference))
        return [(field, kind) for field, kind in keys if kind is not None]


# Sections with several variants, and the key that selects one.
UNIONS = {"rollout": "engine", "optim": "name"}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that a field of `Config` accepts: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]
