"""Run folders as a run opens them."""

import time
from pathlib import Path

from cohort.config import Config, config_from_dict
from cohort.run_folder import RunFolder
from configs import MINIMAL


def config_for(path: Path, *overrides: str) -> Config:
    return config_from_dict({**MINIMAL, "run": {"dir": str(path)}}, overrides)


def open_folder(path: Path, *overrides: str, resume: bool = False) -> RunFolder:
    return RunFolder(config_for(path, *overrides), resume=resume)


def hold_folder(path: Path) -> None:
    """Have it, say so, and stay."""
    folder = open_folder(path)
    print("locked", flush=True)
    time.sleep(600)
    folder.close()
