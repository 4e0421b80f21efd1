"""The `Config` schema: type, default and bounds of every key. `docs/config.md` is generated from it."""

import os
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from cohort.config.algorithm import CORRECTION_CAP, AlgorithmConfig
from cohort.config.catalogue import critic_algorithms, single_completion_algorithms, suggest_instead
from cohort.config.critic import CriticConfig
from cohort.config.data import DataConfig, EvalConfig, RewardConfig
from cohort.config.hardware import HardwareConfig
from cohort.config.model import ModelConfig
from cohort.config.optim import MUON_ON_HOST, AdamwConfig, OptimConfig
from cohort.config.quantization import Quantization, check_run
from cohort.config.reference import ReferenceConfig
from cohort.config.rollout import AutoRolloutConfig, RolloutConfig
from cohort.config.section import Section, number_or
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
        "most that fits, measured before the first step. Out of memory halves it. Changes memory, never the "
        "gradient.",
    )
    gradients_in_forward: bool = Field(
        False,
        description="Compute the LM head's gradient together with the logprobs instead of recomputing its logits in "
        "backward. Faster with large vocabularies; needs memory for one more float32 copy of the head.",
    )
    updates_per_rollout: int = Field(
        1, ge=1, description="Optimizer steps per rollout, each on all of its completions (GRPO's mu)."
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Schedule after warmup: constant, or decay to 0 at the end of the run."
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warmup steps.")
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the experts' load-balancing loss (arXiv:2101.03961, equation 4), computed over "
        "all tokens of an optimizer step. 0.001 is common; above 0 it costs one more forward pass per update. 0: off.",
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Maximum gradient norm (clipping).")
    seed: int = Field(
        0, ge=0, description="Random seed of the data order and of sampling; a run is reproducible from it."
    )

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both set the length of the run; remove one of the two")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} is more than steps: {self.steps}; use at most {self.steps}"
            )
        return self


class RunConfig(Section):
    """Run folder, checkpoints and logging."""

    dir: str = Field("runs/run", min_length=1, description="Run folder; created if it does not exist.")
    checkpoint_every: int = Field(50, ge=0, description="Save a checkpoint every N steps (0: never).")
    keep_checkpoints: int = Field(3, ge=1, description="Keep the last N checkpoints and delete older ones.")
    max_shard_size: Size = Field(
        "5GB",
        description="Maximum size of a file of saved model weights, such as 500MB. A larger tensor gets its own file.",
    )
    completions_every: int = Field(1, ge=0, description="Write completions to the run folder every N steps (0: never).")
    show_completions_every: int = Field(0, ge=0, description="Print two completions every N steps (0: never).")
    ignore_plan: bool = Field(False, description="Start even if the plan says that GPU memory is too small.")
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
        return value

    @model_validator(mode="after")
    def _check_keep_checkpoints(self) -> Self:
        # the key may have its default value: a run's config.yaml spells out every key
        if self.checkpoint_every == 0 and self.keep_checkpoints != type(self).model_fields["keep_checkpoints"].default:
            raise ValueError("keep_checkpoints has no effect with checkpoint_every: 0; remove one of the two")
        return self


