"""`cohort convert` loses nothing in silence: what could not be carried over is to decide first, and stops a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import load_config
from cohort.errors import UserError
from cohort.trainer.run import train
from cohort_check import check_file, convert_file

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
{before}
def mixed_reward(completions, **kwargs): ...
GRPOTrainer(
    model={model}, reward_funcs={rewards}, train_dataset={data},
    args=GRPOConfig("out", max_prompt_length=256, per_device_train_batch_size=8),
)
"""
USUAL = {
    "before": "",
    "model": '"org/m"',
    "rewards": "mixed_reward",
    "data": "load_dataset('org/d', split='train')",
}
LOADED = 'model = AutoModelForCausalLM.from_pretrained("org/m", {})\n'


def converted(tmp_path: Path, text: str, name: str = "a.py", **options: Any) -> tuple[dict[str, Any], str]:
    (tmp_path / name).write_text(text)
    output = convert_file(tmp_path / name, **options)
    return yaml.safe_load(output), output


def script(**parts: str) -> str:
    return SCRIPT.format(**{**USUAL, **parts})


def test_a_script_of_which_everything_is_carried_over_has_nothing_to_decide(tmp_path: Path) -> None:
    config, _ = converted(tmp_path, script())
    assert "decide_first" not in config and config["rewards"] == [{"use": "rewards.py:mixed_reward", "weight": 1.0}]
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "a.py")]).exit_code == 0


@pytest.mark.parametrize(
    ("before", "model"),
    [
        (
            LOADED.format("load_in_4bit=True") + "model = get_peft_model(model, LoraConfig(r=16))",
            {"quantization": "nf4", "rank": 16},
        ),
        (
            'model, t = FastLanguageModel.from_pretrained(model_name="org/m", load_in_4bit=True)\n'
            "model = FastLanguageModel.get_peft_model(model, r=64, lora_alpha=64)",
            {"quantization": "nf4", "rank": 64},
        ),
        (LOADED.format("torch_dtype=torch.bfloat16"), {"dtype": "bfloat16"}),
    ],
)
def test_a_model_that_is_wrapped_before_the_trainer(tmp_path: Path, before: str, model: dict[str, Any]) -> None:
    config, _ = converted(tmp_path, script(before=before, model="model"))
    found = {**config["model"], **config["model"].get("adapter", {})}
    assert {key: found.get(key) for key in ("path", *model)} == {"path": "org/m", **model}
    assert "decide_first" not in config


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"before": LOADED.format("") + 'model = PeftModel.from_pretrained(model, "org/a")', "model": "model"},
            "adapter: PeftModel",
        ),
        (
            {
                "before": LOADED.format("") + "if lora: model = get_peft_model(model, LoraConfig(r=4))",
                "model": "model",
            },
            "adapter, in a branch",
        ),
        (
            {
                "before": LOADED.format("") + "for p in model.a.parameters():\n    p.requires_grad = False",
                "model": "model",
            },
            "frozen",
        ),
        ({"before": 'model = AutoModelForImageTextToText.from_pretrained("org/m")', "model": "model"}, "images"),
        ({"model": '"Qwen/Qwen2.5-VL-3B-Instruct"'}, "images"),
        (
            {"before": "fs = [mixed_reward]\nif x: fs.append(y)", "rewards": "fs"},
            "a list that the script puts together",
        ),
        ({"rewards": "[lambda completions, **kw: [0.0]]"}, "a lambda; write it as `def reward(completions"),
        ({"before": "f = lambda completions: [0.0]", "rewards": "f"}, "a lambda; write it"),
        (
            {
                "before": f"if x:\n    {LOADED.format('')}else:\n    {LOADED.format('').replace('/m', '/n')}",
                "model": "model",
            },
            "loaded in several places, as 'org/m' or 'org/n'",
        ),
        (
            {
                "before": 'kw = {}\nif x:\n    kw["q"] = BitsAndBytesConfig(load_in_4bit=True)\n'
                + LOADED.format("**kw"),
                "model": "model",
            },
            "load_in_4bit (a.py:5): set in a branch: True",
        ),
        (
            {"before": "d = load_dataset('org/a') if x else load_dataset('org/b')", "data": "d"},
            "train_dataset: or load",
        ),
        (
            {"data": "concatenate_datasets([load_dataset('org/a'), load_dataset('org/b')])"},
            "concatenate_datasets(...)",
        ),
        ({"data": "interleave_datasets([load_dataset('org/a'), load_dataset('org/b')])"}, "interleave_datasets(...)"),
        ({"data": "load_dataset('json', data_files={'data': path})"}, "data.path: fill it in"),
        ({"data": "load_dataset('org/d', split='train').map(f)"}, " map(...)"),
    ],
)
def test_what_could_not_be_carried_over_is_to_decide_first(tmp_path: Path, parts: dict[str, str], said: str) -> None:
    config, output = converted(tmp_path, script(**parts))
    assert any(said in decision for decision in config["decide_first"]), output
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a.py")])
    assert result.exit_code == 1 and "cohort train refuses until" in result.stderr


