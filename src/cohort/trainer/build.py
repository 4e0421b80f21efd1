"""Build the worker of each rank: models, optimizers and sampler."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from cohort.algorithms import Algorithm, build_algorithm
from cohort.config import Config, CriticConfig, TrainConfig
from cohort.config.section import parse_size
from cohort.errors import UserError
from cohort.learner import CriticEngine, TokenBudget, TrainEngine, check_optimizer, learning_rate_factor
from cohort.metrics.resources import PeakMemory
from cohort.models import (
    CollectiveCounter,
    Critic,
    LoadRequest,
    Policy,
    SaveOptions,
    end_token_ids,
    load_critic,
    load_policy,
)
from cohort.plan.defaults import with_checkpointing
from cohort.plan.workload import Checkpointing
from cohort.ranks.collectives import Rank0Failed, Ranks
from cohort.rewards.load_rewards import load_per_group
from cohort.rewards.math_workers import workers_per_process
from cohort.rewards.per_group import GroupScorer
from cohort.rollout import Sampler
from cohort.trainer.checkpoint import CRITIC, load_engine_state
from cohort.trainer.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that other ranks need from rank 0 to build their workers."""

    folder: Path  # run folder
    num_steps: int
    checkpoint: Path | None  # to resume from
    micro_batch_tokens: int  # initial token budget
    longest_sequence_tokens: int  # longest possible sequence
    gradient_checkpointing: Checkpointing | Literal["auto"] = "auto"  # chosen by rank 0; auto: as configured
    dp_replicate: int = 1  # copies of the model
    sync_each_micro_batch: bool = True  # see `Sharding`


def build_worker(config: Config, ranks: Ranks, spec: WorkerSpec, *, device: torch.device, tokenizer: Any) -> Worker:
    """Build this rank's worker, with weights from the model or a checkpoint. Every rank calls this.

    Args:
        config: the same on every rank.
        ranks: training processes.
        spec: received from rank 0.
        device: device of this rank.
        tokenizer: the tokenizer on rank 0; None on other ranks.

    Raises:
        UserError: on rank 0, if the model is not supported or a machine cannot see the run folder.
        Rank0Failed: on the other ranks in that case.
    """
    if spec.gradient_checkpointing != "auto":
        config = with_checkpointing(config, spec.gradient_checkpointing)
    ranks = replace(ranks, dp_replicate=spec.dp_replicate)
    rollout, critic_config = config.rollout, config.critic or CriticConfig()
    resharding = config.hardware.reshard_after_forward
    ranks.run_on_rank0(lambda: check_optimizer(config.optim, ranks.dp_size))
    _check_folder_is_shared(spec.folder, ranks)
    request = LoadRequest(
        config.model,
        device=device,
        tokenizer=tokenizer,
        ranks=ranks,
        collectives=CollectiveCounter(),
        longest_sequence_tokens=spec.longest_sequence_tokens,
        offload_master_weights=config.optim.offload,
        reshard_after_forward=True if resharding == "auto" else resharding,
        sync_each_micro_batch=spec.sync_each_micro_batch,
    )
    algorithm = build_algorithm(
        config.algorithm,
        max_completion_tokens=rollout.max_trained_tokens,
        auto_correction=rollout.default_correction,
        value_clip=critic_config.value_clip,
    )
    policy = load_policy(_policy_request(request, config, algorithm, spec))
    ranks.run_on_rank0(lambda: _check_head(config, policy))
    reference = build_reference(config, algorithm, policy, request)
    critic = _load_critic(critic_config, policy, spec, request) if algorithm.critic else None
    ends = ranks.run_on_rank0(lambda: end_token_ids(policy, tokenizer))
    engine = _engine(config, algorithm, policy, reference, spec, ranks)
    ranks.run_on_rank0(lambda: _check_schedule(config, engine))
    decoder = tokenizer if rollout.uses_servers else _share_tokenizer(tokenizer, ranks)
    worker = Worker(
        ranks=ranks,
        policy=policy,
        algorithm=algorithm,
        engine=engine,
        critic=None if critic is None else _critic_engine(config, critic_config, critic, spec, engine),
        sampler=Sampler(
            policy, end_token_ids=ends, max_num_seqs=rollout.max_num_seqs, tokenizer=decoder, stop=ranks.stop
        ),
        tokenizer=tokenizer,
        memory=PeakMemory(device),
        scorer=GroupScorer(
            partial(
                load_per_group,
                config.rewards,
                max_completion_tokens=rollout.max_trained_tokens,
                num_workers=workers_per_process(config.hardware.reward_workers),
            )
        ),
        save_options=SaveOptions(max_shard_bytes=parse_size(config.run.max_shard_size)),
    )
    if spec.checkpoint is not None:
        engine_state = worker.engine_state()
        load_engine_state(spec.checkpoint, engine_state, ranks)
        worker.load_engine_state(engine_state)
    return worker


