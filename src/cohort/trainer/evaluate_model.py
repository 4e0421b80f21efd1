"""`cohort eval`: one model, one data file, no training."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

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
from cohort.rewards import RewardRunner, build_rewards
from cohort.rollout import LocalEngine, RolloutCollector, Sampler
from cohort.startup import resume_gc
from cohort.trainer.run_inputs import (
    check_eval_lengths,
    column_names,
    read_eval_rows,
    read_evaluation,
)


def evaluate_model(config: Config, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> EvalResult:
    """Evaluate `config.model` on `config.eval`. The other sections give the template, the rewards and the limits.

    The model may be an adapter's folder.

    Raises:
        UserError: there is no `eval` section, or something in it does not work.
    """
    config = config.model_copy(update={"model": with_base(config.model)})
    resume_gc()
    assert config.eval is not None, "an evaluation needs the eval section"
    device = resolve_device(config.hardware.device)
    rows = read_eval_rows(config.eval)
    columns = [*column_names(rows), config.data.prompt]  # as in training, rewards get the prompts by that name
    functions = build_rewards(
        config.rewards,
        base_dir=Path.cwd(),
        columns=columns,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
    rewards = RewardRunner(functions, columns=columns, prompt_column=config.data.prompt)
    tokenizer = load_tokenizer(config.model)
    evaluation = read_evaluation(config, config.eval, rows, tokenizer, rewards)
    check_eval_lengths(config, evaluation)
    policy = load_policy(LoadRequest(config.model, device=device, tokenizer=tokenizer, trainable=False))
    check_vocabulary(policy, evaluation.prompts)
    ends = end_token_ids(policy, tokenizer)
    sampler = Sampler(policy, end_token_ids=ends, max_num_seqs=config.rollout.max_num_seqs)
    with closing(RolloutCollector(LocalEngine(sampler.sample), tokenizer)) as collector:
        return evaluate(evaluation, collector, rewards, on_progress=on_progress)
