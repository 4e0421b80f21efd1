"""The benchmarks run, and what they compare and predict is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import training_step
from gpu_tables import TABLES
from harness import FailedError, ModelShape, disagreement, make_group, sketch, spread
from selection import slow
from training_step import Point, ratio, run_point, sharing_table

BENCH = Path(__file__).parents[2] / "bench"

# Each script, and what its output has. Some need TRL, and `vllm_servers.py` servers: tests/real_vllm has it.
SCRIPTS = {
    "algorithms.py": "| grpo | 16 |",
    "answers.py": "| nine levels of aliases |",
    "campaign.py": "kills: 1 (",
    "checkpoint.py": "with checksums a save takes ",
    "invariance.py": "| grpo | ",
    "large_data.py": "mapped    cohort   filled ",
    "models.py": "| Llama | `llama` | shared prompts |",
    "modes.py": "| the defaults |",
    "packing.py": "| 1,000 | 8 |",
    "plan_verify.py": '"ratio": ',
    "prompt_sampling.py": "| mixture | by success, pass rates known |",
    "real_shape.py": "| cohort | ",
    "reward_calls.py": "| plain | main thread | ",
    "rollout_workers.py": "| 2 | ",
    "run_records.py": "| tokens: writing | ",
    "sampler.py": "largest difference of a logprob",
    "sandbox.py": "| bubblewrap | ",
    "scale.py": "| rank 0 |",
    "scaling.py": "| strong | 2 |",
    "stalls.py": "| results | ",
    "training_step.py": "| shared | ",
    "trl_demo.py": "Cohort's step is ",
    "turns.py": "sampled tokens are the same",
    "view.py": "A demo step takes ",
    "windows.py": "| 64 | 256 | shared prompts | ",
}
WITH_TRL = ("real_shape.py", "trl_demo.py")


ON_GPUS = {table.script for table in TABLES}  # `test_the_full_form_on_a_cpu` runs those that need no more packages


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=pytest.mark.extras if name in WITH_TRL else slow("it runs for up to 20 s"))
        for name in SCRIPTS
        if name in WITH_TRL or name not in ON_GPUS
    ],
)
def test_a_script_runs_quickly(script: str):
    assert SCRIPTS[script] in run(sys.executable, str(BENCH / script), "--quick")


def test_every_script_is_run_somewhere():
    """Scripts begin with their command line; what the GPU benchmark is made of runs with it."""
    scripts = {file.name for file in BENCH.glob("*.py") if f"    python bench/{file.name}" in file.read_text()}
    assert scripts == {*SCRIPTS, "vllm_servers.py"}
    assert all('"--quick"' in (BENCH / name).read_text() for name in scripts)


def run(*command: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@slow("it trains twice")
def test_the_algorithms_benchmark_keeps_what_it_has_run(tmp_path):
    command = [sys.executable, str(BENCH / "algorithms.py"), "--out", str(tmp_path), "--only", "grpo", "--seeds", "0"]
    first = run(*command, "--steps", "1")
    file = tmp_path / "grpo-16-seed0-1.json"
    assert "| grpo | 16 | 19.9% |" in first
    written = file.stat().st_mtime_ns
    assert run(*command, "--steps", "1").splitlines() == first.splitlines()[-3:]
    assert file.stat().st_mtime_ns == written


@slow("four processes, two of which load large tables")
def test_the_training_step_benchmark_finds_the_same_gradients():
    methods = ["full-logits", "shared"]
    out = run(
        sys.executable, str(BENCH / "training_step.py"), "--grid", "tiny", "--repeats", "1", "--methods", *methods
    )
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith(tuple(f"| {m} |" for m in methods))]
    assert [row[0].strip() for row in rows] == methods
    assert all(0 <= float(row[-1]) < 1e-4 for row in rows)


def test_another_gradient_is_refused(monkeypatch):
    sketches = iter([{"w": [1.0, 2.0]}, {"w": [1.0, 2.001]}])
    monkeypatch.setattr(training_step, "run_apart", lambda *_: {"seconds": 1.0, "gradient": next(sketches)})
    point = Point(model="tiny", prompt_tokens=4, completion_tokens=(2, 2))
    with pytest.raises(SystemExit, match=r"gradient of shared is not that of packed: w differs by 4\.5e-04"):
        run_point(point, ["packed", "shared"], 1, "folder")


def test_a_method_that_fails_is_a_row_and_others_are_measured(monkeypatch: pytest.MonkeyPatch):
    def run_apart(_: str, job: dict) -> dict:
        if job["method"] == "liger":
            raise FailedError("it ended with 1:\nTraceback\nImportError: no kernel")
        return {"seconds": 1.0, "wall_s": 1.0, "peak_bytes": 10**6, "gradient": {"w": [1.0, 2.0]}}

    monkeypatch.setattr(training_step, "run_apart", run_apart)
    found = run_point(Point(model="tiny", prompt_tokens=4, completion_tokens=(2, 2)), ["liger", "shared"], 2, "folder")
    liger, shared = training_step.point_table(found).splitlines()[2:]
    assert liger.startswith("| liger (failed: ImportError: no kernel) |") and shared.startswith("| shared | 1 | 1.00 |")


@pytest.mark.parametrize("size", [3, 64, 1000])
def test_sketches_tell_how_far_gradients_are_apart(size: int):
    model = torch.nn.Linear(size, 7, bias=False)
    generator = torch.Generator().manual_seed(0)
    gradient, change = (torch.randn(7, size, generator=generator) for _ in range(2))
    found = []
    for moved in (gradient, gradient + 1e-3 * change):
        model.weight.grad = moved
        found.append(sketch(model))
    distance, name = disagreement(found[1], found[0])
    expected = (1e-3 * change.norm() / gradient.norm()).item()
    assert name == "weight"
    assert distance == pytest.approx(expected, rel=0.5)
    assert disagreement(found[0], found[0])[0] == 0


def test_a_missing_gradient_is_not_the_same():
    model = torch.nn.Linear(4, 4, bias=False)
    nothing = sketch(model)
    model.weight.grad = torch.ones(4, 4)
    assert disagreement(nothing, sketch(model))[0] == pytest.approx(1)
    assert disagreement(sketch(model), nothing)[0] == 1


def test_groups_have_the_weights_of_the_mean_of_means():
    group = make_group(5, spread(2, 8, 3), vocab=50)
    assert sorted(s.num_loss_tokens for s in group) == [2, 5, 8]
    assert [s.loss_weights.sum() for s in group] == pytest.approx([1 / 3] * 3)
    assert [s.advantages[-1] for s in group] == pytest.approx([-2 / 3, 0, 2 / 3])
    assert all((s.token_ids[:5] == group[0].token_ids[:5]).all() for s in group)


def test_operations_of_a_group():
    shape = ModelShape(hidden=4, layers=1, vocab=10, heads=2, kv_heads=1, head_dim=3, intermediate=5)
    assert shape.body_weights == 4 * (6 + 3 + 3 + 6) + 3 * 4 * 5
    body, head = 6 * 132, 6 * 10 * 4
    # prompt of 3, completions of 2 and 3 tokens, whose last is not an input: 1 and 2 inputs
    assert shape.flops(3, [2, 3], shared=True) == body * 6 + 12 * 6 * (6 + 4 + 9) + head * 5
    assert shape.flops(3, [2, 3], shared=False) == body * 9 + 12 * 6 * (10 + 15) + head * 5
    more = shape.flops(3, [2, 3], shared=True, recomputed=True) - shape.flops(3, [2, 3], shared=True)
    assert more == 2 * 6 * 19 + 2 * 40 * 5


def test_ratios_and_savings():
    measured = {
        "packed": {"seconds": 3.0, "peak_bytes": 4},
        "shared": {"seconds": 1.5, "peak_bytes": 1},
        "trl": {"skipped": "needs trl"},
    }
    assert ratio(measured, "packed", "shared", "peak_bytes") == 4
    assert ratio(measured, "trl", "shared", "seconds") is None
    point = Point(model="body-heavy", prompt_tokens=100, completion_tokens=(100,) * 4)
    row = sharing_table({point: measured}).splitlines()[-1].split(" | ")
    assert row[1:4] == ["796", "496", "1.60x"]  # G(1 + r)/(G + r) = 4 * 2 / 5
    assert row[5] == "2.00x"
    assert row[6] == "no |"
