"""The `number` reward: 1.0 if the completion's number is within a tolerance of the answer column."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cohort.config.rewards import NumberSettings
from cohort.errors import UserError, excerpt
from cohort.rewards.builtin import AnswerReward
from cohort.rewards.completion_text import MAX_CHARS, find_marks

_MAX_STRICT_CHARS = 500  # a box, a line or a gold answer that is longer is not a number
_MAX_DIGITS = 3000  # of a power
_NEAR_BEFORE, _NEAR_AFTER = 120, 60  # characters that are looked at around a number

# Digits with thousands apart, and decimals. Their bounds keep exact arithmetic cheap.
_DECIMAL = (
    r"(?:(?:\d{1,3}(?:,\d{3}){1,30}(?!\d)|\d{1,3}(?:[ ]\d{3}){1,30}(?!\d)|\d{1,100}(?!\d))(?:\.\d{0,100}(?!\d))?"
    r"|(?<!\.)\.\d{1,100}(?!\d))"
)
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_^])(?<!\d[.])(?<![A-Za-z][-–−'’])(?<!\^[-–−+(])  # not inside H2O, COVID-19 or cm^2
    (?:(?P<whole>\d{{1,3}})[ ](?=\d{{1,3}}[ ]?/[ ]?\d))?  # 3 1/2
    (?P<digits>{_DECIMAL})
    (?:
        [eE](?P<exponent>[-+]?\d{{1,3}})(?![\w.])
        |\^\(?(?P<power>[-−–]?\d{{1,3}})\)?(?!\d)
        |[ ]?[×·*x][ ]?10\^\(?(?P<ten>[-−–+]?\d{{1,3}})\)?(?!\d)
        |[ ]?/[ ]?(?P<divisor>{_DECIMAL})
    )?
    """,
    re.VERBOSE,
)
_MULTIPLIER = re.compile(r" *\b(hundred|thousand|million|billion|trillion)\b")
_FACTORS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# --- what makes a number part of something else ------------------------------------------------------------------
_UNIT = (  # units that may follow digits without a space
    r"(?:[kcdmnµμ]?m|[kmµμ]?g|[mcdk]?[lL]|[mnµμ]?s|[kMG]?Hz|[kM]?J|[kMG]?W|[km]?V|m?A|[kM]?Pa|[kK]?N|K|C|F|in|ft|yd|mi|"
    r"lbs?|oz|h|hrs?|hours?|mins?|minutes?|secs?|seconds?|days?|years?|am|pm|AM|PM|st|nd|rd|th|mph|kmh|kph|kWh|mol|deg|"
    r"rad|[kKMGT]i?[bB]|bytes?|bits?|cents?|dollars?|euros?|USD|EUR|GBP|percent|px|rpm|ppm|k?cal)(?![A-Za-z])"
)
_VARIABLE = r"[bcefijknopqruvwxyzXYZ](?![\w'’])"  # a letter that is no unit and no word
_COARSE, _FINE = (  # 2 hours 30 minutes, 5 ft 3 in, 2 million 500 thousand
    "|".join(words.split())
    for words in (
        "hours? hrs? h minutes? mins? days? weeks? months? years? feet foot ft yards? miles? km kilometers? meters? m "
        "pounds? lbs? kg kilograms? dollars? euros? hundred thousand million billion",
        "minutes? mins? seconds? secs? hours? days? weeks? months? inch(?:es)? in feet ft cm m meters? ounces? oz g "
        "grams? cents? hundred thousand million",
    )
)
_H = r"[ ]*"  # the text is one line with single blanks
_JOINED_BEFORE = re.compile(
    rf"""(?:
    [×·÷±∓√<≤≥≠^]{_H}[({{]?|!=|[<>]=|[\w)\]}}]{_H}>
    |[\w)\]}}%°!]{_H}[*/+]
    |\d(?::|[ ]+:[ ]+|[ ]+x[ ]+|['’])
    |\d[%°]?[ ]+                                            # 4 3
    |[\d)\]}}%°∞π…]{_H}[,;]|[(\[{{][^()\[\]{{}}\n]{{0,80}},    # (x, 3
    |\d{_H},?{_H}(?:…|\.\.\.){_H},?
    |[\d)\]}}][(\[{{]?|[A-Za-z]\(|\\[A-Za-z]+{_H}[(\[{{]?
    |[\d)\]}}%°]{_H},?{_H}\b(?:or|and|to|of|out[ ]of|in|per|from|by|plus|times|over|mod|vs\.?|versus
        |through|until|divided[ ]by|multiplied[ ]by){_H}(?:maybe|perhaps|possibly|even)?
    |\d[%°]?{_H}[A-Za-z]+{_H},?{_H}\bor
    |\b(?:more|less|fewer|greater|larger|smaller|higher|lower|other|rather)[ ]than
    |\b(?:root|power|half|thirds?|quarters?|square|cube|factorial|reciprocal|logarithm)[ ]of
    |\b(?:log|ln|sin|cos|tan)
    ){_H}$""",
    re.VERBOSE | re.IGNORECASE,
)
_JOINED_AFTER = re.compile(
    rf"""
    (?!{_UNIT})[A-Za-z_₀-₉({{\\]|\.\d
    |{_H}(?:[\^√π∞×·÷±∓≠]|!=|\\[A-Za-z])
    |{_H}[*+]{_H}[\w(\\√π∞]|{_H}[-−–/]{_H}(?:{_VARIABLE}|[(\\√π∞])|{_H}[<>≤≥]{_H}\w
    |[ ]+(?:{_VARIABLE}|(?:pi|sqrt|squared|cubed|factorial|choose|mod|times|plus|minus|divided|multiplied|over)\b)
    |[ ]+(?:\w+[ ])?and[ ](?:a|one|two|three)[ ](?:half|third|quarter|fourth|fifth|eighth|tenth)
    |[ ]+or[ ](?:more|less|fewer|greater|higher|lower|larger|smaller|above|below)\b
    """,
    re.VERBOSE,
)
_COMPOUND_BEFORE = re.compile(rf"\d{_H}(?:{_COARSE}){_H},?{_H}(?:and{_H})?$")
_COMPOUND_AFTER = re.compile(rf"{_H}(?:{_FINE})\b")
_TUPLE = (re.compile(rf"[(\[{{]{_H}$"), re.compile(rf"{_H},"))
_NEGATED = re.compile(rf"(?:\bnot|n['’]t){_H}[-−–+]?$")
_SIGN = re.compile(rf"([-+−–])({_H})$")
_OPERAND = re.compile(r"(?:[\d)\]}%°!∞π+−–-]|(?<![A-Za-z])[A-Za-z]|\\[A-Za-z]+)$")
_SEVERAL = re.compile(r"[,;!&]|\\\\|\b(?:and|or|if|when|where|for|unless|otherwise)\b")
_BRACKETED = re.compile(r"\([^()]*\)")
_WORD = r"[A-Za-zµμΩ]+\.?(?:\^?-?\d)?"  # of a unit: m, s^2
_UNIT_WORDS = re.compile(rf"[\s)%°.'\"]*(?:{_WORD}(?:[ ·*/-]+{_WORD}){{0,4}})?[\s).]*")


