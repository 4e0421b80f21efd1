"""What is taken from Python files: `GRPOConfig(...)`, options of argparse, parsers with their commands, the trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from checks import read
from cohort_check import check_file
from cohort_check.launch import Launch
from cohort_check.readers import read_launch

PYTHON = """# /// script
# dependencies = ["trl==0.24.0"]
# ///
import os
from trl import GRPOConfig, GRPOTrainer
BATCH = 4
os.system("touch {marker}")
args = GRPOConfig(
    "out", per_device_train_batch_size=BATCH * 2, num_generations=int(os.environ["G"]), beta=-0.5, **dict(epsilon=0.3),
    max_steps=int(os.environ.get("STEPS", 10)), logging_steps=5 if BATCH == 4 else 1,
)
args.temperature = 0.7
if os.environ["X"]:
    args.top_p = 0.9
trainer = GRPOTrainer(model="org/model", reward_funcs=[accuracy, m.brevity], args=args)
"""


def values(launch: Launch) -> dict[str, Any]:
    return {key: said.value for key, said in launch.settings.items()}


def unread(launch: Launch) -> list[tuple[str, str]]:
    return [(entry.key, entry.reason) for entry in launch.unread]


def test_python_is_read_and_not_run(tmp_path: Path):
    marker = tmp_path / "ran"
    launch = read(tmp_path, PYTHON.replace("{marker}", str(marker)), "train.py")
    assert values(launch) == {
        "output_dir": "out",
        "per_device_train_batch_size": 8,
        "beta": -0.5,
        "epsilon": 0.3,
        "max_steps": 10,
        "logging_steps": 5,
        "temperature": 0.7,
        "trainer.model": "org/model",
        "trainer.reward_funcs": ["accuracy", "brevity"],
    }
    assert launch.settings["beta"].where == "train.py:9"
    assert unread(launch) == [
        ("num_generations", "computed: int(os.environ['G'])"),
        ("top_p", "set in a branch: 0.9"),
    ]
    assert launch.version and launch.version.value == "0.24.0"
    assert launch.processes is None
    assert not marker.exists()


def test_a_name_that_is_assigned_twice_is_not_trusted(tmp_path: Path):
    text = "B = 4\nif x:\n    B = 8\nargs = GRPOConfig(per_device_train_batch_size=B)\n"
    launch = read(tmp_path, text, "a.py")
    assert [entry.key for entry in launch.unread] == ["per_device_train_batch_size"]
    assert check_file(tmp_path / "a.py").starts == {}


def test_arguments_of_a_dictionary_are_read_one_by_one(tmp_path: Path):
    text = (
        "kw = dict(num_generations=8, report_to=[s for s in x])\nkw['beta'] = 0.1\nif a:\n    kw['epsilon'] = 0.3\n"
        "def f(**more):\n    GRPOConfig('out', **kw, **more)\n"
    )
    launch = read(tmp_path, text, "a.py")
    assert values(launch) == {"output_dir": "out", "num_generations": 8, "beta": 0.1}
    assert [entry.key for entry in launch.unread] == ["report_to", "epsilon", "(**arguments)"]
    assert check_file(tmp_path / "a.py").starts == {}  # more may be anything


def test_straight_lines_of_functions(tmp_path: Path):
    text = """
def main(batch=4):
    size: int = 8
    again = again + 1
    run.batch = 4
    args = GRPOConfig("out", per_device_train_batch_size=size, gradient_accumulation_steps=batch, beta=again)
class Other(PretrainedConfig): pass
Other()
"""
    launch = read(tmp_path, text, "a.py")
    assert values(launch) == {"output_dir": "out", "per_device_train_batch_size": 8} and not launch.others
    # a caller sets the one, and the other refers to itself
    assert unread(launch) == [
        ("gradient_accumulation_steps", "computed: batch, a parameter of main()"),
        ("beta", "computed: again = again + 1"),
    ]


def test_a_trainer_whose_configuration_is_made_elsewhere_is_not_checked_and_no_error(tmp_path: Path):
    text = (
        "import trl\nargs = defaults()\nargs.my_own = 1\nargs.other = f(x)\ntrl.GRPOTrainer('org/model', args=args)\n"
    )
    launch = read(tmp_path, text, "a.py")
    assert launch.settings["my_own"].added
    assert unread(launch) == [("(recipe)", "the configuration is made elsewhere"), ("other", "computed: f(x)")]
    assert not check_file(tmp_path / "a.py").failed


ARGPARSE = """
import argparse
from trl import GRPOConfig, GRPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=4)
parser.add_argument("--gens", dest="num_generations", type=int, default=8)
parser.add_argument("--vllm", action="store_true")
parser.add_argument("--server-url", default=None)
parser.add_argument("--lr", type=float, required=True)
def main():
    args = parser.parse_args()
    config = GRPOConfig(
        per_device_train_batch_size=args.batch_size * 2, num_generations=args.num_generations, use_vllm=args.vllm,
        vllm_server_base_url=args.server_url or "http://a", learning_rate=args.lr, output_dir=f"out-{args.batch_size}",
    )
