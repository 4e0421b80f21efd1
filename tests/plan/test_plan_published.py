"""Predicted step times beside published ones, and times with real lengths."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.plan.lengths import Lengths, parse_lengths
from cohort.plan.shape import preset_shape
from cohort.plan.timing import StepTimes, step_times
from plans import on_gpus, planned, without_advice

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
PROMPT = 150  # tokens, about the mean of OpenMathInstruct-2 with a chat template

# NeMo RL 0.4, "Performance Summary" of its documentation: DGX H100, bfloat16, Megatron, 2,048 completions of at most
# 4,096 tokens: model, training + rollout GPUs (0: the same), tensor parallel of rollouts, mean sequence, seconds.
# Its recipes (examples/configs/recipes/llm/performance of v0.4.0) recompute activations for the 8B model only.
STEPS = {
    "Llama 3.1 8B on 16, on policy": ("llama3-8b", 16, 0, 1, 1060, 97.7),
    "Llama 3.1 8B on 8 + 8, one step off": ("llama3-8b", 8, 8, 1, 1129, 74.6),
    "Qwen3-32B on 32, on policy": ("qwen3-32b", 32, 0, 4, 3206, 393.0),
    "Qwen3-32B on 32 + 32, one step off": ("qwen3-32b", 32, 32, 4, 3207, 215.0),
    "Qwen3-30B-A3B on 32, on policy": ("qwen3-30b-a3b", 32, 0, 4, 3154, 225.0),
    "Qwen3-30B-A3B on 16 + 16, one step off": ("qwen3-30b-a3b", 16, 16, 2, 3158, 244.0),
}
# NeMo RL 0.3, https://nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3, also in its issue 959: Llama 3.1 8B Instruct
# on one node, Megatron, 795 generated tokens in the mean, examples/configs/grpo_math_8B_megatron.yaml of v0.3.0.
PHASES = {
    "generation": (58.0, lambda times: times.sampling_s),
    "training, and logprobs": (28.0 + 18.0, lambda times: times.training_s),
    "refit": (5.0, lambda times: times.publish_s),
    "step": (112.0, lambda times: times.step_s),
}
# prime-rl, benchmarks/results/PAGE.md of 2026-02-01: seconds per micro-batch of one sequence on each H100, with
# recomputed layers and FlashAttention 3: model, GPUs, tokens, rank (0: full fine-tuning), seconds.
MICRO_BATCHES = {
    "Qwen3-0.6B, full, 16,384 tokens": ("qwen3-0.6b", 1, 16384, 0, 1.38),
    "Qwen3-0.6B, full, 65,536 tokens": ("qwen3-0.6b", 1, 65536, 0, 6.46),
    "Qwen3-4B, LoRA, 16,384 tokens": ("qwen3-4b", 1, 16384, 16, 2.63),
    "Qwen3-4B, LoRA, 65,536 tokens": ("qwen3-4b", 1, 65536, 16, 15.74),
    "Qwen3-30B-A3B on 8, LoRA, 16,384 tokens": ("qwen3-30b-a3b", 8, 16384, 16, 3.96),
    "Qwen3-30B-A3B on 8, LoRA, 65,536 tokens": ("qwen3-30b-a3b", 8, 65536, 16, 22.42),
}
ROWS = {
    cells[0]: cells[1:]
    for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.splitlines() if row.startswith("| "))
}


def grpo_step(
    model: str, training: int, sampling: int, tensor_parallel: int, tokens: int, *, checkpointing: bool = False
) -> StepTimes:
    config = config_from_dict(
        {
            "model": {"path": "m", "gradient_checkpointing": checkpointing},
            "data": {"path": "d"},
            "rewards": [{"use": "math"}],
            "algorithm": {"beta": 0.01},
            "rollout": {
                "engine": "vllm",
                "max_prompt_tokens": PROMPT,
                "max_completion_tokens": 4096 - PROMPT,
                "num_generations": 32,
                "tensor_parallel": tensor_parallel,
                "max_staleness": int(sampling > 0),
            },
            "train": {"prompts_per_step": 64},
        }
    )
    on = replace(on_gpus(8, "h100"), lengths=Lengths(mean=tokens - PROMPT))
    placed = {"num_training": training, "num_sampling": sampling or training, "shared": not sampling}
    return step_times(config, preset_shape(model), on, **placed)


def micro_batch_s(model: str, gpus: int, tokens: int, rank: int) -> float:
    config = config_from_dict(
        {
            "model": {"path": "m", "gradient_checkpointing": True, **({"adapter": {"rank": rank}} if rank else {})},
            "data": {"path": "d"},
            "rewards": [{"use": "math"}],
            "algorithm": {"name": "reinforce"},
            "rollout": {
                "engine": "vllm",
                "max_prompt_tokens": 1,
                "max_completion_tokens": tokens - 1,
                "num_generations": 1,
            },
            "train": {"prompts_per_step": 2 * gpus},
        }
    )
    on = on_gpus(8, "h100")
    return step_times(config, preset_shape(model), on, num_training=gpus, num_sampling=gpus).training_s / 2


def comparisons() -> dict[str, tuple[float, float]]:
    """Published and predicted seconds by row of docs/benchmarks.md."""
    found = {
        name: (published, grpo_step(*about, checkpointing="8B" in name).step_s)  # type: ignore[arg-type]
        for name, (*about, published) in STEPS.items()
    }
    by_phase = grpo_step("llama3-8b", 8, 0, 1, 795 + PROMPT)
    found |= {name: (published, predicted(by_phase)) for name, (published, predicted) in PHASES.items()}
    return found | {
        name: (published, micro_batch_s(*about))  # type: ignore[arg-type]
        for name, (*about, published) in MICRO_BATCHES.items()
    }


@pytest.mark.parametrize("run", [*STEPS, *PHASES, *MICRO_BATCHES])
def test_the_page_compares_predicted_with_published_times(run: str) -> None:
    published, found = comparisons()[run]
    said, shown, ratio, reason = ROWS[run]
    assert (float(said), float(shown)) == (published, float(f"{found:.3g}"))
    assert float(ratio) == round(found / published, 2)
    assert 1 / 1.5 <= found / published <= 1.5 or len(reason) > 20


def test_the_longest_completion_costs_a_read_of_the_weights_per_token() -> None:
    """And the more the lengths of a group of 8 vary, the more keys and values are read: up to twice as many."""
    times = [_sampling(f"1000:{longest}") for longest in (1000, 2000, 3000)]
    shape, expected = preset_shape("1.5b"), 2.0794 + 0.5772  # mean of the longest of 8, if exponentially distributed
    read_s, cache_s = (n / (0.6 * 3.35e12) for n in (2 * shape.num_parameters, 8 * shape.kv_bytes(2) * 1000 / 2))
    assert times[1] - times[0] == pytest.approx(1000 * (read_s + cache_s / (expected - 1)), rel=1e-3)
    assert times[2] - times[0] == pytest.approx(1000 * (2 * read_s + cache_s), rel=1e-3)
    assert _sampling("1000") == pytest.approx(times[0] + 1000 * (read_s * (expected - 1) + cache_s), rel=1e-3)
    assert _sampling("9000") == _sampling("4096") > times[2]


def _sampling(lengths: str) -> float:
    overrides = [
        "rollout={engine: vllm, max_prompt_tokens: 512, max_completion_tokens: 4096}",
        "train.prompts_per_step=1",
    ]
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}]}
    on = replace(on_gpus(2), lengths=parse_lengths(lengths))
    config = config_from_dict(raw, overrides)
    return step_times(config, preset_shape("1.5b"), on, num_training=1, num_sampling=1).sampling_s


def test_a_plan_with_lengths_is_faster_and_needs_the_same_memory(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{model: {path: m}, data: {path: d.csv}, rewards: [{use: math}], rollout: {max_completion_tokens: 4096}}"
    )
    command = [str(file), "--model", "1.5b", "--gpus", "2"]
    longest, shorter = planned(*command), planned(*command, "--length", "800:3000")
    assert shorter["timing"]["step_s"]["value"] < longest["timing"]["step_s"]["value"]
    assert shorter["memory"] == longest["memory"]
    with without_advice():
        told = " ".join(CliRunner().invoke(app, ["plan", *command, "--length", "800:3000"]).output.split())
    assert "expected tokens after a prompt mean 800, longest 3000 (--length)" in told
    with without_advice():
        told = " ".join(CliRunner().invoke(app, ["plan", *command, "--length", "800:5000"]).output.split())
    assert "expected tokens after a prompt mean 800, longest 4096 (--length)" in told
    refused = CliRunner().invoke(app, ["plan", *command, "--length", "5000"])
    assert refused.exit_code == 2 and "5000 tokens exceeds rollout.max_completion_tokens: 4096" in refused.output
    refused = CliRunner().invoke(app, ["plan", *command, "--length", "8:7"])
    assert refused.exit_code == 2 and "--length: '8:7' is not" in refused.output
    for wrong in ("0", "x", "800:700", "8.5"):
        with pytest.raises(UserError, match=re.escape(repr(wrong))):
            parse_lengths(wrong)
