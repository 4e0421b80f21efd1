"""The math reward's child process: `python -m cohort.rewards.math_worker`.

It writes `{"id": null}` when ready. Then each line of standard input is a request
`{"id": 1, "gold": "1/2", "text": "... \\boxed{0.5}", "deadline_s": 10, "grader": "math"}`, answered by one line on
standard output, `{"id": 1, "verdict": "correct"}`. It exits when standard input closes.
"""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
import warnings
from decimal import Decimal
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_MEMORY_LIMIT_BYTES = 4 * 2**30  # so that a tower of powers does not exhaust the machine
_ALARM_GRACE_S = 2.0  # after the parent's deadline: if alive, the parent kills first
# A box takes precedence over other LaTeX, and that over a plain number.
_ANSWER_CONFIG = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_OPEN_R1: dict[str, Any] = {"basic_latex": True, "units": True, "equations": True}
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_LATEX_WORDS = re.compile(r"\\text\w*\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}|\b(?:at|if|in|is|no|of|or|to)\b")
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}")


def main() -> None:
    """Answer requests until standard input closes."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # SIGALRM's default action ends the process in the kernel: it works even while a long computation blocks the
    # interpreter, and if the parent that would have killed this process is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # Keep the pipe clean: what libraries print goes to standard error.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    replies.write('{"id": null}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"] + _ALARM_GRACE_S)
        verdict = GRADERS[request["grader"]](request["gold"], request["text"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"id": request["id"], "verdict": verdict}) + "\n")


def grade(gold: str, text: str) -> str:
    """Compare the answer in `text` with `gold`.

    Returns:
        "correct", "wrong", "answer_unparsable" or "gold_unparsable".
    """
    parsed_gold = parse(latex_of_gold(gold), extraction_mode="first_match", parsing_timeout=None)
    if not any(not isinstance(part, str) for part in parsed_gold):
        return "gold_unparsable"
    answer = parse(after_thinking(text), _ANSWER_CONFIG, extraction_mode="first_match", parsing_timeout=None)
    if not answer:
        return "answer_unparsable"
    return "correct" if verify(parsed_gold, answer, timeout_seconds=None) else "wrong"


def grade_as_trl(gold: str, text: str) -> str:
    """Compare as TRL's `accuracy_reward` does: only LaTeX counts as an answer, a box first."""
    return _compare(_parse(gold), _parse(text, [_boxed_latex(units=True)], extraction_mode="first_match"))


def grade_as_open_r1(gold: str, text: str) -> str:
    """Compare as Open-R1's `accuracy_reward` does."""
    answer = _parse(text, [_boxed_latex(**_OPEN_R1, boxed="all")], extraction_mode="first_match")
    return _compare(_parse(gold, extraction_mode="first_match"), answer)


def grade_as_open_r1_latex(gold: str, text: str) -> str:
    """Compare as Open-R1's `cosine` and `len` do: the gold answer is LaTeX, and math-verify's target."""
    parsed_gold = _parse(gold, [LatexExtractionConfig()], extraction_mode="first_match")
    answer = _parse(text, [_boxed_latex(**_OPEN_R1, boxed=True)], extraction_mode="first_match")
    return _compare(parsed_gold, answer, gold_is_target=True)


def _boxed_latex(**normalization: Any) -> LatexExtractionConfig:
    config = NormalizationConfig(**normalization)
    return LatexExtractionConfig(normalization_config=config, boxed_match_priority=0, try_extract_without_anchor=False)


def _parse(text: str, *config: Any, **options: Any) -> list[Any]:
    parsed: list[Any] = parse(text, *config, parsing_timeout=None, **options)
    return parsed


def _compare(gold: list[Any], answer: list[Any], *, gold_is_target: bool = False) -> str:
    if not gold:
        return "gold_unparsable"
    if not answer:
        return "answer_unparsable"
    pair = (answer, gold) if gold_is_target else (gold, answer)
    return "correct" if verify(*pair, timeout_seconds=None) else "wrong"


GRADERS = {"math": grade, "trl": grade_as_trl, "open_r1": grade_as_open_r1, "open_r1_latex": grade_as_open_r1_latex}


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, if any: numbers and boxes of the reasoning are not the answer."""
    return text.rpartition("</think>")[2].strip() or text


def latex_of_gold(gold: str) -> str:
    """Put dollars around a bare formula; without them math-verify reads `(1, 2)` as 2 and `x^2 + 1 = 0` as 0.

    Prose is not changed: between dollars its letters would become symbols.
    """
    if _SCIENTIFIC.fullmatch(gold):
        gold = f"{Decimal(gold):f}"
    if _DELIMITED.search(gold) or _PROSE.search(_LATEX_WORDS.sub(" ", gold)):
        return gold
    return f"${gold}$"


if __name__ == "__main__":
    main()
