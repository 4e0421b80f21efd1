// One run, alone or with others over it: where it stands, why, its charts, and what else there is to know about it.

import { isExport, path, runPath } from "cohort/api.js";
import { LinkedCharts } from "cohort/chart.js";
import { count, plural } from "cohort/format.js";
import { useData, useKeys, useQuery, useRuns } from "cohort/hooks.js";
import { html, useEffect, useMemo, useRef, useState } from "cohort/preact.js";
import { link, splitList } from "cohort/router.js";
import { Failure, Fold, Loading, Problems, Segmented } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";
import { AllMetrics } from "cohort/run/all_metrics.js";
import { MetricCharts, metricSpec, Overview } from "cohort/run/charts.js";
import { Configuration, Log, Memory, Warnings } from "cohort/run/details.js";
import { RunsTable } from "cohort/run/runs_table.js";
import { BySource } from "cohort/run/sources.js";
import { Findings, isLive, StateLine, TimeSpent } from "cohort/run/state.js";

export const MOST_RUNS = 8; // as many as there are colors
const SMOOTHED_FROM = 200; // steps; in shorter runs smoothing would hide a jump
const SMOOTHING = 0.6;
const AXES = [["step", "Steps"], ["time", "Time"]];
const CHOSEN_PX = 280;
const NONE = [];