"""


def test_options_of_argparse_have_their_defaults_or_what_the_command_says(tmp_path: Path):
    launch = read(tmp_path, ARGPARSE, "a.py")
    assert values(launch) == {
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "use_vllm": False,
        "vllm_server_base_url": "http://a",
    }
    unknown = [("learning_rate", "computed: args.lr"), ("output_dir", "computed: f'out-{args.batch_size}'")]
    assert unread(launch) == unknown and launch.processes is None
    command = "accelerate launch --num_processes 4 a.py --batch-size 16 --vllm --lr 1e-6 --server-url $URL"
    told = read_launch(tmp_path / "a.py", launched_with=command)
    assert {"per_device_train_batch_size": 32, "use_vllm": True, "learning_rate": 1e-6}.items() <= values(told).items()
    assert told.processes and told.processes.value == 4
    assert ("vllm_server_base_url", "computed: args.server_url or 'http://a'") in unread(told)
    assert {entry.key for entry in told.unread}.isdisjoint({"server_url"})  # no argument of TRL's


@pytest.mark.parametrize(
    ("made", "known"),
    [
        ("c = Settings()", True),
        ("c = Settings(**vars(parser.parse_args()))", True),
        ("c = Settings(batch=read())", False),
        ("c = Settings(**read())", False),
        ("c = Settings.from_yaml('a.yaml')", False),  # which calls `cls(...)`
        ("c = Settings()\nif x: c.batch = 6", False),
    ],
)
def test_fields_of_a_dataclass_are_their_defaults_where_nobody_sets_them(made: str, known: bool, tmp_path: Path):
    text = (
        "@dataclass\nclass Settings:\n    batch: int = 8\n"
        "    @classmethod\n    def from_yaml(cls, path): return {}\n"
        "{}\nargs = GRPOConfig('out', per_device_train_batch_size=c.batch)\n"
    )
    launch = read(tmp_path, text.format("cls(**read(path))" if "yaml" in made else "None", made), "a.py")
    assert values(launch).get("per_device_train_batch_size") == (8 if known else None)
    assert [key for key, _ in unread(launch)] == ([] if known else ["per_device_train_batch_size"])


def test_a_name_that_is_set_twice_is_told_with_its_lines(tmp_path: Path):
    text = "SIZE = 8\nif QUICK:\n    SIZE = 2\nargs = GRPOConfig('out', per_device_train_batch_size=SIZE)\n"
    launch = read(tmp_path, text, "a.py")
    assert unread(launch) == [("per_device_train_batch_size", "computed: SIZE, which lines 1, 3 set")]


def test_the_trainer_has_no_argument_tokenizer(tmp_path: Path):
    one = "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(m, f, GRPOConfig('out'), tokenizer=t)\n"
    (tmp_path / "a.py").write_text(one)
    report = check_file(tmp_path / "a.py")
    assert report.outcome == "refused" and report.findings[0].nearest == ("processing_class=tokenizer",)
    (tmp_path / "a.py").write_text(one + "GRPOTrainer(m, f, GRPOConfig('out'))\n")  # which of them, a branch may decide
    assert not check_file(tmp_path / "a.py").failed


def test_a_trainer_of_another_package_is_not_checked_and_not_converted(tmp_path: Path):
    text = "from rec.grpo import GRPOTrainer\nGRPOTrainer(model, trie, tokens, mask, device=device).train()\n"
    launch = read(tmp_path, text, "a.py")
    assert (launch.not_checked, launch.settings) == ("GRPOTrainer of rec.grpo, which is not TRL's", {})


PARSER = """@dataclass
class Extra:
    image_size: int = 32
    dataset: str = field(default="org/data")
