"""Real vLLM servers for the tests, few of them: each takes some 15 seconds to start."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.rollout.engines.vllm.server import ServerProcess, check_vllm, server_command
from serving import SECRET, Server, options_for, processes_of, serving_folder, start

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


def serve(folder: Path, python: str, *, tie: bool) -> Iterator[Server]:
    """A server of a tiny model."""
    process = ServerProcess(
        options_for(python, serving_folder(folder, tie=tie)), secret=SECRET, log_file=folder / "server.log"
    )
    try:
        start(process)
        server = Server(process=process, tie=tie)
        yield server
        server.close()
    finally:
        process.stop()


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("untied"), vllm_python, tie=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Server]:
    """With vLLM's own processes, as on GPUs; on CPUs Cohort turns them off."""

    def as_on_gpus(*arguments: Any) -> tuple[list[str], dict[str, str]]:
        command, environment = server_command(*arguments)
        return command, environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.rollout.engines.vllm.server.server_command", as_on_gpus)
        serving = serve(folder := tmp_path_factory.mktemp("tied"), vllm_python, tie=True)
        server = next(serving)
    settings = {p.environ().get("VLLM_ENABLE_V1_MULTIPROCESSING") for p in processes_of(folder / "server.log")}
    assert settings - {None} == {"1"}  # processes that change their title lose what they tell
    yield server
    next(serving, None)  # its end


@pytest.fixture(params=["untied", "tied"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)
