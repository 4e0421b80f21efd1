"""How much of the code a newcomer has to open to read a step."""

import sys
from types import FrameType
from typing import Any

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.packing import pack
from cohort.records import ForwardOnlyOutputs
from test_laws import make_engine, random_groups
from tiny import make_policy


def test_a_gradient_is_computed_by_few_files():
    """From sequences to the gradient of GRPO in one process."""
    engine, algorithm = make_engine(make_policy()), build_algorithm(AlgorithmConfig(), max_completion_tokens=16)
    sequences = assign_advantages(random_groups([[5, 9, 7], [3, 14, 8]], 0), algorithm, ForwardOnlyOutputs())
    loss = algorithm.loss_with(algorithm.coefficients(algorithm.initial_coefficients))
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, is_ours, name = frame.f_code.co_filename.partition("/src/cohort/")
        if event == "call" and is_ours:
            files.add(name)

    sys.setprofile(note)
    try:
        (batch,) = pack(sequences, micro_batch_tokens=engine.budget.tokens, share_prompts=True, padded=False)
        engine.forward_backward(batch, loss)
    finally:
        sys.setprofile(None)
    assert {"packing/bins.py", "learner/train_engine.py", "models/lm_head/logprobs.py", "algorithms/losses.py"} <= files
    assert len(files) <= 19, sorted(files)
