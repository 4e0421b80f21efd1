"""Write the tables of metrics into docs/metrics.md: `python tools/docs/metric_table.py docs/metrics.md`."""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cohort.metrics.catalogue import METRICS

_MARKED = re.compile(r"(<!-- metrics, made by `make docs` -->\n).*?(<!-- end of metrics -->)", re.DOTALL)


def with_metrics(page: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(_tables()) + "\n" + found[2], page)


def _tables() -> Iterator[str]:
    for group, metrics in itertools.groupby(METRICS, key=lambda metric: metric.group):
        yield from (f"### {group}", "", "| name | unit | meaning |", "| --- | --- | --- |")
        yield from (f"| `{m.name}` | {m.unit} | {m.meaning}{m.details} |" for m in metrics)
        yield ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_metrics(path.read_text(encoding="utf-8")), encoding="utf-8")
