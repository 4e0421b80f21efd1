// What is folded below the charts: configuration, memory, warnings, log.

import { runPath } from "cohort/api.js";
import { ago, bytes, count, dateTime, isNumber } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html, useLayoutEffect, useRef, useState } from "cohort/preact.js";
import { Chip, CopyButton, Empty, Failure, Fold, Linkify, Loading, Problems, Select, Table } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";
import { StepLink } from "cohort/run/state.js";
import { valueText } from "cohort/run/runs_table.js";

const code = (text) => html`<code>${visibleLine(String(text))}</code>`;
const visibleLines = (lines) => lines.map(visibleLine).join("\n");

/** What to show until an answer is there. */
function waiting({ error, reload }) {
  return error ? html`<${Failure} error=${error} retry=${reload} />` : html`<${Loading} />`;
}

/** Changed keys, the whole configuration, command, versions and starts. */
export function Configuration({ id }) {
  const answer = useData(runPath(id, "config"), ["events"]);
  const { data } = answer;
  if (!data) return waiting(answer);
  const { yaml, command, starts } = data;
  const last = starts?.at(-1);
  const versions = Object.entries(data.versions ?? {});
  const about = [["Commit", data.commit], ["Host", last?.host], ["Processes", last?.processes], ...versions];
  const fact = ([label, value]) =>
    html`<div key=${label}><dt>${visibleLine(label)}</dt><dd>${visibleLine(String(value))}</dd></div>`;
  return html`<div class="stack">
    <${Problems} list=${data.problems} />
    ${yaml
      ? html`<${ChangedKeys} keys=${data.changed} />
          <${Fold} name="yaml" title="Whole configuration">
            <div><${CopyButton} label="Copy YAML" text=${() => yaml} /></div>
            <pre class="long-text" tabindex="0" aria-label="YAML">${visibleLines(yaml.split("\n"))}</pre>
          <//>`
      : html`<${Empty} title="config.yaml is missing, empty or cannot be read." />`}
    ${command &&
    html`<p class="command">${code(command)} <${CopyButton} label="Copy command" text=${() => visibleLine(command)} /></p>`}
    <dl class="facts">${about.filter(([, value]) => value).map(fact)}</dl>
    ${starts?.length > 1 && html`<${Starts} starts=${starts} />`}
  </div>`;
}

function ChangedKeys({ keys }) {
  if (!keys.length) return html`<p class="muted">Every key has its default value.</p>`;
  const defaultOf = (row) => (row.default === null ? "–" : valueText(row.default));
  const columns = [
    { label: "Key", value: (row) => code(row.key) },
    { label: "Value", class: "wrap", value: (row) => code(valueText(row.value)) },
    { label: "Default", class: "wrap muted", value: (row) => code(defaultOf(row)) },
  ];
  const props = { caption: "Keys that differ from their defaults", columns, rows: keys, keyOf: (row) => row.key };
  return html`<div class="changed-keys"><${Table} ...${props} /></div>`;
}

function Starts({ starts }) {
  const columns = [
    { label: "Started", value: (start) => dateTime(start.timestamp) },
    { label: "After step", align: "right", value: (start) => count(start.steps_done ?? start.step) },
    { label: "Process", align: "right", value: (start) => String(start.pid ?? "–") },
    { label: "Host", value: (start) => visibleLine(String(start.host ?? "–")) },
  ];
  return html`<h3>Started ${starts.length} times</h3>
    <${Table} caption="Starts of this run" columns=${columns} rows=${starts} />`;
}

/** "Memory per process: peak 922 MB of 80 GB, 815 MB planned: 13% above the plan." */
export function Memory({ memory }) {
  const { peak_bytes: peak, predicted_bytes: predicted, capacity_bytes: capacity, verdict } = memory;
  if (!isNumber(peak) && !isNumber(predicted)) return null;
  const of = isNumber(capacity) ? ` of ${bytes(capacity)}` : "";
  const measured = isNumber(peak) ? `peak ${bytes(peak)}${of}` : "not measured yet";
  const planned = isNumber(predicted) && `${bytes(predicted)} planned${verdict ? `: ${verdict}` : ""}`;
  return html`<p><strong>Memory per process:</strong> ${[measured, planned].filter(Boolean).join(", ")}.</p>`;
}

/** What the run warned of, newest first. @param {{list: object[], total: number}} props equal ones once, the newest last */
export function Warnings({ id, list, total }) {
  return html`${total > list.length && html`<p class="muted">The newest ${count(list.length)} of ${count(total)}:</p>`}
  <ul class="plain-list">${[...list].reverse().map(
    ({ text, num, step, timestamp }) => html`<li key=${text}>
      <p class="wrap"><${Linkify} text=${text} /> ${num > 1 && html`<${Chip}>× ${count(num)}<//>`}</p>
      <p class="dotted small muted">
        ${isNumber(step) && html`<span><${StepLink} id=${id} step=${step}>Step ${count(step)}<//></span>`}
        ${isNumber(timestamp) && html`<span>${ago(timestamp)}</span>`}
      </p>
    </li>`,
  )}</ul>`;
}

/** The last lines of the run's logs; new ones come into view if the end was. */
export function Log({ id }) {
  const [chosen, choose] = useState(null);
  const answer = useData(runPath(id, "log", { name: chosen }), ["status", "metrics", "events"]);
  const kept = useRef(null); // of the file before, until the chosen one is there
  const data = (kept.current = answer.data ?? kept.current);
  const pre = useRef(null);
  const isAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (pre.current && isAtEnd.current) pre.current.scrollTop = pre.current.scrollHeight;
  }, [data]);
  if (!data) return waiting(answer);
  if (!data.files.length) return html`<p class="muted">This run wrote no logs.</p>`;
  const follow = ({ target }) => {
    isAtEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 8;
  };
  const names = data.files.map((file) => [file.name, `${visibleLine(file.name)} (${bytes(file.bytes)})`]);
  const text = visibleLines(data.lines);
  return html`<div class="stack tight">
    <${Problems} list=${data.problems} />
    <div class="row spread">
      ${names.length > 1
        ? html`<${Select} label="File" options=${names} value=${data.name} onChange=${choose} />`
        : html`<span class="muted">${names[0][1]}</span>`}
      <${CopyButton} label="Copy" text=${() => data.lines.join("\n")} />
    </div>
    <pre class="long-text" tabindex="0" aria-label="Last lines of the log" ref=${pre} onScroll=${follow}>${text}</pre>
  </div>`;
}