# --- LaTeX, Markdown and typography to plain text ----------------------------------------------------------------
_SYMBOLS = {
    "≈": "approx|simeq|sim",
    "×": "times",
    "·": "cdot|ast",
    "÷": "div",
    "±": "pm",
    "≤": "leq?(?:slant)?",
    "≥": "geq?(?:slant)?",
    "≠": "neq?",
    "<": "lt",
    ">": "gt",
    "→": "to|rightarrow|Rightarrow|implies|therefore",
    "π": "pi",
    "∞": "infty",
    "√": "sqrt",
    "…": "[lc]?dots",
    "°": "degree|circ",
}
_STYLE = r"\\(?:text\w*|math(?:rm|bf|it|sf)|boldsymbol|[mh]box|operatorname)\s*\{([^{}]*)\}"
_TO_PLAIN = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"</?[a-z_]+\s*/?>", " "),
        (r"(?<=\d)(?:\{,\}|,\\!)(?=\d)", ","),
        (rf"{_STYLE}(?=\s*[\^_])", r" \1"),
        (_STYLE, r" \1 "),
        *((rf"\\(?:{names})(?![A-Za-z])", symbol) for symbol, names in _SYMBOLS.items()),
        (r"\^\s*\{?\s*°\s*\}?", "°"),
        (r"\\(?:(?:left|right|displaystyle|[bB]igg?)(?![A-Za-z])|!)", ""),
        (r"\\(?:[,;: ()\[\]]|q?quad(?![A-Za-z]))|~", " "),
        (r"\\([{}%])", r"\1"),
        (r"\\?[$€£¥₹]|`", ""),
        (r"(?<=[\d)])\*\*(?=[-−\d(])", "^"),
        (r"(?<![\w)\]}])[*_]+(?=\S)|(?<=\S)[*_]+(?![\w({])", ""),  # emphasis
        (r"\b(?:[Nn]egative|[Mm]inus)\s+(?=[\d.])", "-"),
        (r"([_^])\s*\{\s*([-+−–]?\d+)\s*\}", r"\1\2"),
    )
)
_FRACTION = re.compile(
    rf"(?:(\d)\s*)?\\[dtc]?frac\s*(?:\{{\s*([-−]?{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_DECIMAL})\s*\}}|(\d))"
)
_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]")
_VULGAR = re.compile(r"(?:(\d)\s?)?([¼-¾⅐-⅞])")
_SUPERSCRIPT = re.compile(r"([\w)])([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def _to_plain(text: str) -> str:
    text = " ".join(text.split())  # also thin and unbreakable spaces
    text = _FRACTION.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2] or m[3]}/{m[4] or m[5]} ", text)
    for pattern, by in _TO_PLAIN:
        text = pattern.sub(by, text)
    text = _VULGAR.sub(
        lambda m: f"{m[1] + ' ' if m[1] else ''}{unicodedata.normalize('NFKC', m[2]).replace('⁄', '/')}", text
    )
    return _SUPERSCRIPT.sub(lambda m: f"{m[1]}^{m[2].translate(_SUPERSCRIPTS)}", text)