export function RunView({ id }) {
  const [query, setQuery] = useQuery();
  const entries = useRuns();
  const { data: now, error, reload } = useData(runPath(id, "now"), ["status", "metrics", "events"]);
  const { runs, problems } = shownRuns(id, query.with, entries);
  const lists = useMetrics(runs);
  const metrics = useMemo(() => merged(lists), lists);
  const [options, setWeight] = useOptions(query, entries, runs);
  if (!now) return error ? html`<${Failure} error=${error} retry=${reload} />` : html`<${Loading} />`;
  const entry = entries.find((run) => run.id === id);
  const charts = { runs, metrics, options };
  const show = (others) => setQuery({ with: others }, { push: true });
  return html`<div class="run-view">
    <header class="run-head">
      <div class="row">
        <h1>${visibleLine(entry?.name ?? id)}</h1>
        <span class="muted">${[entry?.model, entry?.algorithm].filter(Boolean).map(visibleLine).join(" · ")}</span>
      </div>
      <${StateLine} now=${now} />
    </header>
    <${Problems} list=${[...problems, ...now.problems]} />
    <${Findings} id=${id} now=${now} query=${query} />
    ${runs.length > 1 && html`<${RunsTable} ...${{ id, runs, entries, lists, show }} />`}
    ${metrics.length > 0
      ? html`<section class="stack" aria-label="Charts">
          <${Toolbar} ...${{ ...charts, query, setQuery, setWeight, entries, show }} />
          ${query.names && html`<${Chosen} ...${{ ...charts, id, query }} />`}
          <${Overview} ...${charts} limit=${now.max_completion_tokens} sampling=${now.sampling} />
          ${runs.length === 1 && html`<${BySource} ...${charts} />`}
          ${runs.length === 1 && html`<div><${TimeSpent} time=${now.time} /><${Memory} memory=${now.memory} /></div>`}
        </section>`
      : html`<p class="muted">${isLive(now) ? "Curves come with the first step." : "This run has no metrics."}</p>`}
    <div class="stack tight">
      ${metrics.length > 0 &&
      html`<${Fold} name="metrics" title="All metrics" summary=${count(metrics.length)}>
        <${AllMetrics} ...${{ ...charts, id, query, setQuery }} />
      <//>`}
      <${Fold} name="config" title="Changed keys and command"><${Configuration} id=${id} /><//>
      ${now.warnings.length > 0 &&
      html`<${Fold} name="warnings" title="Warnings" summary=${count(now.num_warnings)}>
        <${Warnings} id=${id} list=${now.warnings} total=${now.num_warnings} />
      <//>`}
      ${!isExport && html`<${Fold} name="log" title="Log"><${Log} id=${id} /><//>`}
    </div>
  </div>`;
}

/** The run and those over it, with what is wrong with the list in the address. */
function shownRuns(id, list, entries) {
  const asked = [...new Set(splitList(list))].filter((run) => run !== id);
  const known = [id, ...asked.filter((run) => entries.some((entry) => entry.id === run))];
  const problems = asked.filter((run) => !known.includes(run)).map((run) => `There is no run named ${run} here.`);
  if (known.length > MOST_RUNS) problems.push(`At most ${MOST_RUNS} runs are shown.`);
  const runs = known.slice(0, MOST_RUNS);
  return { runs: useMemo(() => runs, [runs.join()]), problems };
}

/** The lists of metrics of all runs that are shown. */
function useMetrics(runs) {
  const slots = Array.from({ length: MOST_RUNS }, (_, index) => runs[index] ?? null);
  return slots.map((run) => useData(run && runPath(run, "metrics"), ["metrics"]).data?.metrics ?? NONE);
}

/** Metrics of all runs that have values; those of the first run come first. */
function merged(lists) {
  const found = lists.flat().filter((metric) => metric.num_points > 0);
  return [...new Map([...found].reverse().map((metric) => [metric.name, metric])).values()].reverse();
}

/** How charts are drawn, and a function that sets the smoothing while its slider moves. */
function useOptions(query, entries, runs) {
  const [weight, setWeight] = useState(null);
  const isLong = entries.some(({ id, step }) => runs.includes(id) && step >= SMOOTHED_FROM);
  const given = Number(weight ?? query.smoothing ?? (isLong ? SMOOTHING : 0)) || 0;
  const smoothing = Math.min(0.99, Math.max(0, given));
  const x = query.x === "time" ? "time" : "step";
  const log = query.log === "1";
  const linked = useMemo(() => new LinkedCharts(), [x, runs]);
  useKeys([["0", "Show the whole range of the charts", () => linked.setRange(null)]]);
  return [useMemo(() => ({ x, log, smoothing, linked }), [x, log, smoothing, linked]), setWeight];
}

function Toolbar({ runs, metrics, options, query, setQuery, setWeight, entries, show }) {
  const { x, log, smoothing, linked } = options;
  const free = entries.filter((run) => !runs.includes(run.id));
  const setX = (axis) => setQuery({ x: axis === "step" ? null : axis });
  const add = ({ target }) => show([...runs.slice(1), target.value]);
  const smooth = ({ target }) => {
    setQuery({ smoothing: target.value });
    setWeight(null);
  };
  const csv = path("/api/curves.csv", { runs, names: metrics.map((metric) => metric.name) });
  return html`<div class="row chart-toolbar">
    <h2>Curves</h2>
    <${Segmented} label="Horizontal axis" options=${AXES} value=${x} onChange=${setX} />
    <label class="field" title="Values at or below 0 are left out">
      <input type="checkbox" checked=${log} onChange=${() => setQuery({ log: log ? null : 1 })} />Log scale
    </label>
    <label class="field" title="Weight of the moving average; raw values stay visible, faintly">
      Smoothing
      <input type="range" min="0" max="0.99" step="0.01" value=${smoothing}
        onInput=${({ target }) => setWeight(target.value)} onChange=${smooth} />
      <output>${smoothing.toFixed(2)}</output>
    </label>
    <${ResetZoom} linked=${linked} />
    ${free.length > 0 &&
    runs.length < MOST_RUNS &&
    html`<select class="select" aria-label="Add a run" value="" onChange=${add}>
      <option value="">Add a run…</option>
      ${free.map((run) => html`<option key=${run.id} value=${run.id}>${visibleLine(run.id)}</option>`)}
    </select>`}
    ${!isExport && html`<a download=${`${runs.join("-")}.csv`} title="All metrics, all points" href=${csv}>CSV</a>`}
  </div>`;
}

/** The way back from a zoom, while there is one. */
function ResetZoom({ linked }) {
  const [range, setRange] = useState(linked.range);
  useEffect(() => linked.onRange(setRange), [linked]);
  if (!range) return null;
  const reset = () => linked.setRange(null);
  return html`<button type="button" class="button small" title="Or double-click" onClick=${reset}>Reset zoom</button>`;
}

/** The metrics that a link asks for, large. */
function Chosen({ id, query, runs, metrics, options }) {
  const names = splitList(query.names);
  const found = names.map((name) => metrics.find((metric) => metric.name === name)).filter(Boolean);
  const missing = names.filter((name) => !found.some((metric) => metric.name === name));
  const large = { height: CHOSEN_PX, isAlways: true };
  const specs = useMemo(() => found.map((metric) => ({ ...metricSpec(metric), ...large })), [metrics, query.names]);
  const root = useRef(null);
  useEffect(() => {
    const isBack = history.state?.top !== undefined; // then the reader is where they were
    if (!isBack) root.current.scrollIntoView({ block: "nearest" });
  }, [query.names]);
  return html`<section class="stack tight chosen" ref=${root} aria-label=${plural(found.length, "chosen metric")}>
    <p class="dotted">
      <a href=${link.run(id, { ...query, names: null })}>← All of this run</a>
      ${missing.length > 0 && html`<span class="muted">Not recorded: ${missing.map(visibleLine).join(", ")}</span>`}
    </p>
    ${specs.length > 0 && html`<${MetricCharts} ...${{ specs, runs, options }} />`}
  </section>`;
}
