"""Processes forked from one that has imported what they need, which takes longer than most of what they do.

They are processes like any other: killed, stopped and interrupted alike, with an environment and output of their own.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PRELOAD = ["rank_script", "cohort.cli", "cohort.launch", "cohort.trainer", "cohort.display"]


def start_server() -> None:
    """Have the process that others are forked from import what they need, while this one goes on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


def fork(
    target: Callable[..., Any], *arguments: object, out: Path, err: Path | None = None, **environment: object
) -> BaseProcess:
    """Start `target(*arguments)`, in this process's environment and more.

    Args:
        target: a function of a module.
        arguments: of it.
        out: the file for what it prints.
        err: the file for what it prints as errors; the same unless given.
        environment: variables beside this process's.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    process = context.Process(target=_start, args=(target, arguments, variables, out, err or out), daemon=True)
    process.start()
    return process


def run_module(name: str, *arguments: str) -> None:
    """As `python -m name arguments`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _start(
    target: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], out: Path, err: Path
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))  # the library read its variable long ago
    for file, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    target(*arguments)
