"""The built-in rewards by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.rewards.accuracy import AccuracyReward, ReasoningAccuracyReward
from cohort.rewards.answer_grader import AnswerGrader
from cohort.rewards.choice import ChoiceReward
from cohort.rewards.code import CodeReward
from cohort.rewards.exact import ExactReward
from cohort.rewards.exact_set import ExactSetReward
from cohort.rewards.format import FormatReward
from cohort.rewards.json_schema import JsonSchemaReward
from cohort.rewards.judge import JudgeReward
from cohort.rewards.length_scaled import CosineReward, LengthReward
from cohort.rewards.math import MathReward
from cohort.rewards.math_client import Grader
from cohort.rewards.number import NumberReward
from cohort.rewards.overlong import OverlongReward
from cohort.rewards.reasoning_gym import ReasoningGymReward
from cohort.rewards.regex import RegexReward
from cohort.rewards.repetition import TokenRepetitionReward, WordRepetitionReward
from cohort.rewards.reward_model import ModelReward
from cohort.rewards.soft_overlong import SoftOverlongReward
from cohort.rewards.text_form import CodeFormatReward, reasoning_steps, tag_count, think_answer_format, think_format
from cohort.sandbox import SharedSandbox

_BUDGET_SHARE = 0.8  # share of the deadline after which rewards that grade answers leave the rest unscored


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a built-in reward knows of its run when it is created."""

    timeout_s: float  # deadline of one call
    max_completion_tokens: int
    sandbox: SharedSandbox
    device: str = "auto"  # `hardware.device`
    run_folder: Path | None = None  # may not exist yet
    ask_servers_first: bool = True  # check that a judge's server answers; False: once a reply is not in its cache

    @property
    def budget_s(self) -> float:
        """Seconds for the answers of one call."""
        return _BUDGET_SHARE * self.timeout_s


def _grader(grader: Grader, context: RewardContext) -> AnswerGrader:
    return AnswerGrader(grader, budget_s=context.budget_s)


# Imports of optional packages belong into `required_columns` and `__call__`: every run imports these modules.
BUILTINS: Mapping[str, Callable[[RewardContext], Callable[..., Any]]] = {
    "choice": lambda context: ChoiceReward(),
    "code": lambda context: CodeReward(context.sandbox.open(), budget_s=context.budget_s),
    "exact": lambda context: ExactReward(),
    "exact_set": lambda context: ExactSetReward(),
    "format": lambda context: FormatReward(),
    "json_schema": lambda context: JsonSchemaReward(),
    "judge": lambda context: JudgeReward(
        budget_s=context.budget_s, run_folder=context.run_folder, ask_server_first=context.ask_servers_first
    ),
    "math": lambda context: MathReward(budget_s=context.budget_s),
    "model": lambda context: ModelReward(budget_s=context.budget_s, train_device=context.device),
    "number": lambda context: NumberReward(),
    "open_r1.accuracy": lambda context: AccuracyReward(_grader("open_r1", context)),
    "open_r1.code_format": lambda context: CodeFormatReward(),
    "open_r1.cosine": lambda context: CosineReward(
        _grader("open_r1_latex", context), counts_tokens=False, default_max_len=1000
    ),
    "open_r1.format": lambda context: think_answer_format,
    "open_r1.len": lambda context: LengthReward(_grader("open_r1_latex", context)),
    "open_r1.reasoning_steps": lambda context: reasoning_steps,
    "open_r1.repetition_penalty": lambda context: WordRepetitionReward(),
    "open_r1.soft_overlong": lambda context: SoftOverlongReward(),
    "open_r1.tag_count": lambda context: tag_count,
    "overlong": lambda context: OverlongReward(context.max_completion_tokens),
    "reasoning_gym": lambda context: ReasoningGymReward(context.sandbox, budget_s=context.budget_s),
    "regex": lambda context: RegexReward(),
    "trl.accuracy": lambda context: AccuracyReward(_grader("trl", context)),
    "trl.cosine": lambda context: CosineReward(_grader("trl", context), counts_tokens=True),
    "trl.reasoning_accuracy": lambda context: ReasoningAccuracyReward(_grader("trl", context)),
    "trl.repetition_penalty": lambda context: TokenRepetitionReward(),
    "trl.soft_overlong": lambda context: SoftOverlongReward(),
    "trl.think_format": lambda context: think_format,
}
