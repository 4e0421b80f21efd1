// The runs of a chart: their colors, in what they differ, one more or one less.

import { h } from "./dom.js";
import { link } from "./router.js";

const LEGEND_KEYS = 4;
const LEGEND_CHARACTERS = 28;

/** Most runs over each other: there are as many colors. */
export const MOST_RUNS = 8;

/** A choice of one more run for the charts, or null if there is none. @param {string[]} runs those shown */
export function runAdder(context, runs, onAdd) {
  const free = context.runs.filter((run) => !runs.includes(run.id));
  if (!free.length || runs.length >= MOST_RUNS) return null;
  return h(
    "select.select",
    {
      "aria-label": "Add a run to the charts",
      on: { change: (event) => event.target.value && onAdd(event.target.value) },
    },
    h("option", { value: "" }, "Compare with…"),
    free.map((run) => h("option", { value: run.id }, run.id)),
  );
}

/**
 * The runs that are shown, with their colors and the configuration keys in which they differ.
 * @param {object} context
 * @param {string[]} runs
 * @param {(run: string) => void} onRemove
 * @param {string | null} fixed a run that cannot be removed
 */
export async function runLegend(context, runs, onRemove, fixed = null) {
  const { api, signal } = context;
  const { keys, unknown } =
    runs.length > 1 ? await api.get(api.path("/api/differences", { runs }), { signal }) : { keys: [], unknown: [] };
  // Values that fit first: paths and lists say less.
  const shown = [...keys].sort((one, other) => longest(one) - longest(other)).slice(0, LEGEND_KEYS);
  return h(
    "ul.run-legend",
    { "aria-label": "Runs" },
    runs.map((run, index) =>
      h(
        "li",
        null,
        h("span.stroke", { class: `series-${(index % 8) + 1}`, "aria-hidden": "true" }),
        h("a.legend-name", { href: link.now(run) }, run),
        unknown.includes(run)
          ? h("span.legend-keys.muted", null, "configuration not known")
          : h(
              "span.legend-keys",
              { title: keys.map((key) => `${key.key}: ${valueText(key.values[run])}`).join("\n") },
              shown.map((key) =>
                h(
                  "span",
                  null,
                  h("span.muted", null, `${key.key} `),
                  ending(valueText(key.values[run]), LEGEND_CHARACTERS),
                ),
              ),
              keys.length > shown.length && h("span.muted", null, `and ${keys.length - shown.length} more`),
            ),
        run !== fixed &&
          h(
            "button.icon-button.legend-remove",
            {
              type: "button",
              "aria-label": `Remove ${run}`,
              title: "Remove from the charts",
              on: { click: () => onRemove(run) },
            },
            "✕",
          ),
      ),
    ),
  );
}

const longest = (key) => Math.max(...Object.values(key.values).map((value) => valueText(value).length));

/** The end of a text, which for paths is what differs. */
function ending(text, characters) {
  return text.length > characters ? `…${text.slice(1 - characters)}` : text;
}

/** A configuration value as text; a run without the key has none. */
export function valueText(value) {
  if (value === undefined) return "not set";
  return typeof value === "string" ? value : JSON.stringify(value);
}
