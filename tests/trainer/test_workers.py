"""Calls of workers on several ranks: results and errors, logprobs, weights, and deadlines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.records import ForwardOnlyOutputs
from cohort.trainer.worker import run_forward_only
from rank_engine import make_engine
from rank_workers import sequences, workers_of
from ranks import run_ranks
from selection import slow
from tiny import naive_logprobs, relative_error, save_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, dict[str, Any]]:
    """What three ranks made of each job."""
    jobs = {
        "calls": ("calls",),
        "mesh": ("mesh", model),
        "logprobs": ("logprobs", model, model),
        "send_weights": ("send_weights", model, model),
        "patient": ("waiting", model, model, "yes"),
    }
    return dict(zip(jobs, run_ranks(3, tmp_path_factory.mktemp("ranks"), *jobs.values()), strict=True))


def assert_right(logprobs: dict[int, np.ndarray], path: str) -> None:
    """Each sequence's are those of one unpadded forward pass, at the engine's temperature."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    assert logprobs.keys() == {s.index for s in sequences()}
    for s in sequences():
        with torch.no_grad():
            expected, _ = naive_logprobs(model, s, temperature=0.9)
        np.testing.assert_allclose(logprobs[s.index], expected.numpy(), rtol=0, atol=1e-6)  # RMSNorm is in float32


def test_forward_only_outputs_of_one_rank_are_the_engines_own(model: str):
    engine = make_engine(model, SINGLE_PROCESS, reference=model)
    outputs = run_forward_only(
        workers_of(engine, SINGLE_PROCESS), sequences(), {"logprobs", "entropies", "reference_logprobs"}
    )
    own = engine.forward_only(sequences(), {"logprobs"})["logprobs"]
    assert all(np.array_equal(outputs.logprobs[s.index], own[s.index].numpy()) for s in sequences())
    for logprobs in (outputs.logprobs, outputs.reference_logprobs):
        assert_right(logprobs, model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for s in sequences():
        with torch.no_grad():
            _, entropy = naive_logprobs(loaded, s, temperature=0.9)
        np.testing.assert_allclose(outputs.entropies[s.index], entropy.numpy(), rtol=0, atol=1e-6)
    assert not outputs.values


def test_nothing_is_computed_for_an_algorithm_that_asks_for_nothing(model: str):
    workers = workers_of(make_engine(model, SINGLE_PROCESS, reference=model), SINGLE_PROCESS)
    assert run_forward_only(workers, sequences(), frozenset()) == ForwardOnlyOutputs()


def test_calls_on_three_ranks_return_by_rank_and_raise_what_one_raised(three: dict[str, dict[str, Any]]):
    assert three["calls"] == {"sharded": [11, 112, 213], "error": "rank 2 has failed", "same": [3, 103, 203]}


def test_weights_are_sharded_over_the_data_parallel_axis_of_the_mesh(three: dict[str, dict[str, Any]]):
    assert three["mesh"]["axes"] == ("dp_shard",)
    assert three["mesh"]["where"] == [{"dp": (rank, 3), "weights": (rank, 3)} for rank in range(3)]
    assert (SINGLE_PROCESS.dp_rank, SINGLE_PROCESS.dp_size) == (0, 1)


def test_ranks_that_compute_the_same_sequences_count_once(tmp_path: Path, model: str):
    """On a mesh of 2 x 2 ranks everything is as with two ranks, and the sums are those of one."""
    one, four = (run_ranks(n, tmp_path, ("replicas", model, model))[0] for n in (2, 4))
    assert (one["results"], four["results"]) == ([10], [10, 211])
    assert_right(four["logprobs"], model)
    assert len(four["steps"]) == 2 and four["steps"][0] == four["steps"][1]
    alone, step = one["steps"][0], four["steps"][0]
    assert step.num_tokens_unshared == alone.num_tokens_unshared == sum(len(s.token_ids) - 1 for s in sequences())
    assert step.metrics == pytest.approx(alone.metrics, rel=1e-6, abs=1e-9)
    assert four["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert relative_error(four["gradients"][name], gradient) < 1e-6, name


def test_logprobs_over_three_ranks_are_those_of_one(three: dict[str, dict[str, Any]], model: str):
    assert_right(three["logprobs"]["logprobs"], model)


def test_a_receiver_that_fails_gets_no_rank_out_of_step(three: dict[str, dict[str, Any]], model: str):
    """All ranks see all weights, four times: a rank that stopped early would leave the others in a collective."""
    saved = load_file(Path(model) / "model.safetensors")
    received = three["send_weights"]["received"]
    assert received.keys() == saved.keys() and all(torch.equal(received[name], saved[name]) for name in saved)
    assert [len(came) for came in three["send_weights"]["came"]] == [4 * len(saved)] * 3
    assert all(came == three["send_weights"]["came"][0] for came in three["send_weights"]["came"])


def test_every_rank_lends_its_own_memory(three: dict[str, dict[str, Any]], model: str):
    done, saved = three["send_weights"], load_file(Path(model) / "model.safetensors")
    assert done["handles"] == ["GPU-0", "GPU-1", "GPU-2"]
    assert done["lent"].keys() == saved.keys() and all(torch.equal(done["lent"][name], saved[name]) for name in saved)


def test_the_others_wait_for_as_long_as_rank_0_says_so(three: dict[str, dict[str, Any]]):
    assert three["patient"]["said"] == ["", "", ""]
    assert three["patient"]["logprobs"] == len(sequences())
    assert three["patient"]["counts"] > 10


@slow("the negative control of the test above: where rank 0 says nothing their deadline passes")
def test_the_others_do_not_wait_where_nobody_says_so(tmp_path: Path, model: str):
    (done,) = run_ranks(3, tmp_path, ("waiting", model, model, "no"))
    assert all("did not answer" in said or "a connection broke" in said for said in done["said"][1:])
