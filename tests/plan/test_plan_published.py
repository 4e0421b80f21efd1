"""Predicted step times beside published ones, and times with real lengths."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.plan.hardware import Lengths, parse_lengths
from cohort.plan.shape import preset_shape
from cohort.plan.timing import StepTimes, step_times
from plans import on_gpus, planned

GUIDE = (Path(__file__).parents[2] / "docs" / "guide-gpu-allocation.md").read_text(encoding="utf-8")
PROMPT = 150  # tokens, about the mean of OpenMathInstruct-2 with a chat template

# NeMo RL 0.4, "Performance Summary" of its documentation: DGX H100, bfloat16, Megatron, 2,048 completions of at most
# 4,096 tokens: model, training + rollout GPUs (0: the same), tensor parallel of rollouts, mean sequence, seconds.
PUBLISHED = {
    "Llama 3.1 8B on 16, on policy": ("llama3-8b", 16, 0, 1, 1060, 97.7),
    "Llama 3.1 8B on 8 + 8, one step off": ("llama3-8b", 8, 8, 1, 1129, 74.6),
    "Qwen3-32B on 32, on policy": ("qwen3-32b", 32, 0, 4, 3206, 393.0),
    "Qwen3-32B on 32 + 32, one step off": ("qwen3-32b", 32, 32, 4, 3207, 215.0),
    "Qwen3-30B-A3B on 32, on policy": ("qwen3-30b-a3b", 32, 0, 4, 3154, 225.0),
    "Qwen3-30B-A3B on 16 + 16, one step off": ("qwen3-30b-a3b", 16, 16, 2, 3158, 244.0),
}
ROWS = {
    cells[0]: cells[1:]
    for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in GUIDE.splitlines() if row.startswith("| "))
    if cells[0] in PUBLISHED
}


def predicted(model: str, training: int, sampling: int, tensor_parallel: int, tokens: int) -> StepTimes:
    config = config_from_dict(
        {
            "model": {"path": "m", "gradient_checkpointing": model == "qwen3-32b"},
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


@pytest.mark.parametrize("run", PUBLISHED)
def test_the_guide_compares_predicted_with_published_times(run: str) -> None:
    *about, published = PUBLISHED[run]
    said, shown, ratio, reason = ROWS[run]
    found = predicted(*about).step_s  # type: ignore[arg-type]
    assert (float(said), float(shown)) == (published, float(f"{found:.3g}"))
    assert float(ratio) == round(found / published, 2)
    assert 1 / 1.5 <= found / published <= 1.5 or len(reason) > 20


def test_the_longest_completion_costs_a_read_of_the_weights_per_token() -> None:
    times = [_sampling(f"1000:{longest}") for longest in (1000, 2000, 3000)]
    read_s = 2 * preset_shape("1.5b").num_parameters / (0.6 * 3.35e12)
    assert times[1] - times[0] == pytest.approx(1000 * read_s) == times[2] - times[1]
    assert _sampling("1000") == pytest.approx(times[0] + 1000 * read_s * (2.0794 + 0.5772 - 1), rel=1e-3)
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
    told = " ".join(CliRunner().invoke(app, ["plan", *command, "--length", "800:3000"]).output.split())
    assert "expected tokens after a prompt mean 800, longest 3000 (--length)" in told
    refused = CliRunner().invoke(app, ["plan", *command, "--length", "8:7"])
    assert refused.exit_code == 2 and "--length: '8:7' is not" in refused.output
    for wrong in ("0", "x", "800:700", "8.5"):
        with pytest.raises(UserError, match=re.escape(repr(wrong))):
            parse_lengths(wrong)
