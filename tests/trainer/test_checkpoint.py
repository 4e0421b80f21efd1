"""Checkpoints: whole or not there, pruned, and loadable by Transformers."""

import errno
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort import models
from cohort.config import ModelConfig
from cohort.errors import TrainingError
from cohort.models import LoadRequest, Policy, load_policy, load_tokenizer
from cohort.run.atomic import disk_errors, remove_leftovers, write_file_atomically, write_folder_atomically
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import TrainerState, load_engine_state, load_trainer_state, save_checkpoint
from forked import fork
from selection import slow
from tiny import CHAT_TEMPLATE, make_policy, make_tokenizer, save_model_folder
from waiting import PATIENCE_S, until

TOKENIZER = make_tokenizer()
INTACT = "Earlier checkpoints are intact: correct this, such as by freeing space, and run the same command again"
FULL = f"no space left on device. {INTACT}"


def state(steps_done: int) -> TrainerState:
    return TrainerState(
        steps_done=steps_done,
        data={"epoch": 1, "position": 2},
        pending=[{"step": 3, "prompt_id": 4, "epoch": 0}],
        num_tokens=30,
        seconds=4.5,
        micro_batch_tokens=512,
        micro_batch_tokens_wanted="auto",
        processes=3,
        control={"kl": 0.1, "entropy": 0.0, "last_entropy": None},
    )


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
    policy = load_policy(LoadRequest(source, device=torch.device("cpu"), tokenizer=own_tokenizer))
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
    again = load_policy(LoadRequest(ModelConfig(path=str(folder)), device=torch.device("cpu"), tokenizer=tokenizer))
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), policy.model.parameters(), strict=True))


def test_trainer_and_engine_state_come_back(tmp_path):
    folder = save(tmp_path, 7)
    assert load_trainer_state(folder) == state(7)
    loaded = {"updates_done": 0, "moments": torch.zeros(3)}
    load_engine_state(folder, loaded)
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


class StoppedFile(io.FileIO):
    """Unbuffered; raises `error` at one write among those of all files."""

    num_writes: int
    write_number: int
    error: BaseException

    def write(self, data: Any) -> int:
        StoppedFile.num_writes += 1
        if StoppedFile.num_writes == StoppedFile.write_number:
            raise StoppedFile.error
        return super().write(data)


def stop_torch(monkeypatch: pytest.MonkeyPatch, write_number: int, error: BaseException) -> None:
    """Have `error` raised at one of the writes of torch.distributed.checkpoint."""

    @contextmanager
    def create_stream(_: Any, path: Path, mode: str) -> Iterator[io.FileIO]:
        with StoppedFile(path, mode) as file:
            yield file

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", create_stream)
    StoppedFile.num_writes, StoppedFile.write_number, StoppedFile.error = 0, write_number, error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (partial(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC)), TrainingError),
    ],
)
def test_whatever_write_of_torch_is_stopped_it_is_told_as_what_it_is(tmp_path, monkeypatch, error, told):
    policy = make_policy()
    save(tmp_path, 1, policy=policy)
    before = contents(tmp_path)
    for write_number in itertools.count(1):
        stop_torch(monkeypatch, write_number, error())
        try:
            save(tmp_path, 2, policy=policy, keep=1)
        except told as caught:
            assert told is KeyboardInterrupt or str(caught).startswith(f"{tmp_path}/step-2: {FULL}")
            assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
            assert contents(tmp_path) == before
        else:
            break
    assert write_number > 30  # the last one was beyond the end
    assert [p.name for p in checkpoints(tmp_path)] == ["step-2"]