def _share_tokenizer(tokenizer: Any, ranks: Ranks) -> Any:
    """Return rank 0's tokenizer, with which each rank decodes what it samples; None where it cannot be unpickled.

    Rank 0 decodes the completions of such ranks, for example if the tokenizer has code of its own.
    """

    def pickled() -> bytes:
        with suppress(Exception):
            return pickle.dumps(tokenizer)
        return b""

    if ranks.world_size == 1:
        return tokenizer
    content = ranks.run_on_rank0(pickled)
    with suppress(Exception):
        return tokenizer if ranks.is_rank0 else pickle.loads(content)
    return None


def _load_critic(critic_config: CriticConfig, policy: Policy, spec: WorkerSpec, request: LoadRequest) -> Critic:
    """Load the critic from the checkpoint, else from `critic.path` or the policy's model.

    Raises:
        UserError: on rank 0, if it is not supported.
        Rank0Failed: on the other ranks in that case.
    """
    own = critic_config.path or request.config.path
    path = own if spec.checkpoint is None else str(spec.checkpoint / CRITIC)
    try:
        # always trained in full: its head starts at 0, and its body learns a different task
        full = {"adapter": None, "quantization": None, "freeze": ()}
        config = request.config.model_copy(update={"path": path, **full})
        critic = load_critic(replace(request, config=config))
    except UserError as error:
        if critic_config.path is None:
            raise
        raise UserError(str(error).replace("model.path", "critic.path", 1)) from error
    rows, wanted = (len(p.model.get_input_embeddings().weight) for p in (critic, policy))

    def check() -> None:
        if rows < wanted:
            raise UserError(
                f"critic.path: {path!r} has embeddings for {rows} tokens, the policy for {wanted}; use a critic "
                f"with the policy's tokenizer"
            )

    request.ranks.run_on_rank0(check)
    return critic


def _engine(
    config: Config, algorithm: Algorithm, policy: Policy, reference: Policy | None, spec: WorkerSpec, ranks: Ranks
) -> TrainEngine:
    waits = config.critic.warmup_steps if config.critic is not None else 0
    return TrainEngine(
        policy,
        config.train,
        config.optim,
        budget=TokenBudget(spec.micro_batch_tokens),
        learning_rate=_learning_rate(_own_rate(config), num_steps=spec.num_steps, waits=waits),
        temperature=config.rollout.temperature,
        reference=reference,
        reference_in_loss=algorithm.needs_reference,
        reference_changes=config.reference is not None and config.reference.refresh_every > 0,
        ranks=ranks,
    )


def _critic_engine(
    config: Config, critic_config: CriticConfig, critic: Critic, spec: WorkerSpec, engine: TrainEngine
) -> CriticEngine:
    """Build the critic's engine.

    It uses the policy's `train` and `optim` sections, except the learning rate, options of the language model head, and
    `optim.groups`, which name weights of the policy.
    """
    train = config.train.model_copy(
        update={
            "learning_rate": critic_config.learning_rate,
            "gradients_in_forward": False,
            "router_aux_loss_coef": 0.0,
        }
    )
    return CriticEngine(
        critic,
        train,
        config.optim.model_copy(update={"groups": ()}),
        budget=engine.budget,
        learning_rate=_learning_rate(train, num_steps=spec.num_steps, updates=critic_config.updates),
        temperature=1.0,
        reference=None,
        ranks=engine.ranks,
    )


