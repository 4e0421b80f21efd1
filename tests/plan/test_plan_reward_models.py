"""Memory of reward models: on the policy's device, in their dtype."""

from dataclasses import replace

import pytest

from cohort.config import config_from_dict
from cohort.plan.memory import plan_memory
from cohort.plan.shape import preset_shape
from cohort.plan.state_memory import reward_model_bytes
from reward_models import save_reward_model
from test_plan_memory import workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("rm"))


def config(*rewards):
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}}
    return config_from_dict({**sections, "rewards": [{"use": "model", "args": args} for args in rewards]})


def test_weights_count_on_the_device_of_the_policy(folder):
    size = (folder / "model.safetensors").stat().st_size  # float32
    path = str(folder)
    assert reward_model_bytes(config({"path": path}), on_gpu=True) == size
    assert (
        reward_model_bytes(config({"path": path, "dtype": "bfloat16"}, {"path": path}), on_gpu=True) == size // 2 + size
    )
    assert reward_model_bytes(config({"path": path, "device": "cuda:1"}), on_gpu=True) == 0
    for device in ("cuda", "cuda:0", None):
        assert reward_model_bytes(config({"path": path, "device": device}), on_gpu=True) == size
    assert reward_model_bytes(config({"path": path, "device": "cuda"}), on_gpu=False) == 0
    assert reward_model_bytes(config({"url": "http://x"}), on_gpu=True) == 0
    assert reward_model_bytes(config({"path": "unknown/model"}), on_gpu=True) == 0


def test_the_plan_has_them_in_every_phase():
    without = workload(preset_shape("0.5b"))
    plan, more = plan_memory(without), plan_memory(replace(without, reward_model_bytes=1 << 30))
    assert more.peak_bytes == plan.peak_bytes + (1 << 30)


def test_a_hub_id_counts_by_its_preset():
    small = config({"path": "Qwen/Qwen2.5-0.5B-Instruct"})
    assert reward_model_bytes(small, on_gpu=True) == 2 * 494_033_665  # of 494,032,768, and a head of 896 + 1
