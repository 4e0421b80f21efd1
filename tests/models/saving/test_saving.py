"""Saved weights: files of a stated size, one tensor at a time, whole or not there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cohort.config import AdapterConfig, ModelConfig
from cohort.display import ConsoleDisplay
from cohort.errors import TrainingError
from cohort.models import LoadRequest, SaveOptions, load_policy, save_policy, stream_weights, weight_files
from cohort.models.loading.safetensors_files import INDEX, SINGLE, TensorInfo, stored_weights
from cohort.models.weight_files import plan_files
from cohort.packing import collate
from cohort.run.atomic import write_folder_atomically
from cohort.trainer.checkpoint import TrainerState, save_checkpoint
from configs import MINIMAL, message
from live_bytes import LiveBytes
from tiny import make_model, make_policy, make_tokenizer, policy_of, random_sequences, save_model_folder

TOKENIZER = make_tokenizer()
STATE = TrainerState(
    steps_done=1,
    data={},
    pending=[],
    num_tokens=1,
    seconds=1.0,
    micro_batch_tokens=64,
    micro_batch_tokens_wanted=64,
    processes=1,
    control={},
)


def info(name: str, num_bytes: int) -> TensorInfo:
    return TensorInfo.of(name, (num_bytes // 4,), torch.float32)


def test_a_file_has_as_many_tensors_as_fit():
    tensors = [info(name, size) for name, size in (("a", 40), ("b", 60), ("c", 4), ("d", 120), ("e", 96))]
    files = {file.name: [t.name for t in file.tensors] for file in plan_files(tensors, 100)}
    assert files == {
        "model-00001-of-00004.safetensors": ["a", "b"],
        "model-00002-of-00004.safetensors": ["c"],
        "model-00003-of-00004.safetensors": ["d"],  # by itself, as it fits nowhere
        "model-00004-of-00004.safetensors": ["e"],
    }
    assert [file.name for file in plan_files(tensors, 320)] == [SINGLE]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.lists(st.integers(1, 40), max_size=9, unique=True),
    st.integers(1, 500),
    st.integers(1, 2000),
    st.integers(0, 40),
)
def test_ranks_share_the_tensors_evenly(numbers, others, max_shard, min_shard, num_of_rank0):
    tensors = [info(f"t{i}", 4 * number) for i, number in enumerate(numbers)]
    on_rank0, writers = {t.name for t in tensors[len(tensors) - num_of_rank0 :]}, [0, *sorted(others)]
    files = plan_files(tensors, max_shard, writers=writers, min_shard_bytes=min_shard, on_rank0=on_rank0)
    assert sorted(t.name for file in files for t in file.tensors) == sorted(t.name for t in tensors)
    num_bytes = dict.fromkeys(writers, 0)
    for file in files:
        assert file.tensors and (len(file.tensors) == 1 or sum(t.num_bytes for t in file.tensors) <= max_shard)
        assert file.rank == 0 or not on_rank0 & {t.name for t in file.tensors}
        num_bytes[file.rank] += sum(t.num_bytes for t in file.tensors)
    for rank in writers:  # in the order in which they are gathered, and one file after the other
        own = [t.name for file in files if file.rank == rank for t in file.tensors]
        assert own == sorted(own, key=lambda name: int(name[1:]))
    largest, total = max(t.num_bytes for t in tensors), sum(num_bytes.values())
    busy = max(1, min(len(writers), total // min_shard))
    assert sum(map(bool, num_bytes.values())) <= busy
    assert all(num_bytes[rank] <= total / busy + largest for rank in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_that_of_the_library(tmp_path, dtype):
    model = make_model("qwen3", tie=False, dtype=dtype, num_hidden_layers=11)
    model.save_pretrained(tmp_path / "expected", max_shard_size="20KB")
    save_policy(policy_of(model), TOKENIZER, tmp_path / "saved", save_options=SaveOptions(max_shard_bytes=20_000))
    expected, saved = (stored_weights(tmp_path / name) for name in ("expected", "saved"))
    assert {n: (s.shape, s.stored_dtype) for n, s in saved.items()} == {
        n: (s.shape, s.stored_dtype) for n, s in expected.items()
    }
    index, ours = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("expected", "saved"))
    assert ours["metadata"]["total_size"] == index["metadata"]["total_size"]
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_text() == (tmp_path / "expected" / name).read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    for file in (tmp_path / "saved").glob("*.safetensors"):
        tensors = load_file(file).values()
        assert sum(t.nbytes for t in tensors) <= 20_000 or len(tensors) == 1


def test_a_folder_that_is_saved_to_again_has_the_new_weights_alone(tmp_path):
    """In other files than before, of which transformers would prefer the single one."""
    for seed, max_shard_bytes in ((0, 10**9), (1, 20_000), (2, 40_000), (3, 10**9)):
        torch.manual_seed(seed)
        model = make_model("qwen3", tie=False, num_hidden_layers=5)
        with torch.no_grad():
            model.lm_head.weight.fill_(seed)
        save_policy(policy_of(model), TOKENIZER, tmp_path, save_options=SaveOptions(max_shard_bytes=max_shard_bytes))
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.lm_head.weight.eq(seed).all()
        shards = [path.name for path in tmp_path.glob("model-*")]
        assert (tmp_path / INDEX).exists() == bool(shards) != (tmp_path / SINGLE).exists()
        assert len({name.partition("-of-")[2] for name in shards}) <= 1


def test_a_weight_that_cannot_be_read_is_known_to_all_ranks(tmp_path, monkeypatch):
    """It is read by rank 0 alone, for which the others would wait."""
    agreed: list[object] = []
    monkeypatch.setattr(weight_files, "_agree", lambda ranks, folder, problem: agreed.append(problem))
    described = [info("a", 40), info("b", 60)]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(10)
        raise OSError("gone")

    weight_files.write_weights(tmp_path, plan_files(described, 100), tensors())
    assert [str(problem) for problem in agreed] == ["gone", "None"]


def test_saving_takes_no_memory_where_the_weights_are_as_they_are_stored(tmp_path):
    model = make_model("qwen3", tie=False, num_hidden_layers=8)
    total, policy = sum(p.nbytes for p in model.parameters()), policy_of(model)
    with LiveBytes() as live:
        save_policy(policy, TOKENIZER, tmp_path, save_options=SaveOptions(max_shard_bytes=20_000))
    assert live.most < 0.01 * total
    with LiveBytes() as live:  # negative control: what is gathered at once is counted
        kept = [p.detach().clone() for p in model.parameters()]
    assert live.most == total == sum(t.nbytes for t in kept)


def test_a_full_disk_in_the_third_file_leaves_what_there_was(tmp_path, monkeypatch):
    policy, real = make_policy(), Path.open

    def open_on_a_full_disk(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith("model-00003-of-"):
            return real(Path("/dev/full"), *args, **kwargs)
        return real(self, *args, **kwargs)

    write_folder_atomically(tmp_path / "final", lambda folder: save_policy(policy, TOKENIZER, folder))
    before = (tmp_path / "final" / SINGLE).read_bytes()
    monkeypatch.setattr(Path, "open", open_on_a_full_disk)
    with pytest.raises(TrainingError, match=r"final: no space left on device. Earlier checkpoints are intact"):
        write_folder_atomically(
            tmp_path / "final",
            lambda folder: save_policy(policy, TOKENIZER, folder, save_options=SaveOptions(max_shard_bytes=20_000)),
        )
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / SINGLE).read_bytes() == before


def test_an_interrupt_in_a_file_leaves_what_there_was(tmp_path):
    policy = make_policy()

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    save_options = SaveOptions(max_shard_bytes=20_000, on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder_atomically(
            tmp_path / "step-1", lambda folder: save_policy(policy, TOKENIZER, folder, save_options=save_options)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["model", "adapter", "checkpoint", "weights for a server"])
def test_training_goes_on_after_a_save_that_was_cut_off(tmp_path, monkeypatch, kind):
    """Also while its traceback is alive, as in a notebook, and with it the generator that was cut off."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def save() -> None:
        options = SaveOptions(on_progress=interrupt)
        if kind == "checkpoint":
            state = {"updates_done": 1, "moments": torch.arange(3.0)}
            save_checkpoint(
                tmp_path,
                policy=policy,
                tokenizer=TOKENIZER,
                engine_state=state,
                state=STATE,
                keep=1,
                save_options=options,
            )
        elif kind == "weights for a server":
            for _ in stream_weights(policy, torch.bfloat16):
                interrupt()
        else:
            save_policy(policy, TOKENIZER, tmp_path / "saved", save_options=options)

    policy = make_policy()
    if kind == "adapter":
        path = str(save_model_folder(tmp_path / "base"))
        config = ModelConfig(path=path, dtype="float32", adapter=AdapterConfig())
        policy = load_policy(LoadRequest(config, device=torch.device("cpu"), tokenizer=TOKENIZER))
        monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt) as cut_off:
        save()
    batch = collate(random_sequences([(4, [3, 5])]), share_prompts=True)
    policy.logprobs(batch, temperature=1.0)[0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.model.parameters())
    assert cut_off.tb is not None


