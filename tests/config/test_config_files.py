"""Configurations in files: what is found where, and that what is written reads back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import config_page as docs
from cohort.config import AlgorithmConfig, config_from_dict, load_config, to_yaml
from cohort.errors import UserError
from configs import MINIMAL
from selection import examples

# Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "a configuration is a mapping of sections (model, data, ...), not None"),
        ("- a\n", "a configuration is a mapping of sections (model, data, ...), not ['a']"),
        ("model: {path: m\n", "not valid YAML: line 2, column 1: expected ',' or '}'"),
        (
            "train:\n  steps: 1\n  seed: 2\n  steps: 3\n",
            "not valid YAML: line 4, column 3: duplicate key 'steps'",
        ),
        ("train: {steps: 2024-13-45}\n", "not valid YAML: line 1, column 16: '2024-13-45' is not a valid timestamp"),
        ("train: {seed: !!bool maybe}\n", "not valid YAML: line 1, column 15: 'maybe' is not a valid bool"),
        ("rewards: [{args: &a {x: *a}}]\n", "not valid YAML: nested too deeply, or an anchor contains itself"),
        ("[" * 1000, "not valid YAML: nested too deeply"),
        ("{a: " * 3000, "not valid YAML: nested too deeply"),
        (
            "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 10)),
            "not valid YAML: more than 100,000 values, counting every use of an anchor",
        ),
        ("# " + "x" * 10_000_000, "10,000,002 bytes, and a configuration has at most 200,000; is this another file?"),
        ("a: !!python/object:os.x {}\n", "not valid YAML: line 1, column 4: could not determine a constructor"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "gsm8k.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "gsm8.yaml")
    assert str(caught.value) == f"{tmp_path}/gsm8.yaml: no such configuration file; did you mean gsm8k.yaml?"
    with pytest.raises(UserError, match=r"nowhere/x\.yaml: no such configuration file$"):
        load_config(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(UserError, match=r"cannot be read: .*directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(UserError, match=r"cannot be read: .*utf-8"):
        load_config(tmp_path / "latin.yaml")


def test_paths_are_looked_up_beside_the_file_then_in_the_working_directory(tmp_path, monkeypatch):
    beside, here = tmp_path / "configs", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (here / "model").mkdir()
    (beside / "rewards.py").touch()
    (here / "held.jsonl").touch()
    raw = {
        "model": {"path": "model"},
        "data": {"path": "both.jsonl"},
        "rewards": [{"use": "rewards.py:right"}, {"use": "package.module:f"}, {"use": "missing.py:f"}],
        "eval": {"path": "held.jsonl"},
        "run": {"dir": "runs/a"},
    }
    (beside / "run.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(here)
    config = load_config("../configs/run.yaml")
    assert config.model.path == str(here / "model")
    assert config.data.path == str(beside / "both.jsonl")
    assert [r.use for r in config.rewards] == [
        f"{beside}/rewards.py:right",
        "package.module:f",
        f"{beside}/missing.py:f",
    ]
    assert config.eval is not None
    assert config.eval.path == str(here / "held.jsonl")
    assert config.run.dir == str(here / "runs" / "a")
    # what is nowhere is missing beside the file, unless it may be a data set of the Hub
    given = [
        load_config("../configs/run.yaml", [f"data.path={path}"]) for path in ("boht.jsonl", "org/rows", "rows-1.5")
    ]
    assert [other.data.path for other in given] == [str(beside / "boht.jsonl"), "org/rows", "rows-1.5"]


def test_paths_that_do_not_exist_stay_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.jsonl").touch()
    config = config_from_dict(
        {**MINIMAL, "model": {"path": "org/name"}, "data": {"path": "~/d.jsonl"}, "eval": {"path": "x" * 300}}
    )
    assert config.model.path == "org/name"
    assert config.data.path == str(tmp_path / "d.jsonl")
    assert config.eval is not None
    assert config.eval.path == "x" * 300


@pytest.mark.parametrize("given", ["~/env/bin/python", "env/bin/python", "{home}/env/bin/python"])
def test_the_python_of_vllm_stays_a_link(tmp_path, monkeypatch, given):
    """An environment's python is a link to another one's, without whose name it would not be in its environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": "vllm"}}))
    config = load_config(tmp_path / "run.yaml", [f"rollout.vllm_python={given.format(home=tmp_path)}"])
    assert config.rollout.vllm_python == str(tmp_path / "env" / "bin" / "python")


def test_a_python_of_vllm_that_is_not_there_is_left_to_the_search_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_from_dict({**MINIMAL, "rollout": {"engine": "vllm", "vllm_python": "python3.11"}})
    assert config.rollout.vllm_python == "python3.11"


