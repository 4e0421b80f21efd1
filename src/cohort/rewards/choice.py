"""The `choice` reward: 1.0 if the completion picks the right letter of a multiple-choice question."""

import re
from functools import cache
from typing import Any

from cohort.config.rewards import ChoiceSettings
from cohort.errors import UserError, excerpt
from cohort.rewards.builtin import AnswerReward
from cohort.rewards.completion_text import MAX_CHARS, Mark, find_marks

# How answers are introduced. Capital letters are choices, so words are matched without their case one by one.
_CORRECT = r"(?:correct|right|best|final)"
_NOUN = rf"(?:(?i:(?:the\s)?(?:{_CORRECT}\s)?(?:answer|option|choice|letter))\s?(?:is\s?)?:?\s?){{0,3}}"
_SURELY = r"(?:(?i:therefore|thus|hence|clearly|definitely|simply|probably|(?:most\s+)?likely|either|both"
_SURELY += r"|I\s+(?:think|believe|guess)),?\s*)?"
_NOT_BUT = r"(?:not\s+\(?[A-Z]\)?,?\s+but\s*)?"
_BE = r"(?:\s+(?:(?:is|was)|(?:must|should|would|will|has\s+to)\s+be)\b)"
_ALONE = r"(?=[(\[]?[A-Z][)\]]?\s*(?:[.,;!]|$))"
_INTRODUCTION = "|".join(
    (
        rf"\b(?i:answer){_BE}?\s*[:=]?\s*{_NOT_BUT}{_SURELY}",
        rf"\b(?i:{_CORRECT})\s+(?i:option|choice|one|letter|statement)(?:{_BE}|\s*:)\s*:?\s*{_SURELY}",
        r"(?<!not )(?<!n't )(?<!n’t )\b(?i:choose|chose|choosing|pick|picking|select|selecting|go(?:ing)?\s+with)\s+",
        rf"\b(?i:it)(?:['’]s|\s+is|\s+must\s+be)\s+{_SURELY}{_ALONE}",
        rf"(?:^|[.!?])\s*(?i:therefore|thus|hence|so)[,:]?\s+{_ALONE}",
    )
)
_RIGHT = r"(?:is|must\s+be)\s+(?:(?:clearly|definitely|therefore|thus)\s+)?(?:the\s+)?(?:correct|right|best|answer)\b"
_WHY = r"\s+(?:because|since)\b"
_JOINED = r"(?:,?\s*(?:\b(?:or|and|nor)\b|[,/&+])\s*(?:(?:also|maybe|possibly|option|choice)\s+)*)"
_IF = re.compile(r"\b(?:if|whether|unless|suppose|assuming)\s+(?:option\s+|choice\s+)?\(?$", re.IGNORECASE)

