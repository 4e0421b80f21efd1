"""`assign_advantages` with defaults for what most tests do not vary."""

from collections.abc import Mapping, Sequence

from cohort.algorithms import Algorithm, Coefficients, build_sequences
from cohort.algorithms import assign_advantages as assign
from cohort.records import ForwardOnlyOutputs, ScoredGroup, TrainSequence


def assign_advantages(
    groups: Sequence[ScoredGroup],
    algorithm: Algorithm,
    outputs: ForwardOnlyOutputs | None = None,
    *,
    reward_weights: Mapping[str, float] | None = None,
    coefficients: Coefficients | None = None,
) -> list[TrainSequence]:
    """The sequences of `groups`; by default without forward-only outputs, with the initial coefficients."""
    return assign(
        groups,
        algorithm,
        build_sequences(groups),
        outputs or ForwardOnlyOutputs(),
        reward_weights=reward_weights or {},
        coefficients=coefficients or algorithm.coefficients(algorithm.initial_coefficients),
    )
