"""Run folders as a run opens them."""

import os
import time
from pathlib import Path

from cohort.config import Config, config_from_dict
from cohort.rewards.judge import prompt_hashes
from cohort.run.folder import RunFolder
from configs import MINIMAL


def config_for(path: Path, *overrides: str) -> Config:
    return config_from_dict({**MINIMAL, "run": {"dir": str(path)}}, overrides)


def open_folder(path: Path, *overrides: str, resume: bool = False) -> RunFolder:
    config = config_for(path, *overrides)
    return RunFolder(config, resume=resume, judge_prompts=prompt_hashes(config.rewards))


def hold_folder(path: Path) -> None:
    """Have it, say so, and stay."""
    folder = open_folder(path)
    print("locked", flush=True)
    time.sleep(600)
    folder.close()


def hold_folder_and_fork(path: Path) -> None:
    """Do the same with a child, which lives on, and say its process id."""
    folder = open_folder(path)
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    print(f"locked\n{child}", flush=True)
    time.sleep(600)
    folder.close()
