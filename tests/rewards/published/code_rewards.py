"""Python in code fences, run in every way that people run it."""

import ast
import concurrent.futures
import contextlib
import functools
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
SECONDS_PER_SNIPPET = float(os.environ.get("SNIPPET_TIMEOUT", 30))


def extract_code(text: str) -> str | None:
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else None


def on_code(score):
    """Make a reward of texts into one of chat completions."""

    @functools.wraps(score)
    def wrapper(completions, **kwargs):
        start = time.perf_counter()
        sources = [extract_code(c[0]["content"] if isinstance(c, list) else c) for c in completions]
        rewards = score(sources, **kwargs)
        print(f"[{score.__name__}] {len(rewards)} completions in {time.perf_counter() - start:.2f} s", file=sys.stderr)
        return rewards

    return wrapper


@on_code
def syntax_reward(sources, **kwargs):
    def parses(source):
        with contextlib.suppress(SyntaxError, TypeError):
            return bool(ast.parse(source).body)
        return False

    return [0.25 if parses(source) else -0.25 for source in sources]


def _passes(source: str, test: str) -> bool:
    names: dict = {}
    try:
        exec(source, names)
        exec(test, names)
    except BaseException:
        return False
    return True


def _run_tests(job) -> float:
    source, tests = job
    return sum(_passes(source, test) for test in tests) / len(tests)


def pool_reward(completions, tests, **kwargs):
    jobs = [(extract_code(c[0]["content"]) or "", t) for c, t in zip(completions, tests, strict=True)]
    with concurrent.futures.ProcessPoolExecutor(max_workers=2) as pool:
        return list(pool.map(_run_tests, jobs, timeout=60))


def _work(source, tests, queue):
    queue.put(_run_tests((source, tests)))


def process_reward(completions, tests, **kwargs):
    """One process each, which is killed at its deadline."""
    context = multiprocessing.get_context("fork")
    rewards = []
    for completion, asserts in zip(completions, tests, strict=True):
        queue = context.SimpleQueue()
        process = context.Process(target=_work, args=(extract_code(completion[0]["content"]) or "", asserts, queue))
        process.start()
        wait([process.sentinel], timeout=SECONDS_PER_SNIPPET)
        if process.is_alive():
            process.kill()
        process.join()
        rewards.append(-1.0 if queue.empty() else queue.get())
    return rewards


def thread_reward(completions, tests, **kwargs):
    rewards = []
    for completion, asserts in zip(completions, tests, strict=True):
        result = [-1.0]  # what it stays at if the thread does not get there

        def work(source=extract_code(completion[0]["content"]) or "", asserts=asserts, result=result):
            result[0] = _run_tests((source, asserts))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(timeout=SECONDS_PER_SNIPPET)
        rewards.append(result[0])
    return rewards


class SnippetTimeoutError(Exception):
    pass


def alarm_reward(completions, tests, **kwargs):
    def on_alarm(signum, frame):
        raise SnippetTimeoutError

    rewards = []
    for completion, asserts in zip(completions, tests, strict=True):
        names: dict = {}
        before = signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_SNIPPET)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(extract_code(completion[0]["content"]), names)
                for test in asserts:
                    exec(test, names)
            rewards.append(1.0)
        except SnippetTimeoutError:
            rewards.append(-1.0)
        except (Exception, SystemExit) as e:
            rewards.append(0.5 if isinstance(e, AssertionError) else 0.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return rewards