class Config(Section):
    """Configuration of a run."""

    model: ModelConfig
    data: DataConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
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
    def _resolve_single_process(self) -> Self:
        if self.hardware.processes == "auto" and self.single_process_key is not None:
            # bypasses `frozen`: `Config(...)` ignores another object returned from here
            object.__setattr__(self, "hardware", self.hardware.model_copy(update={"processes": 1}))
        return self

    @model_validator(mode="after")
    def _check_rollout_gpus(self) -> Self:
        rollout, gpus = self.rollout, self.hardware.rollout_gpus
        if gpus == "auto" or rollout.engine == "auto":
            return self
        if not rollout.uses_servers:
            raise ValueError(
                f"hardware.rollout_gpus has no effect with rollout.engine: {rollout.engine}, which samples on the "
                f"training GPUs; remove it, or use rollout.engine: vllm"
            )
        if rollout.urls:
            raise ValueError(
                "hardware.rollout_gpus has no effect with rollout.urls, whose servers have their own GPUs; remove one"
            )
        if gpus == "shared" and rollout.samples_ahead:
            raise ValueError(
                f"rollout.max_staleness: {rollout.max_staleness} needs dedicated rollout GPUs, but with "
                f"hardware.rollout_gpus: shared the servers sleep during training; use max_staleness: 0, or set "
                f"rollout_gpus to a number of GPUs"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling_correction(self) -> Self:
        algorithm, rollout = self.algorithm, self.rollout
        has_none = algorithm.sampling_correction == "auto" and rollout.default_correction == "none"
        if rollout.engine != "auto" and has_none and algorithm.sampling_correction_cap != CORRECTION_CAP:
            raise ValueError(
                f"algorithm.sampling_correction_cap has no effect with rollout.engine: {rollout.engine}, for "
                f"which sampling_correction: auto means none; remove it, or set sampling_correction"
            )
        corrects_stale = rollout.samples_ahead and rollout.stale_completions == "correct"
        if corrects_stale and algorithm.sampling_correction == "none":
            raise ValueError(
                "rollout.stale_completions: correct has no effect with algorithm.sampling_correction: none; use "
                "sampling_correction: token_truncate, or stale_completions: drop"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.reference is None:
            return self
        if self.algorithm.beta == 0:
            raise ValueError(
                "reference has no effect with algorithm.beta: 0, which turns the KL term off; remove the section, or "
                "set algorithm.beta above 0 (such as 0.04)"
            )
        if self.model.adapter is not None:
            raise ValueError(
                "reference has no effect with model.adapter: the reference is the model with the initial adapter, and "
                "takes no extra memory; remove the section, or the adapter"
            )
        if self.reference.device == "cpu" and self.hardware.processes not in (1, "auto"):
            raise ValueError(
                f"reference.device: cpu needs a single process, but hardware.processes is {self.hardware.processes} "
                f"(which shards the reference anyway); use reference.device: auto, or hardware.processes: 1"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.optim.offload and self.model.adapter is not None:
            raise ValueError(
                "optim.offload: true with model.adapter saves almost nothing: only the small adapter is trained, and "
                "the model stays on the GPU; remove optim.offload, or the adapter"
            )
        if not self.model.parameter_offload:
            return self
        if self.model.adapter is not None:
            raise ValueError(
                "model.parameter_offload: true with model.adapter would copy the frozen weights from host memory twice "
                "per micro-batch; remove model.parameter_offload, and use model.dtype: bfloat16 to halve the weights"
            )
        if self.optim.offload:
            raise ValueError(
                "optim.offload has no effect with model.parameter_offload: true, which offloads the optimizer state "
                "too; remove one (optim.offload alone keeps the weights on the GPU, which is faster)"
            )
        if self.optim.name == "muon":
            raise ValueError(f"model.parameter_offload: true with optim.name: muon: {MUON_ON_HOST}")
        if self.reference is not None and self.reference.device == "cpu":
            raise ValueError(
                "reference.device: cpu has no effect with model.parameter_offload: true, which keeps the reference in "
                "host memory too; remove it"
            )
        if self.reference is not None and self.reference.quantization is not None:
            raise ValueError(
                f"reference.quantization: {self.reference.quantization} saves no GPU memory with "
                f"model.parameter_offload: true, which keeps the reference in host memory; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_max_shard_size(self) -> Self:
        size = self.run.max_shard_size
        saves_a_model = self.model.adapter is None or self.algorithm.needs_critic
        if not saves_a_model and size != RunConfig.model_fields["max_shard_size"].default:
            raise ValueError(
                f"run.max_shard_size: {size} has no effect with model.adapter, which is saved in one file; remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        for field, kind in self.quantized():
            check_run(
                field,
                kind,
                processes=self.hardware.processes,
                engine=self.rollout.engine,
                shares_weights=self.rollout.shares_weights,
            )
        return self

    def quantized(self) -> list[tuple[str, Quantization]]:
        """Return the keys that quantize weights, with their values."""
        reference = None if self.reference is None else self.reference.quantization
        keys = (("model.quantization", self.model.quantization), ("reference.quantization", reference))
        return [(field, kind) for field, kind in keys if kind is not None]

    @model_validator(mode="after")
    def _check_router_loss(self) -> Self:
        coefficient = self.train.router_aux_loss_coef
        if coefficient and (self.model.adapter is not None or "routers" in self.model.freeze):
            frozen = "model.adapter" if self.model.adapter is not None else "model.freeze: [routers]"
            raise ValueError(
                f"train.router_aux_loss_coef: {coefficient:g} has no effect with {frozen}, which freezes the "
                f"routers; remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        algorithm, generations = self.algorithm, self.rollout.num_generations
        if generations < algorithm.min_generations:
            if generations > 1:
                raise ValueError(
                    f"rollout.num_generations: {generations} is less than algorithm.at_k: {algorithm.at_k}, so "
                    f"nothing would be learned; use at least {algorithm.min_generations}, or a smaller at_k"
                )
            raise ValueError(
                f"rollout.num_generations: {generations} with algorithm.name: {algorithm.name} (advantage: "
                f"{algorithm.advantage}): a group of one has nothing to compare with, so its advantage is always 0 and "
                f"nothing would be learned; use at least {algorithm.min_generations} (8 is common), or "
                f"{suggest_instead(algorithm.name, algorithm.advantage, single_completion_algorithms())}, which work "
                f"with one completion per prompt"
            )
        if self.critic is not None and not algorithm.needs_critic:
            raise ValueError(
                f"critic has no effect with algorithm.name: {algorithm.name} (advantage: {algorithm.advantage}), which "
                f"has no critic; remove the section, or use "
                f"{suggest_instead(algorithm.name, algorithm.advantage, critic_algorithms())}"
            )
        steps, warmup = self.train.steps, self.critic.warmup_steps if self.critic else 0
        if steps is not None and warmup >= steps:
            raise ValueError(
                f"critic.warmup_steps: {warmup} leaves no step of train.steps: {steps} that trains the policy; use "
                f"at most {steps - 1}"
            )
        if self.train.gradients_in_forward and algorithm.sequence_level_key:
            raise ValueError(
                f"algorithm.{algorithm.sequence_level_key} needs the logprobs of whole completions, but "
                f"train.gradients_in_forward: true computes the loss tile by tile; use gradients_in_forward: false, or "
                f"token-level components (policy_loss: clipped, sampling_correction: token_truncate)"
            )
        return self

    @model_validator(mode="after")
    def _check_learning_signal(self) -> Self:
        algorithm, prompts = self.algorithm, self.train.prompts_per_step
        generations, resample = self.rollout.num_generations, self.rollout.resample
        kl_in_reward = algorithm.kl_in == "reward"
        needed = max((part.min_completions for part in algorithm.components()), default=1)
        if generations * prompts < needed and not kl_in_reward:
            raise ValueError(
                f"train.prompts_per_step: {prompts} with rollout.num_generations: {generations}: advantage: "
                f"{algorithm.advantage} compares the completions of a step; with a single one it is always 0 and "
                f"nothing would be learned; use prompts_per_step: {needed} or more (16 is common), or more generations"
            )
        if generations == 1 and resample:
            raise ValueError(
                f"rollout.resample: {resample} with rollout.num_generations: 1 would replace every "
                f"group, since the rewards of a group of one are always equal; use resample: 0, or more generations"
            )
        if resample and any(part.learns_from_equal_rewards for part in algorithm.components()):
            raise ValueError(
                f"rollout.resample: {resample} would replace useful groups: advantage: "
                f"{algorithm.advantage} also learns from groups whose rewards are equal; use resample: 0, or an "
                f"advantage that compares within the group, such as group_mean_std"
            )
        if resample and kl_in_reward:
            raise ValueError(
                f"rollout.resample: {resample} would replace useful groups: with algorithm.kl_in: reward, completions "
                f"with equal rewards still differ in their KL penalty; use resample: 0, or kl_in: loss"
            )
        return self

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        algorithm, updates = self.algorithm, self.train.updates_per_rollout
        parts = algorithm.components()
        if updates > 1 and not all(part.has_ratio for part in parts):
            raise ValueError(
                f"train.updates_per_rollout: {updates} with algorithm.policy_loss: {algorithm.policy_loss}: "
                f"this loss has no importance ratio, so it is off-policy from the second update on; use "
                f"updates_per_rollout: 1, or policy_loss: clipped or cispo"
            )
        for i, reward in enumerate(self.rewards):
            if (reward.weight < 0 or reward.use == "overlong") and not all(
                part.allows_negative_rewards for part in parts
            ):
                what = f"weight: {reward.weight:g}" if reward.weight < 0 else "use: overlong"
                raise ValueError(
                    f"rewards.{i}.{what} makes rewards negative, and algorithm.advantage: {algorithm.advantage} needs "
                    f"rewards of at least 0; remove it, or use another advantage such as group_mean_std"
                )
        return self


# Sections with several variants, and the key that selects one.
UNIONS = {"rollout": "engine", "optim": "name"}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that a field of `Config` accepts: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]
