"""Text to SQL: the rows of a query on a small database that the file makes at import."""

import re
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

SCHEMA = """
create table singer (id integer primary key, name text, country text, age integer);
insert into singer values (1, 'Ana', 'PT', 31), (2, 'Bo', 'SE', 45), (3, 'Cy', 'SE', 27), (4, 'Di', 'FR', null);
create table concert (id integer primary key, singer_id integer, year integer);
insert into concert values (1, 1, 2019), (2, 2, 2020), (3, 2, 2021), (4, 3, 2021);
"""
db = sqlite3.connect(":memory:")
db.executescript(SCHEMA)


class Outcome(Enum):
    SAME_ROWS = "same rows"
    OTHER_ROWS = "other rows"
    ERROR = "error"
    NO_QUERY = "no query"


@dataclass
class SqlRewardConfig:
    scores: dict[Outcome, float] = field(
        default_factory=lambda: {
            Outcome.SAME_ROWS: 1.0,
            Outcome.OTHER_ROWS: 0.1,
            Outcome.ERROR: 0.0,
            Outcome.NO_QUERY: -1.0,
        }
    )
    max_rows: int = 100


CONFIG = SqlRewardConfig()


@lru_cache(maxsize=1024)
def run_query(query: str) -> tuple[tuple[Any, ...], ...] | None:
    try:
        return tuple(db.execute(query).fetchmany(CONFIG.max_rows))
    except sqlite3.Error:
        return None


def extract_sql(text: str) -> str | None:
    match = re.search(r"```sql\s+(.*?)```|<sql>(.*?)</sql>", text, re.DOTALL | re.IGNORECASE)
    return next(group for group in match.groups() if group).strip() if match else None


def judge(text: str, gold: str) -> Outcome:
    query = extract_sql(text)
    if query is None:
        return Outcome.NO_QUERY
    rows = run_query(query)
    if rows is None:
        return Outcome.ERROR
    is_ordered = "order by" in gold.lower()
    expected = run_query(gold)
    same = rows == expected if is_ordered else Counter(rows) == Counter(expected or ())
    return Outcome.SAME_ROWS if same else Outcome.OTHER_ROWS


def execution_reward(completions, sql, **kwargs) -> list[float]:
    outcomes = [judge(c[0]["content"], gold) for c, gold in zip(completions, sql, strict=True)]
    return [CONFIG.scores[outcome] for outcome in outcomes]


def make_keyword_reward(keyword: str, weight: float = 0.2):
    def reward(prompts, completions, sql, **kwargs):
        has = [keyword in (extract_sql(c[0]["content"]) or "").lower() for c in completions]
        return [weight if h == (keyword in gold.lower()) else -weight for h, gold in zip(has, sql, strict=True)]

    reward.__name__ = f"{keyword.replace(' ', '_')}_reward"
    return reward


order_by = make_keyword_reward("order by")
