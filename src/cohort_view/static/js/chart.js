// A chart as a card: name, values under the cursor, and a plot of lines or stacked areas. It wraps uPlot.

import uPlot from "uplot";
import { xAxis, xRange, yAxis, yRange } from "cohort/axes.js";
import { count, inUnit, isNumber, seconds } from "cohort/format.js";
import { useTheme } from "cohort/hooks.js";
import { drawMarks, markAt } from "cohort/marks.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "cohort/preact.js";
import { smooth } from "cohort/smooth.js";
import { visibleLine } from "cohort/visible.js";

/**
 * A line: the points of one run, or of one part of a whole.
 * @typedef {object} Line
 * @property {string} label
 * @property {number} color index into the palette
 * @property {number[]} x increasing
 * @property {(number | null)[]} y
 * @property {(number | null)[] | null} [means] of all values that a point stands for, if the line was downsampled
 * @property {(number | null)[]} [low] bounds of a band around the line
 * @property {(number | null)[]} [high]
 * @property {boolean} [right] whether it is a share with an axis of its own, on the right
 */

/** Charts that share a zoom and a cursor. */
export class LinkedCharts {
  static #count = 0;

  constructor() {
    this.key = `linked-${(LinkedCharts.#count += 1)}`;
    /** @type {[number, number] | null} */
    this.range = null;
    /** All x of all charts. @type {[number, number] | null} */
    this.full = null;
    this.listeners = new Set();
  }

  /** Widen the range without zoom, so that the same x is in the same place of all charts. */
  include(low, high) {
    if (!isNumber(low) || !isNumber(high)) return;
    const [from, to] = this.full ?? [low, high];
    if (this.full && low >= from && high <= to) return;
    this.full = [Math.min(low, from), Math.max(high, to)];
    if (!this.range) this.setRange(null);
  }

  /** Zoom all to this range of x, or null for everything. */
  setRange(range) {
    this.range = range;
    this.listeners.forEach((listener) => listener(range));
  }

