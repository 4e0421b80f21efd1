"""A script of TRL under torchrun: every rank runs it, callbacks of any rank count, and rank 0 writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runs import assert_same_weights, metric
from selection import slow
from tiny import save_model_folder
from waiting import PATIENCE_S

# Rank 1 alone asks for the end. What it writes itself are its shards of the optimizer.
SCRIPT = """
import os
import sys
import time

from transformers import TrainerCallback

from cohort.trl import GRPOConfig, GRPOTrainer

rank, out = int(os.environ["RANK"]), sys.argv[1]
stop_at, resume = int(sys.argv[2]), [a for a in sys.argv[3:] if "checkpoint" in a] or [None]


def write(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(out):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR) and not arguments[0].endswith(".distcp"):
            print("wrote", rank, arguments[0], flush=True)


sys.addaudithook(write)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = rank == 1 and state.global_step == stop_at
        if state.is_world_process_zero and state.global_step == 1:  # a call of rank 0 alone
            trainer.save_model(out + "/alone")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"logged {rank} {state.global_step} {state.is_world_process_zero}\\n", end="", flush=True)


def digits(completions, **kwargs):
    print("scored", rank, flush=True)
    time.sleep(0.5 * ("slowly" in sys.argv))
    return [sum(c.isdigit() for c in completion) / 8 for completion in completions]


args = GRPOConfig(
    output_dir=out,
    max_steps=4,
    per_device_train_batch_size=2,
    num_generations=4,
    max_completion_length=6,
    logging_steps=1,
    save_steps=2 if "best" in sys.argv else 1,
    eval_strategy="steps",
    eval_steps=2,
    learning_rate=1e-2,
    beta=0.1,
    report_to=[],
    disable_tqdm=True,
    load_best_model_at_end="best" in sys.argv,
    metric_for_best_model="few_reward",
)
rows = [{"prompt": f"{n} 1"} for n in range(8)]
held_out = {"few": rows[:2], "many": rows[:3]}
trainer = GRPOTrainer(BASE, digits, args, rows, held_out, callbacks=[Stop()])
print(f"before {rank} {trainer.evaluate()['eval_few_reward']}\\n", end="", flush=True)
steps = trainer.train(resume_from_checkpoint=resume[0]).global_step
after = trainer.evaluate(rows[:3])["eval_reward"]
print(f"after {rank} {steps} {after} {trainer.state.best_model_checkpoint}\\n", end="", flush=True)
trainer.save_model(out + "/final")
if trainer.accelerator.is_main_process:
    trainer.save_model(out + "/by-rank-0")
if rank == 0:
    time.sleep(1)
    open(out + "/before-barrier", "w").close()
