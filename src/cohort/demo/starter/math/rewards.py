"""Rewards of this run. A reward gets lists with one entry per completion, and returns one number each."""

import re


def right(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1.0 if the number after the last `####` is the row's answer, else 0.0. `answer` is a column of the data."""
    found = [re.search(r"####\s*(-?\d+)\s*$", completion) for completion in completions]
    return [float(match is not None and match[1] == str(gold)) for match, gold in zip(found, answer, strict=True)]
