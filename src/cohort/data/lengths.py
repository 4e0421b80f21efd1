"""Find which prompts of large data are too long, and refuse data of which too many are.

N = prompts of a set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cohort.data.cache import content_key, recall, remember
from cohort.data.content import Place
from cohort.data.rows import OnProgress, StoredRows, describe_row, reporting, values_of
from cohort.errors import UserError
from cohort.records import IntArray

if TYPE_CHECKING:
    from cohort.data.prompts import PromptRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Which rows are too long."""

    kept: IntArray  # [N] rows that are not
    overlong: Mapping[int, int]  # row -> tokens of those that are
    longest: int  # at least the tokens of the longest kept prompt; 0 if there is none


def find_lengths(
    rows: Sequence[Mapping[str, Any]],
    renderer: "PromptRenderer",
    on_progress: OnProgress,
    *,
    max_prompt_tokens: int,
    where: str,
    optional: bool,
) -> Lengths:
    """Find or recall the lengths of all rows' prompts, which are checked as by rendering."""
    digest = rows.digest if isinstance(rows, StoredRows) else None
    key = None
    if digest is not None and renderer.digest is not None:
        key = content_key("lengths", digest, renderer.digest, str(max_prompt_tokens), str(optional))
        if (known := recall(key)) is not None:
            overlong = {int(row): tokens for row, tokens in known["overlong"].items()}
            return _lengths(len(rows), overlong, known["longest"])
    overlong, longest = {}, 0
    lengths = _each_length(rows, renderer, max_prompt_tokens=max_prompt_tokens, where=where, optional=optional)
    for row, tokens in reporting(lengths, lambda done: on_progress("tokenizing prompts", done, len(rows))):
        if tokens > max_prompt_tokens:
            overlong[row] = tokens
        else:
            longest = max(longest, tokens)
    if key is not None:
        remember(key, {"overlong": overlong, "longest": longest})
    return _lengths(len(rows), overlong, longest)


def _each_length(
    rows: Sequence[Mapping[str, Any]], renderer: "PromptRenderer", *, max_prompt_tokens: int, where: str, optional: bool
) -> Iterator[tuple[int, int]]:
    """Yield the number of each row, and the tokens of its prompt, or a bound of them."""
    values, start = enumerate(values_of(rows, renderer.prompt_column)), 0
    for source, end in (rows.sources if isinstance(rows, StoredRows) else ()) or ((None, len(rows)),):
        lengths = renderer.for_source(source).find_lengths(
            islice(values, end - start),
            max_prompt_tokens=max_prompt_tokens,
            where=lambda row: Place(lambda: f"{where}: {describe_row(rows, row)}"),
            optional=optional,
        )
        yield from lengths
        start = end


def _lengths(num_rows: int, overlong: Mapping[int, int], longest: int) -> Lengths:
    kept = np.setdiff1d(np.arange(num_rows), np.fromiter(overlong, np.int64, len(overlong)), assume_unique=True)
    return Lengths(kept=kept, overlong=dict(sorted(overlong.items())), longest=longest)


def check_overlong(
    overlong: Mapping[int, int],
    rows: Sequence[Mapping[str, Any]],
    max_prompt_tokens: int,
    wanted: Literal["drop", "error"],
    field: str,
) -> None:
    """Refuse data whose prompts are all too long, or any if that is an error. `overlong`: row -> tokens."""
    num_rows = len(rows)
    if not overlong or (wanted == "drop" and len(overlong) < num_rows):
        return
    limit = f"rollout.max_prompt_tokens={max_prompt_tokens}"
    lengths = overlong.values()
    if len(overlong) == num_rows:
        raise UserError(
            f"{limit}: no prompt of {field} is that short; the shortest of {num_rows} has {min(lengths)} tokens, "
            f"the longest {max(lengths)}; use at least {min(lengths)} ({max(lengths)} keeps every prompt)"
        )
    first = min(overlong)
    raise UserError(
        f"{limit}: the prompt in {describe_row(rows, first)} of {field} has {overlong[first]} tokens, and "
        f"{len(overlong)} of {num_rows} prompts are too long; use at least {max(lengths)}, or "
        f"data.overlong_prompts: drop"
    )


def check_shares(sources: Sequence[tuple[str, int]], lengths: Lengths, max_prompt_tokens: int) -> None:
    """Refuse a mixture in which a source has no prompt, and so cannot have a share."""
    start = 0
    for number, (name, end) in enumerate(sources):
        field = f"data.sources.{number}"
        if start == end:
            raise UserError(
                f"{field}: eval.rows leaves no row of {name!r} to train on, so that it cannot have a share of the "
                f"mixture; hold fewer rows out, or remove the source"
            )
        if np.searchsorted(lengths.kept, start) == np.searchsorted(lengths.kept, end):
            shortest = min(lengths.overlong[row] for row in range(start, end))
            raise UserError(
                f"rollout.max_prompt_tokens={max_prompt_tokens}: no prompt of {field} ({name!r}) is that short, so "
                f"that it cannot have a share of the mixture; the shortest of {end - start} has {shortest} tokens; use "
                f"at least {shortest}, or remove the source"
            )
        start = end