trainer.accelerator.wait_for_everyone()
assert os.path.exists(out + "/before-barrier"), "rank 1 has waited"
assert sum(p.numel() for p in trainer.model.parameters()) and trainer.ref_model is not None
print(f"done {rank} {trainer.state.global_step}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    base = save_model_folder(folder / "base", "qwen3")
    (folder / "script.py").write_text(SCRIPT.replace("BASE", repr(str(base))))
    return folder / "script.py"


TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no")


def launch(script: Path, *arguments: object, launcher: tuple[str, ...] = TORCHRUN) -> list[str]:
    """The lines that a script prints with two processes; it must not fail."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def said(lines: list[str], word: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in lines if line.startswith(f"{word} "))


@slow("the other tests run the trainer in one process, and tests/launch/test_python_trainer.py runs a script")
def test_ranks_do_the_same_and_resume(script: Path, tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lines = launch(script, whole, 9)
    assert said(lines, "done") == [["0", "4"], ["1", "4"]]
    assert {rank for rank, *_ in said(lines, "scored")} == {"0"} == {rank for rank, *_ in said(lines, "wrote")} | {"0"}
    (_, before), (_, before_1) = said(lines, "before")
    (_, *after), (_, *after_1) = said(lines, "after")
    assert before == before_1 and after == after_1 and before != after[1]
    assert_same_weights(whole / "final", whole / "by-rank-0")
    assert_same_weights(whole / "final", whole / "checkpoint-4")
    assert metric(whole / "cohort", "processes") == [2.0] * 4
    lines = launch(script, parts, 3)
    assert said(lines, "done") == [["0", "3"], ["1", "3"]]
    told = [[str(rank), str(step), str(rank == 0)] for rank in (0, 1) for step in (1, 2, 3)]
    assert said(lines, "logged") == told
    lines = launch(script, parts, 9, parts / "checkpoint-2")
    assert said(lines, "done") == [["0", "4"], ["1", "4"]]
    assert [step for _, step, _ in said(lines, "logged")] == ["3", "4", "3", "4"]
    assert_same_weights(parts / "final", whole / "final")
    assert metric(parts / "cohort-2", "reward") == metric(whole / "cohort", "reward")
    assert [p.name for p in (parts / "earlier").iterdir()] == ["checkpoint-3"]


@slow("the other tests run the trainer in one process")
def test_a_new_run_with_the_best_model_by_accelerate(script: Path, tmp_path: Path):
    launch(script, tmp_path / "out", 1, launcher=(*ACCELERATE, "--num_machines", "1", "--dynamo_backend", "no"))
    lines = launch(script, tmp_path / "out", 9, "best")
    (_, steps, _, best), other = said(lines, "after")
    assert steps == "4" and other[1:] == [steps, other[2], best]
    assert_same_weights(tmp_path / "out" / "final", Path(best))
    assert len(metric(tmp_path / "out" / "cohort", "reward")) == 1
    assert len(metric(tmp_path / "out" / "cohort-2", "reward")) == 4


@slow("tests/launch has signals to the ranks of a run; test_trl_resuming.py interrupts a trainer in one process")
def test_a_signal_saves_and_the_run_resumes(script: Path, tmp_path: Path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", *TORCHRUN, str(script), str(out), "9", "slowly"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("logged 0 2"):
            process.send_signal(signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    last = max(int(p.name.rpartition("-")[2]) for p in out.glob("checkpoint-*"))
    assert last in (2, 3), errors
    lines = launch(script, out, 9, out / f"checkpoint-{last}")
    assert said(lines, "done") == [["0", "4"], ["1", "4"]]
    assert len(metric(out / "cohort", "reward")) == 4


MERGING = """
import os
import sys

from peft import LoraConfig

from cohort.trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(output_dir=sys.argv[1], max_steps=1, max_completion_length=8, report_to=[], disable_tqdm=True)
rows = [{"prompt": "1"}]
trainer = GRPOTrainer(BASE, lambda completions, **_: [0.0] * len(completions), args, rows, peft_config=LoraConfig(r=4))
for _ in range(2):
    merged = trainer.model.merge_and_unload()
    print(f"merged {os.environ['RANK']} {type(merged).__name__}\\n", end="", flush=True)
if trainer.is_world_process_zero():
    trainer.model.merge_and_unload().save_pretrained(sys.argv[1] + "/alone")
"""


@slow("test_trl_surface.py merges in one process")
def test_every_rank_or_the_first_alone_merges_an_adapter(tmp_path: Path):
    base = save_model_folder(tmp_path / "base", "qwen3")
    (tmp_path / "script.py").write_text(MERGING.replace("BASE", repr(str(base))))
    lines = launch(tmp_path / "script.py", tmp_path / "out")
    assert said(lines, "merged") == [[rank, "Qwen3ForCausalLM"] for rank in "0011"]
    assert_same_weights(tmp_path / "out" / "alone", base)


OPTIMIZERS = """
import os
import sys

import torch
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from cohort.trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained(BASE)
groups = [{"params": [p for p in model.parameters() if p.ndim == n], "lr": 0.01 / n} for n in (1, 2)]
optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
optimizers = optimizer, get_linear_schedule_with_warmup(optimizer, 1, 6)


def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in completion) / 8 for completion in completions]


out, resume = sys.argv[1], (sys.argv[2:] or [None])[0]
size = 8 // int(os.environ.get("WORLD_SIZE", 1))
args = GRPOConfig(
    out, max_steps=4, per_device_train_batch_size=size, num_generations=4, max_completion_length=6, save_steps=2,
    report_to=[], disable_tqdm=True,
)
rows = [{"prompt": f"{n} 1"} for n in range(8)]
trainer = GRPOTrainer(model, digits, args, rows, optimizers=optimizers)
trainer.train(resume_from_checkpoint=resume)
of_optimizer = optimizer.param_groups[1]["params"][0]
print(f"trained {type(of_optimizer).__name__} {optimizers[1].last_epoch}\\n", end="", flush=True)
"""


@slow("test_trl_optimizers.py trains with one in one process")
def test_an_optimizer_of_the_script_updates_the_shards(tmp_path: Path):
    base = save_model_folder(tmp_path / "base", "qwen3")
    script, alone, sharded = tmp_path / "script.py", tmp_path / "alone", tmp_path / "sharded"
    script.write_text(OPTIMIZERS.replace("BASE", repr(str(base))))
    one = ("torch.distributed.run", "--nproc-per-node", "1")
    assert said(launch(script, alone, launcher=one), "trained")[0][1] == "4"
    assert said(launch(script, sharded), "trained") == [["DTensor", "4"]] * 2
    first, second = (load_file(p / "checkpoint-4" / "model.safetensors") for p in (alone, sharded))
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)
    before = load_file(base / "model.safetensors")
    assert not any(torch.allclose(first[name], before[name], atol=1e-4) for name in first)
    launch(script, tmp_path / "again", sharded / "checkpoint-2")
    assert_same_weights(tmp_path / "again" / "checkpoint-4", sharded / "checkpoint-4")
