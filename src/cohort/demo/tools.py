"""The tool of `cohort demo --task tools`. Your own tools are functions like this one, in a file of their own.

The entries are made up from a hash of the name, so the only way to know one is to look it up.
"""

import hashlib

FIRST_NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida", "Jon", "Kim"),
    *("Leo", "Mia", "Ned", "Ola", "Pia", "Ron", "Sam", "Tess", "Uma", "Zoe"),
)
LAST_NAMES = (
    *("Ash", "Bell", "Cole", "Dale", "Egan", "Ford", "Gray", "Hill", "Jones", "King"),
    *("Lane", "Moss", "North", "Price", "Reed", "Stone", "Tate", "Vance", "West", "Young"),
)
ADJECTIVES = (
    *("red", "blue", "green", "black", "white", "old", "new", "big", "small", "round", "long", "short"),
    *("soft", "hard", "warm", "cold", "loud", "quiet", "plain", "shiny", "heavy", "light", "wooden", "golden"),
)
NOUNS = (
    *("kite", "lamp", "drum", "cape", "hat", "robot", "chair", "clock", "boat", "bag", "ball", "ring"),
    *("book", "mirror", "basket", "bell", "flute", "globe", "knife", "puzzle", "rope", "scarf", "tent", "vase"),
)


def look_up(name: str) -> str:
    """Look up what a person wants, or what a thing costs in dollars.

    Args:
        name: a person such as "Mia Hill", or a thing such as "red kite"
    """
    first, _, second = name.partition(" ")
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    if first in FIRST_NAMES and second in LAST_NAMES:
        return f"{ADJECTIVES[number % len(ADJECTIVES)]} {NOUNS[number // len(ADJECTIVES) % len(NOUNS)]}"
    if first in ADJECTIVES and second in NOUNS:
        return str(2 + number % 18)
    raise ValueError(f"there is no entry {name!r}")
