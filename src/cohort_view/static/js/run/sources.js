// Charts with a line for each source of the data, of training and of evaluations.

import { html, useMemo } from "cohort/preact.js";
import { visibleLine } from "cohort/visible.js";
import { MetricCharts, metricSpec } from "cohort/run/charts.js";

const MOST_SOURCES = 8; // as many as there are colors
const QUANTITIES = [["reward", "Reward"], ["accuracy", "Accuracy"], ["mean_length", "Completion length"]];
const SOURCE_METRIC = /^(?:eval\/)?sources\/(.+)\/\w+$/;

/** @param {{metrics: object[]}} props all others go to the charts */
export function BySource({ metrics, ...props }) {
  const sources = useMemo(() => sourcesOf(metrics), [metrics]);
  const specs = useMemo(() => sourceSpecs(metrics, sources.slice(0, MOST_SOURCES)), [metrics]);
  if (!specs.length) return null;
  const others = sources.slice(MOST_SOURCES).map(visibleLine);
  return html`<section class="stack tight" aria-label="By source">
    <h2>By source</h2>
    <${MetricCharts} specs=${specs} ...${props} />
    ${others.length > 0 && html`<p class="muted small">More sources under “All metrics”: ${others.join(", ")}</p>`}
  </section>`;
}

/** The names of all sources, 2 before 10. */
function sourcesOf(metrics) {
  const names = metrics.map((metric) => metric.name.match(SOURCE_METRIC)?.[1]).filter(Boolean);
  return [...new Set(names)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

/** The charts of quantities that at least two of the sources have. Each source has one color in all of them. */
function sourceSpecs(metrics, sources) {
  const known = new Map(metrics.map((metric) => [metric.name, metric]));
  const spec = (prefix, quantity, label) => {
    const nameOf = (source) => `${prefix}sources/${source}/${quantity}`;
    const lines = Object.fromEntries(sources.map((source, color) => [nameOf(source), { label: source, color }]));
    const names = sources.map(nameOf).filter((name) => known.has(name));
    if (names.length < 2) return [];
    return [{ ...metricSpec(known.get(names[0])), title: names.join(", "), label, names, lines }];
  };
  const heldOut = (label) => `Held-out ${label.toLowerCase()}`;
  return [
    ...QUANTITIES.flatMap(([quantity, label]) => spec("", quantity, label)),
    ...QUANTITIES.flatMap(([quantity, label]) => spec("eval/", quantity, heldOut(label))),
  ];
}
