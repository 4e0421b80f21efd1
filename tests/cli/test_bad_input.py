"""Bad input through the real command line: the exit code, one message, no traceback, and no weights where possible."""

import json
import os
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from cohort.config import load_config
from cohort.models.model_limits import _max_positions
from cohort.run import log as loggers
from cohort.run.folder import RunFolder
from commands import Ended, assert_refused, set_up
from tiny import copy_task_rows, make_tokenizer, save_model_folder, write_jsonl

# Refused before any weights are loaded
REWARD = "def right(completions, **kwargs):\n    return [1.0] * len(completions)\n"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        # the configuration
        ({"train": {"stepz": 5}}, ["error: train.stepz: unknown key; did you mean steps?"]),
        (
            {"train": {"steps": None, "epochs": 1, "warmup_steps": 4}},
            ["error: train.warmup_steps: 4 exceeds the run's 3 steps (6 prompts, 2 per step); use at most 3"],
        ),
        ({"hardware": {"device": "cuda:99"}}, ["error: hardware.device: 'cuda:99': this machine", "use auto or cpu"]),
        # the data
        ({"data": {"path": "dota.jsonl"}}, ["error: data.path='dota.jsonl': no such file", "data.jsonl"]),
        ({"data": {"path": "broken.jsonl"}}, ["broken.jsonl': line 2 is not valid JSON", "at character 13"]),
        ({"data": {"split": "validation"}}, ["is a single file, where split='validation' has no effect"]),
        (
            {"data": {"prompt": "questoin"}},
            ["error: data.prompt='questoin': the data has no such column; did you mean question? Columns: question"],
        ),
        ({"data": {"prompt": "level"}}, ["error: data.prompt='level': row 1: a prompt is text or a list of chat"]),
        (
            {"rollout": {"max_prompt_tokens": 3}},
            ["error: rollout.max_prompt_tokens=3: no prompt of data.path is that short"],
        ),
        (
            {"data": {"path": "long.jsonl", "overlong_prompts": "error"}},
            ["the prompt in row 2 of data.path has", "or data.overlong_prompts: drop"],
        ),
        ({"data": {"chat_template_kwargs": {"enable_thinking": False}}}, ["never reads 'enable_thinking'"]),
        # the rewards
        (
            {"rewards": [{"use": "exactly"}]},
            ["error: rewards[0].use: no built-in reward 'exactly'; did you mean exact"],
        ),
        ({"rewards": [{"use": "nowhere.py:f"}]}, ["error: rewards[0].use: 'nowhere.py:f': no such file: "]),
        ({"rewards": [{"use": "no_such_package.x:f"}]}, ["there is no module 'no_such_package'"]),
        ({"rewards": [{"use": "reward.py:wright"}]}, ["has no 'wright'; did you mean right?"]),
        ({"rewards": [{"use": "syntax.py:f"}]}, ["syntax.py:f' does not import: SyntaxError"]),
        (
            {"rewards": [{"use": "exact", "args": {"patern": "x"}}]},
            ["error: rewards.0.args.patern: unknown key; did you mean pattern"],
        ),
        ({"data": {"path": "unanswered.jsonl"}}, ["error: rewards[0]: reward 'exact' needs the column 'answer'"]),
        # the evaluation
        ({"eval": {"path": "held.jsonl"}}, ["error: eval.path='held.jsonl': no such file"]),
        ({"eval": {"path": "data.jsonl", "prompt": "q"}}, ["error: eval.prompt='q': the data has no such column"]),
        ({"eval": {"path": "unanswered.jsonl"}}, ["eval.path, rewards[0]: reward 'exact' needs the column 'answer'"]),
        (
            {"eval": {"path": "data.jsonl", "success_reward": "acc"}},
            ["error: eval.success_reward: 'acc' is not a reward; must be one of exact"],
        ),
        # the model
        ({"model": {"path": "./modle"}}, ["error: model.path: './modle': no such folder;"]),
        ({"model": {"path": "data.jsonl"}}, ["is a file; give the folder that holds config.json"]),
    ],
)
def test_refused_before_any_weights_are_loaded(tmp_path, monkeypatch, cohort, sections, parts):
    monkeypatch.chdir(tmp_path)
    rows = copy_task_rows(2)
    files = {
        "broken.jsonl": json.dumps(rows[0]) + '\n{"answer": 4]\n',
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
        ("config.json", "is not a model folder: it has no config.json. It contains: chat_template.jinja"),
        ("model.safetensors", "has no weights (*.safetensors)"),
        ("tokenizer.json", "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json); copy the model's tokeniz"),
        ("chat_template.jinja", "the tokenizer has no chat template; put a chat_template.jinja into the model's"),
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
    assert_refused(
        cohort("train", path),
        "generation_config.json, so completions would never end",
    )


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_a_completion_longer_than_the_model_knows_positions(tmp_path, cohort, section):
    held_out = {"path": str(tmp_path / "data.jsonl")} if section == "eval" else {}
    ended = cohort("train", set_up(tmp_path, **{section: {**held_out, "max_completion_tokens": 1000}}))
    assert_refused(ended, f"{section}.max_completion_tokens: 1000 plus the longest prompt", "has 512 positions")


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        ({"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        ({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, 512),  # its frequencies are constant
        (
            {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128},
            },
            128,
        ),
        ({"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "yarn", "factor": 4.0}}, 512),
    ],
)
def test_positions_that_a_model_knows(rope, positions):
    assert _max_positions(SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)) == positions
    assert _max_positions(SimpleNamespace()) is None


def test_a_tokenizer_with_tokens_that_the_model_does_not_have(tmp_path, cohort):
    path = set_up(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["say"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = len(make_tokenizer())
    assert_refused(cohort("train", path), f"token id {rows}, but the model has only {rows} embeddings")


def test_fewer_steps_than_the_run_has_behind_it(tmp_path, cohort):
    path = set_up(tmp_path)
    assert cohort("train", path).code == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert_refused(cohort("train", path, "train.steps=2"), "train.steps: the run in", "has already done 3 steps")


def test_a_run_whose_answers_have_changed_does_not_go_on(tmp_path, cohort):
    path = set_up(tmp_path)
    assert cohort("train", path).code == 0
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('"answer": "1"', '"answer": "2"'))
    assert_refused(cohort("train", path, "train.steps=4"), "data.path")


@pytest.mark.usefixtures("no_weights")
def test_a_logger_that_is_not_installed(tmp_path, cohort, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
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
    assert_refused(cohort("train", path), "is not empty and holds no run (thesis.tex); use a new folder")
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
        assert ended.out.startswith(f"this run is already finished (3 steps): {tmp_path}/run/final\n")
        assert f"for a new run, use another folder: run.dir={tmp_path}/run-2\n" in ended.out
    ended = cohort("train", path, "train.seed=1", "rollout.top_k=5")
    assert_refused(
        ended,
        f"run.dir: '{tmp_path}/run' already holds another run. It differs in\n"
        "  rollout.top_k: 0 there, 5 here\n  train.seed: 0 there, 1 here\nUse a new run.dir",
    )
    assert (tmp_path / "run" / "summary.json").read_text() == summary
    assert "steps: 3" in (tmp_path / "run" / "config.yaml").read_text()  # not the 2 of the command that did nothing


# The weights


def test_weights_that_cannot_be_loaded(tmp_path, cohort):
    path = set_up(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert_refused(cohort("train", path), "model.path:", "model.safetensors (", "is truncated, or not")
    file.write_bytes(whole)
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    ended = cohort("train", path)
    assert_refused(ended, "1 weights are missing from the files: model.norm.weight")
    file.write_bytes(whole)
    assert cohort("train", path).code == 0  # the same run folder, after the mistake is mended


# Rewards that misbehave when they are called


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("return [1.0]", "reward 'f' returned 1 values for 4 completions; it must return one number or None for each"),
        ("return [None] * 4", "no reward scored any of the 4 completions of this step"),
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
    assert "dropped 1 training prompts over rollout.max_prompt_tokens=32, 4 left" in ended.out


# cohort eval


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"--data": "held.jsonl"}, "error: eval.path='held.jsonl': no such file"),
        (
            {"--prompt": "questoin"},
            "error: eval.prompt='questoin': the data has no such column; did you mean question",
        ),
        (
            {"--reward-args": "{a: ["},
            "error: --reward-args: '{a: [' is not valid YAML; use a mapping such as '{pattern:",
        ),
        ({"--reward-args": "5"}, "error: rewards.0.args: 5: input should be a valid dictionary"),
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
