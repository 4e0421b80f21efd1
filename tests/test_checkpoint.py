"""Checkpoints: whole or not there, pruned, and loadable by Transformers."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort.checkpoint import (
    TrainerState,
    checkpoints,
    disk_errors,
    load_engine_state,
    load_trainer_state,
    remove_leftovers,
    save_checkpoint,
    write_file_atomically,
    write_folder_atomically,
)
from cohort.config import ModelConfig
from cohort.errors import TrainingError
from cohort.policy import Policy, load_policy, load_tokenizer
from tiny import CHAT_TEMPLATE, make_policy, make_tokenizer, save_model_folder

TOKENIZER = make_tokenizer()
FULL = "no space left on the disk. Nothing written earlier is lost: free some space and run the same command again"


def state(steps_done: int) -> TrainerState:
    return TrainerState(steps_done=steps_done, data={"epoch": 1, "position": 2}, num_tokens=30, seconds=4.5)


def save(
    root: Path, steps_done: int, *, policy: Policy | None = None, tokenizer: Any = TOKENIZER, keep: int = 3
) -> Path:
    return save_checkpoint(
        root,
        policy=policy or make_policy(),
        tokenizer=tokenizer,
        engine_state={"updates_done": steps_done, "moments": torch.arange(3.0)},
        state=state(steps_done),
        keep=keep,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What is saved


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_checkpoint_is_a_model_folder(tmp_path, kind, tie):
    source = ModelConfig(path=str(save_model_folder(tmp_path / "model", kind, tie=tie, seed=3)))
    own_tokenizer = load_tokenizer(source)
    policy = load_policy(source, device=torch.device("cpu"), tokenizer=own_tokenizer)
    folder = save(tmp_path, 7, policy=policy, tokenizer=own_tokenizer)
    assert folder == tmp_path / "step-7"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    expected = policy.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
        assert weight.dtype == torch.float32
    is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert is_tied is tie
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<user>say 1<end>")["input_ids"] == own_tokenizer("<user>say 1<end>")["input_ids"]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    again = load_policy(ModelConfig(path=str(folder)), device=torch.device("cpu"), tokenizer=tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), policy.model.parameters(), strict=True))


def test_trainer_and_engine_state_come_back(tmp_path):
    folder = save(tmp_path, 7)
    assert load_trainer_state(folder) == state(7)
    loaded = load_engine_state(folder)
    assert loaded["updates_done"] == 7
    assert torch.equal(loaded["moments"], torch.tensor([0.0, 1.0, 2.0]))


def test_the_last_ones_are_kept_in_the_order_of_their_numbers(tmp_path):
    policy = make_policy()
    for steps_done in (2, 9, 10, 11):
        save(tmp_path, steps_done, policy=policy, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-11"]
    assert [p.name for p in checkpoints(tmp_path)] == ["step-10", "step-11"]


def test_other_files_are_no_checkpoints(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "step-4").mkdir()  # no trainer state in it
    (tmp_path / "step-5").touch()
    (tmp_path / "step-best").mkdir()
    (tmp_path / ".writing-step-6").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-3"]
    assert checkpoints(tmp_path / "nowhere") == []


# Whole or not there


def test_a_writer_that_raises_leaves_nothing_and_touches_nothing(tmp_path):
    save(tmp_path, 1)
    before = contents(tmp_path)

    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    for name in ("step-2", "step-1"):  # a new one, and one that is there
        with pytest.raises(KeyboardInterrupt):
            write_folder_atomically(tmp_path / name, write)
        assert contents(tmp_path) == before
        assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("write_number", range(1, 8))
def test_an_interrupt_while_torch_writes_is_an_interrupt(tmp_path, monkeypatch, write_number):
    save(tmp_path, 1)
    real = torch.save

    class Interrupted:
        def __init__(self, file: Any):
            self.file, self.num_writes = file, 0

        def write(self, data: bytes) -> int:
            self.num_writes += 1
            if self.num_writes == write_number:
                raise KeyboardInterrupt
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    monkeypatch.setattr(torch, "save", lambda state, file: real(state, Interrupted(file)))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_is_there_is_replaced(tmp_path):
    for text in ("old", "new"):
        write_folder_atomically(tmp_path / "final", lambda folder, text=text: (folder / text).write_text(text))
    assert contents(tmp_path) == {"final/new": b"new"}


def test_a_file_is_replaced_or_as_before(tmp_path):
    file = tmp_path / "made" / "summary.json"
    with write_file_atomically(file) as partial:
        partial.write_text("old")
    with pytest.raises(ZeroDivisionError), write_file_atomically(file) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert contents(tmp_path) == {"made/summary.json": b"old"}
    with write_file_atomically(file) as partial:
        partial.write_text("new")
    assert contents(tmp_path) == {"made/summary.json": b"new"}


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_checkpoint
from cohort import checkpoint

root = Path(sys.argv[1])
test_checkpoint.save(root, 1)
test_checkpoint.save(root, 2)
real = checkpoint.save_model

def slow(*args):
    real(*args)
    print("half written", flush=True)
    time.sleep(60)

checkpoint.save_model = slow
test_checkpoint.save(root, 3, keep=1)
"""


def test_a_kill_while_writing_leaves_the_earlier_ones_whole(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line == "half written\n" for line in lines)
        process.send_signal(signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".writing-step-3", "step-1", "step-2"]
    assert (tmp_path / ".writing-step-3" / "model.safetensors").exists()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-1", "step-2"]
    assert load_trainer_state(tmp_path / "step-2") == state(2)
    assert load_engine_state(tmp_path / "step-2")["updates_done"] == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "step-2")
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_leftovers_go(tmp_path):
    for name in (".writing-step-3", ".deleting-step-1", "step-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in (".config.yaml.partial", ".lock", "notes.partial"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "notes.partial", "step-2"]


# A full disk


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json", "tokenizer.json"])
def test_a_full_disk_is_explained_and_leaves_the_earlier_ones(tmp_path, monkeypatch, file):
    save(tmp_path, 1)
    before = contents(tmp_path)
    real = Path.mkdir

    def mkdir_with_a_file_on_a_full_disk(self: Path, *args, **kwargs) -> None:
        real(self, *args, **kwargs)
        if self.name == ".writing-step-2":
            (self / file).symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", mkdir_with_a_file_on_a_full_disk)
    with pytest.raises(TrainingError) as caught:
        save(tmp_path, 2, keep=1)
    assert str(caught.value).startswith(f"{tmp_path}/step-2: {FULL}")
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


class SafetensorError(Exception):
    """Like that of safetensors, which is neither OSError nor RuntimeError."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("basic_ios::write: No space left on device"),
    ],
)
def test_every_way_to_say_that_the_disk_is_full(error):
    with pytest.raises(TrainingError) as caught, disk_errors(Path("/runs/a/final")):
        raise error
    assert str(caught.value) == (f"/runs/a/final: {FULL} to go on from the last checkpoint")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [ValueError("x"), PermissionError(errno.EACCES, "no"), TrainingError("No space left")]
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, disk_errors(Path("x")):
        raise error
    assert caught.value is error