def test_keys_of_the_file_can_be_read_past(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": "vllm", "urls": ["http://a:1"]}}))
    assert load_config(path).rollout.urls == ("http://a:1",)
    assert load_config(path, ["rollout.tensor_parallel=2"], without=["rollout.urls"]).rollout.urls == ()
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_config(path, without=["rollout.urls", "eval.path"]) == load_config(path)


# The round trip
number = st.floats(min_value=1e-9, max_value=0.9)
text = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1).map(
    lambda s: "_" + s.replace("/", "_").replace("~", "_")
)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
number_or_auto = st.just("auto") | st.integers(1, 10**6)
raw_configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": text}, optional={"dtype": st.sampled_from(["float64", "bfloat16"])}),
        "data": st.fixed_dictionaries(
            {"path": text}, optional={"system_prompt": text, "chat_template_kwargs": st.dictionaries(text, json_value)}
        ),
        "rewards": st.lists(
            st.fixed_dictionaries(
                {"use": text}, optional={"weight": number, "args": st.dictionaries(text, json_value)}
            ),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "algorithm": st.fixed_dictionaries(
            {"name": st.sampled_from(["grpo", "dr_grpo", "dapo", "luspo", "gmpo"])},
            optional={
                "beta": number,
                "clip_low": number,
                "advantage": st.sampled_from(["group_mean", "leave_one_out", "max_at_k"]),
                "loss_weight": st.sampled_from(["token_mean", "constant"]),
            },
        ),
        "train": st.fixed_dictionaries(
            {"learning_rate": number}, optional={"epochs": number, "micro_batch_tokens": number_or_auto}
        ),
        "hardware": st.fixed_dictionaries({"processes": st.just("auto") | st.integers(1, 10**5), "timeout_s": number}),
        "eval": st.fixed_dictionaries({"path": text}, optional={"temperature": number}),
        "run": st.fixed_dictionaries({"checkpoint_every": st.sampled_from([0, 1, 50])}),
    },
)


@examples(60)
@given(raw=raw_configs)
def test_yaml_reads_back_to_an_equal_configuration(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    config = config_from_dict(raw)
    path.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    assert to_yaml(config).startswith(
        "# Written by cohort: a run's configuration with every default.\n# `algorithm` lists only"
    )


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, {"name": "grpo"}),
        ({"name": "dapo", "advantage": "group_mean_std", "clip_high": 0.28}, {"name": "dapo"}),
        ({"name": "dapo", "clip_high": 0.2}, {"name": "dapo", "clip_high": 0.2}),
        ({"policy_loss": "gspo"}, {"name": "grpo", "policy_loss": "gspo"}),
        ({"policy_loss": "reinforce"}, {"name": "grpo", "policy_loss": "reinforce"}),
        ({"beta": 0.1, "kl_estimator": "k2"}, {"name": "grpo", "beta": 0.1, "kl_estimator": "k2"}),
        ({"entropy_target": 0.2}, {"name": "grpo", "entropy_target": 0.2}),
    ],
)
def test_of_the_algorithm_only_what_its_name_does_not_say_is_written(given, written):
    config = config_from_dict({**MINIMAL, "algorithm": given})
    assert config.model_dump(mode="json")["algorithm"] == written
    assert yaml.safe_load(to_yaml(config))["algorithm"] == written
    assert config_from_dict({**MINIMAL, "algorithm": written}) == config


def test_another_name_in_a_written_file_is_another_algorithm(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config_from_dict({**MINIMAL, "algorithm": {"name": "gspo"}})))
    config = load_config(tmp_path / "config.yaml", ["algorithm.name=ppo"])
    assert config.algorithm == AlgorithmConfig(name="ppo")


# Around it


def test_the_page_of_keys_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == docs.render(), "run `make docs`"


def test_import_is_light():
    code = (
        "import sys, cohort.config, cohort.data, cohort.plan, cohort.records, cohort.errors, cohort.cli\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_path_of_an_adapter_decides_is_not_written_down(tmp_path):
    """Read back, a default would contradict the adapter that is at the path."""
    (tmp_path / "adapter").mkdir()
    for keys in ({"rank": 4}, {"path": "adapter"}, {"path": "adapter", "alpha": 3.0}):
        config = config_from_dict({**MINIMAL, "model": {"path": "m", "adapter": keys}}, base_dir=tmp_path)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        again = load_config(tmp_path / "config.yaml")
        assert again == config and again.model.adapter.rank == keys.get("rank", 16)
        assert again.model.adapter.path in (None, str(tmp_path / "adapter"))
        assert again.model.adapter.model_fields_set >= keys.keys()
        assert ("rank" in again.model.adapter.model_fields_set) == ("path" not in keys)
