"""The `Config` schema: every key of a run with its type, default and bounds. `docs/config.md` is generated from it."""

import os
from typing import Any, Literal, Self, get_args

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
from cohort.config.section import Section
from cohort.config.sizes import Size


class TrainConfig(Section):
    """Optimization."""

    steps: int | None = Field(
        None, ge=1, description="Rollout steps of the run. Default: what `epochs` comes to, rounded up."
    )
    epochs: float | None = Field(None, gt=0, description="Passes over the prompts, instead of `steps`. Default 1.")
    prompts_per_step: int = Field(16, ge=1, description="P, prompts per step; a step has P x G completions.")
    micro_batch_tokens: int | Literal["auto"] = Field(
        8192,
        description="Hard cap on the tokens of one forward/backward, but for a sequence that is longer by itself. "
        "auto: the most that fits, found before the first step. Out of memory halves it. Changes memory, never the "
        "gradient.",
    )
    gradients_in_forward: bool = Field(
        False,
        description="Compute the gradient of the head along with the logprobs instead of computing its logits once "
        "more in backward: faster with large vocabularies, and one more float32 copy of the head in memory.",
    )
    updates_per_rollout: int = Field(
        1, ge=1, description="Optimizer steps on the same completions, each over all of them (GRPO's mu)."
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After warm-up: constant, or decay towards 0 at the end of the run."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Of the loss that keeps the experts of a mixture evenly used (arXiv:2101.03961, equation 4), over "
        "all tokens of an optimizer step: 0.001 is usual. 0: none, at no cost; else one more forward pass per update.",
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the gradient's norm to this.")
    seed: int = Field(0, ge=0, description="One seed, one run: data order and every completion's random stream.")

    @field_validator("micro_batch_tokens", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be a whole number of at least 1, or auto (the most that fits)")

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs say the same thing twice; remove one of the two")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps: {self.warmup_steps} is more than steps: {self.steps}")
        return self


class RunConfig(Section):
    """Run folder, checkpoints and logging."""

    dir: str = Field("runs/run", min_length=1, description="Folder of the run, made if it does not exist.")
    checkpoint_every: int = Field(50, ge=0, description="Checkpoint every so many steps; 0: never.")
    keep_checkpoints: int = Field(3, ge=1, description="Older checkpoints than the last so many are deleted.")
    max_shard_size: Size = Field(
        "5GB",
        description="Largest file of a saved model's weights, such as 500MB; a larger tensor has a file of its own.",
    )
    completions_every: int = Field(1, ge=0, description="Write every so many steps' completions; 0: never.")
    show_completions_every: int = Field(0, ge=0, description="Print two completions every so many steps; 0: never.")
    ignore_plan: bool = Field(False, description="Start on GPUs whose memory is too small by the run's plan.")
    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="Send the metrics there too, where the package is installed."
    )

    @field_validator("dir")
    @classmethod
    def _can_be_a_folder(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path has no character of code 0; remove it")
        if any(len(os.fsencode(part)) > 255 for part in value.split("/")):
            raise ValueError("a folder's name has at most 255 bytes; use a shorter one")
        return value

    @model_validator(mode="after")
    def _keep_what_is_made(self) -> Self:
        # the default may be written out: a run's own config.yaml has every key
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
        """Whether the reference's weights stay on the GPU beside the policy's."""
        return self.algorithm.beta > 0 and (self.reference is None or self.reference.device == "auto")

    @property
    def works_in_one_process(self) -> str | None:
        """The key and value that limit the run to one process; None if there is no such limit."""
        for field, kind in self.quantized():
            return f"{field}: {kind}"
        if self.reference is not None and self.reference.device == "cpu":
            return "reference.device: cpu"
        if self.optim.name == "adafactor":
            return "optim.name: adafactor"
        return f"hardware.device: {self.hardware.device}" if ":" in self.hardware.device else None

    @field_validator("optim", mode="before")
    @classmethod
    def _adamw_unless_named(cls, value: Any) -> Any:
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @field_validator("rollout", mode="before")
    @classmethod
    def _auto_unless_named(cls, value: Any) -> Any:
        return {"engine": "auto", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _one_process_where_no_more_work(self) -> Self:
        if self.hardware.processes == "auto" and self.works_in_one_process is not None:
            # set past the frozen section: what is given back in place of `self` is ignored where a Config is made
            object.__setattr__(self, "hardware", self.hardware.model_copy(update={"processes": 1}))
        return self

    @model_validator(mode="after")
    def _rollout_gpus_sample(self) -> Self:
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
                "hardware.rollout_gpus has no effect with rollout.urls: the servers have theirs; remove one"
            )
        if gpus == "shared" and rollout.samples_ahead:
            raise ValueError(
                f"rollout.max_staleness: {rollout.max_staleness} has no effect with hardware.rollout_gpus: shared, "
                f"where servers sleep while the policy trains; use max_staleness: 0, or GPUs that only sample"
            )
        return self

    @model_validator(mode="after")
    def _correction_suits_the_run(self) -> Self:
        algorithm, rollout = self.algorithm, self.rollout
        has_none = algorithm.sampling_correction == "auto" and rollout.default_correction == "none"
        if rollout.engine != "auto" and has_none and algorithm.sampling_correction_cap != CORRECTION_CAP:
            raise ValueError(
                f"algorithm.sampling_correction_cap has no effect with rollout.engine: {rollout.engine}, where "
                f"sampling_correction: auto is none; remove it, or set sampling_correction"
            )
        corrects_stale = rollout.samples_ahead and rollout.stale_completions == "correct"
        if corrects_stale and algorithm.sampling_correction == "none":
            raise ValueError(
                "rollout.stale_completions: correct corrects nothing with algorithm.sampling_correction: none; use "
                "sampling_correction: token_truncate, or stale_completions: drop"
            )
        return self

    @model_validator(mode="after")
    def _reference_has_an_effect(self) -> Self:
        if self.reference is None:
            return self
        if self.algorithm.beta == 0:
            raise ValueError(
                "reference has no effect with algorithm.beta: 0, where nothing is measured from it; remove the "
                "section, or set algorithm.beta above 0 (such as 0.04)"
            )
        if self.model.adapter is not None:
            raise ValueError(
                "reference has no effect with model.adapter, where the reference is the model with the adapter as it "
                "began: it takes no memory, and cannot move; remove the section, or the adapter"
            )
        if self.reference.device == "cpu" and self.hardware.processes not in (1, "auto"):
            raise ValueError(
                f"reference.device: cpu works in one process, and hardware.processes is {self.hardware.processes}, "
                f"over which the reference is spread already; use reference.device: auto, or hardware.processes: 1"
            )
        return self

    @model_validator(mode="after")
    def _offload_has_an_effect(self) -> Self:
        if self.optim.offload and self.model.adapter is not None:
            raise ValueError(
                "optim.offload: true with model.adapter: only the adapter is trained, and its state is small beside "
                "the model, which stays on the GPU; remove optim.offload, or the adapter"
            )
        if not self.model.parameter_offload:
            return self
        if self.model.adapter is not None:
            raise ValueError(
                "model.parameter_offload: true with model.adapter: every micro-batch would bring the frozen weights "
                "from host memory twice; use model.dtype: bfloat16, which halves them, and remove "
                "model.parameter_offload"
            )
        if self.optim.offload:
            raise ValueError(
                "optim.offload has no effect with model.parameter_offload: true, which has the optimizer's state in "
                "host memory too; remove one: with optim.offload alone the weights stay on the GPU, which is faster"
            )
        if self.optim.name == "muon":
            raise ValueError(f"model.parameter_offload: true with optim.name: muon: {MUON_ON_HOST}")
        if self.reference is not None and self.reference.device == "cpu":
            raise ValueError(
                "reference.device: cpu has no effect with model.parameter_offload: true, where the reference waits in "
                "host memory too; remove it"
            )
        if self.reference is not None and self.reference.quantization is not None:
            raise ValueError(
                f"reference.quantization: {self.reference.quantization} with model.parameter_offload: true, where the "
                f"reference waits in host memory, layer by layer, and takes none of the GPU's; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _shards_are_written(self) -> Self:
        size = self.run.max_shard_size
        saves_a_model = self.model.adapter is None or self.algorithm.needs_critic
        if not saves_a_model and size != RunConfig.model_fields["max_shard_size"].default:
            raise ValueError(
                f"run.max_shard_size: {size} has no effect with model.adapter, which is saved in one file; remove it"
            )
        return self

    @model_validator(mode="after")
    def _quantization_suits_the_run(self) -> Self:
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
    def _routers_are_trained(self) -> Self:
        coefficient = self.train.router_aux_loss_coef
        if coefficient and (self.model.adapter is not None or "routers" in self.model.freeze):
            frozen = "model.adapter" if self.model.adapter is not None else "model.freeze: [routers]"
            raise ValueError(
                f"train.router_aux_loss_coef: {coefficient:g} has no effect with {frozen}, where routers stay as they "
                f"are; remove one"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_suits_the_run(self) -> Self:
        algorithm, generations = self.algorithm, self.rollout.num_generations
        if generations < algorithm.min_generations:
            if generations > 1:
                raise ValueError(
                    f"rollout.num_generations: {generations} is less than algorithm.at_k: {algorithm.at_k}, so that "
                    f"nothing would be learned; use at least {algorithm.min_generations}, or a smaller at_k"
                )
            raise ValueError(
                f"rollout.num_generations: {generations} with algorithm.name: {algorithm.name} (advantage: "
                f"{algorithm.advantage}): a group of one has no peers to be judged against, so its advantage is always "
                f"0 and nothing would be learned; use at least {algorithm.min_generations} (8 is usual), or "
                f"{suggest_instead(algorithm.name, algorithm.advantage, single_completion_algorithms())}, which need "
                f"no peers"
            )
        if self.critic is not None and not algorithm.needs_critic:
            raise ValueError(
                f"critic has no effect with algorithm.name: {algorithm.name} (advantage: {algorithm.advantage}), which "
                f"trains none; remove the section, or use "
                f"{suggest_instead(algorithm.name, algorithm.advantage, critic_algorithms())}"
            )
        steps, waits = self.train.steps, self.critic.warmup_steps if self.critic else 0
        if steps is not None and waits >= steps:
            raise ValueError(
                f"critic.warmup_steps: {waits} of train.steps: {steps} leave none in which the policy learns; use at "
                f"most {steps - 1}"
            )
        if self.train.gradients_in_forward and algorithm.sequence_level_key:
            raise ValueError(
                f"algorithm.{algorithm.sequence_level_key} needs the logprobs of whole completions before the "
                f"loss of any token, and train.gradients_in_forward: true computes it tile by tile; use "
                f"gradients_in_forward: false, or what looks at each token by itself (policy_loss: clipped, "
                f"sampling_correction: token_truncate)"
            )
        return self

    @model_validator(mode="after")
    def _steps_can_teach(self) -> Self:
        algorithm, prompts = self.algorithm, self.train.prompts_per_step
        generations, resample = self.rollout.num_generations, self.rollout.resample
        kl_in_reward = algorithm.kl_in == "reward"
        needed = max((part.min_completions for part in algorithm.components()), default=1)
        if generations * prompts < needed and not kl_in_reward:
            raise ValueError(
                f"train.prompts_per_step: {prompts} with rollout.num_generations: {generations}: advantage: "
                f"{algorithm.advantage} compares the completions of a step, and of a single one it is always 0, so "
                f"nothing would be learned; use prompts_per_step: {needed} or more (16 is usual), or more generations"
            )
        if generations == 1 and resample:
            raise ValueError(
                f"rollout.resample: {resample} with rollout.num_generations: 1: the rewards of a group of "
                f"one are all equal, so every group would be replaced; use resample: 0, or more generations"
            )
        if resample and any(part.learns_from_equal_rewards for part in algorithm.components()):
            raise ValueError(
                f"rollout.resample: {resample} would replace groups that teach: advantage: "
                f"{algorithm.advantage} learns where the rewards of a group are equal too; use resample: 0, or an "
                f"advantage that compares within the group, such as group_mean_std"
            )
        if resample and kl_in_reward:
            raise ValueError(
                f"rollout.resample: {resample} would replace groups that teach: with algorithm.kl_in: reward a group "
                f"of equal rewards is told apart by how far its completions are from the reference; use resample: 0, "
                f"or kl_in: loss"
            )
        return self

    @model_validator(mode="after")
    def _components_suit_the_run(self) -> Self:
        algorithm, updates = self.algorithm, self.train.updates_per_rollout
        parts = algorithm.components()
        if updates > 1 and not all(part.has_ratio for part in parts):
            raise ValueError(
                f"train.updates_per_rollout: {updates} with algorithm.policy_loss: {algorithm.policy_loss}: it has no "
                f"ratio to the policy that sampled, which from the second update on is another one; use "
                f"updates_per_rollout: 1, or policy_loss: clipped or cispo"
            )
        for i, reward in enumerate(self.rewards):
            if (reward.weight < 0 or reward.use == "overlong") and not all(
                part.allows_negative_rewards for part in parts
            ):
                what = f"weight: {reward.weight:g}" if reward.weight < 0 else "use: overlong"
                raise ValueError(
                    f"rewards.{i}.{what} makes rewards negative, and algorithm.advantage: {algorithm.advantage} takes "
                    f"rewards of at least 0; remove it, or use another advantage such as group_mean_std"
                )
        return self


# sections of which there are several: the key whose value says which
UNIONS = {"rollout": "engine", "optim": "name"}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field of `Config` may hold: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]
