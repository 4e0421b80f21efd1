"""A child process of the math rewards, which compares answers with math-verify.

A request is `{"gold": "1/2", "text": "... \\boxed{0.5}", "grader": "math"}`; its answer is a verdict like "correct".
None is answered with None, once all is imported.
"""

import contextlib
import logging
import re
import resource
import warnings
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import And, Eq, Float, MatrixBase, Mul, Set, Tuple, UnevaluatedExpr

from cohort.processes.child import serve
from cohort.rewards.completion_text import after_thinking, find_marks

_MEMORY_LIMIT_BYTES = 4 * 2**30  # so that a tower of powers does not exhaust the machine
_MAX_CHARS = 15_000  # of a completion: math-verify's patterns take time quadratic in it
_MAX_BOX_CHARS = 2_000  # of an answer that can be parsed
# A box takes precedence over other LaTeX, and that over a plain number.
_ANSWER_CONFIG = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_OPEN_R1: dict[str, Any] = {"basic_latex": True, "units": True, "equations": True}
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_LATEX_WORDS = re.compile(r"\\(?:text\w*|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}|\b(?:at|if|in|is|no|of|or|to)\b")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?![\w.]*\w)")
_EMPHASIS = re.compile(r"(?<![\w*`_^{\\])(\*{1,3}|`|__?)(?=\S)((?:(?!\1)[^\n$\\]){1,200}?)(?<=\S)\1(?![\w*`])")
_NAMES = (
    (re.compile(r"\\log_(?:e\b|\{e\})"), r"\\ln "),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"(?<=\d)\\[,!](?=\d{3}(?!\d))"), ""),  # 10\,000
)
_CONDITION = re.compile(r"\\text\w*\s*\{[^{}]*\b(?:if|when|where|unless)\b")
_BASE = re.compile(r"\$?[0-9A-Fa-f]+_\{?(\d+)\}?\$?")
_LIST = re.compile(r"(?:\\left)?\[.*,.*\]", re.DOTALL)
_UNIT_NAMES = (  # each name of a unit is one unit
    "mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche, ft foot "
    "feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce, s sec second, min minute, "
    "h hr hour, day, week, month, year, ml milliliter millilitre, l liter litre, dollar, cent, degree, radian rad"
)
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(",") for name in names.split()}
_UNIT = re.compile(  # a single letter may be a variable, unless it is in \text or ends the answer
    r"[\d}]\s*(?:\\[,;: ]|~)*\s*(?:"
    r"\\(?:text\w*|mathrm|mbox)\s*\{\s*(?:(?:square|cubic)\s+)?([A-Za-z]+)\b"
    r"|(?:(?:square|cubic)\s+)?([A-Za-z]{2,})\b(?!\s+[a-z]))|\d\s([A-Za-z])\s*\.?\s*$"
)


