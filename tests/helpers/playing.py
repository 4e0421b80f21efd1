"""Tokenizers, engines and runs with several turns."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

import chat_tokenizers
from cohort.config import config_from_dict
from cohort.records import IntArray, ModelCall, Prompt, RolloutGroup
from cohort.rollout import CallKey, RolloutCollector, SamplingParams, StepKey
from cohort.rollout.environments.build import Environments
from cohort.rollout.workers.load_rollout import collector_options
from cohort.trainer.parts import Parts
from tiny import make_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# For random models: a reply with one of the letters a to m calls `look` with that letter.
LETTER_CALLS = {
    "start_anchor": ["<|im_start|>assistant\n"],
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"(?P<key>[a-m])",
            "close_pattern": r"(?:<\|im_end\|>|\Z)",
            "transform": {"type": "function", "function": {"name": "look", "arguments": {"key": "{key}"}}},
        },
    },
}


@cache
def turns_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose chat template has tools in Hermes' form."""
    return chat_tokenizers.make_tokenizer(TEMPLATE, chat_tokenizers.CHATML)


def call(name: str, arguments: str = "{}") -> str:
    """Text of a tool call."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def replies(*texts: str) -> Callable[[str, CallKey], str]:
    """A script: the first text in the first turn and so on; the last one in all further turns."""
    return lambda context, key: texts[min(key.turn, len(texts) - 1)]


def module_of(file: Path) -> Any:
    """The module that a run has imported from a file."""
    return next(m for m in sys.modules.values() if getattr(m, "__file__", None) == str(file))


def make_game() -> type:
    """An environment whose class is defined in a function, as in a notebook."""

    class Game:
        def reset(self, **row: Any) -> str:
            self.looks = 0
            return " go"

        def look(self, key: str) -> str:
            """Look up a value.

            Args:
                key: name of the value
            """
            self.looks += 1
            return key

        def get_reward(self) -> float:
            return float(self.looks)

    return Game


class ScriptedModel:
    """An engine that replies by a script: text of the context and key of the call -> text of the reply.

    A reply that ends with "..." is cut by the limit of the call. None samples nothing, for ever.
    """

    def __init__(self, script: Callable[[str, CallKey], str | None]):
        self._script = script
        self.contexts: list[str] = []

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        tokenizer = turns_tokenizer()
        context = tokenizer.decode(token_ids.tolist())
        self.contexts.append(context)
        text = self._script(context, key)
        await asyncio.sleep(0)
        if text is None:
            await asyncio.Event().wait()
        assert text is not None
        is_cut = text.endswith("...")
        ids = tokenizer(text.removesuffix("...") + "<|im_end|>" * (not is_cut), add_special_tokens=False)["input_ids"]
        is_cut |= len(ids) > sampling.max_completion_tokens
        ids = ids[: sampling.max_completion_tokens]
        return ModelCall(
            context_ids=token_ids,
            token_ids=np.array(ids),
            sampling_logprobs=np.full(len(ids), -0.5),
            finish_reason="length" if is_cut else "stop",
            policy_version=0,
        )

    def advance(self) -> bool:
        return False

    def release_gpus(self) -> None:
        pass

    def update_weights(self, *, policy_version: int) -> None:
        pass

    def close(self) -> None:
        pass


def turns_config(folder: Path, **rollout: Any) -> Any:
    """A configuration with the keys of `rollout`, and of its own sections `data`, `rewards` and `sandbox`."""
    data = {"path": "d.jsonl", **rollout.pop("data", {})}
    rewards = rollout.pop("rewards", [{"use": "math"}])
    lengths = {"max_prompt_tokens": 2000, "max_completion_tokens": 200, "num_generations": 2, "engine": "local"}
    sections = {"sandbox": rollout.pop("sandbox")} if "sandbox" in rollout else {}
    raw = {**sections, "model": {"path": "m"}, "data": data, "rewards": rewards, "rollout": {**lengths, **rollout}}
    return config_from_dict(raw, base_dir=folder)


def load(folder: Path, **rollout: Any) -> Environments:
    """The environments of a configuration; files are relative to `folder`."""
    environments = Parts(turns_config(folder, **rollout), tokenizer=turns_tokenizer()).environments
    assert environments is not None
    return environments


def play(
    folder: Path,
    script: Callable[[str, CallKey], str | None] | ScriptedModel,
    rows: Sequence[dict[str, Any]],
    *,
    release: bool = True,
    step: int = 0,
    **rollout: Any,
) -> list[RolloutGroup]:
    """Roll out one group per row, whose column `prompt` is the prompt."""
    config = turns_config(folder, **rollout)
    environments = Parts(config, tokenizer=turns_tokenizer()).environments
    model = script if isinstance(script, ScriptedModel) else ScriptedModel(script)
    prompts = [
        Prompt(
            id=n,
            epoch=0,
            content=row.get("prompt", ""),
            token_ids=np.array([1]),
            columns={k: v for k, v in row.items() if k != "prompt"},
        )
        for n, row in enumerate(rows)
    ]
    options = collector_options(config, environments)
    with closing(RolloutCollector(model, turns_tokenizer(), **options)) as collector:
        groups = collector.collect(
            prompts, SamplingParams.for_training(config.rollout), StepKey(purpose="train", seed=0, step=step)
        )
        if release:
            collector.release(groups)
        return groups


def save_turns_model(path: Path, **overrides: Any) -> Path:
    """A folder with a random model that calls the tool `look` often."""
    tokenizer = chat_tokenizers.make_tokenizer(TEMPLATE, chat_tokenizers.CHATML)
    tokenizer.response_template = LETTER_CALLS
    return save_model(path, tokenizer, **overrides)


def save_model(path: Path, tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Path:
    """A folder with a random model and a tokenizer."""
    end = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "max_position_embeddings": 4096}
    make_model("llama", **{**sizes, **overrides}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
