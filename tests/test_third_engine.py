"""A rollout engine of one folder and one config class: the rest treats it by what the class says it can do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import pytest

from cohort.check.launch import Launch, Said
from cohort.check.rules.cohort import judge_cohort
from cohort.config import ENGINES, Config, config_from_dict, load
from cohort.config.schema import sections_in
from cohort.errors import UserError
from cohort.launch.serve import serve_command
from cohort.placement import split_machine
from cohort.plan.layout import plan_layout
from cohort.plan.shape import preset_shape
from cohort.plan.timing import step_times
from plans import EIGHT
from runs import changed, make_inputs, metric, train
from stub_engine.config import StubRolloutConfig
from stub_engine.server import serving
from tiny import make_tokenizer

RUN: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the class is written into the union in `cohort.config.rollout`."""
    field = Config.model_fields["rollout"]
    before, union = field.annotation, Union[field.annotation, StubRolloutConfig]  # noqa: UP007
    monkeypatch.setitem(ENGINES, "stub", StubRolloutConfig)
    monkeypatch.setitem(load._SECTIONS, "rollout", sections_in(union))
    field.annotation = union
    Config.model_rebuild(force=True)
    yield
    field.annotation = before
    Config.model_rebuild(force=True)


def stub(**keys: Any) -> dict[str, Any]:
    return {**RUN, **{section: value for section, value in keys.items() if section != "rollout"}} | {
        "rollout": {"engine": "stub", **keys.get("rollout", {})}
    }


def test_a_run_samples_ahead_on_it_and_corrects_by_default(tmp_path: Path):
    tokenizer = make_tokenizer()
    with serving(len(tokenizer)) as server:
        rollout = {"engine": "stub", "urls": [server.url], "max_staleness": 1}
        train(changed(make_inputs(tmp_path), rollout=rollout, train={"steps": 4}))
    assert server.versions == [0, 1, 2, 3, 4]  # the last for the evaluation at the end
    assert set(server.sampled_versions) <= set(server.versions)
    assert metric(tmp_path / "run", "rollout/staleness_max")[1:] == [1, 1, 1]
    assert len(metric(tmp_path / "run", "sampling/importance_weight/clipped_ratio")) == 4


def test_plan_and_placement_have_its_servers():
    config = config_from_dict(stub(rollout={"tensor_parallel": 2}, hardware={"rollout_gpus": 4}))
    layout = plan_layout(config, preset_shape("llama3-1b"), EIGHT)
    assert (layout.num_training, layout.num_sampling, layout.shared) == (4, 4, False)
    assert "(2 stub servers, 2 GPUs each)" in layout.reason
    times = {
        staleness: step_times(
            config_from_dict(stub(rollout={"max_staleness": staleness})),
            preset_shape("llama3-1b"),
            EIGHT,
            num_training=4,
            num_sampling=4,
        )
        for staleness in (0, 1)
    }
    assert not times[0].overlap and times[1].overlap and times[1].step_s < times[0].step_s
    split = split_machine(config_from_dict(stub(hardware={"device": "cpu"})))
    assert split is not None and split.reason == "1 process and 1 stub server share the CPU"
    assert split_machine(config_from_dict(stub(rollout={"urls": ["http://a:1"]}))) is None


def test_what_contradicts_its_capabilities_is_refused():
    adapter = {"path": "m", "adapter": {"rank": 4}, "quantization": "int8"}
    with pytest.raises(UserError, match=r"quantization: int8 with rollout\.engine: stub: servers load the base"):
        config_from_dict(stub(model=adapter))
    with pytest.raises(UserError, match=r"stale_completions: correct corrects nothing"):
        config_from_dict(stub(rollout={"max_staleness": 1}, algorithm={"sampling_correction": "none"}))
    # `auto` truncates, so that the cap has an effect
    config_from_dict(stub(algorithm={"sampling_correction_cap": 3.0}))


def test_its_servers_are_not_started_as_vllm():
    with pytest.raises(UserError, match=r"rollout\.engine: stub does not sample with vLLM servers"):
        serve_command(config_from_dict(stub(hardware={"device": "cpu"})), host="127.0.0.1", port=8000)


def test_check_tells_who_samples():
    settings = {"rollout.engine": Said("stub", ""), "model.path": Said("m", "")}
    launch = Launch(framework="cohort", form="yaml", reason="", settings=settings)
    assert judge_cohort(launch).sampling == "by stub servers"


def test_an_engine_that_is_not_known_is_refused_where_the_configuration_is_read():
    with pytest.raises(UserError, match=r"rollout\.engine: 'sglang' is not one of auto, local, vllm, stub"):
        config_from_dict({**RUN, "rollout": {"engine": "sglang"}})
