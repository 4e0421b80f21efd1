// The runs that are shown together: their colors, results, and the keys in which their configurations differ.

import { path } from "cohort/api.js";
import { number, percent } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { stateChip, Table } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";

const LONGEST = 40; // characters of a value; of paths, the end is what differs

/** A configuration value in one line, as YAML would write it. */
export function valueText(value) {
  if (value === null || value === undefined) return "null";
  return visibleLine(typeof value === "string" ? value : JSON.stringify(value));
}

/**
 * @param {{id: string, runs: string[], entries: object[], lists: object[][], show: (others: string[]) => void}} props
 *   `entries` of /api/runs, `lists` of metrics of each run, `show` changes which runs are over the first
 */
export function RunsTable({ id, runs, entries, lists, show }) {
  const { data } = useData(path("/api/differences", { runs }));
  const last = (run, name) => lists[runs.indexOf(run)]?.find((metric) => metric.name === name)?.last;
  const remove = (run) => {
    const others = runs.filter((other) => other !== run && other !== id);
    const props = { type: "button", "aria-label": `Remove ${visibleLine(run)}`, onClick: () => show(others) };
    return html`<button class="icon-button" ...${props}>✕</button>`;
  };
  const name = (run) => html`
    <span class="stroke" style=${{ background: `var(--series-${runs.indexOf(run) + 1})` }}></span>${" "}
    <a href=${link.run(run)}>${visibleLine(run)}</a>${" "}
    ${run !== id && remove(run)}
  `;
  const columns = [
    { label: "Run", class: "nowrap", value: name },
    { label: "State", value: (run) => stateChip(entries.find((entry) => entry.id === run)?.state) },
    { label: "Reward", align: "right", value: (run) => number(last(run, "reward")) },
    { label: "Held-out", align: "right", value: (run) => percent(last(run, "eval/accuracy")) },
    ...(data?.keys ?? []).map(({ key, values }) => ({
      label: visibleLine(key),
      class: "mono nowrap",
      value: (run) => difference(values, run, data.unknown),
    })),
  ];
  const isSame = data && !data.keys.length && runs.length - data.unknown.length > 1;
  const unknown = data?.unknown.map(visibleLine).join(", ");
  const caption = "Runs, and the configuration keys in which they differ";
  return html`<section class="card runs-table" aria-label="Runs">
    <${Table} caption=${caption} columns=${columns} rows=${runs} keyOf=${(run) => run} />
    ${isSame && html`<p class="muted">Their configurations are the same.</p>`}
    ${unknown && html`<p class="muted">Not compared, since config.yaml is missing or cannot be read: ${unknown}.</p>`}
  </section>`;
}

function difference(values, run, unknown) {
  if (unknown.includes(run)) return "";
  if (!Object.hasOwn(values, run)) return html`<span class="muted">not set</span>`;
  const text = valueText(values[run]);
  return text.length > LONGEST ? html`<span title=${text}>…${text.slice(1 - LONGEST)}</span>` : text;
}
