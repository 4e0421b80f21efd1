"""Judge a run after every step and evaluation, and report what changed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from cohort.health.facts import RunFacts
from cohort.health.findings import Finding
from cohort.health.metrics_table import MetricsBuilder
from cohort.health.rules import is_notable, judge


class HealthMonitor:
    """Follows a run's metrics and reports changed findings, and those to show to the user once."""

    def __init__(
        self,
        facts: RunFacts,
        *,
        on_change: Callable[[Sequence[Finding]], None],
        on_notable: Callable[[int, Finding], None],
        rows: Sequence[Mapping[str, Any]] = (),
        past: Iterable[Sequence[Finding]] = (),
    ):
        """Create a monitor.

        Args:
            facts: what rules need to know of the run's configuration.
            on_change: called with all findings when their sentences are others than before.
            on_notable: called with the step and a finding that the user should see, once.
            rows: of metrics.jsonl, before the run was resumed.
            past: the findings that were reported then.
        """
        self._facts = facts
        self._on_change = on_change
        self._on_notable = on_notable
        self._metrics = MetricsBuilder()
        self._metrics.append(rows)
        self._findings: Sequence[Finding] = ()
        self._shown: set[tuple[str, ...]] = set()
        for findings in past:
            self._findings = findings
            self._shown |= {finding.key for finding in findings if is_notable(finding)}

    def add(self, step: int, metrics: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        """Add the metrics of a step, or of the evaluation after it, and report what they change."""
        self._metrics.append([{**metrics, "step": step, "kind": kind}])
        self.report(step)

    def report(self, step: int) -> None:
        """Report what changed by the end of a step."""
        findings = judge(self._metrics.table(), self._facts)
        if [(f.level, f.sentence) for f in findings] != [(f.level, f.sentence) for f in self._findings]:
            self._findings = findings
            self._on_change(findings)
        for finding in findings:
            if is_notable(finding) and finding.key not in self._shown:
                self._shown.add(finding.key)
                self._on_notable(step, finding)
