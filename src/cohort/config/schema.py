"""The `Config` schema: type, default and bounds of every key, and checks of keys against each other."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from cohort.config.algorithm import AlgorithmConfig
from cohort.config.catalogue import critic_algorithms, single_completion_algorithms, suggest_instead
from cohort.config.data import DataConfig, EvalConfig
from cohort.config.hardware import HardwareConfig, SandboxConfig
from cohort.config.model import CriticConfig, ModelConfig, Quantization, ReferenceConfig, check_run
from cohort.config.optim import MUON_ON_HOST, AdamwConfig, OptimConfig
from cohort.config.rewards import RewardConfig
from cohort.config.rollout import AutoRolloutConfig, RolloutConfig
from cohort.config.section import Section, Size, expand_home, must_be, number_or
from cohort.errors import UserError


def check_sections(config: "Config") -> None:
    """Reject keys without effect and misleading combinations.

    Raises:
        ValueError: names the keys, their values and what works.
    """
    for check in (
        _check_inputs,
        _check_turns,
        _check_gates,
        _check_rollout_gpus,
        _check_sampling_correction,
        _check_reference,
        _check_adapter,
        _check_offload,
        _check_optimizer,
        _check_quantization,
        _check_algorithm,
        _check_learning_signal,
        _check_components,
        _check_sandbox,
    ):
        check(config)


def _check_inputs(config: "Config") -> None:
    """Check that there are data and rewards, which an environment or agent may bring."""
    brings_its_own = _has_environment(config)
    if not config.data.is_given and not brings_its_own:
        raise ValueError("data.path: missing; this key is required")
    if config.data.stream:
        if config.data.path is None:
            raise ValueError("data.stream: true has no effect without data.path; remove it, or set data.path")
        if config.train.steps is None:
            raise ValueError(
                "train.steps: missing; data.stream: true reads rows as they are sampled, so their number is not known: "
                "give the number of steps (instead of epochs), or leave out data.stream"
            )
    if not config.rewards and not brings_its_own:
        raise ValueError("rewards: []: at least one reward is needed, such as [{use: math}]")
    if config.eval is not None and config.eval.rows is not None and config.data.stream:
        raise ValueError(
            f"eval.rows: {config.eval.rows} needs the number of rows, which is not known with data.stream: true; set "
            f"eval.path, or leave out data.stream"
        )
    if config.eval is not None and config.eval.rows is not None and not config.data.is_given:
        raise ValueError(f"eval.rows: {config.eval.rows} needs data.path, whose rows are held out; set it")
    if config.eval is not None and not config.eval.is_given:
        if not brings_its_own:
            raise ValueError("eval.path: missing; this key is required")
        if config.eval.max_prompts is None:
            raise ValueError("eval.max_prompts: missing; it says how many trajectories to evaluate without eval.path")


def _has_environment(config: "Config") -> bool:
    """Whether an environment or agent plays the run's trajectories; it may bring rows and a reward."""
    return config.rollout.environment is not None or config.rollout.agent is not None


def _check_turns(config: "Config") -> None:
    rollout = config.rollout
    is_builtin = isinstance(config.algorithm.advantage, str)
    if rollout.step_rewards == "per_token" and is_builtin and not config.algorithm.takes_token_rewards:
        raise ValueError(
            f"rollout.step_rewards: per_token has no effect with algorithm.advantage: {config.algorithm.advantage}, "
            f"which has one value for all tokens of a trajectory; use step_rewards: sum, or advantage: gae"
        )


def _check_gates(config: "Config") -> None:
    """Refuse a gate before nothing. The reward of an environment comes after all others."""
    if config.rewards and config.rewards[-1].gate and not _has_environment(config):
        last = len(config.rewards) - 1
        raise ValueError(f"rewards[{last}].gate: true has no effect on the last reward; list it before what it gates")


def _check_sandbox(config: "Config") -> None:
    if not config.runs_code:
        for key in type(config.sandbox).model_fields:
            config.refuse(
                f"sandbox.{key}",
                "rewards and tools that run no code",
                "remove it, or add the reward {use: code} or {use: reasoning_gym}, or the tool python",
            )


def _check_rollout_gpus(config: "Config") -> None:
    rollout, gpus = config.rollout, config.hardware.rollout_gpus
    if rollout.engine != "auto" and not rollout.uses_servers:
        reason = f"rollout.engine: {rollout.engine}, which samples on the training GPUs"
        config.refuse("hardware.rollout_gpus", reason, "remove it, or use rollout.engine: vllm")
    if rollout.uses_servers and rollout.urls:
        config.refuse("hardware.rollout_gpus", "rollout.urls, whose servers have their own GPUs")
    if gpus == "shared" and rollout.samples_ahead:
        raise ValueError(
            f"rollout.max_staleness: {rollout.max_staleness} needs dedicated rollout GPUs, but hardware.rollout_gpus "
            f"is shared, so servers sleep during training; use max_staleness: 0, or a number of rollout_gpus"
        )


