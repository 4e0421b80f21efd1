"""The demo with a tool over a vLLM server."""

import json
from pathlib import Path

import cohort
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import TOOLS
from runs import metric
from selection import slow

STEPS = 4


@slow("the demo's tool with both engines; test_turns has the smallest runs with tools")
def test_the_tools_demo_has_the_metrics_of_the_local_engine(tmp_path: Path, vllm_python: str):
    names, rewards = {}, {}
    for engine in ("local", "vllm"):
        config = demo_config(tmp_path / engine, task=TOOLS, seed=0, engine=engine)
        changes = {
            "rollout": {"vllm_python": vllm_python} if engine == "vllm" else {},
            "train": {"steps": STEPS},
            "eval": {"every": STEPS},
        }
        config = config.model_copy(update={k: getattr(config, k).model_copy(update=u) for k, u in changes.items()})
        write_data(tmp_path / engine, config, task=TOOLS, seed=0)
        cohort.train(config)
        lines = [json.loads(line) for line in (tmp_path / engine / "metrics.jsonl").read_text().splitlines()]
        names[engine] = {name for line in lines for name in line}
        rewards[engine] = metric(tmp_path / engine, "rewards/right/mean")
        assert max(metric(tmp_path / engine, "tools/call_frequency")) > 0.3
        assert metric(tmp_path / engine, "completions/broken") == [0] * STEPS
    assert names["local"] - names["vllm"] == {"memory/rollout_peak_bytes"}, "the server has its own memory"
    assert abs(rewards["local"][0] - rewards["vllm"][0]) < 0.15, "the same policy, sampled by another engine"
