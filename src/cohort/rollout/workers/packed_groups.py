"""Groups as messages: a JSON header and few arrays. Reading one runs no code of the process that wrote it.

The tokens of a context are written from where it departs from the sequence before it: the prompt, or the context and
completion of the trajectory's previous call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohort import fast_json
from cohort.processes.this_process import gc_paused
from cohort.records import IntArray, ModelCall, Prompt, RolloutGroup, Trajectory, TurnStats, common_length
from cohort.rollout.engines.base import PackedCompletions

_END = b"\0"  # of the header; JSON has no such byte
_DTYPES = ("int32", "float32", "float64")
_PLAIN = ("text", "end", "observation", "error")  # fields of a trajectory that are written as they are


def write_message(header: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> bytes:
    """Return a JSON header and arrays as one message."""
    shapes = [(array.dtype.name, len(array)) for array in arrays]
    text = fast_json.encode({**header, "arrays": shapes}, default=_plain)
    return b"".join([text, _END, *(array.tobytes() for array in arrays)])


def read_message(content: bytes) -> dict[str, Any]:
    """Return the header of a message, with its arrays as "arrays".

    Raises:
        ValueError: it is no message.
    """
    end = content.index(_END)
    header: dict[str, Any] = fast_json.decode(content[:end])
    arrays: list[NDArray[Any]] = []
    start = end + 1
    for dtype, length in header["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"an array of {dtype}")
        arrays.append(np.frombuffer(content, dtype, length, start))
        start += arrays[-1].nbytes
    return {**header, "arrays": arrays}


def write_group(number: int, group: RolloutGroup, *, is_held: bool, **header: Any) -> bytes:
    """Return the message with a group's trajectories.

    Args:
        number: of the group.
        group: the group.
        is_held: whether its trajectories are kept until they are released.
        header: more entries.
    """
    calls = [call for trajectory in group.trajectories for call in trajectory.calls]
    completions = PackedCompletions.of(calls)
    before = [seen for trajectory in group.trajectories for seen in _before(group.prompt, trajectory.calls)]
    kept = [common_length(call.context_ids, seen) for call, seen in zip(calls, before, strict=True)]
    new = [call.context_ids[n:] for call, n in zip(calls, kept, strict=True)]
    header = {
        **header,
        "group": number,
        "is_held": is_held,
        "trajectories": [_header(trajectory) for trajectory in group.trajectories],
        "lengths": completions.lengths.tolist(),
        "finish_reasons": completions.finish_reasons,
        "texts": completions.texts,
        "kept": kept,
        "new": [len(ids) for ids in new],
        "versions": [call.policy_version for call in calls],
        "trained": [call.trained for call in calls],
    }
    new_ids = np.concatenate([np.zeros(0, np.int64), *new]).astype(np.int32)
    return write_message(header, [completions.token_ids, completions.sampling_logprobs, new_ids])


@gc_paused()
def read_group(message: Mapping[str, Any], prompt: Prompt, *, environment: Callable[[int], Any]) -> RolloutGroup:
    """Return the group of a message.

    Args:
        message: as `read_message` returned it.
        prompt: the group's.
        environment: returns what stands for the environment of a trajectory that is held, from its index.

    Raises:
        KeyError, TypeError, ValueError: the message has no group.
    """
    token_ids, logprobs, new_ids = message["arrays"]
    completions = PackedCompletions(
        token_ids=token_ids,
        sampling_logprobs=logprobs,
        lengths=np.array(message["lengths"], np.int64),
        finish_reasons=tuple(message["finish_reasons"]),
        texts=tuple(message["texts"]),
    ).unpack()
    new = [new_ids[start:end] for start, end in pairwise([0, *np.cumsum(message["new"]).tolist()])]
    calls = zip(completions, message["kept"], new, message["versions"], message["trained"], strict=True)
    trajectories = []
    for index, header in enumerate(message["trajectories"]):
        parts = [next(calls) for _ in range(header["num_calls"])]
        contexts = _contexts(prompt.token_ids, [(kept, ids, sampled.token_ids) for sampled, kept, ids, *_ in parts])
        own = [
            sampled.model_call(context, policy_version=version, trained=trained)
            for context, (sampled, _, _, version, trained) in zip(contexts, parts, strict=True)
        ]
        trajectories.append(_trajectory(header, own, environment=environment(index) if message["is_held"] else None))
    return RolloutGroup(prompt=prompt, trajectories=tuple(trajectories))


def _contexts(prompt_ids: IntArray, calls: Sequence[tuple[int, IntArray, IntArray]]) -> list[IntArray]:
    """Return the contexts of a trajectory's calls. Those of calls that continue each other are parts of one array.

    Args:
        prompt_ids: the sequence before the first call.
        calls: for each call, how many tokens of the sequence before it start its context, the rest of the context, and
            the sampled tokens.
    """
    contexts: list[IntArray] = []
    pieces, length = [prompt_ids], len(prompt_ids)  # of the sequence so far
    ends: list[int] = []  # of contexts in it
    for kept, new, sampled in calls:
        if kept != length:  # the history was rewritten
            sequence = np.concatenate(pieces)
            contexts += [sequence[:end] for end in ends]
            pieces, ends = [sequence[:kept]], []
        pieces += [new, sampled]
        ends.append(kept + len(new))
        length = ends[-1] + len(sampled)
    sequence = np.concatenate(pieces)
    return contexts + [sequence[:end] for end in ends]


def _header(trajectory: Trajectory) -> dict[str, Any]:
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "num_calls": len(trajectory.calls),
        "messages": trajectory.messages,
        "rewards": dict(trajectory.rewards),
        "step_rewards": trajectory.step_rewards,
        "metrics": dict(trajectory.metrics),
        "stats": None if trajectory.stats is None else asdict(trajectory.stats),
    }


def _trajectory(header: Mapping[str, Any], calls: Sequence[ModelCall], *, environment: Any) -> Trajectory:
    return Trajectory(
        **{name: header[name] for name in _PLAIN},
        calls=tuple(calls),
        messages=tuple(header["messages"]),
        rewards=header["rewards"],
        step_rewards=tuple(header["step_rewards"]),
        metrics=header["metrics"],
        stats=None if header["stats"] is None else TurnStats(**header["stats"]),
        environment=environment,
    )


def _before(prompt: Prompt, calls: Sequence[ModelCall]) -> Iterator[IntArray]:
    """Yield the sequence before each call of a trajectory."""
    before = prompt.token_ids
    for call in calls:
        yield before
        before = _sequence(call)


def _sequence(call: ModelCall) -> IntArray:
    return np.concatenate([call.context_ids, call.token_ids])


def _plain(value: Any) -> Any:
    """Convert what JSON lacks: mappings to dictionaries, arrays and numbers of NumPy to Python's, the rest to text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
