// Memory as a bar: the parts that the plan predicts, the measured peak as a line.

import { h } from "./dom.js";
import { bytes, isNumber } from "./format.js";

const SMALLEST_SHARE = 0.02;
// The plan's parts in the order of colors, which come again after eight: the largest of most runs have one of their own
// prettier-ignore
const COLORED = [
  "weights", "optimizer state", "gradients", "activations", "logprob head", "gathered weights", "framework", "keys and values",
  "adapter", "reference weights", "critic weights", "critic optimizer", "gradient reduction", "logits", "reward model",
];

/** The class with a part's color, the same wherever the part is shown. */
export const partClass = (name) => `series-${((COLORED.indexOf(name) + 8) % 8) + 1}`;

/**
 * @param {{peak_bytes: number | null, predicted_bytes: number | null, capacity_bytes: number | null,
 *   parts: {name: string, bytes: number}[]}} sizes
 */
export function memoryBar({ peak_bytes: peak, predicted_bytes: predicted, capacity_bytes: capacity, parts }) {
  const used = Math.max(peak ?? 0, predicted ?? 0);
  // A machine with far more memory than the run needs would leave nothing of the bar.
  const full = isNumber(capacity) && capacity < used * 4 ? Math.max(capacity, used) : used * 1.1;
  if (!(full > 0)) return null;
  const shown = together(
    (parts ?? []).filter((part) => part.bytes > 0),
    full,
  );
  const bar = h(
    "div.plan-bar",
    { "aria-hidden": "true" },
    shown.map((part) =>
      h("div.plan-part", {
        class: partClass(part.name),
        style: { "--share": part.bytes / full },
        title: `${part.name}: ${bytes(part.bytes)}`,
      }),
    ),
    isNumber(peak) && h("div.plan-peak", { style: { "--share": peak / full }, title: `Peak so far: ${bytes(peak)}` }),
  );
  const legend = h(
    "ul.plan-legend",
    { "aria-label": "The plan's prediction by part" },
    shown.map((part) =>
      h(
        "li",
        null,
        h("span.swatch", { class: partClass(part.name) }),
        part.name,
        h("span.muted", null, ` ${bytes(part.bytes)}`),
      ),
    ),
    isNumber(peak) && h("li", null, h("span.line"), "measured peak", h("span.muted", null, ` ${bytes(peak)}`)),
  );
  return h("div", null, bar, legend);
}

/** Parts, largest first, with all small ones as one. */
function together(parts, full) {
  const sorted = [...parts].sort((a, b) => b.bytes - a.bytes);
  const large = sorted.filter((part) => part.bytes / full >= SMALLEST_SHARE).slice(0, 7);
  const rest = sorted.filter((part) => !large.includes(part));
  if (rest.length <= 1) return [...large, ...rest];
  return [
    ...large,
    { name: rest.map((part) => part.name).join(", "), bytes: rest.reduce((sum, part) => sum + part.bytes, 0) },
  ];
}
