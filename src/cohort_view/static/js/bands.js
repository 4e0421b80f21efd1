// Small charts beside tables: lines with a confidence band, and stacked layers. Curves of metrics are in chart.js.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { saveCsv } from "./csv.js";
import { h, replace } from "./dom.js";
import { drawMarks, markAt } from "./marks.js";

const HEIGHT = 240;

/**
 * Lines over steps: `lines` are {label, values, low?, high?}, the last two a band around it. `range`: limits of y, null for
 * the data's; `marks`: {x, kind, text} of what happened to the run; `name` of its CSV file. Returns {node, destroy()}.
 */
export function lineChart({ name, x, lines, marks, format, xLabel, range = [null, null], theme }) {
  const entries = lines.map(({ label, values }, index) => ({ label, color: index, text: (at) => format(values[at]) }));
  const columns = lines.flatMap(({ label, values, low, high }) => [
    [label, values],
    ...(low && high ? [[`${label}, low`, low], [`${label}, high`, high]] : []),
  ]);
  return follow({ name, columns, theme, x, xLabel, entries, marks }, (width) => {
    const data = [x];
    const series = [{}];
    const bands = [];
    lines.forEach(({ values, low, high }, index) => {
      const color = theme.series(index);
      series.push({ stroke: color, width: 2, points: { show: x.length <= 40, size: 6, fill: color } });
      data.push(values);
      if (!low || !high) return;
      bands.push({ series: [series.length, series.length + 1], fill: alpha(color, 0.16) });
      for (const bound of [high, low]) {
        series.push({ stroke: "transparent", width: 0, points: { show: false } });
        data.push(bound);
      }
    });
    return [{ ...common({ width, theme, xLabel, format, range }), series, bands }, data];
  });
}

/** Layers on top of each other: {label, values, color: index of a series color}; the first is at the bottom. */
export function stackedChart({ name, x, layers, marks, format, xLabel, theme }) {
  const sums = [];
  let below = x.map(() => 0);
  for (const { values } of layers) {
    below = below.map((sum, index) => sum + (values[index] ?? 0));
    sums.push(below);
  }
  const entries = layers.map(({ label, color, values }) => ({ label, color, text: (at) => format(values[at] ?? 0) }));
  const columns = layers.map(({ label, values }) => [label, values]);
  return follow({ name, columns, theme, x, xLabel, entries, marks }, (width) => {
    // Highest first, so that each layer's fill is covered by those below it
    const order = layers.map((_, index) => index).reverse();
    const colors = order.map((index) => theme.series(layers[index].color));
    const series = [{}, ...colors.map((color) => ({ stroke: color, width: 1, points: { show: false } }))];
    series.at(-1).fill = alpha(colors.at(-1), 0.75);
    const bands = colors
      .slice(0, -1)
      .map((color, index) => ({ series: [index + 1, index + 2], fill: alpha(color, 0.75) }));
    return [
      { ...common({ width, theme, xLabel, format, range: [0, null] }), series, bands },
      [x, ...order.map((index) => sums[index])],
    ];
  });
}

function common({ width, theme, xLabel, format, range }) {
  const axis = {
    stroke: theme.color("--muted"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: theme.color("--grid"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: { range: (_, low, high) => limits(low, high, range) } },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 30,
        label: xLabel,
        labelSize: 20,
        labelFont: axis.font,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000],
        values: (_, steps) => steps.map((step) => step.toLocaleString("en-US")),
      },
      { ...axis, size: 64, values: (_, values) => values.map(format) },
    ],
    cursor: { points: { size: 7 }, drag: { x: false, y: false } },
    legend: { show: false },
  };
}

function limits(low, high, [least, most]) {
  const bottom = least ?? low ?? 0;
  const top = most ?? (high ?? 1) * 1.05;
  return top > bottom ? [bottom, top] : [bottom, bottom + 1];
}

/** A color, given as #rrggbb, that lets what is below show through. */
function alpha(color, share) {
  return (
    color +
    Math.round(share * 255)
      .toString(16)
      .padStart(2, "0")
  );
}

/** A chart that keeps the width of its place and the colors of the theme, above a legend with the values at the cursor. */
function follow({ name, columns, theme, x, xLabel, entries, marks = [] }, build) {
  const place = h("div.band-plot", null);
  const legend = h("div.band-legend.small", null);
  let chart = null;
  const tell = (at, mark = null) =>
    replace(
      legend,
      at !== null && h("span.muted", null, `${xLabel} ${x[at].toLocaleString("en-US")}`),
      entries.map(({ label, color, text }) =>
        h(
          "span.legend-item",
          null,
          h(`span.swatch.series-${(color % 8) + 1}`),
          label,
          at !== null && h("b", null, text(at)),
        ),
      ),
      mark && h("span", null, mark),
    );
  const draw = () => {
    const width = place.clientWidth;
    if (!width) return;
    chart?.destroy();
    const [options, data] = build(width);
    const hooks = {
      setCursor: [
        (plot) => tell(plot.cursor.idx ?? null, plot.cursor.left >= 0 ? markAt(plot, marks, plot.cursor.left) : null),
      ],
      draw: [(plot) => drawMarks(plot, marks, theme)], // above the layers, which would hide them
    };
    chart = new uPlot({ ...options, hooks }, data, place);
  };
  const observer = new ResizeObserver(() =>
    chart ? chart.setSize({ width: place.clientWidth, height: HEIGHT }) : draw(),
  );
  observer.observe(place);
  const forget = theme.on(draw);
  tell(null);
  const save = () =>
    saveCsv(
      `${name}.csv`,
      [xLabel, ...columns.map(([label]) => label)],
      x.map((at, index) => [at, ...columns.map(([, values]) => values[index])]),
    );
  const csv = { type: "button", title: "Download the values as CSV", on: { click: save } };
  return {
    node: h("div.band-chart", null, place, h("div.band-foot", null, legend, h("button.chart-csv", csv, "CSV"))),
    destroy: () => {
      observer.disconnect();
      forget();
      chart?.destroy();
    },
  };
}
