"""Judge a run after every step and evaluation, and report what changed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from cohort.health.facts import RunFacts
from cohort.health.findings import Finding
from cohort.health.metrics_table import MetricsBuilder
from cohort.health.rules import judge


class HealthMonitor:
    """Follows a run's metrics, reports changed findings, and warns once about each."""

    def __init__(
        self,
        facts: RunFacts,
        *,
        on_change: Callable[[Sequence[Finding]], None],
        on_warning: Callable[[int, Finding], None],
        rows: Sequence[Mapping[str, Any]] = (),
        past: Iterable[Sequence[Finding]] = (),
    ):
        """Create a monitor.

        Args:
            facts: what rules need to know of the run's configuration.
            on_change: called with all findings when their sentences are others than before.
            on_warning: called with the step and a finding when it first becomes a warning, or bad.
            rows: of metrics.jsonl, before the run was resumed.
            past: the findings that were reported then.
        """
        self._facts = facts
        self._on_change = on_change
        self._on_warning = on_warning
        self._metrics = MetricsBuilder()
        self._metrics.append(rows)
        self._findings: Sequence[Finding] = ()
        self._warned: set[tuple[str, ...]] = set()
        for findings in past:
            self._findings = findings
            self._warned |= {finding.key for finding in findings if finding.is_warning}

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
            if finding.is_warning and finding.key not in self._warned:
                self._warned.add(finding.key)
                self._on_warning(step, finding)
