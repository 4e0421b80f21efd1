"""Rewards that are not plain functions: reward models, and an overridden `_calculate_rewards`."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cohort.errors import UserError
from cohort.rewards.function import name_of, unique_names
from cohort.trl.config import GRPOConfig
from cohort.trl.sections import as_dict

_BATCH = 32  # texts
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra", "environments")


class RewardModel:
    """The first output of a sequence classifier for the text of prompt and completion, as TRL has it."""

    def __init__(self, model: Any, tokenizer: Any, *, device: torch.device, options: Mapping[str, Any], template: Any):
        """Load the tokenizer, unless one is given. A model that is given by name is loaded when it is first called.

        Args:
            model: a model, or its folder or id.
            tokenizer: of the model. Default: that of its folder or id.
            device: computes the scores.
            options: arguments for loading the model.
            template: arguments of the chat template.

        Raises:
            UserError: there is no tokenizer.
        """
        self._model, self._options, self._device, self._template = model, dict(options), device, dict(template)
        origin = model if isinstance(model, str) else model.config._name_or_path
        self.__name__ = str(origin).rstrip("/").rpartition("/")[2] or "model"
        try:
            self._tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(origin)
        except (OSError, ValueError) as error:
            raise UserError(f"reward_processing_classes: missing; the reward model {origin!r} has none") from error
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._is_ready = False

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Return the scores."""
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        model, scores = self._ready(), list[float]()
        for start in range(0, len(texts), _BATCH):
            inputs = self._tokenizer(
                text=texts[start : start + _BATCH],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            )
            with torch.inference_mode():
                scores += model(**inputs.to(self._device)).logits[:, 0].float().tolist()
        return scores

    def _ready(self) -> Any:
        if isinstance(self._model, str):
            load = AutoModelForSequenceClassification.from_pretrained
            self._model = load(self._model, num_labels=1, **self._options)
        if not self._is_ready:
            self._model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
            self._model = self._model.to(self._device).eval()
            self._is_ready = True
        return self._model

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        text: str = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self._template)
        return text


class RewardTable:
    """Calls `_calculate_rewards` once a step, and gives each reward its column."""

    def __init__(self, functions: Sequence[Callable[..., Any]], calculate: Callable[..., Any]):
        """`calculate` takes rows, prompts, completions and their tokens, and returns a tensor [N, rewards]."""
        self._functions, self._calculate = list(functions), calculate
        self.arguments: dict[str, Any] = {}  # of the step's functions, besides columns
        self._values: Any = None  # [N, rewards], of the step
        self._runner = asyncio.Runner()

    def columns(self) -> list[Callable[..., list[float | None]]]:
        """Return one function per reward. The first one computes all."""
        return [self._column(i) for i in range(len(self._functions))]

    def _column(self, number: int) -> Callable[..., list[float | None]]:
        def column(prompts: Any, completions: Any, completion_ids: Any, **others: Any) -> list[float | None]:
            if number == 0:
                self.arguments = {name: value for name, value in others.items() if name in _GIVEN}
                columns = {name: values for name, values in others.items() if name not in _GIVEN}
                columns.setdefault("prompt", prompts)
                rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                self._values = torch.as_tensor(self._calculate(rows, prompts, completions, completion_ids))
            return [None if value != value else value for value in self._values[:, number].tolist()]

        return column

    def calculate(self, rows: Sequence[Mapping[str, Any]], *positional: Any) -> torch.Tensor:
        """Call each function, and return its values as a column: float32 [N, rewards], NaN for None."""
        arguments = dict(zip(("prompts", "completions", "completion_ids"), positional, strict=True))
        for name in rows[0].keys() - {"prompt", "completion", "completion_ids"}:
            arguments[name] = [row[name] for row in rows]
        found = [function(**{**arguments, **self.arguments}) for function in self._functions]
        awaited = iter(self._runner.run(_gather([f for f in found if asyncio.iscoroutine(f)])))
        columns = [next(awaited) if asyncio.iscoroutine(column) else column for column in found]
        values = [[float("nan") if value is None else value for value in column] for column in columns]
        return torch.tensor(values, dtype=torch.float32).T


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


def reward_functions(given: Sequence[Any], tokenizers: Sequence[Any], args: GRPOConfig) -> list[Any]:
    """Return the rewards of a run, with models as functions.

    Args:
        given: functions, models or their names.
        tokenizers: one each, or none.
        args: of the run.

    Raises:
        UserError: there are not as many tokenizers as rewards, or a reward model has none.
    """
    tokenizers = tokenizers or [None] * len(given)
    if len(tokenizers) != len(given):
        raise UserError(f"reward_processing_classes: {len(tokenizers)} for {len(given)} reward_funcs")
    options = as_dict(args.model_init_kwargs, "model_init_kwargs")
    options.setdefault("trust_remote_code", args.trust_remote_code)
    template = as_dict(args.chat_template_kwargs, "chat_template_kwargs")
    return [
        RewardModel(reward, tokenizer, device=args.device, options=options, template=template)
        if isinstance(reward, str | torch.nn.Module)
        else reward
        for reward, tokenizer in zip(given, tokenizers, strict=True)
    ]


def names_of(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the names of rewards in metrics."""
    return unique_names([name_of(function) for function in functions])