def main(script_args, training_args):
    data = load_dataset(script_args.dataset, split="train")
    GRPOTrainer(args=training_args, train_dataset=data)
if __name__ == "__main__":
    parser = {}((Extra, GRPOConfig))
    main(*parser.parse_args_into_dataclasses())
"""


@pytest.mark.parametrize("parser", ["TrlParser", "HfArgumentParser"])
def test_a_parser_takes_the_options_of_the_command(parser: str, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("num_generations: 16\n")
    (tmp_path / "a.py").write_text(PARSER.replace("{}", parser))

    def launched(command: str) -> Launch:
        return read_launch(tmp_path / "a.py", launched_with=command)

    dataset = {"trainer.train_dataset.path": "org/data", "trainer.train_dataset.split": "train"}
    launch = launched("accelerate launch --num_processes 2 a.py --num_generations 4 --image_size 64")
    assert values(launch) == {"num_generations": "4", "image_size": "64", **dataset}
    assert launch.settings["image_size"].added and launch.processes and launch.processes.value == 2
    other = launched("python a.py --config recipe.yaml")
    assert values(other) == {"num_generations": 16, **dataset}
    assert other.settings["num_generations"].where == "recipe.yaml:1" and other.processes and other.processes.value == 1
    assert check_file(tmp_path / "a.py", launched_with="torchrun --nproc_per_node 8 a.py").starts[8].starts


def test_a_parser_without_a_command_is_not_checked_and_no_error(tmp_path: Path):
    launch = read(tmp_path, PARSER.replace("{}", "TrlParser"), "a.py")
    assert [entry.key for entry in launch.unread] == ["(recipe)"] and "--launch" in launch.unread[0].reason
    report = check_file(tmp_path / "a.py")
    assert not report.failed and report.starts == {}


TRAINER = """
from trl.rewards import accuracy_reward
def brevity(completions): ...
train, test = load_dataset("json", "main", data_files="train.jsonl", split=["train", "test"])
train = train.map(to_prompt).filter(short)
extra = load_dataset(PATH)
trainer = GRPOTrainer(
    "org/model", args=GRPOConfig("out"), reward_funcs=[accuracy_reward, brevity, "org/judge"], train_dataset=train,
    eval_dataset=test, callbacks=[Print()], peft_config=LoraConfig(r=8, lora_alpha=ALPHA),
)
"""


def test_a_class_by_another_name_is_read(tmp_path: Path):
    launch = read(tmp_path, "from trl import GRPOConfig as Base\nBase(beta=0.1)\n", "a.py")
    assert values(launch) == {"beta": 0.1} and not launch.unread and not check_file(tmp_path / "a.py").failed


def test_what_the_trainer_is_given_is_kept_for_convert(tmp_path: Path):
    launch = read(tmp_path, TRAINER, "a.py")
    data = {"path": "json", "name": "main", "data_files": "train.jsonl", "split": ["train", "test"]}
    assert values(launch) == {
        "output_dir": "out",
        "trainer.model": "org/model",
        "trainer.reward_funcs": ["accuracy_reward", "brevity", "org/judge"],
        "trainer.reward_funcs.accuracy_reward": "trl.rewards",
        "trainer.reward_funcs.brevity": "a.py:3",
        "trainer.peft_config": "LoraConfig",
        "trainer.peft_config.r": 8,
        **{f"trainer.train_dataset.{key}": value for key, value in data.items()},
        **{f"trainer.eval_dataset.{key}": value for key, value in data.items()},
    }
    assert [(said.value, said.where) for said in launch.todo] == [
        ("train_dataset goes through filter(...): write it as data.map, or save its rows", "a.py:5"),
        ("train_dataset goes through map(...): write it as data.map, or save its rows", "a.py:5"),
        ("callbacks=[Print()]", "a.py:9"),
    ]
    assert unread(launch) == [("peft_config.lora_alpha", "computed: ALPHA")]


def test_a_notebook_is_read_by_its_code(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": "GRPOConfig(beta=1)"},
        {"cell_type": "code", "source": ["!pip install trl\n", "from trl import GRPOConfig"]},
        {"cell_type": "code", "source": "GRPOConfig('out', num_generations=4)"},
    ]
    launch = read(tmp_path, json.dumps({"cells": cells}), "a.ipynb")
    assert {key: (said.value, said.where) for key, said in launch.settings.items()} == {
        "output_dir": ("out", "a.ipynb:3"),
        "num_generations": (4, "a.ipynb:3"),
    }


@pytest.mark.parametrize(
    ("text", "framework", "generations", "not_checked"),
    [
        ("RLOOConfig('out')\n", "trl", 2, None),  # its own default
        ("RLHFArguments(rlhf_type='grpo', num_generations=4)\n", "ms-swift", 4, None),
        ("AsyncGRPOConfig(num_generations=4)\n", "trl", 4, "AsyncGRPOConfig, whose defaults are not known here"),
        (
            "class Mine(GRPOConfig):\n    beta: float = 0.1\nMine(num_generations=4)\n",
            "trl",
            4,
            "Mine, whose defaults are not known here",
        ),
    ],
)
def test_relatives_of_grpo_config(
    text: str, framework: str, generations: int, not_checked: str | None, tmp_path: Path
) -> None:
    launch = read(tmp_path, text, "a.py")
    assert (launch.framework, launch.not_checked) == (framework, not_checked)
    assert launch.settings["num_generations"].value == generations


def test_constants_of_a_module_beside_the_script(tmp_path: Path):
    (tmp_path / "config.py").write_text(
        "import os\nG = 4\nGRPO = dict(num_generations=G, beta=0.1)\nLR = float(os.environ['LR'])\n"
        "BATCH = 2\nBATCH = BATCH * G\nif LR:\n    STEPS = 3\n"
    )
    text = (
        "from trl import GRPOConfig\nfrom config import BATCH as B, GRPO, LR, STEPS\n"
        "args = GRPOConfig(per_device_train_batch_size=B, learning_rate=LR, max_steps=STEPS, **GRPO)\n"
    )
    launch = read(tmp_path, text, "train.py")
    assert values(launch) == {"per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.1}
    assert launch.settings["num_generations"].where == "train.py:2"
    assert unread(launch) == [("learning_rate", "computed: LR"), ("max_steps", "computed: STEPS")]
    changed = read(tmp_path, text.replace("args =", "GRPO['beta'] = f()\nif f():\n    B = 3\nargs ="), "train.py")
    assert values(changed) == {"num_generations": 4}
    (tmp_path / "config.py").write_text("from train import GRPO\nB = (\n")
    assert values(read(tmp_path, text, "train.py")) == {}


def test_outside_of_functions_a_name_has_the_value_of_the_last_line_above(tmp_path: Path):
    text = (
        "from trl import GRPOConfig\nG = 4\nG = G * 2\nN = 1\n"
        "def made():\n    return GRPOConfig(num_generations=G, beta=N)\n"
        "args = GRPOConfig(num_generations=G, beta=N)\nG = 16\nfor N in (2, 3):\n    pass\n"
    )
    outside, inside = launches(tmp_path, text)
    assert values(outside) == {"num_generations": 8} and values(inside) == {}
    assert ("num_generations", "computed: G, which lines 2, 3, 8 set") in unread(inside)


def launches(folder: Path, text: str) -> tuple[Launch, ...]:
    first = read(folder, text, "train.py")
    return (first, *first.others)


def test_computed_keys_say_which_version_fits_and_are_refused_whatever_their_value(tmp_path: Path):
    text = "from trl import GRPOConfig\nargs = GRPOConfig(num_generations=4, max_prompt_length=f(){more})\n"
    (tmp_path / "train.py").write_text(text.format(more=""))
    found = check_file(tmp_path / "train.py")
    assert found.outcome == "starts" and found.rules and found.rules.version == "0.27.2"
    (tmp_path / "requirements.txt").write_text("trl==1.16\n")
    assert check_file(tmp_path / "train.py").outcome == "refused"
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "train.py").write_text(text.format(more=", evaluation_strategy='no'"))  # of older transformers
    assert not check_file(tmp_path / "train.py").failed


def test_arguments_of_train_are_to_be_decided(tmp_path: Path):
    text = "from trl import GRPOConfig, GRPOTrainer\nt = GRPOTrainer(args=GRPOConfig())\nt.train(episodes=9)\n"
    assert "train(episodes=9)" in [entry.value for entry in read(tmp_path, text, "train.py").todo]
