"""Single-turn rollouts: a prompt and one completion."""

from typing import Any

from cohort.records import Prompt, Trajectory
from cohort.rollout.engines.base import CallKey, Generate, SamplingParams
from cohort.rollout.stop_strings import cut_at_stop


async def answer_prompt(
    generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
) -> Trajectory:
    """Sample one completion of a prompt with a single model call."""
    call = cut_at_stop(await generate(prompt.token_ids, sampling, key), sampling.stop, tokenizer)
    return Trajectory.single_turn(call, text=tokenizer.decode(call.token_ids.tolist(), skip_special_tokens=True))
