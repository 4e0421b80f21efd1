"""Summaries and translations: similarity, length and language, on plain text prompts."""

import difflib
import hashlib
import json
import math
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np

CACHE = Path(__file__).parent / "embedding_cache"


def similarity_reward(completions, reference, **kwargs):
    return [difflib.SequenceMatcher(None, c, r).ratio() for c, r in zip(completions, reference, strict=True)]


def length_reward(completions, target_words=20, tolerance=0.5, **kwargs):
    return [math.exp(-((len(c.split()) / target_words - 1) ** 2) / tolerance) for c in completions]


short_reward = partial(length_reward, target_words=8)
short_reward.__name__ = "short_reward"

SCRIPTS = {"ru": "CYRILLIC", "el": "GREEK", "ja": ("HIRAGANA", "KATAKANA", "CJK"), "en": "LATIN"}


def language_reward(completions, **kwargs):
    rewards = []
    for i, completion in enumerate(completions):
        letters = [unicodedata.name(c, "") for c in completion if c.isalpha()]
        wanted = sum(name.startswith(SCRIPTS[kwargs["language"][i]]) for name in letters)
        rewards.append(wanted / len(letters) if letters else None)
    return rewards


def embed(text: str) -> np.ndarray:
    """A bag of hashed words, kept on disk as calls to an embedding service would be."""
    CACHE.mkdir(exist_ok=True)
    file = CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if file.exists():
        return np.array(json.loads(file.read_text()))
    vector = np.zeros(64)
    for word in text.lower().split():
        vector[int(hashlib.md5(word.encode()).hexdigest(), 16) % 64] += 1
    file.write_text(json.dumps(vector.tolist()))
    return vector


def embedding_reward(prompts, completions, reference, **kwargs):
    left, right = np.stack([embed(c) for c in completions]), np.stack([embed(r) for r in reference])
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(axis=1) / np.maximum(norms, 1e-9)
