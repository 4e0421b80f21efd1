"""How far the gradient of a step moves with its shape: 1, 2 and 3 processes, every budget, shuffled, per algorithm.

    python bench/invariance.py

Largest relative error of any parameter's gradient against one process with one unpadded forward pass per completion,
full logits and one backward pass. Steps, models and algorithms are those of tests/test_ranks.py, in float64.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rank_engine import BUDGETS, STEPS, step_sequences
from ranks import run_ranks
from test_laws import ALGORITHMS, dense_gradient
from tiny import policy_of, relative_error, save_model_folder

WORLDS = (1, 2, 3)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [str(save_model_folder(folder / str(seed), seed=seed)) for seed in (0, 1)]
        results = {n: run_ranks(n, folder, ("gradients", *models))[0] for n in WORLDS}
        policy, reference = (
            policy_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()) for path in models
        )
    print("| algorithm | " + " | ".join(f"{n} processes" for n in WORLDS) + " |")
    print("| --- |" + " --- |" * len(WORLDS))
    for name in ALGORITHMS:
        worst = dict.fromkeys(WORLDS, 0.0)
        for step, lengths in STEPS.items():
            algorithm, sequences = step_sequences(name, *lengths)
            _, expected = dense_gradient(policy, reference, sequences, algorithm)
            for n in WORLDS:
                for budget in BUDGETS:
                    _, actual, _ = results[n][f"{name}/{step}/{budget}"]
                    errors = [relative_error(actual[k], expected[k]) for k in expected if expected[k].norm() > 1e-12]
                    worst[n] = max(worst[n], *errors)
        print(f"| {name} | " + " | ".join(f"{worst[n]:.0e}" for n in WORLDS) + " |")


if __name__ == "__main__":
    main()
