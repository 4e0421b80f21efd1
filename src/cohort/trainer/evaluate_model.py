"""Evaluate a model on a data file without training (`cohort eval`)."""

from collections.abc import Callable
from contextlib import closing

from cohort.config import Config
from cohort.evaluation import EvalResult, evaluate
from cohort.models import (
    LoadRequest,
    check_vocabulary,
    end_token_ids,
    load_policy,
    load_tokenizer,
    resolve_device,
    with_base,
)
from cohort.rollout import LocalEngine, RolloutCollector, Sampler
from cohort.sandbox import SharedSandbox
from cohort.startup import resume_gc
from cohort.trainer.run_inputs import (
    column_names,
    read_environments,
    read_eval_rows,
    read_evaluation,
    read_rewards,
    rollout_options,
)


def evaluate_model(
    config: Config,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    notify: Callable[[str], None] = lambda text: None,
) -> EvalResult:
    """Evaluate `config.model`, which may be an adapter folder, on `config.eval`.

    Args:
        config: chat template, rewards and limits come from the other sections.
        on_progress: called with the number of prompts done and the total.
        notify: shows a message to the user, such as which sandbox is in use.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
    """
    config = config.model_copy(update={"model": with_base(config.model)})
    resume_gc()
    assert config.eval is not None, "config.eval is required"
    device = resolve_device(config.hardware.device)
    tokenizer = load_tokenizer(config.model)
    sandbox = SharedSandbox(config.sandbox)
    environments = read_environments(config, tokenizer, sandbox)
    rows = read_eval_rows(config, config.eval, environments)
    # rewards get prompts under the name of the training column
    rewards = read_rewards(config, [*column_names(rows), config.data.prompt], environments, sandbox)
    for note in sandbox.notes:
        notify(note)
    evaluation = read_evaluation(config, config.eval, rows, tokenizer, rewards, environments)
    policy = load_policy(LoadRequest(config.model, device=device, tokenizer=tokenizer, trainable=False))
    check_vocabulary(policy, evaluation.prompts)
    ends = end_token_ids(policy, tokenizer)
    seqs = config.rollout.max_num_seqs
    sampler = Sampler(policy, end_token_ids=ends, max_num_seqs=seqs, tokenizer=tokenizer)
    options = rollout_options(config, environments)
    with closing(RolloutCollector(LocalEngine(sampler.sample), tokenizer, **options)) as collector:
        return evaluate(evaluation, collector, rewards, on_progress=on_progress)
