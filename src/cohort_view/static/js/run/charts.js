// Charts of metrics, of one run or of several over each other. Those that have nothing to show take no room.

import { get, hasStep, path } from "cohort/api.js";
import { Chart } from "cohort/chart.js";
import { count, isNumber } from "cohort/format.js";
import { navigate, useData, useSeen } from "cohort/hooks.js";
import { html, useEffect, useMemo, useState } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { smoothingUnit } from "cohort/smooth.js";
import { Failure } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";
import { metricWords, phaseWords, STEP_PHASES } from "cohort/run/words.js";

const POINTS = 800;
const ZOOM_MS = 60;
const BATCH = 12; // charts that are fetched together
const ROOM_PX = 70; // at least, of a chart that is not fetched yet
const SMALL_SHARE = 0.03; // of the time: shorter phases are drawn together, or not at all
const [WRONG, MIXED, RIGHT, UNKNOWN, REST] = [1, 2, 0, 6, 7]; // colors
const LENGTHS = { "completions/mean_length": { label: "Mean" }, "completions/max_length": { label: "Longest" } };
const PROMPTS = {
  "prompts/never_right": { label: "Never right", color: WRONG },
  "prompts/sometimes_right": { label: "Sometimes", color: MIXED },
  "prompts/always_right": { label: "Always", color: RIGHT },
  "prompts/not_sampled": { label: "Not sampled yet", color: UNKNOWN },
};
const NONE = [];

/**
 * What a chart shows: a line for each metric of `names`, or all parts of a whole if it has a `kind`. `lines` says how a
 * line is named and colored, where that is not by its metric and its place.
 * @typedef {{label: string, title: string, names: string[], unit: string, kind?: "outcomes" | "parts" | "phases",
 *   lines?: Record<string, {label: string, color?: number}>, range?: [number, number],
 *   limit?: {y: number, label: string}, height?: number, isAlways?: boolean}} Spec
 */

/** A chart of one metric. @param {{name: string, unit: string, description: string}} metric */
export function metricSpec({ name, unit, description }) {
  const title = visibleLine(description ? `${name}: ${description}` : name);
  return { label: metricWords(name), title, names: [name], unit };
}

/** The charts that come first, of the metrics that there are. @param {object[]} metrics @returns {Spec[]} */
function overview(metrics, isOne, limit, sampling) {
  const known = new Map(metrics.map((metric) => [metric.name, metric]));
  const one = (name, changes) => (known.has(name) ? [{ ...metricSpec(known.get(name)), ...changes }] : NONE);
  const all = (list, more) => ({ names: list.filter((name) => known.has(name)), title: list.join(", "), ...more });
  const share = { range: [0, 1] };
  const outcomes = ["frac_all_wrong", "frac_all_right"];
  const phases = metrics.map(({ name }) => name).filter((name) => name.startsWith("time/") && phaseColor(name) >= 0);
  const isLimited = limit && !known.has("turns/mean"); // with turns, the limit is that of a single one
  const limited = { limit: { y: limit, label: `limit ${count(limit)}` } };
  const prompts = { label: "Prompts by outcome", kind: "parts", lines: PROMPTS };
  const [unsampled, ...sampled] = Object.keys(PROMPTS).reverse().map((name) => known.get(name)?.last);
  // Before, uniform sampling takes every prompt once, and the groups by outcome say the same.
  const hasPrompts = isOne && (sampling === "by_success" || !(unsampled > sum(sampled)));
  return [
    ...(isOne && known.has("reward") && known.has("eval/accuracy")
      ? one("reward", all(["reward", "eval/accuracy"], { label: "Reward and held-out accuracy", isAlways: true }))
      : [...one("reward", { isAlways: true }), ...one("eval/accuracy")]),
    ...(!outcomes.every((name) => known.has(name))
      ? one("frac_reward_zero_std", share)
      : isOne
        ? one(outcomes[0], { ...all(outcomes, share), label: "Groups by outcome", kind: "outcomes" })
        : outcomes.flatMap((name) => one(name, share))),
    ...(hasPrompts ? one("prompts/never_right", all(Object.keys(PROMPTS), prompts)) : NONE),
    ...one("completions/mean_length", isOne && all(Object.keys(LENGTHS), { lines: LENGTHS, ...(isLimited && limited) })),
    ...one("entropy"),
    ...one("grad_norm"),
    ...one("step_time", isOne && phases.length > 0 && all(["step_time", ...phases], { kind: "phases" })),
  ];
}

