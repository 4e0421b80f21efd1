"""A game of several turns as an environment class: find a secret code from hints, as in Mastermind.

`examples/code_breaker.yaml` trains on it.
"""

import random


class CodeBreaker:
    """Find a code of four letters in at most eight guesses."""

    def __init__(self, letters: str = "ABCDEF", length: int = 4, max_guesses: int = 8):
        self.letters, self.length, self.max_guesses = letters, length, max_guesses

    def reset(self, seed: int) -> str:
        """Start a game. Every trajectory gets a seed of its own, and with it a code of its own."""
        rng = random.Random(seed)
        self.code = "".join(rng.choice(self.letters) for _ in range(self.length))
        self.num_guesses = 0
        self.best = 0.0  # share of right letters in the best guess
        return (
            f"I have a secret code of {self.length} letters from {self.letters}; a letter may occur twice. Find it in "
            f"at most {self.max_guesses} guesses. After each guess I say how many letters are right, and how many "
            "others are in the code at another place."
        )

    def guess(self, code: str) -> str:
        """Guess the code.

        Args:
            code: the letters of the guess, such as AABC
        """
        code = code.strip().upper()
        if len(code) != self.length or not set(code) <= set(self.letters):
            raise ValueError(f"a guess has {self.length} letters from {self.letters}")  # becomes a message to the model
        if self._is_over():
            return "The game is over."
        self.num_guesses += 1
        right = sum(a == b for a, b in zip(code, self.code, strict=True))
        common = sum(min(code.count(letter), self.code.count(letter)) for letter in self.letters)
        self.best = max(self.best, right / self.length)
        if right == self.length:
            return f"{code} is the code!"
        hint = f"{right} right, {common - right} at another place"
        return f"{hint}. The game is over: the code is {self.code}." if self._is_over() else hint

    def get_reward(self) -> float:
        """Return 1 for the code in one guess, less for more guesses, and up to 0.3 for a part of it."""
        if self.best == 1.0:
            return 1.0 - 0.5 * (self.num_guesses - 1) / self.max_guesses
        return 0.3 * self.best

    def _is_over(self) -> bool:
        return self.best == 1.0 or self.num_guesses == self.max_guesses
