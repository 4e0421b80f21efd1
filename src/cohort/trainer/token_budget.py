"""The token budget of a micro-batch that a run begins with: configured, resumed or found by trying."""

from collections.abc import Callable

from cohort.checkpoint import TrainerState
from cohort.config import Config
from cohort.distributed import Ranks
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


def knows_budget(state: TrainerState, wanted: int | str, world_size: int) -> bool:
    """Whether the budget of a checkpoint is what the configuration asks for: with `auto`, on as many processes."""
    return state.micro_batch_tokens_wanted == wanted and (wanted != "auto" or state.processes == world_size)


def first_budget(config: Config, inputs: Inputs, state: TrainerState | None, ranks: Ranks) -> int:
    """The token budget that a run begins or goes on with. With `auto` it is the most that can be of use."""
    wanted = config.train.micro_batch_tokens
    if state is not None and knows_budget(state, wanted, ranks.world_size):
        return state.micro_batch_tokens
    if wanted == "auto":
        share = inputs.largest_share(ranks.dp_size)
        return share.num_sequences * share.sequence_tokens
    return wanted


def find_auto_budget(
    config: Config,
    inputs: Inputs,
    workers: WorkerGroup[Worker],
    state: TrainerState | None,
    note: Callable[[str], None],
) -> None:
    """Find the token budget by trying, if `train.micro_batch_tokens` is `auto` and no checkpoint has one."""
    wanted, ranks = config.train.micro_batch_tokens, workers.ranks
    if wanted != "auto" or (state and knows_budget(state, wanted, ranks.world_size)):
        return
    most = workers.local.engine.budget.tokens
    found = workers.call(Worker.find_budget, inputs.largest_share(ranks.dp_size), most)[0]
    why = "a whole step's share of one process" if found == most else "the most that fits"
    note(f"train.micro_batch_tokens: auto: {found} tokens, {why}")