  /** Call `listener(range)` at each zoom; returns a function that stops it. */
  onRange(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

const HEIGHT = 168;
const FEW_POINTS = 40;
const CLICK_PX = 4;
const DOUBLE_CLICK_MS = 300;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const BAND = 0.16;
const AREA = 0.7;

/**
 * A card with a chart.
 * @param {object} props
 * @param {string} props.label name
 * @param {string} [props.title] what it is, as a tooltip
 * @param {string} [props.unit] of the values, as in /api/runs/ID/metrics
 * @param {Line[]} props.lines
 * @param {boolean} [props.stacked] areas on top of each other, of lines with the same x
 * @param {{x: number, kind: string, text: string}[]} [props.marks]
 * @param {"step" | "time"} [props.x]
 * @param {boolean} [props.log]
 * @param {number} [props.smoothing] weight of the moving average, 0 for none
 * @param {number} [props.smoothingUnit] distance of x to which the weight belongs
 * @param {LinkedCharts} [props.linked]
 * @param {[number, number] | null} [props.range] of y
 * @param {{y: number, label: string} | null} [props.limit] a dashed line, where values come near it
 * @param {((line: Line, x: number) => void) | null} [props.onOpen] click on a point
 * @param {string | null} [props.href] of the name
 */
export function Chart(props) {
  const { label, title, unit = "", lines, x = "step", href = null, height = HEIGHT } = props;
  const root = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const own = useMemo(() => new LinkedCharts(), []);
  const all = { ...props, unit, x, height, theme, linked: props.linked ?? own, onCursor: setAt };
  useLayoutEffect(() => {
    plot.current = new Plot(root.current);
    return () => plot.current.destroy();
  }, []);
  useLayoutEffect(() => plot.current.show(all));
  useEffect(() => plot.current.redraw(), [theme.value]);
  const end = Math.max(...lines.map((line) => line.x.at(-1) ?? 0), props.linked?.full?.[1] ?? 0);
  const last = lines.map((line) => `${visibleLine(line.label)} ${inUnit(line.y.findLast(isNumber), line.right ? "share" : unit)}`).join(", ");
  const heading = href ? html`<a class="chart-name" href=${href}>${label}</a>` : html`<span class="chart-name">${label}</span>`;
  return html`<article class="card chart-card" aria-label=${label}>
    <header class="chart-head">
      <h3 title=${title}>${heading}</h3>
      ${at && html`<span class="chart-place">${x === "time" ? seconds(at.x) : `step ${count(at.x)}`}</span>`}
    </header>
    <ul class="chart-values" aria-label="Values">
      ${lines.map((line) => html`<li key=${line.label}><${Value} line=${line} at=${at} unit=${line.right ? "share" : unit} end=${x === "step" ? end : null} name=${lines.length > 1 && line.label} /></li>`)}
    </ul>
    <div class="chart-body">
      <div class=${`chart-plot ${props.onOpen ? "opens" : ""}`} role="img" aria-label=${`Chart of ${label}. Last: ${last}`} ref=${root} style=${{ height: `${height}px` }}></div>
      ${at?.mark && html`<p class="chart-mark">${visibleLine(at.mark)}</p>`}
    </div>
  </article>`;
}

/** A line's value under the cursor, or its last; with the step of one before `end`, that of all lines if x is a step. */
function Value({ line, at, unit, end, name }) {
  const theme = useTheme();
  const index = lastUpTo(line, at ? at.x : Infinity);
  const isOld = !at && index >= 0 && end !== null && line.x[index] < end;
  return html`${name && html`<span class="stroke" style=${{ background: theme.series(line.color) }}></span>${visibleLine(name)} `}
    <span class="chart-value">${inUnit(line.y[index] ?? null, unit)}</span>
    ${isOld && html` <span class="muted">at step ${count(line.x[index])}</span>`}`;
}

/** Index of the last value of a line at or before x; -1 if there is none. */
function lastUpTo(line, x) {
  let low = 0;
  let high = line.x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] <= x) low = middle + 1;
    else high = middle;
  }
  let index = low - 1;
  while (index >= 0 && !isNumber(line.y[index])) index -= 1;
  return index;
}

/** The plot of a chart, built anew when its shape changes. */
class Plot {
  #root;
  #plot = null;
  #props = null;
  #shape = "";
  #stop = null;
  #resizer;

  constructor(root) {
    this.#root = root;
    this.#resizer = new ResizeObserver(() => this.#resize());
    this.#resizer.observe(root);
  }

