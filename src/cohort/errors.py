"""Exceptions for user errors and failed runs, and how messages show values and exceptions."""

import difflib
from collections.abc import Iterable

TROUBLESHOOTING = "docs/troubleshooting.md"
# Parts of messages, of Cohort and of the libraries under it, by the section of the page that explains them
_SECTIONS = {
    "the-run-folder": (
        "already holds another run. It differs in",
        "is in use by process ",
        "is not empty and holds no run",
        "has no intact checkpoint to resume from",
        "was written by an incompatible version of Cohort",
    ),
    "the-model-does-not-load": (
        ": cannot load the model: ",
        ": cannot load the tokenizer: ",
        " weights are missing from the files: ",
    ),
    "the-chat-template": (
        "the tokenizer has no chat template",
        "which the chat template writes as well",
        "the last message is the assistant's",
    ),
    "prompts-are-too-long": ("prompts are too long; use at least", "is that short"),
    "the-plan-does-not-fit": ("even with the smallest micro-batches",),
    "vllm-is-not-found": ("has no vLLM, which rollout.engine: vllm needs", "is not a working Python: "),
    "no-sandbox": ("sandbox: no backend works here",),
    "memory-on-the-gpu": ("Free memory on device", "No available memory for the cache blocks"),
    "the-context-does-not-fit": ("To serve at least one request with the model's max seq len",),
    "the-model-or-its-dtype": ("Bfloat16 is only supported on GPUs", "are not supported for now"),
    "the-engine-does-not-start": ("Engine core initialization failed",),
    "cuda-is-not-available": (
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system",
        "The NVIDIA driver on your system is too old",
    ),
    "no-kernel-image": ("no kernel image is available for execution on the device",),
    "device-side-assert": ("device-side assert triggered",),
    "too-many-open-files": ("Too many open files",),
    "shared-memory": ("Error while creating shared memory segment", "Bus error"),
    "communication-fails": ("unhandled system error", "unhandled cuda error", "NCCL WARN"),
    "the-watchdog": ("Watchdog caught collective operation timeout",),
    "the-allocator": ("CUDA out of memory. Tried to allocate", "DefaultCPUAllocator: can't allocate memory"),
    "the-disk-is-full": (" free, but the run needs ", "Earlier checkpoints are intact"),
    "processes-do-not-find-each-other": (
        "could not reach the rendezvous at",
        "did not join within",
        "rank 0 exited before ranks",
        "MASTER_PORT: ",
    ),
    "out-of-memory": ("(docs/memory.md)",),
    "a-process-was-killed": ("usually out of memory",),
    "a-reward-fails": (
        "did not finish within its deadline of",
        "it must return a list with one number or",
        "it must return one number or None for each",
        "which Python only allows in a main thread",
    ),
    "nothing-is-scored": ("no reward scored any of the",),
    "trajectories-fail": ("fewer than two trajectories are intact", "trajectories failed", "rollout: all "),
    "the-gradient-is-not-finite": ("gradient norm is ",),
    "parity": ("parity: after step ",),
    "servers-fail": (" is left: ", " failed repeatedly at the same prompts: "),
    "a-process-does-not-answer": ("gave up in ", "did not answer its peers within hardware.timeout_s"),
}


def explained_in(message: str) -> str:
    """Return "See docs/troubleshooting.md#section" for a message that the page explains, else ""."""
    if TROUBLESHOOTING in message:  # the output of a process that said it already
        return ""
    found = (name for name, parts in _SECTIONS.items() if any(part in message for part in parts))
    return next((f"See {TROUBLESHOOTING}#{name}" for name in found), "")


class _Explained(Exception):  # noqa: N818
    """Has a note with the section of the page that explains its message. Tracebacks and the command line show it."""

    def __init__(self, *args: object):
        super().__init__(*args)
        if see := explained_in(" ".join(map(str, args))):
            self.add_note(see)


class UserError(_Explained, ValueError):
    """A mistake in the user's input. The message names the field, the value, the rule and what works.

    The command line prints only the message and exits with code 2.
    """


class TrainingError(_Explained, RuntimeError):
    """The run cannot continue, but its configuration was valid. Exit code 1."""


class StopRequested(TrainingError):  # noqa: N818
    """A requested stop of the run, raised where it is safe. The training loop catches it."""


class RankDesyncError(TrainingError):
    """This rank failed while other ranks may be waiting in a collective; the process must exit."""


class DoesNotFitError(RankDesyncError):
    """Memory ran out on this rank, and no smaller micro-batch would help."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean x?" with the known name most like `wrong`, or "" if none is like it."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), lower, n=3)
    # prefer swapped letters: gpro is meant as grpo, not gspo
    near.sort(key=lambda name: sorted(name) != sorted(wrong.lower()))
    return f"; did you mean {lower[near[0]]}?" if near else ""


def suggest(wrong: str, known: Iterable[str], what: str) -> str:
    """Return "; did you mean x? What: x, y", the end of a message about a wrong name."""
    names = list(known)
    return f"{did_you_mean(wrong, names) or '.'} {what}: {', '.join(names) or 'none'}"


def describe_error(error: BaseException, limit: int | None = None) -> str:
    """Return an exception's type and message, even if its `__str__` raises.

    Args:
        limit: return only the first line, without a full stop, and at most this many characters.
    """
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception as another:
        return f"{name} (whose message cannot be shown: its __str__ raises {type(another).__name__})"
    text = f"{name}: {message}" if message else name
    return text if limit is None else text.partition("\n")[0].rstrip(".")[:limit]


def excerpt(value: object, limit: int = 80) -> str:
    """Return `repr(value)` on one line, with the middle omitted if it is longer than `limit` characters."""
    # Truncate long strings before repr, so that a completion of a megabyte is cheap.
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]
    try:
        text = repr(value)
    except Exception as error:  # in the __repr__ of a user's class
        return f"<its repr raises {type(error).__name__}>"
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
