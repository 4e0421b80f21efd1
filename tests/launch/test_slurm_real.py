"""The batch script in a real Slurm, on this machine: preempted, at its time limit, and requeued both times."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import cohort
from cohort.config import load_config
from cohort.launch.slurm import SlurmOptions, slurm_script
from real_slurm import Cluster, real_slurm, why_not
from runs import assert_same_weights, changed, make_inputs
from waiting import free_port, num_lines, until

pytestmark = [pytest.mark.extras, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

NUM_STEPS = 20
# Slow until the test has stopped the run twice.
PACED_REWARD = """
import pathlib, time
from my_rewards import digit as unpaced

def digit(**inputs):
    if not pathlib.Path(__file__).with_name("hurry").exists():
        time.sleep(1)
    return unpaced(**inputs)
"""


@pytest.fixture
def slurm() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, real_slurm(Path(folder)) as cluster:
        yield cluster


def test_a_job_that_is_stopped_twice_ends_with_the_weights_of_an_uninterrupted_run(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    config = changed(
        make_inputs(tmp_path),
        hardware={"device": "cpu", "processes": 2},
        rollout={"engine": "local"},
        train={"steps": NUM_STEPS},
        run={"checkpoint_every": 1000, "record_tokens": True},
    )
    del config["eval"]
    (tmp_path / "paced.py").write_text(PACED_REWARD)
    paced = changed(config, run={"dir": str(tmp_path / "job")})
    paced["rewards"] = [{"use": f"{tmp_path}/paced.py:digit"}, config["rewards"][1]]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(paced))
    options = SlurmOptions(nodes=1, max_restarts=0, port=free_port(), sbatch=["--partition=low", "--output=job.log"])
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(load_config(file), config_path=file, overrides=(), options=options))
    log, steps = tmp_path / "job.log", tmp_path / "job" / "metrics.jsonl"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slurm.environment["PYTHONPATH"] = str(tmp_path)

    number = slurm.submit(script)

    def wait(condition: Callable[[], object]) -> None:
        def holds() -> object:
            assert slurm.state(number) not in ("FAILED", "TIMEOUT", "CANCELLED"), log.read_text()
            return condition()

        until(holds, every_s=0.3)

    def is_requeued(times: int) -> bool:
        return slurm.state(number) == "PENDING" and slurm.job(number)["Restarts"] == str(times)

    # a node refuses a job that starts again in the second in which it ended; Slurm itself waits for two minutes
    start_soon = ("scontrol", "update", f"JobId={number}", "StartTime=now+4")
    wait(lambda: num_lines(steps) >= 2)
    slurm.submit("--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait(lambda: is_requeued(1))
    stopped = num_lines(steps)
    assert f"stopped by SIGTERM after step {stopped}: saved" in log.read_text()

    slurm.run(*start_soon)
    wait(lambda: num_lines(steps) >= stopped + 2)
    hours, minutes, _ = map(int, slurm.job(number)["RunTime"].split(":"))
    slurm.run("scontrol", "update", f"JobId={number}", f"TimeLimit={60 * hours + minutes + 3}")
    slurm.run("scancel", "--signal=USR1", number)  # as Slurm does before the limit, which it looks at twice a minute
    wait(lambda: is_requeued(2))
    stopped = num_lines(steps)
    assert f"stopped by SIGUSR1 after step {stopped}: saved" in log.read_text()

    (tmp_path / "hurry").touch()
    slurm.run(*start_soon, "TimeLimit=60")
    wait(lambda: slurm.state(number) == "COMPLETED")
    assert [json.loads(line)["step"] for line in steps.read_text().splitlines()] == list(range(1, NUM_STEPS + 1))
    assert "Traceback" not in log.read_text()
    cohort.train(config)
    assert_same_weights(tmp_path / "job" / "final", tmp_path / "run" / "final")