def _own_rate(config: Config) -> TrainConfig:
    """Return the `train` section, whose learning rate is a factor if the optimizer has rates of its own."""
    return config.train.model_copy(update={"learning_rate": 1.0}) if config.optim.name == "custom" else config.train


def _learning_rate(train: TrainConfig, *, num_steps: int, waits: int = 0, updates: int = 1) -> Callable[[int], float]:
    """Return the learning rate schedule: number of updates done -> learning rate of the next update.

    Args:
        train: the `train` section.
        num_steps: total number of steps.
        waits: steps with a learning rate of 0 before the schedule starts.
        updates: updates of the model per update of the policy.
    """
    per_step = train.updates_per_rollout * updates
    waits *= per_step
    factor = partial(
        learning_rate_factor,
        warmup=train.num_warmup_steps(num_steps) * per_step,
        total=num_steps * per_step - waits,
        schedule=train.lr_schedule,
        minimum=train.min_lr_ratio,
    )
    return lambda updates_done: 0.0 if updates_done < waits else train.learning_rate * factor(updates_done - waits)


def _policy_request(request: LoadRequest, config: Config, algorithm: Algorithm, spec: WorkerSpec) -> LoadRequest:
    """Return the request that loads the policy, from the checkpoint or else from `model.path`."""
    if config.model.adapter is None:
        path = config.model.path if spec.checkpoint is None else str(spec.checkpoint)
        model = config.model.model_copy(update={"path": path})
        return replace(request, config=model, multimodal_path=config.model.path)  # old checkpoints are deleted
    return replace(
        request,
        adapter_checkpoint=spec.checkpoint,
        keep_reference=_uses_reference(algorithm),
        seed=config.train.seed,
    )


def _uses_reference(algorithm: Algorithm) -> bool:
    """Whether the loss or a forward-only pass uses a reference policy."""
    return algorithm.needs_reference or "reference_logprobs" in algorithm.forward_only_outputs


def build_reference(config: Config, algorithm: Algorithm, policy: Policy, request: LoadRequest) -> Policy | None:
    """Load the reference policy, the initial model of the run; None if the algorithm does not use it.

    Args:
        config: configuration of the run.
        algorithm: decides whether a reference is needed.
        policy: the trained policy; with an adapter, its base model is the reference.
        request: request to load the initial model.
    """
    if not _uses_reference(algorithm):
        return None
    if config.model.adapter is not None:
        return policy.as_reference()
    quantization = {} if config.reference is None else {"quantization": config.reference.quantization}
    reference = load_policy(replace(request, config=request.config.model_copy(update=quantization), trainable=False))
    if config.reference is not None and config.reference.device == "cpu":
        reference.offload_weights()
    return reference


def _check_head(config: Config, policy: Policy) -> None:
    """Check that the model's head supports the `train` section.

    Raises:
        UserError: a key has no effect on this model.
    """
    if config.train.gradients_in_forward and not policy.has_plain_head:
        raise UserError(
            "train.gradients_in_forward: true has no effect on this model, because its head is not a supported linear "
            "layer and full logits are computed; remove it"
        )


def _check_schedule(config: Config, engine: TrainEngine) -> None:
    """Check that there is one learning-rate schedule.

    Raises:
        UserError: the optimizer brings a scheduler, and the `train` section has a schedule.
    """
    train, custom = config.train, engine.optimizer.custom
    if custom is None or custom.scheduler is None:
        return
    for key in ("lr_schedule", "warmup_steps", "warmup_ratio"):
        if (value := getattr(train, key)) != TrainConfig.model_fields[key].default:
            raise UserError(
                f"train.{key}: {value} has no effect, because the optimizer has a scheduler "
                f"({type(custom.scheduler).__name__}); remove one of the two"
            )


def _check_folder_is_shared(folder: Path, ranks: Ranks) -> None:
    """Check that every rank sees the run folder, into which each writes its part of a checkpoint.

    Raises:
        UserError: on rank 0, if a rank does not see it.
        Rank0Failed: on the other ranks in that case.
    """
    if ranks.all_reduce_min(folder.is_dir()):
        return
    if not ranks.is_rank0:
        raise Rank0Failed
    raise UserError(
        f"run.dir: {str(folder)!r} does not exist on every machine of the run; use a folder on a file system that "
        "all of them share"
    )
