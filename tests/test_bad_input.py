"""Bad input through the real command line: the exit code, one message, no traceback, and no weights where possible."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from cohort import checkpoint
from cohort.checkpoint import checkpoints, load_trainer_state
from cohort.cli import main
from cohort.config import load_config
from cohort.metrics import writers
from cohort.policy.limits import _known_positions
from cohort.run_folder import RunFolder
from cohort.trainer import setup
from tiny import copy_task_rows, make_tokenizer, save_model_folder, write_jsonl
from waiting import free_port, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def cohort(monkeypatch, capsys) -> Callable[..., Ended]:
    """Runs the command line in this process."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cohort", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Ended(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Makes it an error to get as far as loading weights."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr("cohort.trainer.run.build_run", refuse)
    monkeypatch.setattr("cohort.trainer.evaluate_model.load_policy", refuse)


def assert_refused(ended: Ended, *parts: str, code: int = 2) -> None:
    """One message on stderr that has these parts, and nothing else."""
    assert ended.err.startswith("error: ")
    assert ended.err.count("error: ") == 1
    assert "Traceback" not in ended.err + ended.out
    for part in parts:
        assert part in ended.err
    assert ended.code == code


def set_up(folder: Path, *, files: dict[str, str] | None = None, **sections: Any) -> Path:
    """Model, data and run.yaml, whose path this is, of a run of 3 steps of 2 prompts x 2 generations in `folder/run`.

    A section that is a mapping changes keys of the configuration's; any other takes its place.
    """
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    if not (folder / "model").exists():
        save_model_folder(folder / "model")
    if not (folder / "data.jsonl").exists():
        write_jsonl(folder / "data.jsonl", copy_task_rows(6))
    raw: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "prompt": "question"},
        "rewards": [{"use": "exact"}],
        "rollout": {"num_generations": 2, "max_prompt_tokens": 32, "max_completion_tokens": 4},
        "train": {"steps": 3, "prompts_per_step": 2},
        "hardware": {"device": "cpu"},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 1},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


# Refused before any weights are loaded

