"""Building what every rank has: the models, and everything that uses them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.algorithms import Algorithm, build_algorithm
from cohort.checkpoint import CRITIC, load_engine_state
from cohort.config import Config, CriticConfig, TrainConfig
from cohort.config.sizes import parse_size
from cohort.distributed import Ranks, Stopped
from cohort.engine import CriticEngine, TokenBudget, TrainEngine, check_optimizer, learning_rate_factor
from cohort.errors import UserError
from cohort.metrics import PeakMemory
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
from cohort.rollout import Sampler
from cohort.trainer.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOrder:
    """What rank 0 knows and the other ranks need to build their parts."""

    folder: Path  # of the run
    num_steps: int
    checkpoint: Path | None  # to go on from
    micro_batch_tokens: int  # the budget to begin with
    longest_sequence_tokens: int  # that there can be


def build_worker(config: Config, ranks: Ranks, order: BuildOrder, *, device: torch.device, tokenizer: Any) -> Worker:
    """Load the weights, from the model or from a checkpoint, and make everything that uses them. On every rank.

    Args:
        config: of the run, the same on every rank.
        ranks: this process among those of the run.
        order: from rank 0.
        device: of this rank.
        tokenizer: rank 0's; None elsewhere.

    Raises:
        UserError: on rank 0, where the model cannot be used, or a machine does not see the run folder.
        Stopped: on the other ranks then.
    """
    rollout, critic_config = config.rollout, config.critic or CriticConfig()
    resharding = config.hardware.reshard_after_forward
    ranks.first(lambda: check_optimizer(config.optim, ranks.world_size))
    _check_folder_is_shared(order.folder, ranks)
    request = LoadRequest(
        config.model,
        device=device,
        tokenizer=tokenizer,
        ranks=ranks,
        collectives=CollectiveCounter(),
        longest_sequence_tokens=order.longest_sequence_tokens,
        offload_master_weights=config.optim.offload,
        reshard_after_forward=True if resharding == "auto" else resharding,
    )
    algorithm = build_algorithm(
        config.algorithm,
        max_completion_tokens=rollout.max_completion_tokens,
        auto_correction=rollout.default_correction,
        value_clip=critic_config.value_clip,
    )
    policy = load_policy(_of_policy(request, config, algorithm, order))
    ranks.first(lambda: _check_head(config, policy))
    reference = build_reference(config, algorithm, policy, request)
    critic = _load_critic(critic_config, policy, order, request) if algorithm.critic else None
    ends = ranks.first(lambda: end_token_ids(policy, tokenizer))
    engine = _engine(config, algorithm, policy, reference, order, ranks)
    worker = Worker(
        ranks=ranks,
        policy=policy,
        algorithm=algorithm,
        engine=engine,
        critic=None if critic is None else _critic_engine(config, critic_config, critic, order, engine),
        sampler=Sampler(policy, end_token_ids=ends, max_num_seqs=rollout.max_num_seqs),
        tokenizer=tokenizer,
        memory=PeakMemory(device),
        save_options=SaveOptions(max_shard_bytes=parse_size(config.run.max_shard_size)),
    )
    if order.checkpoint is not None:
        engine_state = worker.engine_state()
        load_engine_state(order.checkpoint, engine_state, ranks)
        worker.load_engine_state(engine_state)
    return worker


def _load_critic(critic_config: CriticConfig, policy: Policy, order: BuildOrder, request: LoadRequest) -> Critic:
    """The critic, of the checkpoint or of where it begins.

    Raises:
        UserError: on rank 0, where it cannot be used.
        Stopped: on the other ranks then.
    """
    own = critic_config.path or request.config.path
    path = own if order.checkpoint is None else str(order.checkpoint / CRITIC)
    try:
        # trained whole, whatever the policy is: its head begins at 0, and its body has another task
        own_way = {"adapter": None, "quantization": None, "freeze": ()}
        config = request.config.model_copy(update={"path": path, **own_way})
        critic = load_critic(replace(request, config=config))
    except UserError as error:
        if critic_config.path is None:
            raise
        raise UserError(str(error).replace("model.path", "critic.path", 1)) from error
    rows, wanted = (len(p.model.get_input_embeddings().weight) for p in (critic, policy))

    def check() -> None:
        if rows < wanted:
            raise UserError(
                f"critic.path: {path!r} has embeddings for {rows} tokens, and the policy for {wanted}; they have to "
                f"have the same tokenizer"
            )

    request.ranks.first(check)
    return critic


def _engine(
    config: Config, algorithm: Algorithm, policy: Policy, reference: Policy | None, order: BuildOrder, ranks: Ranks
) -> TrainEngine:
    waits = config.critic.warmup_steps if config.critic is not None else 0
    return TrainEngine(
        policy,
        config.train,
        config.optim,
        budget=TokenBudget(order.micro_batch_tokens),
        learning_rate=_learning_rate(config.train, num_steps=order.num_steps, waits=waits),
        temperature=config.rollout.temperature,
        reference=reference,
        reference_in_loss=algorithm.needs_reference,
        reference_changes=config.reference is not None and config.reference.refresh_every > 0,
        ranks=ranks,
    )


def _critic_engine(
    config: Config, critic_config: CriticConfig, critic: Critic, order: BuildOrder, engine: TrainEngine
) -> CriticEngine:
    """The policy's `train` and `optim` sections hold for the critic, but for the learning rate, for what its head has
    not, and for groups of weights, which are named after the policy's.
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
        learning_rate=_learning_rate(train, num_steps=order.num_steps, updates=critic_config.updates),
        temperature=1.0,
        reference=None,
        ranks=engine.ranks,
    )


