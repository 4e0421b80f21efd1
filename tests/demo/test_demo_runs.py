"""Runs of the demos. tests/display has what they print and gain, tests/launch their runs on several processes."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import cohort
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import TOOLS
from runs import stop_after
from selection import slow


@slow("a dozen steps of the tools demo; test_turn_runs has a smaller run")
def test_a_resumed_run_with_tools_has_the_same_trajectories(tmp_path: Path):
    """Interrupted after step 5, resumed from the checkpoint of step 4."""
    configs = {}
    for name in ("whole", "parts"):
        config = demo_config(tmp_path / name, task=TOOLS, seed=0)
        changes = {"train": {"steps": 8, "prompts_per_step": 8}, "run": {"checkpoint_every": 4}, "eval": {"every": 0}}
        sections = {key: getattr(config, key).model_copy(update=update) for key, update in changes.items()}
        configs[name] = config.model_copy(update=sections)
        write_data(tmp_path / name, configs[name], task=TOOLS, seed=0)
    cohort.train(configs["whole"])
    with pytest.raises(KeyboardInterrupt):
        cohort.train(configs["parts"], display=stop_after(5))
    cohort.train(configs["parts"], resume=True)
    for step in range(1, 9):
        whole, parts = (
            pq.read_table(tmp_path / name / "completions" / f"step-{step:06d}.parquet") for name in ("whole", "parts")
        )
        assert max(len(calls) for calls in whole["calls"].to_pylist()) > 1
        for column in ("prompt_id", "sequence_token_ids", "loss_mask", "reward", "advantage"):
            assert whole[column].to_pylist() == parts[column].to_pylist(), (step, column)