REWARD = "def right(completions, **kwargs):\n    return [1.0] * len(completions)\n"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        # the configuration
        ({"train": {"stepz": 5}}, ["error: train.stepz: unknown key; did you mean steps?"]),
        ({"train": {"steps": "many"}}, ["error: train.steps: 'many': input should be a valid integer"]),
        ({"algorithm": {"name": "gpro"}}, ["error: algorithm.name: 'gpro': is not one of grpo", "did you mean grpo?"]),
        (
            {"rollout": {"num_generations": 1}},
            ["error: rollout.num_generations: 1 with algorithm.name: grpo (advantage: group_mean_std): a"],
        ),
        ({"run": {"checkpoint_every": 0, "keep_checkpoints": 2}}, ["keep_checkpoints has no effect"]),
        ({"train": {"warmup_steps": 4}}, ["error: train: warmup_steps: 4 is more than steps: 3"]),
        (
            {"train": {"steps": None, "epochs": 1, "warmup_steps": 4}},
            ["error: train.warmup_steps: 4 is more than the run's 3 steps (6 prompts, 2 per step); use at most 3"],
        ),
        (
            {"hardware": {"processes": 0}},
            ["error: hardware.processes: 0: must be a whole number of at least 1, or auto"],
        ),
        ({"hardware": {"processes": -2}}, ["error: hardware.processes: -2: must be a whole number of at least 1"]),
        ({"hardware": {"processes": 1.5}}, ["error: hardware.processes: 1.5: must be a whole number of at least 1"]),
        (
            {"hardware": {"processes": 2, "device": "cuda:1"}},
            ["error: hardware: device: cuda:1 names one GPU, and processes: 2 would share it"],
        ),
        ({"train": {"micro_batch_tokens": 0}}, ["error: train.micro_batch_tokens: 0: must be a whole number of at"]),
        ({"hardware": {"device": "cuda:99"}}, ["error: hardware.device: 'cuda:99': this machine", "use auto or cpu"]),
        # the data
        ({"data": {"path": "dota.jsonl"}}, ["error: data.path='dota.jsonl': no such file", "data.jsonl"]),
        ({"data": {"path": "empty.jsonl"}}, ["empty.jsonl': the file is empty (0 bytes)."]),
        ({"data": {"path": "blank.jsonl"}}, ["blank.jsonl': has no rows. At least one prompt is needed."]),
        ({"data": {"path": "broken.jsonl"}}, ["broken.jsonl': line 2 is not valid JSON", "at character 13"]),
        ({"data": {"path": "list.jsonl"}}, ["list.jsonl': line 1 holds [1], which is not an object."]),
        ({"data": {"path": "data.xml"}}, ["data.xml': the ending '.xml' is not supported. Give a .jsonl"]),
        ({"data": {"split": "validation"}}, ["is a single file, where split='validation' has no effect"]),
        (
            {"data": {"prompt": "questoin"}},
            ["error: data.prompt='questoin': the data has no such column. Did you mean 'question'? Columns: question"],
        ),
        ({"data": {"prompt": "level"}}, ["error: data.prompt='level': row 1: a prompt is text or a list of chat"]),
        (
            {"rollout": {"max_prompt_tokens": 3}},
            ["error: rollout.max_prompt_tokens=3: no prompt of data.path is that short."],
        ),
        (
            {"data": {"path": "long.jsonl", "overlong_prompts": "error"}},
            ["the prompt in row 2 of data.path has", 'set data.overlong_prompts="drop"'],
        ),
        ({"data": {"chat_template_kwargs": {"enable_thinking": False}}}, ["never reads 'enable_thinking'"]),
        # the rewards
        (
            {"rewards": [{"use": "exactly"}]},
            ["error: rewards[0].use: no built-in reward 'exactly'. Did you mean 'exact'"],
        ),
        ({"rewards": [{"use": "nowhere.py:f"}]}, ["error: rewards[0].use: 'nowhere.py:f': no such file."]),
        ({"rewards": [{"use": "no_such_package.x:f"}]}, ["there is no module 'no_such_package'"]),
        ({"rewards": [{"use": "reward.py:wright"}]}, ["has no 'wright'. Did you mean 'right'?"]),
        ({"rewards": [{"use": "syntax.py:f"}]}, ["syntax.py:f' does not import: SyntaxError"]),
        (
            {"rewards": [{"use": "exact", "args": {"patern": "x"}}]},
            ["takes no argument 'patern'. Did you mean 'pattern'"],
        ),
        ({"data": {"path": "unanswered.jsonl"}}, ["error: rewards[0]: reward 'exact' needs the column 'answer'"]),
        # the evaluation
        ({"eval": {"path": "held.jsonl"}}, ["error: eval.path='held.jsonl': no such file"]),
        ({"eval": {"path": "data.jsonl", "prompt": "q"}}, ["error: eval.prompt='q': the data has no such column"]),
        ({"eval": {"path": "unanswered.jsonl"}}, ["eval.path, rewards[0]: reward 'exact' needs the column 'answer'"]),
        (
            {"eval": {"path": "data.jsonl", "success_reward": "acc"}},
            ["error: eval.success_reward: 'acc' is not the name of a reward; the rewards are exact"],
        ),
        # the model
        ({"model": {"path": "./modle"}}, ["error: model.path: './modle': no such folder."]),
        ({"model": {"path": "data.jsonl"}}, ["is a file; give the folder that holds config.json"]),
    ],
)
def test_refused_before_any_weights_are_loaded(tmp_path, monkeypatch, cohort, sections, parts):
    monkeypatch.chdir(tmp_path)
    rows = copy_task_rows(2)
    files = {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "broken.jsonl": json.dumps(rows[0]) + '\n{"answer": 4]\n',
        "list.jsonl": "[1]\n",
        "data.xml": "<a/>",
        "long.jsonl": json.dumps(rows[0]) + "\n" + json.dumps({**rows[1], "question": "x" * 40}) + "\n",
        "unanswered.jsonl": '{"question": "a"}\n',
        "reward.py": REWARD,
        "syntax.py": "def f(:\n",
    }
    path = set_up(tmp_path, files=files, **sections)
    save_file({}, tmp_path / "model" / "model.safetensors")  # whole, and without a weight: none is looked for
    assert_refused(cohort("train", path), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("config.json", "has no config.json, so it is not a model folder. It holds: chat_template.jinja"),
        ("model.safetensors", "has no weights (*.safetensors)"),
        ("tokenizer.json", "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json); copy the tokenizer files"),
        ("chat_template.jinja", "the tokenizer has no chat template. Put a chat_template.jinja into the model's"),
    ],
)
def test_a_model_folder_that_lacks_something(tmp_path, cohort, missing, part):
    path = set_up(tmp_path)
    (tmp_path / "model" / missing).unlink()
    assert_refused(cohort("train", path), part)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_cannot_end_a_completion(tmp_path, cohort):
    path = set_up(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    assert cohort("train", path, f"run.dir={tmp_path}/fine").code == 0  # the model's config has one
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": None}))
    assert_refused(cohort("train", path), "has an eos_token, so completions would never end")


@pytest.mark.usefixtures("no_weights")
def test_a_completion_longer_than_the_model_knows_positions(tmp_path, cohort):
    ended = cohort("train", set_up(tmp_path, rollout={"max_completion_tokens": 1000}))
    assert_refused(
        ended, "rollout.max_completion_tokens: 1000 after the longest prompt", "the model knows 512 positions"
    )


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
    ],
)
def test_positions_that_a_model_knows(rope, positions):
    assert _known_positions(SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)) == positions
    assert _known_positions(SimpleNamespace()) is None