  /** Show what a chart's properties say. */
  show(props) {
    const before = this.#props;
    this.#props = props;
    if (before?.linked !== props.linked) {
      this.#stop?.();
      this.#stop = props.linked.onRange((range) => this.#applyRange(range));
    }
    const { lines, log, smoothing, smoothingUnit, x, unit, height, stacked, limit, range } = props;
    const shape = JSON.stringify([
      [log, smoothing, smoothingUnit, x, unit, height, stacked, limit, range],
      lines.map((line) => [line.color, line.right, Boolean(line.low), line.x.length <= FEW_POINTS]),
    ]);
    if (shape === this.#shape && before?.lines === lines && before?.marks === props.marks) return;
    lines.forEach((line) => props.linked.include(line.x[0], line.x.at(-1)));
    if (shape !== this.#shape) this.#build();
    else this.#plot.setData(this.#data(), true);
    this.#shape = shape;
  }

  redraw() {
    this.#plot?.redraw(false);
  }

  destroy() {
    this.#stop?.();
    this.#resizer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  /** Columns of each line: its values, the smoothed ones, and the bounds of its band. */
  #data() {
    const { lines, log, smoothing = 0, smoothingUnit = 1, stacked } = this.#props;
    if (!lines.length) return [[]];
    const shown = (y) => (log ? y.map((value) => (isNumber(value) && value > 0 ? value : null)) : y);
    let below = null;
    const tables = lines.map((line) => {
      let raw = shown(line.y);
      if (stacked) raw = below = raw.map((value, index) => (value ?? 0) + (below?.[index] ?? 0));
      // Extremes are all that a downsampled curve keeps; its average has to be that of all its values.
      const values = line.means && !stacked ? shown(line.means) : raw;
      const smoothed = smoothing > 0 ? smooth(line.x, values, smoothing, smoothingUnit) : raw.map(() => null);
      return [line.x, raw, smoothed, ...(line.low ? [line.high, line.low] : [])];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  #build() {
    this.#plot?.destroy();
    const { lines, theme, linked, log, unit, x, smoothing = 0, height, limit } = this.#props;
    const axis = {
      font: FONT,
      stroke: () => theme.color("--muted"),
      ticks: { show: false },
      grid: { stroke: () => theme.color("--grid"), width: 1 },
    };
    const { series, bands } = this.#series();
    this.#plot = new uPlot(
      {
        width: Math.max(this.#root.clientWidth, 120),
        height,
        padding: [8, 20, 0, 0],
        legend: { show: false },
        focus: { alpha: 1 },
        scales: {
          x: { time: false, range: (_, low, high) => linked.range ?? xRange(...(linked.full ?? [low, high])) },
          y: { distr: log ? 3 : 1, range: (_, low, high) => this.#rangeOf(low, high) },
          right: { range: [0, 1] },
        },
        axes: [
          { ...axis, ...xAxis(x) },
          { ...axis, ...yAxis(unit, log) },
          ...(lines.some((line) => line.right) ? [{ ...axis, ...yAxis("share"), scale: "right", side: 1, grid: { show: false } }] : []),
        ],
        series,
        bands,
        cursor: {
          // `click` would hold back clicks of which uPlot saw no move before; ours tell them from drags themselves.
          drag: { x: true, y: false, setScale: false, dist: CLICK_PX, click: () => {} },
          sync: { key: linked.key, setSeries: false, scales: ["x", null], filters: { pub: isCursor, sub: isCursor } },
          points: { size: (_, index) => (smoothing > 0 && series[index].isRaw ? 5 : 7), width: 0 },
          bind: {
            dblclick: () => () => {
              linked.setRange(null);
              return null;
            },
          },
        },
        hooks: {
          setSelect: [(plot) => this.#select(plot)],
          setCursor: [(plot) => this.#cursor(plot)],
          drawAxes: [(plot) => drawMarks(plot, this.#props.marks ?? [], theme)],
          draw: [(plot) => limit && drawLimit(plot, limit, theme)],
        },
      },
      this.#data(),
      this.#root,
    );
    this.#listenToClicks();
  }

  /** The shown range of y. */
  #rangeOf(low, high) {
    const { range = null, limit, log, stacked } = this.#props;
    if (range && !log) return range;
    const [from, to] = yRange(low, nearLimit(high, limit), log);
    return [stacked ? 0 : from, to];
  }

  #series() {
    const { lines, theme, smoothing = 0, stacked } = this.#props;
    const series = [{}];
    const bands = [];
    for (const [index, line] of lines.entries()) {
      const color = () => theme.series(line.color);
      const area = () => faint(color(), AREA);
      const isFew = line.x.length <= FEW_POINTS && !stacked;
      const isFaint = smoothing > 0 && !stacked;
      if (stacked && index > 0) bands.push({ series: [series.length, series.length - 2], fill: area });
      const scale = line.right ? "right" : "y";
      series.push({
        isRaw: true,
        scale,
        stroke: isFaint ? () => faint(color(), 0.35) : color,
        width: isFaint ? 1 : 1.5,
        fill: stacked && index === 0 ? area : undefined,
        points: { show: isFew && !isFaint, size: 4, width: 0, fill: color, filter: lonely },
      });
      series.push({ show: isFaint, scale, stroke: color, width: 1.75, points: { show: false } });
      if (!line.low) continue;
      bands.push({ series: [series.length, series.length + 1], fill: () => faint(color(), BAND) });
      series.push(...[0, 1].map(() => ({ scale, stroke: "transparent", width: 0, points: { show: false } })));
    }
    return { series, bands };
  }

  #applyRange(range) {
    if (!this.#plot) return;
    const x = this.#plot.data[0];
    const [low, high] = range ?? xRange(...(this.#props.linked.full ?? [x[0], x.at(-1)]));
    if (isNumber(low) && isNumber(high)) this.#plot.setScale("x", { min: low, max: high });
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < CLICK_PX) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.#props.linked.setRange(range);
  }

  #cursor(plot) {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) return this.#props.onCursor(null);
    const isHere = plot.over.matches(":hover"); // not in a linked chart
    const mark = isHere ? markAt(plot, this.#props.marks ?? [], left) : null;
    return this.#props.onCursor({ x: plot.data[0][idx], mark });
  }

  #listenToClicks() {
    const plot = this.#plot;
    let downX = 0;
    let opening = 0;
    plot.over.addEventListener("mousedown", (event) => (downX = event.clientX));
    plot.over.addEventListener("dblclick", () => clearTimeout(opening));
    plot.over.addEventListener("click", (event) => {
      clearTimeout(opening);
      const { onOpen, linked } = this.#props;
      if (!onOpen || event.detail > 1 || Math.abs(event.clientX - downX) >= CLICK_PX) return;
      const point = this.#pointAt(event);
      // While zoomed, a second click may follow, which resets the zoom.
      if (point) opening = setTimeout(() => onOpen(...point), linked.range ? DOUBLE_CLICK_MS : 0);
    });
  }

  /** The line nearest to a click, with the x of its point there; null if there is none. */
  #pointAt(event) {
    // The plot's own cursor moves with the next frame only, which comes after a tap.
    const area = this.#plot.over.getBoundingClientRect();
    const top = event.clientY - area.top;
    const x = this.#plot.data[0][this.#plot.posToIdx(event.clientX - area.left)];
    const far = (line) => Math.abs(this.#plot.valToPos(line.y[line.x.indexOf(x)], line.right ? "right" : "y") - top);
    const here = this.#props.lines.filter((one) => isNumber(one.y[one.x.indexOf(x)]));
    const [line] = this.#props.stacked ? here : here.sort((a, b) => far(a) - far(b));
    return line ? [line, x] : null;
  }

  #resize() {
    const width = this.#root.clientWidth;
    if (this.#plot && width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: this.#props.height });
  }
}

const isCursor = (type) => type === "mousemove" || type === "mouseleave";

/** The highest value to show: the limit, if values come near it. */
function nearLimit(high, limit) {
  return limit && isNumber(high) && high > limit.y / 2 ? Math.max(high, limit.y) : high;
}

function drawLimit(plot, { y, label }, theme) {
  const { ctx, bbox } = plot;
  const top = Math.round(plot.valToPos(y, "y", true)) + 0.5;
  if (!(top >= bbox.top && top <= bbox.top + bbox.height)) return;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = theme.color("--muted");
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, top);
  ctx.lineTo(bbox.left + bbox.width, top);
  ctx.stroke();
  ctx.font = FONT.replace("11px", `${11 * devicePixelRatio}px`);
  ctx.textAlign = "right";
  ctx.fillText(label, bbox.left + bbox.width - 4, top + 13 * devicePixelRatio);
  ctx.restore();
}

/** Indices of points without a neighbor, which a line alone would not show. */
function lonely(plot, series, show) {
  if (show) return null;
  const y = plot.data[series];
  const found = [];
  let last = null; // the last value that belongs to this line: null for a gap
  for (let i = 0; i < y.length; i += 1) {
    if (y[i] === undefined) continue;
    if (isNumber(y[i]) && !isNumber(last)) {
      let next = i + 1;
      while (next < y.length && y[next] === undefined) next += 1;
      if (!isNumber(y[next])) found.push(i);
    }
    last = y[i];
  }
  return found.length ? found : null;
}

/** A computed color, such as rgb(0, 114, 178), with an opacity. */
function faint(color, opacity) {
  return color.replace(/^rgb\(([^)]*)\)$/, `rgba($1, ${opacity})`);
}
