// A card with one metric's chart: its name, the value under the cursor, CSV. It draws itself when it comes into view.

import { Chart } from "./chart.js";
import { saveCsv } from "./csv.js";
import { h, replace } from "./dom.js";
import { inUnit, isNumber, MISSING, number, seconds } from "./format.js";
import { link } from "./router.js";
import { smoothingUnit } from "./smooth.js";

const SHOWN_AS_IS = new Set(["", "s", "seconds", "bytes", "B", "share"]);

export class ChartCard {
  /**
   * @param {{name: string, unit: string, description: string, kind: string}} metric
   * @param {object} panel see js/curves_panel.js: context, runs, data, linked, options, colorOf
   * @param {{height?: number, href?: string}} [look]
   */
  constructor(metric, panel, { height = 168, href = null } = {}) {
    Object.assign(this, { metric, panel, height });
    this.chart = null;
    this.isVisible = false;
    this.isStale = true;
    this.points = null; // those that are drawn
    this.whole = null; // those without zoom
    this.readout = h("div.chart-readout", { class: panel.runs.length > 2 ? "own-line" : "" });
    this.plotRoot = h("div.chart-plot", { role: "img", style: { "min-height": `${height}px` } });
    this.label = h("p.chart-mark", { hidden: true });
    const unit = SHOWN_AS_IS.has(metric.unit) ? null : h("span.chart-unit", null, metric.unit);
    const name = href
      ? h("a.chart-name", { href, title: metric.description || metric.name }, metric.name)
      : h("span.chart-name", null, metric.name);
    this.node = h(
      "article.card.chart-card",
      { "aria-label": metric.name },
      h("header.chart-head", null, h("h3", null, name, unit), (this.csv = this.#csvLink()), this.readout),
      h("div.chart-body", null, this.plotRoot, this.label),
    );
  }

  /** The card came into view, or left it. */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible && this.isStale) this.load();
  }

  /** There may be new points. */
  refresh() {
    this.isStale = true;
    if (this.isVisible) this.load();
  }

  /** Fetch the points of the shown range and draw them. */
  async load() {
    this.isStale = false;
    const { data, linked } = this.panel;
    try {
      let points = await data.get(this.metric.name);
      this.whole = points;
      if (linked.range && points.curves.some((curve) => curve.means)) {
        const [low, high] = linked.range;
        points = await data.get(this.metric.name, [low - (high - low) / 2, high + (high - low) / 2]);
      }
      this.#draw(points);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.isStale = true;
      this.#clear(error.message);
    }
  }

  /** The panel's options changed. */
  setOptions(options) {
    this.chart?.setOptions(this.#chartOptions(options));
    this.#showLast();
  }

  destroy() {
    this.chart?.destroy();
  }

  #draw(points) {
    this.points = points;
    if (!points.curves.some((curve) => curve.y.some(isNumber))) return this.#clear("No values yet");
    const { context, linked, options, colorOf } = this.panel;
    if (!linked.range) points.curves.forEach((curve) => linked.include(curve.x[0], curve.x.at(-1)));
    if (!this.chart) {
      replace(this.plotRoot);
      this.chart = new Chart(this.plotRoot, {
        ...this.#chartOptions(options),
        unit: this.metric.unit,
        height: this.height,
        linked,
        theme: context.theme,
        onCursor: (at) => this.#showCursor(at),
        onOpen: (line, x, index) => this.#open(line, x, index),
      });
    }
    const lines = points.curves.map((curve) => ({
      run: curve.run,
      label: curve.run,
      color: colorOf(curve.run),
      x: curve.x,
      y: curve.y,
      means: curve.means ?? null,
    }));
    this.chart.setOptions(this.#chartOptions(options));
    this.chart.setLines(lines, points.marks);
    this.#showLast();
    const last = points.curves.map((curve) => `${curve.run}: ${this.#text(curve.y.findLast(isNumber))}`).join(", ");
    this.plotRoot.setAttribute("aria-label", `Chart of ${this.metric.name}. Last value of ${last}`);
  }

  #chartOptions({ x, log, smoothing }) {
    if (this.metric.kind === "eval") return { x, log, smoothing: 0, smoothingUnit: 1 }; // few points, each with a meaning
    const [low, high] = this.panel.linked.full ?? [0, 0];
    const steps = Math.max(1, ...(this.whole?.curves ?? []).map((curve) => curve.total));
    return {
      x,
      log,
      smoothing,
      smoothingUnit: smoothingUnit(high - low, x === "step" ? 1 : (high - low) / steps || 1),
    };
  }