def test_a_part_of_the_batch_is_told_with_what_is_left_to_fill_in(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("GRPOConfig('out', num_generations=read(), per_device_train_batch_size=4)")
    (said,) = [text for text in yaml.safe_load(convert_file(tmp_path / "a.py"))["decide_first"] if "prompts" in text]
    assert said.endswith("the source's batch is only known at run time (per_device_train_batch_size is 4)")


def test_evaluation_samples_as_training_does(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "reward_funcs: [r]\nnum_generations: 4\ntemperature: 0.7\neval_strategy: steps\ndataset_name: d\n"
    )
    evaluation = yaml.safe_load(convert_file(tmp_path / "a.yaml"))["eval"]
    assert (evaluation["num_samples"], evaluation["temperature"], evaluation["before_training"]) == (4, 0.7, False)


def test_a_program_that_is_not_verls_is_to_decide(tmp_path: Path) -> None:
    command = (
        "python -m agentlightning.verl data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.model.path=m "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6\n"
    )
    config, _ = converted(tmp_path, command, "run.sh")
    assert any(text.startswith("program: agentlightning.verl is a program") for text in config["decide_first"])
    assert config["eval"]["temperature"] == 0.6


@pytest.mark.parametrize(("version", "temperature"), [("0.9", 0.6), ("0.6", 0.0)])
def test_asynchronous_rollouts_of_verl_evaluate_with_the_temperature_that_is_set(
    tmp_path: Path, version: str, temperature: float
) -> None:
    text = (
        "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm trainer.nnodes=1 "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=False actor_rollout_ref.rollout.val_kwargs.temperature=0.6\n"
    )
    (tmp_path / "run.sh").write_text(text)
    evaluation = yaml.safe_load(convert_file(tmp_path / "run.sh", framework_version=version))["eval"]
    assert evaluation["temperature"] == temperature


def test_a_run_with_open_decisions_does_not_start(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata: {path: org/d}\nrewards: [{use: math}]\ndecide_first: [images are dropped, b]\n"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match="decide_first: 2 open: 'images are dropped'; 'b'; settle"):
        train(load_config(tmp_path / "run.yaml"))
    assert check_file(tmp_path / "run.yaml").outcome == "refused"


def test_counts_of_other_units_become_steps(tmp_path: Path) -> None:
    text = (
        "reward_funcs: [r]\nmax_steps: 100\nnum_iterations: 4\nsave_steps: 50\neval_strategy: steps\neval_steps: 10\n"
    )
    config, output = converted(tmp_path, text, "r.yaml")
    found = (config["train"]["steps"], config["run"]["checkpoint_every"], config["eval"]["every"])
    assert found == (25, 13, 3) and "train.steps: 100 optimizer steps there / 4 = 25 steps here" in output
    verl = (
        "python -m verl.trainer.main_ppo data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=4 "
        "trainer.total_training_steps=100 trainer.save_freq=10 actor_rollout_ref.actor.optim.lr_warmup_steps=5\n"
    )
    config, output = converted(tmp_path, verl, "v.sh")
    assert (config["train"]["steps"], config["train"]["warmup_steps"]) == (800, 40)  # of 4 prompts each
    assert config["run"]["checkpoint_every"] == 80 and "100 rollouts there x 8 = 800 steps here" in output


def test_unsloth_raises_the_batch(tmp_path: Path) -> None:
    text = "from unsloth import FastLanguageModel\n" + script().replace(
        "per_device_train_batch_size=8", "per_device_train_batch_size=1, gradient_accumulation_steps=4"
    )
    config, output = converted(tmp_path, text)
    assert config["train"]["prompts_per_step"] == 4 and "which Unsloth raises to num_generations 8" in output


# --- the version of its time


@pytest.mark.parametrize(
    ("name", "pin", "version"),
    [
        ("requirements.txt", "torch\ntrl==0.15.2\n", "0.15.2"),
        ("requirements.txt", "# trl==0.15.2\ntrl[vllm]>=0.16,<0.18\n", "0.17.0"),
        ("requirements.txt", "trl @ git+https://github.com/huggingface/trl.git@v0.19.0\n", "0.19.0"),
        ("pyproject.toml", '[project]\ndependencies = ["trl~=0.18.0"]\n', "0.18.2"),
        ("environment.yml", "dependencies:\n- pip:\n  - trl=0.16.1\n", "0.16.1"),
        ("uv.lock", '[[package]]\nname = "trl"\nversion = "0.20.0"\n', "0.20.0"),
        ("trl/__init__.py", '__version__ = "0.21.0"\n', "0.21.0"),
        ("requirements.txt", "trl>=0.15\nmy-trl==1.0\n", None),
    ],
)
def test_pins_beside_the_file_are_read(tmp_path: Path, name: str, pin: str, version: str | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(pin)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "r.yaml").write_text("reward_funcs: [r]\nnum_generations: 8\n")
    rules = check_file(tmp_path / "scripts" / "r.yaml").rules
    assert rules is not None and rules.version == (version or "1.16")
    assert rules.version_reason.startswith(name if version else "the default")


def test_without_a_pin_the_newest_version_that_knows_the_keys_is_assumed(tmp_path: Path) -> None:
    config, output = converted(tmp_path, script())
    assert "judged as TRL 0.15.2 to 0.27.2, the versions that know max_prompt_length; TRL 1.16 does not" in output
    (tmp_path / "requirements.txt").write_text("trl==0.15.2\n")
    config, output = converted(tmp_path, script())
    assert config["algorithm"]["beta"] == 0.04 and "those of TRL 0.15.2: requirements.txt:1" in output
    config, _ = converted(tmp_path, script(), framework_version="0.16")
    assert config["algorithm"]["beta"] == 0.04


def test_a_minor_version_is_its_newest_release(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("reward_funcs: [r]\n")
    rules = check_file(tmp_path / "r.yaml", framework_version="0.19").rules
    assert rules is not None and rules.version == "0.19.1"


def test_methods_of_text_change_no_list_of_rewards(tmp_path: Path) -> None:
    config, _ = converted(tmp_path, script(before='x = "a b".split()[0].strip()', rewards="[mixed_reward]"))
    assert config["rewards"] == [{"use": "rewards.py:mixed_reward", "weight": 1.0}] and "decide_first" not in config


def test_rewards_that_a_call_makes_are_to_decide(tmp_path: Path) -> None:
    for rewards in ("build_rewards()", "[mixed_reward, make(10)]"):
        config, _ = converted(tmp_path, script(rewards=rewards))
        assert any("build_rewards()" in said or "make(10)" in said for said in config["decide_first"])


def test_a_trainer_of_the_scripts_own_and_what_is_set_on_its_arguments(tmp_path: Path) -> None:
    text = """
from trl import GRPOConfig, GRPOTrainer
class Mine(GRPOTrainer):
    def compute_loss(self, *args): ...
def right(completions, **columns): ...
args = GRPOConfig("out")
args.num_generations = 4
args.beta = 0.04
Mine("org/m", right, args, train_dataset=load_dataset("org/d", split="train"))
"""
    config, _ = converted(tmp_path, text)
    assert config["model"]["path"] == "org/m" and config["rewards"][0]["use"] == "rewards.py:right"
    assert config["rollout"]["num_generations"] == 4 and config["algorithm"]["beta"] == 0.04
    assert config["decide_first"] == ["a.py:9: trainer: Mine changes compute_loss"]


def test_a_quantized_model_may_have_an_adapter_that_is_not_read(tmp_path: Path) -> None:
    before = LOADED.format("load_in_4bit=True") + 'model = PeftModel.from_pretrained(model, "org/a")'
    (tmp_path / "a.py").write_text(script(before=before, model="model"))
    assert not [finding for finding in check_file(tmp_path / "a.py").findings if finding.severity == "error"]