@pytest.mark.usefixtures("no_weights")
def test_a_held_out_completion_longer_than_the_model_knows_positions(tmp_path, cohort):
    evaluation = {"path": str(tmp_path / "data.jsonl"), "max_completion_tokens": 1000}
    ended = cohort("train", set_up(tmp_path, eval=evaluation))
    assert_refused(ended, "eval.max_completion_tokens: 1000 after the longest prompt")


def test_a_tokenizer_with_tokens_that_the_model_does_not_have(tmp_path, cohort):
    path = set_up(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["say"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = len(make_tokenizer())
    assert_refused(cohort("train", path), f"token id {rows}, and the model has embeddings for {rows} tokens")


def test_fewer_steps_than_the_run_has_behind_it(tmp_path, cohort):
    path = set_up(tmp_path)
    assert cohort("train", path).code == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert_refused(cohort("train", path, "train.steps=2"), "train.steps: the run in", "has 3 steps behind it already")


def test_a_run_whose_answers_have_changed_does_not_go_on(tmp_path, cohort):
    path = set_up(tmp_path)
    assert cohort("train", path).code == 0
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('"answer": "1"', '"answer": "2"'))
    assert_refused(cohort("train", path, "train.steps=4"), "data.path")


@pytest.mark.usefixtures("no_weights")
def test_a_logger_that_is_not_installed(tmp_path, cohort, monkeypatch):
    monkeypatch.setitem(writers._PACKAGES, "wandb", "no_such_package")
    ended = cohort("train", set_up(tmp_path, run={"log": ["wandb"]}))
    assert_refused(ended, "run.log: 'wandb': the package is not installed; run `pip install 'cohort-rl[wandb]'`")


@pytest.mark.usefixtures("no_weights")
def test_a_configuration_file_that_is_missing_or_broken(tmp_path, cohort):
    path = set_up(tmp_path)
    assert cohort("train", tmp_path / "rnu.yaml") == Ended(
        code=2, out="", err=f"error: {tmp_path}/rnu.yaml: no such configuration file; did you mean run.yaml?\n"
    )
    assert_refused(cohort("train", path, "train.steps"), "override 'train.steps': must look like key.sub=value")
    path.write_text("model: [")
    assert_refused(cohort("train", path), f"{path}: not valid YAML: line 1, column 9")


# The run folder


@pytest.mark.usefixtures("no_weights")
def test_a_folder_of_other_files(tmp_path, cohort):
    path = set_up(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert_refused(cohort("train", path), "is not empty and holds no run (thesis.tex); give a new folder")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.usefixtures("no_weights")
def test_resume_without_a_run(tmp_path, cohort):
    ended = cohort("train", set_up(tmp_path), "--resume")
    assert_refused(ended, f"run.dir: '{tmp_path}/run' holds no run to resume; leave out --resume to start one")


@pytest.mark.usefixtures("no_weights")
def test_a_folder_in_which_another_process_trains(tmp_path, cohort):
    path = set_up(tmp_path)
    folder = RunFolder(load_config(path), resume=False)
    assert_refused(cohort("train", path), f"run.dir: '{tmp_path}/run' is in use by process {os.getpid()}; wait for it")
    folder.close()


def test_a_finished_run(tmp_path, cohort, monkeypatch, request):
    path = set_up(tmp_path)
    assert cohort("train", path).code == 0
    summary = (tmp_path / "run" / "summary.json").read_text()
    request.getfixturevalue("no_weights")
    for arguments in ([], ["--resume"], ["train.steps=2"]):
        ended = cohort("train", path, *arguments)
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.startswith(f"this run is finished (3 steps): {tmp_path}/run/final\n")
    ended = cohort("train", path, "train.seed=1", "rollout.top_k=5")
    assert_refused(
        ended,
        f"run.dir: '{tmp_path}/run' already holds another run. It differs in\n"
        "  rollout.top_k: 0 there, 5 here\n  train.seed: 0 there, 1 here\nGive a new run.dir",
    )
    assert (tmp_path / "run" / "summary.json").read_text() == summary
    assert "steps: 3" in (tmp_path / "run" / "config.yaml").read_text()  # not the 2 of the command that did nothing


# The weights


def test_weights_that_cannot_be_loaded(tmp_path, cohort):
    path = set_up(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert_refused(cohort("train", path), "model.path:", "model.safetensors is truncated: it has")
    file.write_bytes(whole)
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    ended = cohort("train", path)
    assert_refused(ended, "1 weights are missing from its files and would be random: model.norm.weight")
    file.write_bytes(whole)
    assert cohort("train", path).code == 0  # the same run folder, after the mistake is mended


# Rewards that misbehave when they are called


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("return [1.0]", "reward 'f' returned 1 values for 4 completions; it must return one number or None for each"),
        ("return 1.0", "reward 'f' returned 1.0 (float); it must return a list with one number or None for each"),
        ("return ['good'] * 4", "reward 'f' returned 'good' (str) at position 0"),
        ("return [0.0, float('nan'), 0.0, 0.0]", "reward 'f' returned nan (float) at position 1"),
        ("return [0.0, 0.0, float('inf'), 0.0]", "reward 'f' returned inf (float) at position 2"),
        ("return [None] * 4", "no reward judged any of the 4 completions of this step"),
        ("raise KeyError('gold')", "reward 'f' raised KeyError: 'gold' (at "),
    ],
)
def test_rewards_that_misbehave(tmp_path, cohort, body, part):
    path = set_up(tmp_path, files={"r.py": f"def f(completions, **kwargs):\n    {body}\n"}, rewards=[{"use": "r.py:f"}])
    assert_refused(cohort("train", path), part)
    assert not (tmp_path / "run" / "final").exists()


def test_overlong_prompts_are_dropped_and_counted(tmp_path, cohort):
    rows = [*copy_task_rows(4), {"question": "x" * 40, "answer": "1"}]
    write_jsonl(tmp_path / "data.jsonl", rows)
    ended = cohort("train", set_up(tmp_path))
    assert ended.code == 0
    assert "1 training prompts over rollout.max_prompt_tokens: 32 dropped, 4 left" in ended.out


# No space on the disk


def test_too_little_space_is_found_before_the_first_step(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000))
    ended = cohort("train", path)
    assert_refused(ended, f"run.dir: '{tmp_path}/run' has 0.0 GB free, and the run needs", "keep_checkpoints (now 3)")
    monkeypatch.undo()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