def test_what_torch_cannot_write_is_told_as_it_is(tmp_path, monkeypatch):
    stop_torch(monkeypatch, 3, OSError(errno.ENXIO, "not today"))
    with pytest.raises(OSError, match="not today"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


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


def save_and_stop(root: str) -> None:
    """Save two checkpoints and half of a third one, and wait to be killed."""
    save(Path(root), 1)
    save(Path(root), 2)
    real = models.save_policy

    def stop(*args: Any) -> None:
        real(*args)
        print("half written", flush=True)
        time.sleep(PATIENCE_S)

    models.save_policy = stop
    save(Path(root), 3, keep=1)


def test_a_kill_while_writing_leaves_the_earlier_ones_whole(tmp_path):
    said = tmp_path / "said"
    process = fork(save_and_stop, str(tmp_path), out=said)
    until(lambda: not process.is_alive() or (said.exists() and "half written" in said.read_text()))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    said.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".writing-step-3", "step-1", "step-2"]
    assert (tmp_path / ".writing-step-3" / "model.safetensors").exists()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-1", "step-2"]
    assert load_trainer_state(tmp_path / "step-2") == state(2)
    loaded = {"updates_done": 0, "moments": torch.zeros(3)}
    load_engine_state(tmp_path / "step-2", loaded)
    assert loaded["updates_done"] == 2
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


FILES = ["optimizer/__0_0.distcp", "optimizer/.metadata.tmp", "trainer_state.json", "tokenizer.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_is_explained_and_leaves_the_earlier_ones(tmp_path, monkeypatch, file):
    save(tmp_path, 1)
    before = contents(tmp_path)
    real = Path.mkdir

    def mkdir_with_a_file_on_a_full_disk(self: Path, *args, **kwargs) -> None:
        real(self, *args, **kwargs)
        if self.name == ".writing-step-2":
            real((self / file).parent, exist_ok=True)
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
    what = "disk quota exceeded" if getattr(error, "errno", None) == errno.EDQUOT else "no space left on device"
    assert str(caught.value) == f"/runs/a/final: {what}. {INTACT} to resume from the last one"
    assert caught.value.__cause__ is error


def test_a_full_disk_is_told_by_the_name_that_the_folder_was_to_have():
    with (
        pytest.raises(TrainingError, match=r"^/runs/a/final: no space left"),
        disk_errors(Path("/runs/a/.writing-final")),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


FULL_ON_ONE_RANK = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/../helpers"]
import torch
from test_checkpoint import TOKENIZER, make_policy, state
from cohort.trainer.checkpoint import save_checkpoint
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.errors import TrainingError

ranks = join_ranks(backend="gloo", timeout_s=600, command_timeout_s=600)
torch.manual_seed(0)
policy, root = make_policy(), Path(sys.argv[1])

def save(steps_done):
    moments = {f"moments_{i}": torch.arange(1000.0) for i in range(4)}  # each is written by one of the ranks
    save_checkpoint(root, policy=policy, tokenizer=TOKENIZER if ranks.is_rank0 else None, engine_state=moments,
                    state=state(steps_done), keep=1, ranks=ranks)

save(1)
if ranks.is_rank0:
    full = root / ".writing-step-2" / "optimizer" / "__1_0.distcp"
    real = Path.mkdir
    def mkdir(self, *args, **kwargs):
        real(self, *args, **kwargs)
        if self.name == ".writing-step-2":
            real(full.parent)
            full.symlink_to("/dev/full")
    Path.mkdir = mkdir
try:
    save(2)
except TrainingError as error:
    (root / f"rank-{ranks.rank}").write_text(str(error))
leave_ranks()
"""


@slow("a launcher and two ranks; one process has every full disk")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_for_one_rank_is_explained_by_all(tmp_path):
    (tmp_path / "script.py").write_text(FULL_ON_ONE_RANK)
    root = tmp_path / "root"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, str(tmp_path / "script.py"), str(root), str(Path(__file__).parent)], check=True)
    for rank in range(2):
        assert (root / f"rank-{rank}").read_text().startswith(f"{root}/step-2: {FULL}")
    assert sorted(p.name for p in root.iterdir()) == ["rank-0", "rank-1", "step-1"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        OSError(errno.ENXIO, "no"),
        FileNotFoundError(errno.ENOENT, "no"),
        TrainingError("No space left"),
    ],
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, disk_errors(Path("x")):
        raise error
    assert caught.value is error
