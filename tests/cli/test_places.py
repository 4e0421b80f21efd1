"""Files that may not be read, users without a home folder, and systems without a temporary one."""

import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.config import config_from_dict
from cohort.data.files import read_rows
from cohort.errors import UserError
from commands import ENVIRONMENT, assert_refused, set_up
from configs import MINIMAL, message
from permissions import without_override

_LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
os.execv(sys.executable, [sys.executable, "-m", "cohort", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("name", "mode"), [(".", 0o000), ("model", 0o000), ("model", 0o600), ("model/config.json", 0o000)]
)
def test_a_model_that_may_not_be_read(cohort, tmp_path: Path, name: str, mode: int):
    """Nor may the folder be looked into, or the one that holds it."""
    (tmp_path / "models").mkdir()
    config = set_up(tmp_path, model={"path": "models/model"})
    (tmp_path / "model").rename(tmp_path / "models" / "model")
    forbidden = tmp_path / "models" / name
    forbidden.chmod(mode)
    try:
        with without_override():
            assert_refused(cohort("plan", config), f"model.path: cannot read {tmp_path}/models/model/config.json: ")
            checked = cohort("check", config)
            assert "warning CHK021" in checked.out and "models/model': permission denied" in checked.out
            assert_refused(cohort("train", config), f"{tmp_path}/models/model", "ermission denied")
    finally:
        forbidden.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model/model.safetensors", "model.path: "),
        ("model/tokenizer.json", "model.path: "),
        ("data.jsonl", "data.path='{}/data.jsonl': cannot be read"),
        ("own.py", "rewards[0].use: '{}/own.py:score' does not import"),
        ("rewards", "rewards[0].use: '{0}/rewards/own.py:score': {0}/rewards/own.py: cannot be read"),
        ("run", "{}/run/config.yaml: permission denied"),
    ],
)
def test_other_files_that_may_not_be_read(cohort, tmp_path: Path, name: str, message: str):
    reward = "def score(completions):\n    return [1.0 for _ in completions]\n"
    for folder in ("rewards", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "rewards" / "own.py").write_text(reward)
    uses = ["rewards/own.py:score"] if name == "rewards" else ["own.py:score"]
    config = set_up(tmp_path, files={"own.py": reward}, rewards=[{"use": use} for use in uses])
    (tmp_path / name).chmod(0o000)
    try:
        with without_override():
            assert_refused(cohort("train", config), message.format(tmp_path), "ermission denied")
    finally:
        (tmp_path / name).chmod(0o700)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user of a container who has no entry in the password file."""

    def getpwuid(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


@pytest.mark.usefixtures("no_home")
def test_paths_in_a_home_that_there_is_not():
    expected = "this user has no home folder for `~`; set HOME, or give a path without it"
    for override in ("model.path=~/m", "data.path=~/d.jsonl", "run.dir=~/runs", "rewards.0.use=~/own.py:score"):
        key, _, value = override.partition("=")
        assert message(MINIMAL, override) == f"{key}: '{value}': {expected}"
    judge = {"use": "judge", "args": {"url": "http://h", "model": "m", "range": [0, 1], "prompt": "~/judge.txt"}}
    assert expected in message({**MINIMAL, "rewards": [judge]})
    with pytest.raises(UserError, match=r"data\.path='~/d.jsonl': this user has no home folder"):
        read_rows("~/d.jsonl", field="data.path")
    assert config_from_dict(MINIMAL, ["data.path=~backup.jsonl"]).data.path == "~backup.jsonl"


def test_no_folder_for_temporary_files(tmp_path: Path):
    """Where nothing can be written, the message is one line."""
    command = [sys.executable, "-c", _LIMITED, "train", set_up(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stderr == "error: no folder for temporary files can be written to; set TMPDIR to one that can\n"
    assert done.returncode == 2
