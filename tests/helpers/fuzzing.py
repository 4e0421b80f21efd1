"""Mutations of what users give, from a seed, and the judgement of how each ends: only as a message for the user."""

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import settings

from cohort.errors import TrainingError, UserError
from selection import THOROUGH

LONGEST_S = 60  # of one case; a hang is one that takes longer

VALUES = (
    *("", "null", "true", "-1", "0", "1e400", ".nan", ".inf", "9" * 400, "0x1F", "1_000", "2026-01-01", "1:30:00"),
    *("[]", "{}", "[[]]", "{a: {b: c}}", "[1, two, 3.0]", "'", '"', "{", "[", "- x", "? x", "!!python/object:os.x y"),
    *("!!binary aGk=", "!!bool maybe", "!!float x", "!!set {a}", "&a [*a]", "*nowhere", "&a {x: *a}", "|", ">", "%TAG"),
    *("\x00", "\ufeff", "\u2028", "\ud7ff", "e\u0301", "x" * 3000, "[" * 300, "{a: " * 300, "auto", "grpo", "..", "/"),
)
KEYS = ("model", "path", "data", "rewards", "use", "args", "algorithm", "name", "rollout", "engine", "num_generations")
KEYS += ("train", "steps", "seed", "optim", "clip_threshold", "hardware", "processes", "run", "dir", "eval", "weight")


def cases(thorough: int, quick: int) -> range:
    """Seeds: so many in `make test-all`, and in `make test`."""
    return range(thorough if settings.get_current_profile_name() == THOROUGH else quick)


def mutated_text(text: str, rng: random.Random) -> str:
    """A configuration with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        lines = text.splitlines() or [""]
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        match rng.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2 | 3 | 4:
                lines[at] = f"{key}: {rng.choice(VALUES)}" if colon else rng.choice(VALUES)
            case 5:
                lines[at] = lines[at].replace(key.strip(), rng.choice(KEYS), 1)
            case 6:
                lines[at] = rng.choice(("  ", "\t", "- ")) + lines[at]
            case 7:
                lines[at] = lines[at].lstrip()
            case 8:
                lines[at] = str(mutated_bytes(lines[at].encode(), rng), "utf-8", "replace")
        text = "\n".join(lines)
    return text


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, cut out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at:at] = rng.choice(VALUES).encode("utf-8", "replace")
            case 4:
                del changed[at:]
    return bytes(changed)


def failures(seeds: range, try_one: Callable[[random.Random], str]) -> list[str]:
    """The cases that end in anything but a message.

    Args:
        seeds: one for each case.
        try_one: makes a case and tries it; says what it was.
    """
    found = []
    for seed in seeds:
        try:
            with _alarm():
                try_one(random.Random(seed))
        except (UserError, TrainingError) as error:
            if not str(error).strip():
                found.append(f"seed {seed}: an empty message")
        except BaseException:
            found.append(f"seed {seed}:\n{traceback.format_exc(limit=-4)}")
    return found


class HangError(Exception):
    """It took too long."""


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