def main() -> None:
    """Answer requests until the parent hangs up."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    serve(answer)


def answer(request: Mapping[str, str] | None) -> str | None:
    """Return the verdict on a request."""
    return None if request is None else GRADERS[request["grader"]](request["gold"], request["text"])


def grade(gold: str, text: str) -> str:
    """Compare the answer in `text` with `gold`.

    Returns:
        "correct", "wrong", "answer_unparsable" or "gold_unparsable".
    """
    parsed_gold = _parse(latex_of_gold(_renamed(gold)), extraction_mode="first_match")
    if not any(not isinstance(part, str) for part in parsed_gold):
        return "gold_unparsable"
    text = readable(_near_the_answer(after_thinking(text)))
    marks = [mark for mark in find_marks(text) if mark.kind == "box"]
    boxes = [mark.content for mark in marks]
    if boxes and len(boxes[-1]) > _MAX_BOX_CHARS:
        return "answer_unparsable"
    if len(boxes) > 1 and boxes[-1]:
        text = text[marks[-1].start :]  # of boxes in a row math-verify makes one set: "\boxed{41}, no: \boxed{42}"
    answer = _parse(text, _ANSWER_CONFIG, extraction_mode="first_match")
    if not answer:
        return "answer_unparsable"
    if _is_percentage(answer[0]) and not _is_percentage(parsed_gold[0]):
        answer = [answer[0].doit()]  # math-verify takes 7% for 7, too
    if _contradicts(gold, boxes[-1] if boxes else text, parsed_gold[0], answer):
        return "wrong"
    is_equal = verify(parsed_gold, answer, timeout_seconds=None, allow_set_relation_comp=True)
    return "correct" if is_equal else "wrong"


def _near_the_answer(text: str) -> str:
    """Return the end of a long text, or what follows the last box if that is farther away."""
    box = text.rfind(r"\boxed")
    start = min(len(text) - _MAX_CHARS, box if box >= 0 else len(text))
    return text[max(0, start) :][:_MAX_CHARS]


def readable(text: str) -> str:
    """Rewrite what math-verify misreads: emphasis around an answer, boxes left open, `1e2`, some names."""
    text = _close_box(_EMPHASIS.sub(r"\2", text))
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", _renamed(text))


def _close_box(text: str) -> str:
    """Close the last box at the end of its line, if nothing closes it."""
    start, depth = text.rfind(r"\boxed{"), 0
    for brace in re.finditer(r"[{}]", text[start:] if start >= 0 else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            break
    if depth == 0:
        return text
    line = re.split(r"\n|(?<!\\)\$", text[start:], maxsplit=1)[0]
    end = start + len(line)
    return f"{text[:end]}{'}' * (line.count('{') - line.count('}'))}{text[end:]}"


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def _is_percentage(parsed: Any) -> bool:
    return isinstance(parsed, Mul) and any(isinstance(factor, UnevaluatedExpr) for factor in parsed.args)


def _contradicts(gold: str, given: str, parsed_gold: Any, answer: list[Any]) -> bool:
    """Whether the answer says something else, in a way that math-verify does not look at."""
    stated = str(answer[-1])
    base = _BASE.fullmatch(gold)
    units = [_unit(gold), _unit(given)]
    is_list = _LIST.fullmatch(stated) is not None and not isinstance(parsed_gold, Set | Tuple | MatrixBase)
    return (
        is_list  # [7, 7] is not 7
        or (base is not None and not re.search(rf"_\{{?{base[1]}\b", stated))
        or (None not in units and units[0] != units[1])
        or (_CONDITION.search(stated) is not None and not _CONDITION.search(gold))
        or any(_is_false(part) for part in (answer[0].args if isinstance(answer[0], And) else answer[:1]))
    )


def _unit(text: str) -> str | None:
    """Return the unit of the last number, if it is known."""
    found = list(_UNIT.finditer(text))
    if not found or re.search(r"(?<![\^{])\d", text[found[-1].end() :]):  # of another number
        return None
    word = next(filter(None, found[-1].groups())).lower()
    return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))


def _is_false(relation: Any) -> bool:
    """Whether this is an equation of two numbers that differ, such as 6 = 7."""
    if not isinstance(relation, Eq) or relation.free_symbols:
        return False
    try:
        sides = [complex(side.doit().evalf()) for side in relation.args]
    except (TypeError, ValueError, ArithmeticError, RecursionError):  # no numbers
        return False
    tolerance = 0.05 if relation.has(Float) else 1e-9
    return abs(sides[0] - sides[1]) > tolerance * max(map(abs, sides))


def grade_as_trl(gold: str, text: str) -> str:
    """Compare as TRL's `accuracy_reward` does: only LaTeX counts as an answer, a box first."""
    return _compare(_parse(gold), _parse_latex(text, _boxed_latex(units=True)))


def grade_as_open_r1(gold: str, text: str) -> str:
    """Compare as Open-R1's `accuracy_reward` does."""
    answer = _parse_latex(text, _boxed_latex(**_OPEN_R1, boxed="all"))
    return _compare(_parse(gold, extraction_mode="first_match"), answer)


def grade_as_open_r1_latex(gold: str, text: str) -> str:
    """Compare as Open-R1's `cosine` and `len` do: the gold answer is LaTeX, and math-verify's target."""
    parsed_gold = _parse(gold, [LatexExtractionConfig()], extraction_mode="first_match")
    answer = _parse_latex(text, _boxed_latex(**_OPEN_R1, boxed=True))
    return _compare(parsed_gold, answer, gold_is_target=True)


def _boxed_latex(**normalization: Any) -> LatexExtractionConfig:
    config = NormalizationConfig(**normalization)
    return LatexExtractionConfig(normalization_config=config, boxed_match_priority=0, try_extract_without_anchor=False)


def _parse_latex(text: str, config: LatexExtractionConfig) -> list[Any]:
    return _parse(_near_the_answer(text), [config], extraction_mode="first_match")


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


def latex_of_gold(gold: str) -> str:
    """Put dollars around a bare formula; without them math-verify reads `(1, 2)` as 2 and `x^2 + 1 = 0` as 0.

    Prose is not changed: between dollars its letters would become symbols.
    """
    if _SCIENTIFIC.fullmatch(gold):
        gold = f"{Decimal(gold):f}"
    if _DELIMITED.search(gold) or _PROSE.search(_LATEX_WORDS.sub(" ", gold)):
        return gold
    return f"${gold}$"
