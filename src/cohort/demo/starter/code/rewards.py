"""Rewards of this run. A reward gets lists with one entry per completion, and returns one number each."""


def short(completions: list[str], **columns: object) -> list[float]:
    """1.0 for a function of two lines, else 0.0. A column of the data may be a parameter, as `tests`."""
    return [float(len(completion.strip().splitlines()) == 2) for completion in completions]
