"""The critic over several ranks, which is the one of a single process."""

from pathlib import Path

import pytest

from cohort.ranks.collectives import SINGLE_PROCESS
from rank_critic import PLACES, STEPS, critic_gradient, make_critic_sequences, make_worker, run_critic_steps
from ranks import RanksOnDemand
from selection import slow
from tiny import relative_error, save_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkpoint of three ranks."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> RanksOnDemand:
    return RanksOnDemand(tmp_path_factory.mktemp("ranks"))


@slow("test_critic has it in one process, and test_ranks three ranks")
def test_the_gradient_over_three_ranks_is_that_of_one(on: RanksOnDemand, model: str):
    """Any budget, streams, ranks with nothing to do, and one that runs out of memory at every place."""
    worker, three = make_worker(model, SINGLE_PROCESS), on(3, "critic_gradients", model)
    for step, lengths in STEPS.items():
        sequences = make_critic_sequences(*lengths, seed=3)
        result, expected = critic_gradient(worker, sequences, 10_000)
        for budget in (20, 10_000):
            loss, actual = three[f"{step}/{budget}"]
            assert loss == pytest.approx(result.metrics["loss"], rel=1e-6)
            assert max(relative_error(actual[k], expected[k]) for k in expected) < 1e-6, (step, budget)
    _, expected = critic_gradient(worker, make_critic_sequences(*STEPS["uneven"], seed=3), 10_000)
    for place in PLACES:
        again = three[f"memory/{place}"]
        assert again.num_out_of_memory >= 1 and not again.different, place
        assert max(relative_error(again.gradient[k], expected[k]) for k in expected) < 1e-6, place


@slow("test_critic has it in one process, and test_ranks three ranks")
def test_updates_over_three_ranks_are_those_of_one(on: RanksOnDemand, model: str, root: Path, tmp_path: Path):
    three = on(3, "critic_steps", model, str(root))
    one = run_critic_steps(SINGLE_PROCESS, model, str(tmp_path))
    for actual, expected in zip(three["metrics"], one["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for part in ("policy", "critic"):
        assert three[part].keys() == one[part].keys()
        assert max(relative_error(three[part][k], one[part][k]) for k in one[part]) < 1e-6
    assert {"value_loss", "value/clip_ratio", "value/grad_norm", "value/learning_rate"} <= one["metrics"][0].keys()


@slow("test_critic_runs resumes in one process, and test_ranks three ranks")
def test_a_checkpoint_of_three_ranks_goes_on_with_one(on: RanksOnDemand, model: str, root: Path):
    """Policy, critic and both optimizers."""
    three = on(3, "critic_steps", model, str(root))
    resumed = run_critic_steps(SINGLE_PROCESS, model, str(root), "resume")
    assert resumed["metrics"][0] == pytest.approx(three["metrics"][2], rel=1e-6, abs=1e-9)
    for part in ("policy", "critic"):
        assert max(relative_error(resumed[part][k], weight) for k, weight in three[part].items()) < 1e-6
