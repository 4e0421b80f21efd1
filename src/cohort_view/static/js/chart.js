// A chart of one metric: a wrapper of uPlot with linked zoom and cursor, marks, log scale, smoothing, and clicks on points.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { xAxis, xRange, yAxis, yRange } from "./axes.js";
import { isNumber } from "./format.js";
import { drawMarks, markAt } from "./marks.js";
import { smooth } from "./smooth.js";

/**
 * A line: the points of one run, or of one part of a whole.
 * @typedef {object} Line
 * @property {string} run
 * @property {string} label
 * @property {number} color index into the palette
 * @property {number[]} x
 * @property {(number | null)[]} y
 * @property {(number | null)[] | null} means of all values that a point stands for, if the line was downsampled
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

const FEW_POINTS = 40;
const CLICK_PX = 4;
const DOUBLE_CLICK_MS = 300;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export class Chart {
  /**
   * @param {HTMLElement} root its width is the chart's
   * @param {object} options
   * @param {string} options.unit of the values, as in /api/runs/ID/metrics
   * @param {"step" | "time"} options.x
   * @param {boolean} options.log
   * @param {number} options.smoothing weight of the moving average, 0 for none
   * @param {number} options.smoothingUnit distance of x to which the weight belongs
   * @param {number} options.height
   * @param {LinkedCharts} options.linked
   * @param {Theme} options.theme of js/theme.js
   * @param {(at: {x: number, values: (number | null)[], smoothed: (number | null)[] | null,
   *   isHere: boolean, mark: string | null} | null) => void} options.onCursor
   * @param {((line: Line, x: number, index: number) => void) | null} options.onOpen click on a point
   */
  constructor(root, options) {
    this.root = root;
    this.options = options;
    this.lines = [];
    this.marks = [];
    this.plot = null;
    this.removers = [
      options.linked.onRange((range) => this.#applyRange(range)),
      options.theme.on(() => this.plot?.redraw(false)),
    ];
    this.resizer = new ResizeObserver(() => this.#resize());
    this.resizer.observe(root);
  }

  /** Show these lines and marks ({x, kind, text, color}). @param {Line[]} lines */
  setLines(lines, marks = []) {
    const sameShape =
      this.plot && lines.length === this.lines.length && lines.every((line, i) => line.color === this.lines[i].color);
    this.lines = lines;
    this.marks = marks;
    if (!sameShape) this.#build();
    else this.plot.setData(this.#data(), true);
  }

  /** Change log, smoothing, x, height. */
  setOptions(changes) {
    const isSame = Object.entries(changes).every(([key, value]) => this.options[key] === value);
    Object.assign(this.options, changes);
    if (this.plot && !isSame) this.#build();
  }

  destroy() {
    this.removers.forEach((remove) => remove());
    this.resizer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** Each line has two series: the raw values (faint if smoothed), then the smoothed ones. */
  #data() {
    const { log, smoothing, smoothingUnit } = this.options;
    const shown = (y) => (log ? y.map((value) => (isNumber(value) && value > 0 ? value : null)) : y);
    const tables = this.lines.map((line) => {
      const raw = shown(line.y);
      // Extremes are all that a downsampled curve keeps; its average has to be that of all its values.
      const values = line.means ? shown(line.means) : raw;
      return [line.x, raw, smoothing > 0 ? smooth(line.x, values, smoothing, smoothingUnit) : raw.map(() => null)];
    });
    if (!tables.length) return [[]];
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  #build() {
    this.plot?.destroy();
    const { theme, linked, log, unit, x, smoothing } = this.options;
    const axis = {
      font: FONT,
      stroke: () => theme.color("--muted"),
      ticks: { show: false },
      grid: { stroke: () => theme.color("--grid"), width: 1 },
    };
    this.plot = new uPlot(
      {
        width: Math.max(this.root.clientWidth, 120),
        height: this.options.height,
        padding: [8, 20, 0, 0],
        legend: { show: false },
        focus: { alpha: 1 },
        scales: {
          x: { time: false, range: (_, low, high) => linked.range ?? xRange(...(linked.full ?? [low, high])) },
          y: { distr: log ? 3 : 1, range: (_, low, high) => yRange(low, high, log) },
        },
        axes: [
          { ...axis, ...xAxis(x) },
          { ...axis, ...yAxis(unit, log) },
        ],
        series: [{}, ...this.lines.flatMap((line) => this.#series(line))],
        cursor: {
          // `click` would hold back clicks of which uPlot saw no move before; ours tell them from drags themselves.
          drag: { x: true, y: false, setScale: false, dist: CLICK_PX, click: () => {} },
          sync: { key: linked.key, setSeries: false, scales: ["x", null], filters: { pub: isCursor, sub: isCursor } },
          points: { size: (_, series) => (smoothing > 0 && series % 2 ? 5 : 7), width: 0 },
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
          drawAxes: [(plot) => drawMarks(plot, this.marks, theme)],
        },
      },
      this.#data(),
      this.root,
    );
    this.#listenToClicks();
  }

  #series(line) {
    const { theme, smoothing } = this.options;
    const color = () => theme.series(line.color);
    const isFew = line.x.length <= FEW_POINTS;
    const raw = {
      stroke: smoothing > 0 ? () => faint(color()) : color,
      width: smoothing > 0 ? 1 : 1.5,
      points: { show: isFew && !(smoothing > 0), size: 4, width: 0, fill: color, filter: lonely },
    };
    return [raw, { show: smoothing > 0, stroke: color, width: 1.75, points: { show: false } }];
  }

  #applyRange(range) {
    if (!this.plot) return;
    const [low, high] =
      range ?? xRange(...(this.options.linked.full ?? [this.plot.data[0][0], this.plot.data[0].at(-1)]));
    if (isNumber(low) && isNumber(high)) this.plot.setScale("x", { min: low, max: high });
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < CLICK_PX) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.linked.setRange(range);
  }

  #cursor(plot) {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) return this.options.onCursor(null);
    const values = this.lines.map((_, i) => nearest(plot.data[i * 2 + 1], idx));
    const smoothed = this.options.smoothing > 0 ? this.lines.map((_, i) => nearest(plot.data[i * 2 + 2], idx)) : null;
    const isHere = plot.over.matches(":hover"); // not in a linked chart
    const mark = isHere ? markAt(plot, this.marks, left) : null;
    return this.options.onCursor({ x: plot.data[0][idx], values, smoothed, isHere, mark });
  }

  #listenToClicks() {
    const { onOpen, linked } = this.options;
    const plot = this.plot;
    let downX = 0;
    let opening = 0;
    plot.over.addEventListener("mousedown", (event) => (downX = event.clientX));
    plot.over.addEventListener("dblclick", () => clearTimeout(opening));
    plot.over.addEventListener("click", (event) => {
      clearTimeout(opening);
      if (!onOpen || event.detail > 1 || Math.abs(event.clientX - downX) >= CLICK_PX) return;
      const point = this.#pointAt(event);
      // While zoomed, a second click may follow, which resets the zoom.
      if (point) opening = setTimeout(() => onOpen(...point), linked.range ? DOUBLE_CLICK_MS : 0);
    });
  }

  /** The line nearest to a click, with x and index of its point there; null if there is none. */
  #pointAt(event) {
    // The plot's own cursor moves with the next frame only, which comes after a tap.
    const area = this.plot.over.getBoundingClientRect();
    const top = event.clientY - area.top;
    const x = this.plot.data[0][this.plot.posToIdx(event.clientX - area.left)];
    const far = (line) => Math.abs(this.plot.valToPos(line.y[line.x.indexOf(x)], "y") - top);
    const [line] = this.lines.filter((one) => isNumber(one.y[one.x.indexOf(x)])).sort((a, b) => far(a) - far(b));
    return line ? [line, x, line.x.indexOf(x)] : null;
  }

  #resize() {
    const width = this.root.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
  }
}

const isCursor = (type) => type === "mousemove" || type === "mouseleave";

/** The value at an index, or the closest earlier one of another run's points. */
function nearest(y, index) {
  for (let i = index; i >= 0 && y[i] !== null; i -= 1) if (isNumber(y[i])) return y[i];
  return null;
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

function faint(color) {
  return /^#[0-9a-f]{6}$/i.test(color) ? `${color}59` : color;
}