# --- reading -----------------------------------------------------------------------------------------------------


def read_number(text: str) -> Fraction | None:
    """Return the number that a completion states; None if it states none, or several.

    It is in the last box, answer tags or line after `####`, else the last number of the text.
    """
    text = text[-MAX_CHARS:]
    for mark in reversed(find_marks(text)):
        if mark.kind == "box":
            return _strict(mark.content)
        if mark.kind == "tags":
            return _last(mark.content)
        number = _strict(mark.content, behind=r"(?:^|[=≈:]|\bis)\s*$")
        if number is not None:  # else it is a heading
            return number
    return _last(text)


def plain_number(text: str) -> Fraction | None:
    """Return the number that a gold answer is, with a unit at most, in a box or after the last `####`; else None."""
    marks = find_marks(text)
    return _strict(marks[-1].content if marks else text, behind=r"^[\s(≈]*$", before=_UNIT_WORDS)


def _strict(text: str, *, behind: str = "", before: re.Pattern[str] | None = None) -> Fraction | None:
    """Return the only number of a text, behind the last "=" if there is one; None if it has another one or a condition.

    Args:
        text: content of a box, a line or a gold answer.
        behind: pattern of the text that the number must stand behind, without its sign.
        before: pattern of all that may follow the number.
    """
    if len(text) > _MAX_STRICT_CHARS:
        return None
    found = _find(text.rstrip(" .,;\n"), strict=True)
    if found is None or found.value is None:
        return None
    sides, _, own = found.before.replace("≈", "=").rpartition("=")
    if _NUMBER.search(own) or _SEVERAL.search(_BRACKETED.sub("", f"{found.before} {found.after}")):
        return None
    if not re.search(behind, found.before) or (before is not None and not before.fullmatch(found.after)):
        return None
    if found.after.startswith("!"):
        return None
    side = _NUMBER.fullmatch(sides.rpartition("=")[2].strip())  # 6 = 7
    return None if side and _value(side) != found.value and "≈" not in found.before else found.value


def _last(text: str) -> Fraction | None:
    """Return the last number of a text; None if it is a part of something else, such as "4 or 3"."""
    for line in reversed(text.splitlines()):
        found = _find(line, strict=False)
        if found is not None:
            return found.value
    return None


