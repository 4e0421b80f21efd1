"""Real vLLM servers for the tests, few of them: each takes some 15 seconds to start."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.rollout.engines.vllm.server import check_vllm
from serving import AS_ON_GPUS, Server, processes_of, serve

REPOSITORY = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs vLLM."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Of an environment with vLLM, or no test of these is run; with COHORT_REQUIRE_VLLM, they fail then."""
    own = REPOSITORY / ".venv-vllm" / "bin" / "python"
    python = os.environ.get("COHORT_VLLM_PYTHON") or (str(own) if own.exists() else None)
    if python is None:
        end = pytest.fail if os.environ.get("COHORT_REQUIRE_VLLM") else pytest.skip
        end("no vLLM here: `make vllm-env` installs it, or set COHORT_VLLM_PYTHON to a Python that has it")
    check_vllm(python)
    return python


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("untied"), vllm_python, tie=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Server]:
    """With vLLM's own processes, as on GPUs; on CPUs Cohort turns them off."""

    folder = tmp_path_factory.mktemp("tied")
    serving = serve(folder, vllm_python, tie=True, environment=AS_ON_GPUS)
    server = next(serving)
    settings = {p.environ().get("VLLM_ENABLE_V1_MULTIPROCESSING") for p in processes_of(folder / "server.log")}
    assert settings - {None} == {"1"}  # processes that change their title lose what they tell
    yield server
    next(serving, None)  # its end


@pytest.fixture(params=["untied", "tied"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)
