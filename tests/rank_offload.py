"""What ranks do together in the tests of host memory and of resharding, each job in all of them."""

from pathlib import Path
from typing import Any

import torch

from cohort.checkpoint import TrainerState, load_engine_state, save_checkpoint
from cohort.config import AdamwConfig, Adamw8bitConfig, ModelConfig, MuonConfig, OptimConfig, SgdConfig, TrainConfig
from cohort.distributed import Ranks
from cohort.engine import TrainEngine
from cohort.policy import Collectives, load_policy, load_tokenizer
from rank_engine import CPU, STEPS, batches_of, step_sequences

BFLOAT16, MIXED = {"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}
# name -> the `optim` section, and the `model` section's dtypes
MODES: dict[str, tuple[OptimConfig, dict[str, Any]]] = {
    "adamw": (AdamwConfig(weight_decay=0.1), {}),
    "offloaded": (AdamwConfig(weight_decay=0.1, offload=True), {}),
    "mixed": (AdamwConfig(weight_decay=0.1), MIXED),
    "mixed, offloaded": (AdamwConfig(weight_decay=0.1, offload=True), MIXED),
    "sgd": (SgdConfig(momentum=0.9, weight_decay=0.1), {}),
    "sgd, offloaded": (SgdConfig(momentum=0.9, weight_decay=0.1, offload=True), {}),
    "8 bits": (Adamw8bitConfig(), {}),
    "8 bits, offloaded": (Adamw8bitConfig(offload=True), {}),
    "at random": (AdamwConfig(stochastic_rounding=True), BFLOAT16),
    "at random, muon": (MuonConfig(stochastic_rounding=True), BFLOAT16),
    "at random, 8 bits": (Adamw8bitConfig(stochastic_rounding=True), BFLOAT16),
}


def make_engine(model: str, ranks: Ranks, mode: str, **train: Any) -> TrainEngine:
    optim, dtypes = MODES[mode]
    config = ModelConfig(path=model, **dtypes)
    policy = load_policy(
        config,
        device=CPU,
        tokenizer=load_tokenizer(config) if ranks.is_first else None,
        ranks=ranks,
        collectives=Collectives(),
        masters_on_host=optim.offload,
    )
    return TrainEngine(
        policy,
        TrainConfig(**train),
        optim,
        micro_batch_tokens=10_000,
        learning_rate=lambda _: 0.003,
        temperature=0.9,
        reference=None,
        ranks=ranks,
    )


def whole_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """What is saved, on rank 0."""
    weights = engine.policy.whole_weights()
    return dict(engine.policy.model.state_dict()) if weights is None else weights


def update(engine: TrainEngine, ranks: Ranks, number: int, *, budget: int = 30) -> float:
    """One step on sequences of its own; the gradient's norm."""
    algorithm, sequences = step_sequences("dapo", *STEPS["uneven"], seed=number)
    engine.forward_backward(batches_of(engine, sequences, ranks, budget)[ranks.rank], algorithm.policy_loss)
    return engine.optim_step().grad_norm


def run_trajectory(ranks: Ranks, model: str, mode: str, steps: int, budget: int = 30) -> dict[str, Any]:
    """Updates from the start."""
    engine = make_engine(model, ranks, mode)
    norms = [update(engine, ranks, number, budget=budget) for number in range(steps)]
    return {"weights": whole_weights(engine), "norms": norms}


def run_saved(ranks: Ranks, model: str, mode: str, root: str) -> dict[str, Any]:
    """Two updates, a checkpoint, two more."""
    engine = make_engine(model, ranks, mode)
    for number in range(4):
        update(engine, ranks, number)
        if number == 1:
            save_checkpoint(
                Path(root) / mode,
                policy=engine.policy,
                tokenizer=load_tokenizer(ModelConfig(path=model)) if ranks.is_first else None,
                engine_state=engine.state_dict(),
                state=_state(ranks),
                keep=1,
                ranks=ranks,
            )
    return {"weights": whole_weights(engine)}


def run_resumed(ranks: Ranks, model: str, mode: str, root: str) -> dict[str, Any]:
    """The last two updates, from the checkpoint."""
    folder = Path(root) / mode / "step-2"
    engine = make_engine(str(folder), ranks, mode)
    state = engine.state_dict()
    load_engine_state(folder, state, ranks)
    engine.load_state_dict(state)
    for number in range(engine.updates_done, 4):
        update(engine, ranks, number)
    return {"weights": whole_weights(engine)}


def _state(ranks: Ranks) -> TrainerState:
    return TrainerState(
        steps_done=2,
        data={},
        pending=[],
        num_tokens=0,
        seconds=0,
        micro_batch_tokens=1,
        micro_batch_tokens_wanted=1,
        processes=ranks.world_size,
        control={},
    )


JOBS = {
    "trajectory": run_trajectory,
    "saved": run_saved,
    "resumed": run_resumed,
}
