"""The initial token budget of micro-batches: configured, from a checkpoint, or found by trial."""

from collections.abc import Callable

from cohort.checkpoint import TrainerState
from cohort.config import Config
from cohort.distributed import Ranks
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


def can_reuse_budget(state: TrainerState, wanted: int | str, world_size: int) -> bool:
    """Whether the checkpoint's budget still applies: same setting and, for `auto`, same number of processes."""
    return state.micro_batch_tokens_wanted == wanted and (wanted != "auto" or state.processes == world_size)


def initial_budget(config: Config, inputs: Inputs, state: TrainerState | None, ranks: Ranks) -> int:
    """Initial token budget of a new or resumed run. With `auto`: the largest that is useful."""
    wanted = config.train.micro_batch_tokens
    if state is not None and can_reuse_budget(state, wanted, ranks.world_size):
        return state.micro_batch_tokens
    if wanted == "auto":
        shard = inputs.worst_case_shard(ranks.dp_size)
        return shard.num_sequences * shard.sequence_tokens
    return wanted


def find_auto_budget(
    config: Config,
    inputs: Inputs,
    workers: WorkerGroup[Worker],
    state: TrainerState | None,
    notify: Callable[[str], None],
) -> None:
    """Find the token budget by trying, if `train.micro_batch_tokens` is `auto` and no checkpoint has one."""
    wanted, ranks = config.train.micro_batch_tokens, workers.ranks
    if wanted != "auto" or (state and can_reuse_budget(state, wanted, ranks.world_size)):
        return
    largest = workers.local.engine.budget.tokens
    found = workers.call(Worker.find_budget, inputs.worst_case_shard(ranks.dp_size), largest)[0]
    reason = "one rank's share of a step fits" if found == largest else "the largest that fits"
    notify(f"using train.micro_batch_tokens={found} ({reason})")