def _check_sampling_correction(config: "Config") -> None:
    algorithm, rollout = config.algorithm, config.rollout
    has_none = algorithm.sampling_correction == "auto" and rollout.default_correction == "none"
    if rollout.engine != "auto" and has_none:
        reason = f"rollout.engine: {rollout.engine}, for which sampling_correction: auto means none"
        config.refuse("algorithm.sampling_correction_cap", reason, "remove it, or set sampling_correction")
    corrects_stale = rollout.samples_ahead and rollout.stale_completions == "correct"
    if corrects_stale and algorithm.sampling_correction == "none":
        raise ValueError(
            "rollout.stale_completions: correct has no effect with algorithm.sampling_correction: none; use "
            "sampling_correction: token_truncate, or stale_completions: drop"
        )


def _check_reference(config: "Config") -> None:
    reference, processes = config.reference, config.hardware.processes
    if reference is None:
        return
    if config.algorithm.beta == 0:
        raise ValueError(
            "reference has no effect with algorithm.beta: 0; remove the section, or set beta above 0 (such as 0.04)"
        )
    if config.model.adapter is not None:
        raise ValueError(
            "reference has no effect with model.adapter: the reference is the model with the initial adapter, and "
            "takes no extra memory; remove the section, or the adapter"
        )
    if reference.device == "cpu" and processes not in (1, "auto"):
        raise ValueError(
            f"reference.device: cpu needs a single process, but hardware.processes is {processes}, over which the "
            f"reference is sharded; use reference.device: auto, or processes: 1"
        )
    if config.model.parameter_offload:
        because = "model.parameter_offload: true, which keeps the reference in host memory"
        config.refuse("reference.device", because)
        if reference.quantization is not None:
            raise ValueError(
                f"reference.quantization: {reference.quantization} saves no GPU memory with {because}; remove one of "
                f"the two"
            )


def _check_adapter(config: "Config") -> None:
    adapter, coefficient = config.model.adapter, config.train.router_aux_loss_coef
    if coefficient and (adapter is not None or "routers" in config.model.freeze):
        frozen = "model.freeze: [routers]" if adapter is None else "model.adapter"
        config.refuse("train.router_aux_loss_coef", f"{frozen}, which freezes the routers")
    if adapter is None:
        return
    if config.optim.offload:
        raise ValueError(
            "optim.offload: true with model.adapter saves almost nothing, since only the adapter has optimizer state; "
            "remove one of the two"
        )
    if config.model.parameter_offload:
        raise ValueError(
            "model.parameter_offload: true with model.adapter would copy the frozen weights from host memory twice "
            "per micro-batch; remove parameter_offload, and use model.dtype: bfloat16 to halve the weights"
        )
    if not config.algorithm.needs_critic:
        config.refuse("run.max_shard_size", "model.adapter, which is saved in one file", "remove it")


def _check_offload(config: "Config") -> None:
    if not config.model.parameter_offload:
        return
    if config.optim.offload:
        raise ValueError(
            "optim.offload has no effect with model.parameter_offload: true, which offloads the optimizer state too; "
            "remove one of the two (optim.offload alone keeps the weights on the GPU, which is faster)"
        )
    if config.optim.name == "muon":
        raise ValueError(f"model.parameter_offload: true with optim.name: muon: {MUON_ON_HOST}")


def _check_optimizer(config: "Config") -> None:
    if config.optim.name != "custom":
        return
    because = "optim.name: custom, whose parameter groups have their own"
    config.refuse("train.learning_rate", because, "set lr in optim.args")
    for key, is_set in (
        ("model.parameter_offload", config.model.parameter_offload),
        (f"algorithm.advantage: {config.algorithm.advantage}, which needs a critic,", config.algorithm.needs_critic),
    ):
        if is_set:
            raise ValueError(f"{key} does not work with optim.name: custom; use another optimizer, such as adamw")


def _check_quantization(config: "Config") -> None:
    processes, rollout = config.hardware.processes, config.rollout
    for field, kind in config.quantized():
        check_run(field, kind, processes=processes, engine=rollout.engine, shares_weights=rollout.shares_weights)