const phaseOf = (name) => name.slice("time/".length, -"_s".length);
const phaseColor = (name) => STEP_PHASES.indexOf(phaseOf(name));
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** The lines of a chart, bottom first if they are stacked. @param {Spec} spec */
function linesOf({ kind, names, lines: words = {} }, runs, { curves }) {
  const find = (run, name) => curves.find((curve) => curve.run === run && curve.name === name && curve.x.length);
  const line = (curve, label, color) => ({ ...curve, label, color });
  const [run] = runs;
  const found = names.map((name) => find(run, name)).filter(Boolean);
  if (kind === "outcomes") {
    if (found.length < 2) return NONE;
    const [wrong, right] = aligned(found);
    const mixed = wrong.y.map((share, index) => Math.max(0, 1 - share - right.y[index]));
    const between = line({ ...wrong, y: mixed }, "Mixed", MIXED);
    return [line(wrong, "All wrong", WRONG), between, line(right, "All right", RIGHT)];
  }
  if (kind === "parts") return aligned(found).map((curve) => ({ ...curve, ...words[curve.name] }));
  if (kind === "phases") {
    const [whole, ...phases] = aligned(found);
    if (whole?.name !== "step_time") return NONE;
    const large = phases.filter(({ y }) => sum(y) > SMALL_SHARE * sum(whole.y));
    large.sort((a, b) => phaseColor(a.name) - phaseColor(b.name));
    const rest = whole.y.map((time, index) => Math.max(0, time - sum(large.map(({ y }) => y[index]))));
    const lines = large.map((curve) => line(curve, phaseWords(phaseOf(curve.name)), phaseColor(curve.name)));
    return sum(rest) > SMALL_SHARE * sum(whole.y) ? [...lines, line({ ...whole, y: rest }, "Rest", REST)] : lines;
  }
  // Rewards that are no shares leave the held-out accuracy an axis of its own.
  const isRight = ({ name }) => name === "eval/accuracy" && found[0].y.some((value) => value < 0 || value > 1);
  if (runs.length === 1)
    return found.map((curve, index) => ({
      ...line(curve, metricWords(curve.name), index),
      ...words[curve.name],
      right: isRight(curve),
    }));
  const [name] = names;
  return runs.flatMap((id, index) => (find(id, name) ? [line(find(id, name), id, index)] : NONE));
}

/**
 * Curves at the places that all have and where the first has a value. Long ones keep the first place of each bucket,
 * which stands for the bucket's mean.
 */
function aligned(curves) {
  const tables = curves.map(({ x, y, means }) => new Map(x.map((at, index) => [at, (means ?? y)[index]])));
  const isEverywhere = (at) => tables.every((table, index) => table.has(at) || !curves[index].means);
  const x = (curves[0]?.x ?? NONE).filter((at) => isNumber(tables[0].get(at)) && isEverywhere(at));
  return curves.map((curve, index) => ({ ...curve, x, y: x.map((at) => tables[index].get(at) ?? null), means: null }));
}

const isEmpty = (lines) => lines.every((line) => line.y.every((value) => !isNumber(value) || value === 0));

/**
 * Points of metrics; `names` null for none yet. `data` has those of the zoomed range, if the `whole` curves leave some
 * out.
 */
function useCurves(runs, names, { x, linked }) {
  const [range, setRange] = useState(linked.range);
  useEffect(() => {
    let timer = 0;
    return linked.onRange((next) => {
      clearTimeout(timer);
      timer = setTimeout(() => setRange(next), ZOOM_MS);
    });
  }, [linked]);
  const query = { runs, names, x, points: POINTS };
  const whole = useData(names && path("/api/curves", query), ["metrics", "events"]);
  // Before any chart is drawn: all have the same end, by which they tell old values.
  const curves = whole.data?.curves ?? NONE;
  useMemo(() => curves.forEach((curve) => linked.include(curve.x[0], curve.x.at(-1))), [curves, linked]);
  const isPart = range && curves.some((curve) => curve.means);
  const room = range ? (range[1] - range[0]) / 2 : 0;
  const zoomed = isPart && { ...query, from: range[0] - room, to: range[1] + room };
  const part = useData(zoomed ? path("/api/curves", zoomed) : null, ["metrics"]);
  return { ...whole, data: (isPart && part.data) || whole.data, whole: whole.data };
}