FILLS_THE_DISK_ONCE = """
from pathlib import Path

folder = Path(__file__).parent

def f(completions, **kwargs):
    if (folder / "run" / "checkpoints" / "step-1").exists() and not (folder / "was_full").exists():
        (folder / "was_full").touch()
        (folder / "run" / "completions" / ".step-000002.parquet.partial").symlink_to("/dev/full")
    return [float(i) for i in range(len(completions))]
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_completions_are_written(tmp_path, cohort):
    path = set_up(tmp_path, files={"r.py": FILLS_THE_DISK_ONCE}, rewards=[{"use": "r.py:f"}])
    assert_ends_with_a_full_disk_and_goes_on(cohort, path, f"{tmp_path}/run/completions/step-000002.parquet")


def test_a_disk_that_gets_full_while_a_checkpoint_is_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real, calls = checkpoint.save_model, []

    def save_model(policy: Any, tokenizer: Any, folder: Path, *how: Any) -> None:
        real(policy, tokenizer, folder, *how)
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cohort.checkpoint.save_model", save_model)
    assert_ends_with_a_full_disk_and_goes_on(cohort, path, f"{tmp_path}/run/checkpoints/step-2")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_the_optimizer_is_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real, calls = checkpoint.dcp.save, []

    def save(state: Any, *, storage_writer: Any, **arguments: Any) -> None:
        calls.append(storage_writer.path)
        if len(calls) == 2:
            storage_writer.path.mkdir()
            (storage_writer.path / "__0_0.distcp").symlink_to("/dev/full")
        real(state, storage_writer=storage_writer, **arguments)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    assert_ends_with_a_full_disk_and_goes_on(cohort, path, f"{tmp_path}/run/checkpoints/step-2")


def test_a_disk_that_gets_full_while_the_final_model_is_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real = checkpoint.save_model

    def save_model(policy: Any, tokenizer: Any, folder: Path, *how: Any) -> None:
        real(policy, tokenizer, folder, *how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cohort.trainer.crew.save_model", save_model)
        assert_refused(cohort("train", path), f"error: {tmp_path}/run/final: no space left on the disk.", code=1)
    assert not [p.name for p in (tmp_path / "run").iterdir() if "final" in p.name]
    assert cohort("train", path).code == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def assert_ends_with_a_full_disk_and_goes_on(cohort: Callable[..., Ended], path: Path, written: str) -> None:
    run = path.parent / "run"
    assert_refused(
        cohort("train", path),
        f"error: {written}: no space left on the disk. Nothing written earlier is lost: free some space and run the "
        "same command again to go on from the last checkpoint\n",
        code=1,
    )
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-1"]
    assert load_trainer_state(run / "checkpoints" / "step-1").steps_done == 1
    ended = cohort("train", path)
    assert (ended.code, ended.err) == (0, "")
    assert "going on after step 1" in ended.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert [p.name for p in checkpoints(run / "checkpoints")] == ["step-1", "step-2", "step-3"]
    assert sorted(p.name for p in (run / "completions").iterdir()) == [f"step-{n:06d}.parquet" for n in (1, 2, 3)]


# Processes that a launcher starts, by its environment


@contextmanager
def started_rank(path: Path, *overrides: str, **environment: object) -> Iterator[subprocess.Popen[str]]:
    """`python -m cohort.train` as torchrun starts it on this machine. It never outlives the test."""
    variables = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in environment.items()}}
    process = subprocess.Popen(
        [sys.executable, "-m", "cohort.train", str(path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **variables},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def end_of(process: subprocess.Popen[str]) -> Ended:
    """How it ends, which has to be soon: on a busy machine, nearly all of this is the import of torch."""
    out, err = process.communicate(timeout=90)
    # torch may have had a say before; what counts is that our message is the last
    return Ended(code=process.returncode, out=out, err=err[max(0, err.rfind("error: ")) :])


def test_one_process_of_a_launcher_is_an_ordinary_run(tmp_path):
    path = set_up(tmp_path)
    with started_rank(path, RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1, MASTER_PORT=free_port()) as process:
        ended = end_of(process)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_port_that_another_program_has(tmp_path):
    path = set_up(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with started_rank(path, RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1, MASTER_PORT=port) as process:
            assert_refused(
                end_of(process),
                f"error: MASTER_PORT: 127.0.0.1:{port} is in use by another program; give another port",
                "(torchrun --master-port)",
            )
    assert not (tmp_path / "run").exists()


def test_a_place_where_nobody_is(tmp_path):
    path, port = set_up(tmp_path, hardware={"timeout_s": 3}), free_port()
    with started_rank(path, RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=port) as process:
        assert_refused(
            end_of(process),
            f"error: rank 1 of 2 could not meet the others at 127.0.0.1:{port} within 3 s: is rank 0 running there",
        )


@pytest.mark.parametrize(("first", "second"), [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 2), (2, 3))])
def test_processes_that_do_not_agree_on_their_number(tmp_path, first, second):
    path, port = set_up(tmp_path, hardware={"timeout_s": 10}), free_port()
    told = f"rank 0 on {socket.gethostname()} says {first[1]} processes, rank {second[0]} on"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started_rank(path, RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=1, MASTER_PORT=port)
            )
            for rank, world_size in (first, second)
        ]
        for process in processes:
            assert_refused(end_of(process), f"error: the processes do not agree on their number: {told}", "--nnodes")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        (
            {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
            [
                "error: hardware.processes: 3, and the launcher has started 2 processes on this machine",
                "--nproc-per-node 3, or hardware.processes: auto",
            ],
        ),
        ({}, ["the environment of a distributed run is incomplete ('MASTER_PORT'); start it with torchrun"]),
        ({"MASTER_PORT": "high"}, ["the environment of a distributed run is incomplete (invalid literal"]),
        ({"MASTER_PORT": "1", "RANK": "2"}, ["RANK=2 with WORLD_SIZE=2: ranks go from 0 to WORLD_SIZE - 1"]),
    ],
)
def test_an_environment_that_does_not_fit(tmp_path, cohort, monkeypatch, environment, parts):
    path = set_up(tmp_path, hardware={"processes": 3})
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr("cohort.trainer.process.time.sleep", lambda _: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **environment}.items():
        monkeypatch.setenv(name, value)
    assert_refused(cohort("train", path), *parts)
    assert not (tmp_path / "run").exists()


# cohort eval


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"--data": "held.jsonl"}, "error: eval.path='held.jsonl': no such file"),
        (
            {"--prompt": "questoin"},
            "error: eval.prompt='questoin': the data has no such column. Did you mean 'question'",
        ),
        ({"--reward": "exactly"}, "error: rewards[0].use: no built-in reward 'exactly'. Did you mean 'exact'?"),
        ({"--reward-args": "{a: ["}, "error: --reward-args: '{a: [' is not valid YAML, such as '{pattern:"),
        ({"--reward-args": "5"}, "error: rewards.0.args: 5: input should be a valid dictionary"),
        ({"--num-samples": "4", "--temperature": "0"}, "error: eval: num_samples: 4 with temperature: 0 gives the"),
        ({"--device": "cuda:99"}, "error: hardware.device: 'cuda:99': this machine has"),
        ({"--out": "."}, "error: --out: '.' is a folder; give a file, such as 'completions.parquet'"),
        ({"--out": "data.jsonl/x.parquet"}, "error: --out: 'data.jsonl/x.parquet' cannot be written: "),
    ],
)
def test_eval_refuses_before_any_weights_are_loaded(tmp_path, monkeypatch, cohort, change, part):
    monkeypatch.chdir(tmp_path)
    set_up(tmp_path)
    options = {"--data": "data.jsonl", "--prompt": "question", "--reward": "exact"} | change
    assert_refused(cohort("eval", "model", *(x for pair in options.items() for x in pair)), part)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "model", "run.yaml"]


def test_eval_of_a_model_without_a_tokenizer(tmp_path, cohort):
    write_jsonl(tmp_path / "d.jsonl", copy_task_rows(2))
    folder = save_model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    ended = cohort("eval", folder, "--data", tmp_path / "d.jsonl", "--prompt", "question", "--reward", "exact")
    assert_refused(ended, "has no tokenizer")


# The command line itself


def test_debug_shows_the_traceback(tmp_path, cohort):
    ended = cohort("train", tmp_path / "no.yaml", "--debug")
    assert ended.code == 2
    assert ended.err.startswith("Traceback (most recent call last):\n")
    assert ended.err.endswith(f"UserError: {tmp_path}/no.yaml: no such configuration file\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "x.yaml", "--resmue"], "No such option"),
        (["train"], "Missing argument"),
        (["eval", "model"], "Missing option"),
        (["trian"], "No such command"),
        (["eval", "m", "--data", "d", "--reward", "exact", "--seed", "x"], "Invalid value"),
    ],
)
def test_usage_errors_are_typers_own(cohort, arguments, part):
    ended = cohort(*arguments)
    assert ended.code == 2
    assert part in ended.err
    assert "Usage: " in ended.err
    assert "Traceback" not in ended.err


def test_a_bug_of_ours_is_not_dressed_up(tmp_path, cohort, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("cohort.trainer.run.build_run", fail)
    with pytest.raises(ZeroDivisionError):
        cohort("train", set_up(tmp_path))


def test_interrupted(tmp_path, cohort, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cohort.trainer.run.build_run", interrupt)
    monkeypatch.setattr("cohort.trainer.evaluate_model.load_policy", interrupt)
    path = set_up(tmp_path)
    assert cohort("train", path) == Ended(
        code=130, out="", err="interrupted; the same command goes on from the last checkpoint\n"
    )
    ended = cohort(
        *("eval", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--prompt", "question", "--reward", "exact")
    )
    assert ended == Ended(code=130, out="", err="interrupted\n")


def test_a_real_process_exits_with_the_code_and_the_message(tmp_path):
    path = set_up(tmp_path, data={"prompt": "questoin"})
    result = subprocess.run(
        [sys.executable, "-m", "cohort", "train", str(path)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: data.prompt='questoin': the data has no such column. Did you mean 'question'? "
        "Columns: question, answer, level.\n"
    )


def interrupted(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C as a person does; its stderr. One that arrives where an extension drops errors is lost."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError("it goes on after three interrupts")


def test_a_real_interrupt_and_going_on(tmp_path, cohort):
    path = set_up(tmp_path, train={"steps": 100_000}, run={"completions_every": 0})
    command = [sys.executable, "-m", "cohort", "train", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        until(lambda: (tmp_path / "run" / "checkpoints" / "step-2").exists() or process.poll() is not None)
        err = interrupted(process)
    assert (process.returncode, err) == (130, "interrupted; the same command goes on from the last checkpoint\n")
    done = load_trainer_state(checkpoints(tmp_path / "run" / "checkpoints")[-1]).steps_done
    assert done >= 2
    ended = cohort("train", path, f"train.steps={done + 1}")
    assert ended.code == 0
    assert f"going on after step {done}\n" in ended.out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_metrics_are_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real = writers.MetricsWriter.write

    def write(self: writers.MetricsWriter, step: int, metrics: Any) -> None:
        if step == 2:
            self._file = Path("/dev/full").open("a")  # noqa: SIM115
        real(self, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(writers.MetricsWriter, "write", write)
        ended = cohort("train", path)
    assert_refused(ended, f"error: {tmp_path}/run/metrics.jsonl: no space left on the disk.", code=1)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    assert cohort("train", path).code == 0