  #clear(text) {
    this.chart?.destroy();
    this.chart = null;
    replace(this.plotRoot, h("p.chart-none", null, text));
    replace(this.readout);
  }

  #showLast() {
    if (!this.points?.curves.length) return;
    this.#showValues(
      null,
      this.points.curves.map((curve) => curve.y.findLast(isNumber) ?? null),
    );
  }

  #showCursor(at) {
    this.label.hidden = !at?.mark;
    if (at?.mark) this.label.textContent = at.mark;
    if (!at) return this.#showLast();
    const place = this.panel.options.x === "time" ? seconds(at.x) : `step ${number(at.x)}`;
    return this.#showValues(at.isHere ? place : null, at.values, at.smoothed);
  }

  #showValues(place, values, smoothed = null) {
    const curves = this.points?.curves ?? [];
    const average =
      curves.length === 1 && isNumber(smoothed?.[0])
        ? h("span.chart-place", { title: "smoothed" }, `avg ${this.#text(smoothed[0])}`)
        : null;
    replace(
      this.readout,
      place && h("span.chart-place", null, place),
      curves.map((curve, index) =>
        h(
          "span.chart-value",
          null,
          this.panel.runs.length > 1 &&
            h("span.stroke", { class: `series-${(this.panel.colorOf(curve.run) % 8) + 1}`, title: curve.run }),
          this.#text(values[index]),
        ),
      ),
      average,
    );
  }

  #text(value) {
    return isNumber(value) ? inUnit(value, this.metric.unit) : MISSING;
  }

  async #open(line, x, index) {
    const { context, data, options } = this.panel;
    const curve = this.points.curves.find((one) => one.run === line.run);
    let step = x;
    if (options.x === "time")
      step = curve.steps?.[index] ?? (await this.#stepAt(data, line.run, index, curve.x.length));
    if (!isNumber(step)) return;
    const kind = this.metric.kind === "eval" ? "eval" : null;
    step = Math.round(step);
    if (context.api.hasStep(line.run, step, { kind })) context.navigate(link.step(line.run, step, { kind }));
  }

  /** The step of a point in wall time: the same curve by steps has its points in the same places. */
  async #stepAt(data, run, index, length) {
    const { context } = this.panel;
    const query = { runs: [run], names: [this.metric.name], x: "step" };
    const { curves } = await context.api.get(context.api.path("/api/curves", query));
    return curves[0]?.x.length === length ? curves[0].x[index] : null;
  }

  #csvLink() {
    const { context, runs } = this.panel;
    const name = `${this.metric.name.replaceAll("/", "-")}.csv`;
    const props = { download: name, title: `Download ${this.metric.name} as CSV, all points` };
    if (!context.api.isExport)
      return h(
        "a.chart-csv",
        { ...props, href: context.api.path("/api/curves.csv", { runs, names: [this.metric.name] }) },
        "CSV",
      );
    return h("button.chart-csv", { ...props, type: "button", on: { click: () => this.#saveCsv(name) } }, "CSV");
  }

  /** In an exported report, the points that it has. */
  #saveCsv(name) {
    const rows = (this.points?.curves ?? []).flatMap((curve) => curve.x.map((x, i) => [curve.run, x, curve.y[i]]));
    saveCsv(name, ["run", this.panel.options.x, this.metric.name], rows);
  }
}
