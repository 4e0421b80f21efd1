"""Summaries and translations: similarity, repetition, length and language, on plain text prompts."""

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


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def levenshtein_reward(completions, reference, **_):
    return tuple(1 - edit_distance(c, r) / max(len(c), len(r), 1) for c, r in zip(completions, reference, strict=True))


def get_repetition_penalty(ngram_size: int, max_penalty: float):
    if max_penalty > 0:
        raise ValueError(f"max_penalty {max_penalty} should not be positive")

    def repetition_penalty(completions, completion_ids, **kwargs):
        rewards = []
        for ids in completion_ids:
            ngrams = list(zip(*(ids[i:] for i in range(ngram_size)), strict=False))
            rewards.append((1 - len(set(ngrams)) / len(ngrams)) * max_penalty if ngrams else 0.0)
        return rewards

    return repetition_penalty


repetition_reward = get_repetition_penalty(ngram_size=3, max_penalty=-1.0)


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
