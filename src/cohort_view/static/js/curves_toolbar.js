// The controls above charts: search, smoothing, horizontal axis, log scale, zoom.

import { h } from "./dom.js";
import { segmented } from "./ui.js";

const AXES = [
  ["step", "Steps"],
  ["time", "Time"],
];

/** Build the controls; what they choose goes to the handlers of `props`. Returns {node, showZoom(isZoomed)}. */
export function curvesToolbar(props) {
  const { options, search, beside } = props;
  const find = h("input.input.chart-search", {
    type: "search",
    placeholder: "Find a metric",
    "aria-label": "Find a metric",
    value: search,
    on: { input: (event) => props.onFind(event.target.value) },
  });
  const zoom = h("button.button", { type: "button", hidden: true, title: "Or double-click a chart" }, "Reset zoom");
  zoom.addEventListener("click", props.onResetZoom);
  const log = h("input", { type: "checkbox", checked: options.log });
  log.addEventListener("change", () => props.onLog(log.checked));
  const node = h(
    "div.chart-toolbar",
    { role: "toolbar", "aria-label": "Charts" },
    find,
    smoothingField(props),
    segmented("Horizontal axis", AXES, options.x, props.onX),
    h("label.field", { title: "Values at or below 0 are left out" }, log, "Log scale"),
    zoom,
    beside,
  );
  return {
    node,
    showZoom: (isZoomed) => {
      zoom.hidden = !isZoomed;
    },
  };
}

function smoothingField({ options, onSmoothing, onSmoothingDone }) {
  const shown = h("output.chart-smoothing-value", null, options.smoothing.toFixed(2));
  const range = { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing" };
  const slider = h("input", { ...range, value: options.smoothing });
  slider.addEventListener("input", () => {
    shown.textContent = Number(slider.value).toFixed(2);
    onSmoothing(Number(slider.value));
  });
  slider.addEventListener("change", () => onSmoothingDone(Number(slider.value)));
  const title = "Weight of the moving average; raw values stay visible, faintly";
  return h("label.field", { title }, "Smoothing", slider, shown);
}