def _check_algorithm(config: "Config") -> None:
    algorithm, generations = config.algorithm, config.rollout.num_generations
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
    if config.critic is not None and not algorithm.needs_critic:
        raise ValueError(
            f"critic has no effect with algorithm.name: {algorithm.name} (advantage: {algorithm.advantage}), which "
            f"has no critic; remove the section, or use "
            f"{suggest_instead(algorithm.name, algorithm.advantage, critic_algorithms())}"
        )
    steps, warmup = config.train.steps, config.critic.warmup_steps if config.critic else 0
    if steps is not None and warmup >= steps:
        raise ValueError(
            f"critic.warmup_steps: {warmup} leaves no step of train.steps: {steps} that trains the policy; use "
            f"at most {steps - 1}"
        )
    if config.train.gradients_in_forward and algorithm.sequence_level_key:
        raise ValueError(
            f"algorithm.{algorithm.sequence_level_key} needs the logprobs of whole completions, but "
            f"train.gradients_in_forward: true computes the loss tile by tile; use gradients_in_forward: false, or "
            f"token-level components (policy_loss: clipped, sampling_correction: token_truncate)"
        )


def _check_learning_signal(config: "Config") -> None:
    algorithm, prompts = config.algorithm, config.train.prompts_per_step
    generations, resample = config.rollout.num_generations, config.rollout.resample
    kl_in_reward = algorithm.kl_in == "reward"
    needed = max((part.min_completions for part in algorithm.components()), default=1)
    if generations * prompts < needed and not kl_in_reward:
        raise ValueError(
            f"train.prompts_per_step: {prompts} with rollout.num_generations: {generations}: advantage: "
            f"{algorithm.advantage} compares the completions of a step; with a single one it is always 0 and "
            f"nothing would be learned; use prompts_per_step: {needed} or more (16 is common), or more generations"
        )
    if generations == 1 and config.data.sampling == "by_success":
        raise ValueError(
            "data.sampling: by_success prefers groups with right and wrong completions, and with "
            "rollout.num_generations: 1 there are none; use at least 2, or sampling: uniform"
        )
    why = None
    if generations == 1:
        why = "every group: the rewards of a group of one are always equal", "more generations"
    elif any(part.learns_from_equal_rewards for part in algorithm.components()):
        why = f"useful groups: advantage: {algorithm.advantage} also learns from equal rewards", "group_mean_std"
    elif kl_in_reward:
        why = "useful groups: with algorithm.kl_in: reward, equal rewards differ in their KL penalty", "kl_in: loss"
    if resample and why is not None:
        raise ValueError(f"rollout.resample: {resample} would replace {why[0]}; use resample: 0, or {why[1]}")


def _check_components(config: "Config") -> None:
    algorithm, updates = config.algorithm, config.train.updates_per_rollout
    parts = algorithm.components()
    if updates > 1 and not all(part.has_ratio for part in parts):
        raise ValueError(
            f"train.updates_per_rollout: {updates} with algorithm.policy_loss: {algorithm.policy_loss}: "
            f"this loss has no importance ratio, so it is off-policy from the second update on; use "
            f"updates_per_rollout: 1, or policy_loss: clipped or cispo"
        )
    for i, reward in enumerate(config.rewards):
        is_negative = reward.weight < 0 or reward.use == "overlong"
        if is_negative and not all(part.allows_negative_rewards for part in parts):
            what = f"weight: {reward.weight:g}" if reward.weight < 0 else "use: overlong"
            raise ValueError(
                f"rewards.{i}.{what} makes rewards negative, and algorithm.advantage: {algorithm.advantage} needs "
                f"rewards of at least 0; remove it, or use another advantage such as group_mean_std"
            )


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
RECENT_STEP_TOKENS = 2_000_000  # of a step, the first groups; ranks send rank 0 what they computed for these


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
        "`cohort view`. Costs no computation, only disk: about 7 bytes per token that is trained on. auto: of the "
        f"last {RECENT_STEPS} steps, at most {RECENT_TOKENS_SIZE}, and of the first {RECENT_STEP_TOKENS:,} tokens of "
        "each.",
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
    decide_first: tuple[str, ...] = Field(
        (),
        description="Decisions that `cohort convert` leaves open. `cohort train` refuses until the list is empty.",
    )

    @model_serializer(mode="wrap")
    def _without_empty_decisions(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = serialize(self)
        if not self.decide_first:
            found.pop("decide_first", None)
        return found

    def check_settled(self) -> None:
        """Refuse a converted configuration whose decisions are open.

        Raises:
            UserError: names the first one.
        """
        if self.decide_first:
            raise UserError(
                f"decide_first: {len(self.decide_first)} open: {'; '.join(map(repr, self.decide_first)):.600}; settle "
                f"each of them in this configuration, then remove it from the list"
            )

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
    def runs_code(self) -> bool:
        """Whether the run executes code in the sandbox."""
        return (
            any(reward.use in ("code", "reasoning_gym") for reward in self.rewards)
            or any(tool.use == "python" for tool in self.rollout.tools)
            or any(spec.use.startswith("reasoning_gym:") for spec in self.rollout.environments.values())
        )

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

    @field_validator("data", mode="before")
    @classmethod
    def _take_list_of_sources(cls, value: Any) -> Any:
        return {"sources": value} if isinstance(value, list | tuple) else value

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