@dataclass(frozen=True, slots=True)
class _Found:
    """The last number of a text, and what is around it."""

    value: Fraction | None  # None if it is a part of something else
    before: str  # without its sign
    after: str


def _find(text: str, *, strict: bool) -> _Found | None:
    text = _to_plain(text) if _DIGIT.search(text) else ""
    for match in reversed(list(_NUMBER.finditer(text))):
        near = text[max(0, match.start() - _NEAR_BEFORE) : match.start()]
        if _NEGATED.search(near):  # 4, not 3
            continue
        before, after = text[: match.start()], text[match.end() :]
        value = _value(match)
        factor = _MULTIPLIER.match(after)
        if factor:
            after = after[factor.end() :]
        if sign := _SIGN.search(near):
            near = near[: sign.start()]
            kind = _sign(near, sign[1], is_spaced=bool(sign[2]), strict=strict)
            value = None if value is None or kind is None else value * kind
            before = before[: len(before) - len(sign[0])]
        joined = (
            bool(_JOINED_BEFORE.search(near) or _JOINED_AFTER.match(after[:_NEAR_AFTER]))
            or bool(_COMPOUND_BEFORE.search(near) and (factor or _COMPOUND_AFTER.match(after)))
            or all(pattern.search(part) for pattern, part in zip(_TUPLE, (near, after), strict=True))
        )
        if value is None or joined:
            return _Found(None, before, after)
        return _Found(value * _FACTORS[factor[1]] if factor else value, before, after)
    return None


def _sign(before: str, sign: str, *, is_spaced: bool, strict: bool) -> int | None:
    """Return the sign of a number behind `before` and `sign`; None if the sign is an operator."""
    left = before.rstrip(" ")
    if _OPERAND.search(left):
        return None
    is_dash = is_spaced and (re.search(r"[A-Za-z]$", left) or (not left and not strict))  # answer - 3, and a bullet
    return -1 if sign != "+" and not is_dash else 1


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match; None if it has none, such as 1/0."""
    number, divisor, power = _decimal(match["digits"]), match["divisor"], match["power"]
    if divisor is not None:
        if not _decimal(divisor):
            return None
        number /= _decimal(divisor)
    elif power is not None:
        if not number or len(match["digits"]) * abs(_whole(power)) > _MAX_DIGITS:
            return None
        number **= _whole(power)
    else:
        number *= Fraction(10) ** _whole(match["exponent"] or match["ten"] or "0")
    if match["whole"] is None:
        return number
    return int(match["whole"]) + number if number < 1 else None


def _whole(digits: str) -> int:
    return int(re.sub("[−–]", "-", digits))


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", digits))


_RULE = (
    r"a number is written like 42, -1,234.5, 1e-3, 3/4, 3 1/2, 10^5 or \frac{3}{4}, alone, with a unit, or after ####; "
    "use {use: math} for formulas, {use: exact} for other texts, or set args.answer_column to a column with numbers"
)


class NumberReward(AnswerReward[NumberSettings]):
    """1.0 if |number - gold| <= max(abs_tol, rel_tol * |gold|), else 0.0; None if the row has no answer.

    The number is that of the last box, answer tags or line after `####`, else the last one of the text, behind the last
    `</think>`. docs/rewards.md says what is a number; "4 or 3", "5-3" and "(5, 3)" are none. Comparison is exact,
    without rounding.
    """

    def is_right(self, text: str | None, gold: Fraction) -> bool:
        """See `AnswerReward`."""
        number = read_number(text or "")
        relative, absolute = Fraction(str(self.settings.rel_tol)), Fraction(str(self.settings.abs_tol))  # 0.1: a tenth
        return number is not None and abs(number - gold) <= max(absolute, relative * abs(gold))

    def gold(self, answer: Any) -> Fraction:
        """See `AnswerReward`. The value is plainly a number."""
        gold = None if isinstance(answer, bool) else plain_number(str(answer))
        if gold is None:
            column = self.settings.answer_column
            raise UserError(f"the column {column!r} holds {excerpt(answer)}, which is not plainly a number: {_RULE}")
        return gold
