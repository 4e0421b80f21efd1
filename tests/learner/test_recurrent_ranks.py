"""Layers with a recurrent state over two ranks: FSDP2, checkpointing, running out of memory, and resuming."""

from pathlib import Path

import pytest
import torch

from families import FAMILIES, make_model
from ranks import RanksOnDemand
from selection import slow
from test_ranks import worst
from tiny import make_tokenizer

pytestmark = slow("test_mixers computes these layers in one process, and test_ranks others over ranks")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    """Folders of policy and reference: a gated delta rule, then attention."""
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model-{seed}")
        torch.manual_seed(seed)
        make_model(FAMILIES["Qwen3.5 (text)"]).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> RanksOnDemand:
    return RanksOnDemand(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("way", ["float64", "checkpointing"])
def test_gradients_are_those_of_one_process(results: RanksOnDemand, models: tuple[str, str], way: str):
    """Of micro-batches, and of groups whose prompt is streamed."""
    actual, expected = results(2, "precision", *models, way)[0], results(1, "precision", *models, "float64")[0]
    for step, right in zip(actual, expected, strict=True):
        assert worst(step, right) < 1e-5  # a part of the mixer is float32


def test_out_of_memory_on_one_rank_is_as_a_smaller_budget(results: RanksOnDemand, models: tuple[str, str]):
    done = dict(results(2, "out_of_memory", *models, ""))
    expected = done.pop("expected")
    assert any(name.startswith("backward linear_attn") for name in done)
    for name, again in done.items():
        assert again.num_out_of_memory >= 1, name
        assert not again.different, name
        assert worst(again.gradient, expected) < 1e-5, name


def test_a_checkpoint_goes_on_bit_for_bit(results: RanksOnDemand, models: tuple[str, str], tmp_path: Path):
    saved, resumed = (results(2, "checkpoint", *models, str(tmp_path), how, "adamw") for how in ("save", "resume"))
    assert worst(resumed["weights"], saved["weights"]) == 0
