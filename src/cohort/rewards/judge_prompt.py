"""Prompt files of judges: text with placeholders."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config import RewardConfig
from cohort.config.paths import expand_home

ROLLOUT_PLACEHOLDERS = ("prompt", "completion")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """A prompt with placeholders `{name}`. `{{name}}` stands for `{name}`; other braces stand for themselves."""

    text: str

    @property
    def names(self) -> list[str]:
        """Names of the placeholders, in order."""
        found = (match[2] for match in _PLACEHOLDER.finditer(self.text))
        return list(dict.fromkeys(name for name in found if name))

    def render(self, values: Mapping[str, Any]) -> str:
        """Fill in the placeholders, once: what is filled in may hold braces."""

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else str(values[match[2]])

        return _PLACEHOLDER.sub(value, self.text)


def read_prompt(path: object) -> JudgePrompt:
    """Read a prompt file.

    Raises:
        ValueError: it cannot be read, is empty, or does not show the completion.
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"prompt: {path!r} must be a file with the judge's prompt")
    try:
        text = Path(expand_home(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt: {path!r} cannot be read: {error}") from error
    prompt = JudgePrompt(text)
    if "completion" not in prompt.names:
        shown = ", ".join(f"{{{name}}}" for name in prompt.names) or "none"
        raise ValueError(f"prompt: {path!r} has no placeholder {{completion}}; its placeholders: {shown}")
    return prompt


def prompt_hashes(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """Return key -> SHA-256 of the prompt file, for the judges of a run whose file can be read."""
    hashes = {}
    for i, reward in enumerate(rewards):
        if reward.use != "judge":
            continue
        try:
            prompt = read_prompt(reward.args.get("prompt"))
        except ValueError:  # an error when the reward is loaded
            continue
        hashes[f"rewards.{i}.args.prompt"] = hashlib.sha256(prompt.text.encode()).hexdigest()
    return hashes
