"""Runs in the sandbox, before any answer is read there: imports Reasoning Gym's scorers once, and scores in forks.

Needs only the standard library and Reasoning Gym, and imports nothing of Cohort.
"""

import ctypes
import os
import resource
import select
import signal
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

# Some scorers evaluate the answer. It must not read or write the memory of the process that scores the next one.
_PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def score(name: str, answer: str | None, entry: dict[str, Any], limit_s: float) -> float | None:
    """Return the score of an answer, computed in a fork; None if the scorer raises, or takes longer than `limit_s`."""
    read, write = os.pipe()
    try:
        child = os.fork()
    except BlockingIOError:
        os._exit(1)  # sandlock counts killed processes forever: the trainer goes on in another sandbox
    if child == 0:
        _score_and_exit(name, answer, entry, write)
    os.close(write)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], limit_s)[0]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    text = os.read(read, 64) if select.select([read], [], [], 0)[0] else b""
    for fd in (ended, read):
        os.close(fd)
    return float(text) if text else None


def _score_and_exit(name: str, answer: str | None, entry: dict[str, Any], write: int) -> None:
    try:
        os.dup2(write, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the channel to the trainer among them
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # nothing outlives it
        os.write(3, repr(float(get_score_answer_fn(name)(answer=answer, entry=entry))).encode())
    finally:
        os._exit(0)
