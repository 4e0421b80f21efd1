"""How far the gradient of a step moves with its shape: 1, 2 and 3 processes, every budget, shuffled, per algorithm.

    python bench/invariance.py [--quick]

Largest relative error of any parameter's gradient against one process with one unpadded forward pass per completion,
full logits and one backward pass. Steps, models and algorithms are those of tests/learner/test_ranks.py, in float64.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "learner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from forked import start_server

if __name__ == "__main__":
    start_server()  # while this process imports

import torch
from transformers import AutoModelForCausalLM

from rank_engine import BUDGETS, STEPS, step_sequences
from ranks import run_ranks
from test_laws import ALGORITHMS, dense_gradient
from tiny import policy_of, relative_error, save_model_folder

WORLDS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    quick = parser.parse_args().quick
    worlds, algorithms = (WORLDS[:2], ["grpo"]) if quick else (WORLDS, list(ALGORITHMS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [str(save_model_folder(folder / str(seed), seed=seed)) for seed in (0, 1)]
        splits = [f"{step}/{budget}" for step in STEPS for budget in BUDGETS]
        jobs = [("gradients", *models, name, *splits) for name in algorithms]
        results = {n: dict(zip(algorithms, run_ranks(n, folder, *jobs), strict=True)) for n in worlds}
        policy, reference = (
            policy_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()) for path in models
        )
    print("| algorithm | " + " | ".join(f"{n} processes" for n in worlds) + " |")
    print("| --- |" + " --- |" * len(worlds))
    for name in algorithms:
        worst = dict.fromkeys(worlds, 0.0)
        for step, lengths in STEPS.items():
            algorithm, sequences = step_sequences(name, *lengths)
            _, expected = dense_gradient(policy, reference, sequences, algorithm)
            for n in worlds:
                for budget in BUDGETS:
                    _, actual, _ = results[n][name][f"{step}/{budget}"]
                    errors = [relative_error(actual[k], expected[k]) for k in expected if expected[k].norm() > 1e-12]
                    worst[n] = max(worst[n], *errors)
        print(f"| {name} | " + " | ".join(f"{worst[n]:.0e}" for n in worlds) + " |")


if __name__ == "__main__":
    main()