_TO_PLAIN = (
    (re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|boldsymbol|[mh]box)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[()\[\]]|[$*`“”]|\""), ""),
    (re.compile(r"\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"['‘]([A-Za-z])['’]"), r"\1"),
    (re.compile(r"(?<!\w)_+(?=\w)|(?<=\w)_+(?!\w)"), ""),
)
_SPACES = re.compile(r"\s+")  # runs of them would take time quadratic in their length


class ChoiceReader:
    """Finds the letter that a text picks."""

    def __init__(self, letters: str) -> None:
        """Create a reader for these capital letters."""
        self._letters = letters
        either = letters + letters.lower()
        # not a word: "I think", "A bit", "A's"
        capital = rf"[{letters}](?![A-Za-z0-9'’])(?!(?<=I)\s+[a-z])(?!(?<=A)\s+(?:bit|few|little|lot)\b)"
        letter = rf"(?:[(\[](?P<p>[{either}])[)\]]|(?P<c>{capital})|(?P<l>[{letters.lower()}])(?=\.?\s*$))"
        self._stated = re.compile(rf"(?:{_INTRODUCTION}){_NOUN}{letter}", re.MULTILINE)
        self._called_right = re.compile(rf"(?<![A-Za-z'’]){capital}\)?\s+{_RIGHT}")
        self._is = re.compile(rf"{_NOUN}[(\[]?([{either}])[)\]]?\.?:?")
        self._begins = re.compile(rf"{_NOUN}(?:[(\[](?P<p>[{letters}])[)\]]|(?P<c>{capital})(?:\s*[).:\]=]|{_WHY}))")
        self._joined_before = re.compile(rf"(?<![A-Za-z])[{letters}][)\]]?\s*{_JOINED}\(?$")
        self._joined_after = re.compile(
            rf"[)\].:]?\s*{_JOINED}\(?{capital}(?!\)?\s+(?:is|was|are|were|has|can|do)\b)"
            rf"|[)\]:][^\n]{{1,40}}?\s(?:or|and)\s+\(?{capital}[)\]:]"  # A) 3 or B) 4
        )
        self._option = re.compile(rf"^\s*\(?[{letters}][).:]\s|{_JOINED}\(?{capital}\s*(?:[).:]|$)", re.MULTILINE)

    def read(self, text: str) -> str:
        """Return the letter of the last statement, in upper case; "" if there is none, or if it names several."""
        text = text[-MAX_CHARS:]
        for pattern, by in _TO_PLAIN:
            text = pattern.sub(by, text)
        text = _SPACES.sub(lambda match: "\n" if "\n" in match[0] else " ", text.strip())
        found = [(mark.start, self._of_mark(mark)) for mark in find_marks(text) if mark.kind != "line"]
        found += self._of_sentences(text)
        if found:
            return max(found)[1]
        return self._of_answer(text) or self._of_last_line(text)

    def _of_mark(self, mark: Mark) -> str:
        sentences = self._of_sentences(mark.content) if mark.kind == "tags" else []
        return max(sentences)[1] if sentences else self._of_answer(mark.content.strip())

    def _of_sentences(self, text: str) -> list[tuple[int, str]]:
        """Return where sentences state a letter, and which; "" for several."""
        found = []
        for match in self._stated.finditer(text):
            several = self._joined_after.match(text, match.end())
            found.append((match.start(), "" if several else (match["p"] or match["c"] or match["l"]).upper()))
        for match in self._called_right.finditer(text):
            before = text[max(0, match.start() - 30) : match.start()]
            if not _IF.search(before):
                found.append((match.start(), "" if self._joined_before.search(before) else match[0][0]))
        return found

    def _of_answer(self, text: str) -> str:
        """Return the letter that an answer is, or begins with: "B) 4 cm"."""
        if match := self._is.fullmatch(text):
            return match[1].upper()
        match = self._begins.match(text)
        if match is None or self._option.search(text, match.end()) or self._joined_after.match(text, match.end()):
            return ""
        letter = match["p"] or match["c"]
        following = self._letters[self._letters.index(letter) + 1 :][:1]  # A) 3 B) 4: the options again
        lists_options = following and re.search(rf"\s\(?{following}[).:]\s", text[match.end() :])
        return "" if lists_options else letter

    def _of_last_line(self, text: str) -> str:
        match = self._is.fullmatch(text.rpartition("\n")[2].strip())
        return match[1].upper() if match else ""


class ChoiceReward(AnswerReward[ChoiceSettings]):
    """1.0 for the right letter, 0.0 for another or none; None if the row has no answer.

    The letter is in the last box, answer tags or sentence such as "the answer is B", "I choose B" or "B is correct",
    behind the last `</think>`; without any of these, it is the text itself, its beginning ("B) 4 cm") or its last line.
    "A or B" picks none.
    """

    def is_right(self, text: str | None, gold: str) -> bool:
        """See `AnswerReward`."""
        text = text or ""
        has_pattern = self.settings.pattern is not None
        return gold == (text.strip().upper() if has_pattern else _reader(self.settings.letters).read(text))

    def gold(self, answer: Any) -> str:
        """See `AnswerReward`."""
        letters, first_number = self.settings.letters, self.settings.first_number
        text = str(answer).strip()
        match = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", text)
        if match and match[1].upper() in letters:
            return match[1].upper()
        if first_number is not None and re.fullmatch(r"\d{1,3}(\.0)?", text):
            index = int(float(text)) - first_number
            if 0 <= index < len(letters):
                return letters[index]
        hint = "" if first_number is not None else "; for numbers set args.first_number"
        raise UserError(
            f"the column {self.settings.answer_column!r} holds {excerpt(answer)}, which is none of the choices "
            f"{letters}{hint}"
        )


_reader = cache(ChoiceReader)