def _learning_rate(train: TrainConfig, *, num_steps: int, waits: int = 0, updates: int = 1) -> Callable[[int], float]:
    """Number of updates done -> learning rate of the next.

    Args:
        train: the `train` section.
        num_steps: of the run.
        waits: steps before the schedule begins, in which nothing is learned.
        updates: for each one of the policy.
    """
    per_step = train.updates_per_rollout * updates
    waits *= per_step
    factor = partial(
        learning_rate_factor,
        warmup=train.warmup_steps * per_step,
        total=num_steps * per_step - waits,
        schedule=train.lr_schedule,
    )
    return lambda updates_done: 0.0 if updates_done < waits else train.learning_rate * factor(updates_done - waits)


def _of_policy(request: LoadRequest, config: Config, algorithm: Algorithm, order: BuildOrder) -> LoadRequest:
    """The request for the policy, of the checkpoint or of where it begins."""
    if config.model.adapter is None:
        path = config.model.path if order.checkpoint is None else str(order.checkpoint)
        return replace(request, config=config.model.model_copy(update={"path": path}))
    return replace(
        request,
        adapter_checkpoint=order.checkpoint,
        keep_reference=_looks_at_reference(algorithm),
        seed=config.train.seed,
    )


def _looks_at_reference(algorithm: Algorithm) -> bool:
    """In the loss, or before it."""
    return algorithm.needs_reference or "reference_logprobs" in algorithm.estimates


def build_reference(config: Config, algorithm: Algorithm, policy: Policy, request: LoadRequest) -> Policy | None:
    """The model that a KL divergence is measured from: the one that the run began with; None where nothing asks for it.

    Args:
        config: of the run.
        algorithm: may look at a reference.
        policy: of the run; under an adapter it is the reference too.
        request: for the model that the run began with.
    """
    if not _looks_at_reference(algorithm):
        return None
    if config.model.adapter is not None:
        return policy.as_reference()
    fewer_bits = {} if config.reference is None else {"quantization": config.reference.quantization}
    reference = load_policy(replace(request, config=request.config.model_copy(update=fewer_bits), trainable=False))
    if config.reference is not None and config.reference.device == "cpu":
        reference.offload_weights()
    return reference


def _check_head(config: Config, policy: Policy) -> None:
    """Compare the `train` section with the model's head.

    Raises:
        UserError: a key has no effect on it.
    """
    if config.train.gradients_in_forward and not policy.has_plain_head:
        raise UserError(
            "train.gradients_in_forward: true has no effect on this model, whose head is not a linear layer that is "
            "known here, so that it computes its full logits; remove it"
        )


def _check_folder_is_shared(folder: Path, ranks: Ranks) -> None:
    """Every rank writes its part of a checkpoint into the run folder, so all of them have to see it.

    Raises:
        UserError: on rank 0, where one of them does not.
        Stopped: on the other ranks then.
    """
    if ranks.smallest(folder.is_dir()):
        return
    if not ranks.is_first:
        raise Stopped
    raise UserError(
        f"run.dir: {str(folder)!r} is not there on every machine of the run; give a folder on a file system that all "
        "of them share"
    )
