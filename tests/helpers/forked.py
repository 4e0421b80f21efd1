"""Processes forked from one that has imported what they need, which takes longer than most of what they do.

They are processes like any other: killed, stopped and interrupted alike, with an environment and output of their own.
"""

import faulthandler
import importlib
import logging
import multiprocessing
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
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


def become_server() -> None:
    """Let a fork of this process, which has imported what they need and computed nothing, be that process."""
    for name in PRELOAD:
        importlib.import_module(name)
    with mock.patch.object(util, "spawnv_passfds", _serve_in_a_fork):
        start_server()


def _serve_in_a_fork(_path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do in a fork what Python would with these arguments, whose last is a program, and return the process id."""
    if pid := os.fork():
        return pid
    try:
        _forget_pytest(descriptors)
        exec(arguments[-1])
    finally:
        os._exit(0)


def _forget_pytest(descriptors: Sequence[int]) -> None:
    """Leave only what a new interpreter with these descriptors would have beside the imported modules."""
    forkserver._forkserver._lock = threading.Lock()  # the parent holds it
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # such as pipes to pytest, which waits for their ends
        if number > 2 and number not in (*descriptors, null):
            os.dup2(null, number, inheritable=False)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


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
