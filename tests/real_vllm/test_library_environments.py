"""Environments of libraries over a real vLLM server: the examples train as they do on the local engine."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import cohort
from cohort.chat import ResponseParser
from cohort.config import config_from_dict
from cohort.rollout.engines.vllm.server import ServerProcess, server_options
from playing import save_turns_model
from runs import changed, metric
from serving import SECRET, SIZES, secret_file, start

EXAMPLES = Path(__file__).parents[2] / "examples" / "libraries"
LENGTHS = {"num_generations": 4, "max_prompt_tokens": 600, "max_completion_tokens": 6, "max_turns": 2}
REWARDS = {"verifiers": "verifiers_letters", "textarena": "GuessTheNumber-v0", "reasoning_gym": "leg_counting"}


def example(library: str, folder: Path, **rollout: Any) -> dict[str, Any]:
    """An example's configuration for two quick steps of a random model."""
    config = yaml.safe_load((EXAMPLES / f"{library}.yaml").read_text())
    config["model"] = {"path": str(folder / "base")}
    config["rewards"] = [{"use": f"{folder}/r.py:length", "weight": 0.1}]  # random replies get no other reward
    config.pop("eval", None)
    if "sandbox" in config:
        config["sandbox"]["confinement"] = "none"
    return changed(
        config,
        rollout={**LENGTHS, "max_trajectory_tokens": 300, **rollout},
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2},
        run={"dir": str(folder / library)},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    save_turns_model(folder / "base", **SIZES | {"max_position_embeddings": 4096})
    (folder / "r.py").write_text(
        "def length(completions, **_):\n    return [float(len(str(c))) for c in completions]\n"
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, vllm_python: str) -> Iterator[dict[str, Any]]:
    """The keys of a server as `cohort serve` starts it for one of the runs."""
    raw = example("textarena", folder, engine="vllm", vllm_python=vllm_python)
    options = server_options(config_from_dict(raw, base_dir=folder), gpus="")
    process = ServerProcess(options, secret=SECRET, log_file=folder / "server.log")
    try:
        start(process)
        yield {"engine": "vllm", "urls": [process.url], "secret_file": secret_file(folder), "parity_every": 1}
    finally:
        process.stop()


@pytest.mark.parametrize("library", REWARDS)
def test_the_example_trains(
    library: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("verifiers.v1" if library == "verifiers" else library, exc_type=ImportError)
    if library == "verifiers" and shutil.which("uv", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("uv is not installed, by which verifiers starts its programs")
    server = request.getfixturevalue("server")  # only if there is a test for it
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)  # the random model calls by letters
    cohort.train(example(library, folder, **server))
    run = folder / library
    assert len(metric(run, f"rewards/{REWARDS[library]}/mean")) == 2
    assert metric(run, "completions/broken") == [0, 0]
    assert all(0 < difference < 1e-5 for difference in metric(run, "sampling/parity/mean"))
    differences = metric(run, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2 and all(0 < difference < 1e-4 for difference in differences)