def test_progress_is_told_in_bytes_to_the_end(tmp_path):
    policy, told = make_policy(), []
    save_policy(policy, TOKENIZER, tmp_path, save_options=SaveOptions(on_progress=lambda *how: told.append(how)))
    total = sum(p.nbytes for p in policy.model.parameters())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_only_a_save_that_takes_long_has_a_bar(monkeypatch):
    now = 100.0
    monkeypatch.setattr("cohort.display.console.time.monotonic", lambda: now)
    display = ConsoleDisplay()
    display.save_progress(1, 8 * 10**6)
    now = 101.0
    display.save_progress(2 * 10**6, 8 * 10**6)
    assert display._progress.tasks == []
    now = 103.0
    display.save_progress(4 * 10**6, 8 * 10**6)
    (bar,) = display._progress.tasks
    assert (bar.completed, bar.total) == (4, 8)
    display.save_progress(8 * 10**6, 8 * 10**6)
    assert display._progress.tasks == []


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"run": {"max_shard_size": "5"}}, "run.max_shard_size: '5': has no unit; write 5GB or 5MB"),
        *(
            (
                {"run": {"max_shard_size": size}},
                f"run.max_shard_size: {size!r}: is not a size; write it as 5GB or 500MB",
            )
            for size in ("", "0", "0GB", "-1GB", "much", "5 GBit")
        ),
        (
            {"run": {"max_shard_size": "1GB"}, "model": {"path": "m", "adapter": {}}},
            "run.max_shard_size: 1GB has no effect with model.adapter, which is saved in one file; remove it",
        ),
    ],
)
def test_a_shard_size_that_is_none_or_has_no_effect(section, expected):
    assert expected in message({**MINIMAL, **section})
