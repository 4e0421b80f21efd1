"""Architectures that `test_law_two.py` has not, as `bench/models.py` measures them for docs/models.md."""

import math
from pathlib import Path

import pytest
import torch

import models
from families import FAMILIES
from models import BEGIN, END, measure, table
from rank_moe import load
from selection import mostly_slow

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# what each is for: latent attention and sigmoid routers, norms behind, two residual branches, scales, one norm for two
# branches, sinks and windows, softcaps, chunks and full logits, linear attention, attention of its own, layers that
# drop arguments, tables of positions
SOME = (
    *("DeepSeek-V3, Kimi-K2", "OLMo 2", "Phi", "Granite-MoE", "Cohere 2", "GPT-OSS, short window"),
    *("Gemma 2, short window", "Llama 4 (text), short chunks", "Qwen3-Next", "Falcon", "Nemotron", "OPT"),
)


@pytest.mark.parametrize(
    "name",
    mostly_slow(SOME, "DeepSeek-V3, Kimi-K2", "Cohere 2", "GPT-OSS, short window", reason="other architectures"),
)
def test_as_transformers_computes_it(name: str, tmp_path):
    row = measure(name, tmp_path)
    assert (row.layout, row.reason) == ("shared", "")
    assert row.logprobs < 1e-5 and row.gradient < 5e-5 and row.checkpointing < 5e-5 and row.sampler < 1e-5
    assert row.adapter == "works" and row.saved


def test_what_is_wrong_is_seen(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: weights that are a little off."""

    def shaken(*args, **kwargs):
        policy = load(str(tmp_path), **{k: v for k, v in kwargs.items() if k != "ranks"})
        with torch.no_grad():
            policy.model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
        return policy

    monkeypatch.setattr(models, "load", shaken)
    row = measure("Llama", tmp_path)
    assert min(row.logprobs, row.gradient, row.checkpointing, row.sampler) > 1e-3
    assert row.adapter.startswith("wrong") and not row.saved
    assert "| Llama | `llama` | shared prompts |" in table([row]) and "| **no** |" in table([row])
    assert math.isnan(row.two_ranks) and " | - | " in table([row])


def test_the_page_has_every_architecture():
    measured = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for name, family in FAMILIES.items():
        assert f"| {name} " in measured and f"`{family.model_type}`" in measured, f"{name}: run bench/models.py --write"
