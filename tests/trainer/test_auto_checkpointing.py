"""What a run plans at its start; a resumed one keeps the checkpointing that it began with, unless the key is set."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cohort
from cohort.config import load_config
from cohort.models import activation_checkpointing
from cohort.ranks.collectives import Ranks
from cohort.trainer import preflight
from runs import assert_same_weights, changed, make_inputs, stop_after, train


def test_a_resumed_run_checkpoints_as_it_began_unless_the_key_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    enable = activation_checkpointing.enable_gradient_checkpointing

    def enable_and_note(model: object, *, selective: bool = False) -> None:
        used.append(selective)
        enable(model, selective=selective)

    monkeypatch.setattr(activation_checkpointing, "enable_gradient_checkpointing", enable_and_note)
    config = {key: value for key, value in make_inputs(tmp_path).items() if key != "eval"}
    whole = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    assert used == []

    def kind() -> object:
        return load_config(tmp_path / "run" / "config.yaml").model.gradient_checkpointing

    def interrupt_after(steps: int, **model: object) -> None:
        with pytest.raises(KeyboardInterrupt):
            cohort.train(changed(config, model=model), display=stop_after(steps))

    assert load_config(tmp_path / "whole" / "config.yaml").model.gradient_checkpointing is False
    interrupt_after(2, gradient_checkpointing="selective")
    interrupt_after(4)
    assert (kind(), used) == ("selective", [True, True])
    resumed = train(changed(config, model={"gradient_checkpointing": True}), resume=True)
    assert (kind(), used) == (True, [True, True, False])
    assert_same_weights(resumed.final_dir, whole.final_dir)


@pytest.mark.parametrize(("per_node", "found"), [(8, (8, 2)), (None, (16, 1)), (7, (16, 1))])
def test_a_run_plans_for_the_nodes_that_its_launcher_started(
    monkeypatch: pytest.MonkeyPatch, per_node: int | None, found: tuple[int, int]
):
    """Nodes with different numbers of processes are planned as one."""
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    planned = preflight._hardware(torch.device("cuda", 0), Ranks(world_size=16, ranks_per_node=per_node))
    assert (planned.gpus_per_node, planned.nodes) == found
