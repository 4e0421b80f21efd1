"""Peak memory by phase, and speed as a share of the hardware's."""

import sys

import pytest
import torch

from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.metrics import resources as memory_module
from cohort.metrics.resources import PeakMemory, device_peak_flops, largest_peaks, speed_metrics
from fake_cuda import fake_cuda
from test_laws import make_engine
from tiny import make_policy, pack_for, random_sequences

CPU = torch.device("cpu")
MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks are set back through /proc")


def hold(megabytes: int) -> None:
    torch.ones(megabytes * MB // 4)


@linux
def test_each_phase_has_its_own_peak_and_the_overall_one_stays():
    memory = PeakMemory(CPU)
    with memory.phase("large"):
        hold(400)
    with memory.phase("small"):
        hold(40)
    with memory.phase("large"):  # again, with less
        hold(20)
    peaks = memory.take()
    assert set(peaks) == {"memory/large_peak_bytes", "memory/small_peak_bytes", "memory/peak_bytes"}
    assert 300 * MB < peaks["memory/large_peak_bytes"] - peaks["memory/small_peak_bytes"] < 420 * MB
    assert peaks["memory/peak_bytes"] >= peaks["memory/large_peak_bytes"]
    assert memory.take() == {"memory/peak_bytes": peaks["memory/peak_bytes"]}


def test_the_most_that_the_allocator_reserved_outlives_the_phase(monkeypatch: pytest.MonkeyPatch):
    """A phase resets the driver's peaks."""
    reserved = iter([5, 9, 3, 4])
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: next(reserved))
        memory = PeakMemory(torch.device("cuda", 0))
        with memory.phase("first"):
            pass
        with memory.phase("second"):
            pass
        assert memory.take()["memory/reserved_peak_bytes"] == 9


@linux
def test_a_peak_between_phases_is_in_the_overall_one():
    memory = PeakMemory(CPU)
    hold(600)
    with memory.phase("small"):
        hold(1)
    peaks = memory.take()
    assert peaks["memory/peak_bytes"] - peaks["memory/small_peak_bytes"] > 400 * MB


@linux
def test_a_phase_that_fails_is_counted():
    memory = PeakMemory(CPU)
    with pytest.raises(ZeroDivisionError), memory.phase("failed"):
        hold(1 // 0)
    assert "memory/failed_peak_bytes" in memory.take()


def test_without_a_peak_that_can_be_set_back_there_is_the_overall_one(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_module, "_PROC", tmp_path / "none")
    memory = PeakMemory(CPU)
    with memory.phase("train"):
        hold(1)
    peaks = memory.take()
    assert set(peaks) == {"memory/peak_bytes"} and peaks["memory/peak_bytes"] > 10 * MB


def test_a_kernel_that_does_not_do_as_told_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  900000 kB\nVmRSS:\t  100000 kB\n")
    monkeypatch.setattr(memory_module, "_PROC", tmp_path)
    memory = PeakMemory(CPU)
    with memory.phase("train"):
        pass
    assert memory.take() == {"memory/peak_bytes": 900000 * 1024}


def test_the_largest_of_all_ranks():
    ranks = [{"memory/peak_bytes": 5, "memory/train_peak_bytes": 4}, {"memory/peak_bytes": 7}]
    assert largest_peaks(ranks) == {"memory/peak_bytes": 7, "memory/train_peak_bytes": 4}


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_what_a_pass_counts(budget: int):
    """A prompt of 10 with completions of 4 and 6, and one of 5 with 3. The last token of a sequence is not an input."""
    policy = make_policy()
    engine = make_engine(policy)
    (batch,) = pack_for(policy, random_sequences([(10, [4, 6]), (5, [3])]), budget)
    done = engine.forward_backward(batch, build_algorithm(AlgorithmConfig(), max_completion_tokens=8).policy_loss)
    shared = budget > 1
    assert done.num_tokens_unshared == 13 + 15 + 7
    assert done.num_prompt_inputs == 15 + (0 if shared else 10)
    assert done.num_computed_tokens == done.num_positions == done.num_prompt_inputs + 3 + 5 + 2
    whole = [n * (n + 1) // 2 for n in (13, 15, 7)]
    assert done.attention_pairs == sum(whole) - (55 if shared else 0)
    spared = done.num_tokens_unshared - done.num_computed_tokens
    assert spared / (spared + done.num_prompt_inputs) == (10 / 25 if shared else 0)


def test_speed_by_hand():
    assert speed_metrics(6e15, seconds=2.0, num_processes=3, peak=4e15) == {
        "model_tflops_per_second": 1000.0,
        "mfu": 0.25,
    }
    assert "mfu" not in speed_metrics(6e15, seconds=2.0, num_processes=3, peak=None)
    assert device_peak_flops(CPU, torch.float32) is None
