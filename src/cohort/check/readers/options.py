"""Command lines: `--key value`, `--key=value` and flags, with what could not be resolved."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cohort.check.launch import Said, Unread
from cohort.check.readers.shell import Command
from cohort.check.readers.shell_words import Word, why_unread


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one command."""

    settings: dict[str, Said] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()
    rest: tuple[Word, ...] = ()  # the words before the first option


def parse_options(words: Sequence[Word], where: str) -> Options:
    """Options of a command line. A key with several words has a list; one without any is a flag, true."""
    settings: dict[str, Said] = {}
    unread: list[Unread] = []
    rest: list[Word] = []
    key: str | None = None
    values: list[Word] = []

    def end_option() -> None:
        if key is None:
            return
        missing = [name for word in values for name in word.missing]
        if missing:
            unread.append(Unread(key, where, why_unread(missing)))
        else:
            texts = [word.text for word in values]
            settings[key] = Said(True if not texts else texts[0] if len(texts) == 1 else texts, where)

    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            end_option()
            name, equals, value = word.text[2:].partition("=")
            key, values = name.replace("-", "_"), [Word(value, word.missing)] if equals else []
        elif key is None:
            rest.append(word)
        else:
            values.append(word)
    end_option()
    # A word that is nothing but an unassigned variable may hold any number of options.
    unread += [
        Unread("(options)", where, why_unread((name,))) for word in rest if not word.text for name in word.missing
    ]
    return Options(settings, tuple(unread), tuple(rest))


def gpus_of(env: Mapping[str, Word]) -> tuple[str, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set or cannot be read."""
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        if name in env and not env[name].missing:
            return tuple(part.strip() for part in env[name].text.split(",") if part.strip())
    return None


def env_count(env: Mapping[str, Word], name: str, default: int | None = None) -> int | None:
    """A whole number from the environment of a command."""
    word = env.get(name)
    return int(word.text) if word and not word.missing and word.text.isdecimal() else default


def find_command(commands: Iterable[Command], *names: tuple[str, ...]) -> list[Command]:
    """The commands that have one of these runs of words in them."""
    return [c for c in commands if any(_has(c, name) for name in names)]


def _has(command: Command, name: tuple[str, ...]) -> bool:
    texts = [word.text.rsplit("/", 1)[-1] for word in command.words]
    return any(tuple(texts[i : i + len(name)]) == name for i in range(len(texts)))