/** One chart; nothing if all its values are 0 or missing, unless it `isAlways` shown. */
function MetricChart({ spec, runs, data, whole, options, href = null }) {
  const { x, linked, log, smoothing } = options;
  const { label, title, unit, kind, names, height, range = null, limit = null, isAlways } = spec;
  const lines = useMemo(() => (data ? linesOf(spec, runs, data) : null), [spec, data]);
  const marks = useMemo(() => (data ? marksOf(data.marks, runs) : NONE), [data]);
  const weightUnit = useMemo(() => unitOf(whole, x), [whole, x]);
  if (lines && (!lines.length || (!isAlways && isEmpty(lines)))) return null;
  const isSmooth = !kind && !names[0].startsWith("eval/");
  return html`<${Chart}
    ...${{ label, title, unit, marks, x, height, linked, range, limit, href }}
    lines=${lines ?? NONE}
    stacked=${Boolean(kind)}
    log=${log && !kind}
    smoothing=${isSmooth ? smoothing : 0}
    smoothingUnit=${weightUnit}
    onOpen=${(line, at) => openStep(line, at, x, whole)}
  />`;
}

/** The distance of x that a smoothing weight belongs to. */
function unitOf(whole, x) {
  const curves = (whole?.curves ?? NONE).filter((curve) => curve.x.length);
  const span = Math.max(0, ...curves.map((curve) => curve.x.at(-1) - curve.x[0]));
  return smoothingUnit(span, x === "step" ? 1 : span / Math.max(1, ...curves.map((curve) => curve.total)) || 1);
}

/** Marks of all runs, equal warnings of a run once; with several runs, each text says whose it is. */
function marksOf(byRun, runs) {
  return runs.flatMap((run) => {
    const marks = byRun?.[run] ?? NONE;
    const first = new Map([...marks].reverse().map((mark) => [mark.text, mark]));
    const shown = marks.filter((mark) => mark.kind !== "warning" || first.get(mark.text) === mark);
    return runs.length > 1 ? shown.map((mark) => ({ ...mark, text: `${run}: ${mark.text}` })) : shown;
  });
}

/** Go to the step of a point; on the axis of time, to that of the nearest point of the whole curve. */
async function openStep({ run, name }, at, x, whole) {
  let step = at;
  if (x === "time") {
    const { curves } = await get(path("/api/curves", { runs: [run], names: [name], x: "step", points: POINTS }));
    const times = whole.curves.find((curve) => curve.run === run && curve.name === name)?.x ?? NONE;
    const far = times.map((time) => Math.abs(time - at));
    step = curves[0]?.x[far.indexOf(Math.min(...far))];
  }
  const kind = name.startsWith("eval/") ? "eval" : null;
  if (isNumber(step) && hasStep(run, Math.round(step), { kind })) navigate(link.steps(run, Math.round(step), { kind }));
}

/**
 * The charts that say most about a run.
 * @param {{metrics: object[], limit: number | null, sampling: string | null}} props `limit` of tokens, `sampling` of
 *   prompts
 */
export function Overview({ runs, metrics, options, limit, sampling }) {
  const isOne = runs.length === 1;
  const specs = useMemo(() => overview(metrics, isOne, limit, sampling), [metrics, runs, limit, sampling]);
  const names = [...new Set(specs.flatMap((spec) => spec.names))];
  const loaded = useCurves(runs, names.length ? names : null, options);
  if (loaded.error && !loaded.data) return html`<${Failure} error=${loaded.error} retry=${loaded.reload} />`;
  return html`<div class="chart-grid">
    ${specs.map((spec) => html`<${MetricChart} key=${spec.names[0]} ...${{ ...loaded, spec, runs, options }} />`)}
  </div>`;
}

/** Charts of single metrics, fetched and drawn some at a time when they come into view. */
export function MetricCharts({ specs, ...props }) {
  const batches = [];
  for (let first = 0; first < specs.length; first += BATCH) batches.push(specs.slice(first, first + BATCH));
  return batches.map((batch) => html`<${Batch} key=${batch[0].names[0]} specs=${batch} ...${props} />`);
}

function Batch({ specs, runs, options, hrefOf }) {
  const [ref, isSeen] = useSeen();
  const loaded = useCurves(runs, isSeen ? specs.flatMap((spec) => spec.names) : null, options);
  const { whole, error, reload } = loaded;
  const zero = specs.filter((spec) => whole && !spec.isAlways && isEmpty(linesOf(spec, runs, whole)));
  const chart = (spec) => {
    const [name] = spec.names;
    return html`<${MetricChart} key=${name} href=${hrefOf?.(name)} ...${{ ...loaded, spec, runs, options }} />`;
  };
  const room = isSeen ? {} : { minHeight: `${specs.length * ROOM_PX}px` };
  return html`<div ref=${ref} class="stack">
    ${error && !whole && html`<${Failure} error=${error} retry=${reload} />`}
    <div class=${`chart-grid ${specs[0].height ? "large" : ""}`} style=${room}>${isSeen && specs.map(chart)}</div>
    ${zero.length > 0 && html`<p class="muted small">Always 0: ${zero.map((spec) => spec.label).join(", ")}</p>`}
  </div>`;
}
