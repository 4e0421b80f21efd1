"""Arguments that TRL passes to reward functions besides the rollout: `trainer_state`, `log_metric` and `log_extra`."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import UserError
from cohort.rewards.describe import excerpt

TRL_NAMES = ("trainer_state", "log_metric", "log_extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """How far a run is, with the names of `transformers.TrainerState`; what has no meaning here is None."""

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps of the run
    epoch: float = 0.0  # epochs of the dataset done
    num_train_epochs: int = 1  # epochs begun by the end of the run
    log_history: Sequence[Mapping[str, float]] = ()  # metrics of the last steps, with the key "step"
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    logging_steps: None = None
    eval_steps: None = None
    save_steps: None = None
    train_batch_size: None = None
    num_input_tokens_seen: None = None
    total_flos: None = None
    best_metric: None = None
    best_global_step: None = None
    best_model_checkpoint: None = None
    trial_name: None = None
    trial_params: None = None
    stateful_callbacks: None = None


@dataclass(slots=True)
class RewardLog:
    """Collects what a reward function logs during one call."""

    metrics: dict[str, list[float]] = field(default_factory=dict)  # by name, one per `log_metric`
    extras: dict[str, list[Any]] = field(default_factory=dict)  # by column, one per completion

    def arguments(self, progress: TrainerProgress) -> dict[str, Any]:
        """Return the arguments for a function, by the names of `TRL_NAMES`."""
        return dict(zip(TRL_NAMES, (progress, self.log_metric, self.log_extra), strict=True))

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric, averaged over the calls of a step.

        Raises:
            UserError: `value` is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(f"log_metric({name!r}, {excerpt(value)}): the value must be a number") from None
        self.metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per completion, for the completions files and the page."""
        self.extras.setdefault(str(column), []).extend(values)

    def details(self, count: int) -> dict[str, list[str | None]]:
        """Return the logged columns as texts.

        Args:
            count: number of completions of the call.

        Raises:
            UserError: a column has another number of values.
        """
        for column, values in self.extras.items():
            if len(values) != count:
                raise UserError(f"log_extra({column!r}, ...): {len(values)} values for {count} completions")
        return {
            column: [None if value is None else _text(value) for value in values]
            for column, values in self.extras.items()
        }


def mean_metrics(logs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of all values of each metric."""
    together: dict[str, list[float]] = {}
    for metrics in logs:
        for name, values in metrics.items():
            together.setdefault(name, []).extend(values)
    return {name: sum(values) / len(values) for name, values in together.items()}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, numbers.Real) and not isinstance(value, bool) else str(value)
