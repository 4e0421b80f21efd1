// Charts of all metrics of one or several runs: the toolbar, an overview, and the groups. Used by the views of curves and
// of a comparison.

import { ChartCard } from "./chart_card.js";
import { LinkedCharts } from "./chart.js";
import { CurveData } from "./curve_data.js";
import { curvesToolbar } from "./curves_toolbar.js";
import { h, replace } from "./dom.js";
import { plural } from "./format.js";
import { findMetrics, groupsOf, overviewOf } from "./metric_choice.js";
import { splitList } from "./router.js";
import { empty } from "./ui.js";

const FEW_STEPS = 200; // below, curves are drawn as they are: smoothing would hide a jump

export class CurvesPanel {
  /**
   * @param {HTMLElement} root
   * @param {object} context of the view
   * @param {{runs: string[], query: Record<string, string>, hrefOf: (names: string[] | null) => string, beside?: Node | null}} place
   */
  constructor(root, context, { runs, query, hrefOf, beside = null }) {
    Object.assign(this, { root, context, runs, hrefOf, beside, setQuery: (changes) => context.setQuery(changes) });
    const steps = Math.max(...runs.map((run) => context.runs.find(({ id }) => id === run)?.step ?? 0));
    this.options = {
      x: query.x === "time" ? "time" : "step",
      log: query.log === "1",
      smoothing: Math.min(0.99, Math.max(0, Number(query.smooth ?? (steps < FEW_STEPS ? 0 : 0.6)) || 0)),
    };
    this.names = query.names ? splitList(query.names) : null;
    this.search = query.find ?? "";
    this.opened = new Set(splitList(query.open)); // groups of metrics
    this.linked = new LinkedCharts();
    this.cards = [];
    this.metrics = [];
    this.content = h("div.chart-sections");
    this.observer = new IntersectionObserver(
      (entries) => entries.forEach((entry) => this.cardOf.get(entry.target)?.setVisible(entry.isIntersecting)),
      { rootMargin: "120px" },
    );
    this.cardOf = new Map();
    this.removeRangeListener = this.linked.onRange((range) => this.#zoomed(range));
    this.#newData();
  }

  /** Read the list of metrics and show what the query asks for. */
  async load() {
    this.metrics = await this.#readMetrics();
    this.toolbar = curvesToolbar({
      options: this.options,
      search: this.search,
      beside: this.beside,
      onFind: (text) => this.#find(text),
      onSmoothing: (smoothing) => this.#change({ smoothing }),
      onSmoothingDone: (smoothing) => this.setQuery({ smooth: smoothing }),
      onLog: (log) => {
        this.#change({ log });
        this.setQuery({ log: log ? 1 : null });
      },
      onX: (x) => this.#changeX(x),
      onResetZoom: () => this.linked.setRange(null),
    });
    replace(this.root, this.toolbar.node, this.content);
    this.#show();
  }

  /** There are new points: fetch those in view; others when they come into view. */
  async refresh() {
    if (document.hidden) {
      this.isBehind = true;
      document.addEventListener("visibilitychange", () => this.isBehind && this.refresh(), { once: true });
      return;
    }
    this.isBehind = false;
    const metrics = await this.#readMetrics();
    const isNew = metrics.length !== this.metrics.length;
    this.metrics = metrics;
    this.data.forget();
    if (isNew) this.#show();
    else this.cards.forEach((card) => card.refresh());
  }

  /** A change of a run's files. */
  update(change) {
    const isShown = this.runs.includes(change.run) && ["metrics", "events"].some((part) => change.parts.includes(part));
    return isShown ? this.refresh() : null;
  }

  addKeys() {
    const { keys } = this.context;
    keys.add("0", "Reset the zoom", () => this.linked.setRange(null));
    keys.add("l", "Log scale on or off", () => this.root.querySelector("input[type=checkbox]").click());
    keys.addList(() => [...this.root.querySelectorAll("a.chart-name, .chart-group > summary")], "chart");
  }

  destroy() {
    this.removeRangeListener();
    this.observer.disconnect();
    this.#clear();
  }

  /** Color index of a run. */
  colorOf = (run) => Math.max(0, this.runs.indexOf(run));

  #newData() {
    this.data = new CurveData(this.context.api, this.context.signal, { runs: this.runs, x: this.options.x });
  }

