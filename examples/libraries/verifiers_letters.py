"""A taskset of verifiers v1: write a word without its vowels."""

from collections.abc import Iterator

import verifiers.v1 as vf

WORDS = ("garden", "winter", "mirror", "planet", "silver", "bottle", "candle", "forest")


class LettersData(vf.TaskData):
    """A task."""

    answer: str


class LettersTask(vf.Task[LettersData]):
    """Its reward and metric."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the reply is the word without its vowels."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the reply."""
        return float(len(trace.last_reply))


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    """All words."""

    def load(self) -> Iterator[LettersTask]:
        """Yield the tasks."""
        for word in WORDS:
            answer = "".join(letter for letter in word if letter not in "aeiou")
            prompt = f"Write {word!r} without its vowels, and nothing else."
            yield LettersTask(LettersData(prompt=prompt, answer=answer), self.config.task)


__all__ = ["LettersTaskset"]