  /** Metrics of all runs; those of the first run come first. */
  async #readMetrics() {
    const { api, signal } = this.context;
    const lists = await Promise.all(this.runs.map((run) => api.get(api.runPath(run, "metrics"), { signal })));
    const byName = new Map();
    lists
      .flatMap((list) => list.metrics)
      .forEach((metric) => byName.has(metric.name) || byName.set(metric.name, metric));
    return [...byName.values()].filter((metric) => metric.num_points > 0);
  }

  #change(options) {
    Object.assign(this.options, options);
    this.cards.forEach((card) => card.setOptions(this.options));
  }

  #changeX(x) {
    this.options.x = x;
    this.setQuery({ x: x === "step" ? null : x });
    this.linked.full = null;
    this.linked.setRange(null);
    this.#newData();
    this.cards.forEach((card) => card.refresh());
  }

  #zoomed(range) {
    this.toolbar?.showZoom(Boolean(range));
    clearTimeout(this.zoomTimer);
    this.zoomTimer = setTimeout(() => this.cards.forEach((card) => card.refresh()), 60);
  }

  #find(text) {
    this.search = text.trim();
    this.setQuery({ find: this.search || null });
    this.#show();
  }

  #clear() {
    this.cards.forEach((card) => {
      this.observer.unobserve(card.node);
      card.destroy();
    });
    this.cards = [];
    this.cardOf.clear();
  }

  #show() {
    this.#clear();
    if (!this.metrics.length) {
      const advice = "The first ones come with the end of the first step; this page shows them then.";
      return replace(this.content, empty("There are no metrics yet.", advice));
    }
    if (this.search) return replace(this.content, this.#found());
    if (this.names) return replace(this.content, this.#chosen());
    const overview = overviewOf(this.metrics);
    return replace(
      this.content,
      overview.length > 0 && this.#grid(overview),
      groupsOf(this.metrics).map(([name, metrics]) => this.#section(name, metrics)),
    );
  }

  #found() {
    const found = findMetrics(this.metrics, this.search);
    if (!found.length) {
      const advice = "Search looks at names, groups and descriptions. Clear the field to see all.";
      return empty(`No metric matches “${this.search}”.`, advice);
    }
    return [
      h("p.muted", { role: "status" }, `${plural(found.length, "metric")} of ${this.metrics.length}`),
      this.#grid(found),
    ];
  }

  #chosen() {
    const chosen = this.names.map((name) => this.metrics.find((metric) => metric.name === name)).filter(Boolean);
    const missing = this.names.filter((name) => !this.metrics.some((metric) => metric.name === name));
    const isOne = chosen.length === 1;
    return [
      h("p", null, h("a", { href: this.hrefOf(null) }, "← All metrics")),
      missing.length > 0 &&
        h(
          "p.muted",
          null,
          `Not recorded in ${this.runs.length === 1 ? "this run" : "these runs"}: ${missing.join(", ")}`,
        ),
      isOne && chosen[0].description && h("p.chart-description", null, chosen[0].description),
      this.#grid(
        chosen,
        isOne ? { height: 400 } : { height: 240 },
        isOne ? "one" : chosen.length === 2 || chosen.length === 4 ? "two" : "",
      ),
    ];
  }

  /** A group, folded; its charts are made when it is opened first. */
  #section(name, metrics) {
    const details = h(
      "details.chart-group",
      null,
      h("summary", null, h("h2", null, name), h("span.muted", null, plural(metrics.length, "metric"))),
    );
    const fill = () => details.open && details.childElementCount === 1 && details.append(this.#grid(metrics));
    details.addEventListener("toggle", () => {
      fill();
      if (details.open) this.opened.add(name);
      else this.opened.delete(name);
      this.setQuery({ open: [...this.opened] });
    });
    details.open = this.opened.has(name);
    fill();
    return details;
  }

  #grid(metrics, look = {}, columns = "") {
    const cards = metrics.map(
      (metric) =>
        new ChartCard(metric, this, { ...look, href: this.names?.length === 1 ? null : this.hrefOf([metric.name]) }),
    );
    cards.forEach((card) => {
      this.cards.push(card);
      this.cardOf.set(card.node, card);
      this.observer.observe(card.node);
    });
    return h(
      "div.chart-grid",
      { class: columns },
      cards.map((card) => card.node),
    );
  }
}
