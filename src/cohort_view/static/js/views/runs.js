// All runs of this server: state, progress, reward, accuracy and first finding; select some to compare them.

import { ago, count, number, percent, plural } from "cohort/format.js";
import { useQuery, useRuns } from "cohort/hooks.js";
import { html } from "cohort/preact.js";
import { link, splitList } from "cohort/router.js";
import { Empty, LevelIcon, Select, stateChip } from "cohort/ui.js";
import { MOST_RUNS } from "cohort/views/run.js";
import { visibleLine } from "cohort/visible.js";

const ORDERS = {
  started: ["Newest", (run) => run.started ?? run.updated],
  reward: ["Reward", (run) => run.reward],
  accuracy: ["Held-out accuracy", (run) => run.accuracy],
  name: ["Name", null],
};
const HEADS = ["State", "Step", "Reward", "Held-out", "Model", "Finding"];
const NUMBERS = ["Step", "Reward", "Held-out"];

export function RunsView() {
  const runs = useRuns();
  const [query, setQuery] = useQuery();
  if (!runs.length) {
    const advice = "Start one with `cohort train` or `cohort demo`; it appears here once its folder exists.";
    return html`<h1>Runs</h1><${Empty} title="There are no runs in this folder yet." advice=${advice} />`;
  }
  const chosen = splitList(query.with).filter((id) => runs.some((run) => run.id === id));
  const choose = (id) => setQuery({ with: chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id] });
  const sort = query.sort in ORDERS ? query.sort : "started";
  const shown = sorted(runs.filter(matching(query.find ?? "")), ORDERS[sort][1]);
  return html`
    <div class="row"><h1>Runs</h1><span class="muted">${plural(runs.length, "run")}</span></div>
    ${runs.length > 1 && html`
      <div class="row">
        <input class="input" type="search" placeholder="Find a run" aria-label="Find a run" value=${query.find ?? ""}
          onInput=${(event) => setQuery({ find: event.target.value })} />
        <${Select} label="Sort by" options=${Object.entries(ORDERS).map(([key, [label]]) => [key, label])} value=${sort}
          onChange=${(key) => setQuery({ sort: key === "started" ? null : key })} />
        ${chosen.length > 1
          ? html`<a class="button primary" href=${link.run(chosen[0], { with: chosen.slice(1) })}>
              Compare ${plural(chosen.length, "run")}
            </a>`
          : html`<span class="muted">Select two or more to compare them</span>`}
      </div>
    `}
    ${!shown.length && html`<p class="muted">No run matches “${query.find}”.</p>`}
    ${shown.length > 0 && html`
      <table class="table runs">
        <caption class="visually-hidden">Runs</caption>
        <thead>
          <tr>
            <th scope="col"><span class="visually-hidden">Compare</span></th>
            <th scope="col">Run</th>
            ${HEADS.map((head) => html`<th scope="col" class=${NUMBERS.includes(head) ? "right" : ""}>${head}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${shown.map((run) => html`<${Run} key=${run.id} ...${{ run, chosen, choose }} />`)}
        </tbody>
      </table>
    `}
  `;
}

function Run({ run, chosen, choose }) {
  const isChosen = chosen.includes(run.id);
  const isFull = !isChosen && chosen.length >= MOST_RUNS;
  const about = [run.path, run.algorithm, run.updated && `changed ${ago(run.updated)}`].filter(Boolean).join("; ");
  return html`
    <tr>
      <td>
        <input type="checkbox" checked=${isChosen} disabled=${isFull} aria-label=${`Select ${visibleLine(run.id)} to compare`}
          onChange=${() => choose(run.id)} />
      </td>
      <th scope="row" title=${visibleLine(about)}><a class="run-link" href=${link.run(run.id)}>${visibleLine(run.id)}</a></th>
      <td>${stateChip(run.state)}</td>
      <td class="right" data-label="Step">
        ${count(run.step)}${run.steps > 0 && html`<span class="muted"> of ${count(run.steps)}</span>`}
      </td>
      <td class="right" data-label="Reward">${number(run.reward)}</td>
      <td class="right" data-label="Held-out">${percent(run.accuracy)}</td>
      <td class="run-model"><bdi>${visibleLine(run.model ?? "")}</bdi></td>
      <td class="run-finding"><${Finding} run=${run} /></td>
    </tr>
  `;
}

function Finding({ run }) {
  const { banner, gone } = run;
  const text = visibleLine(gone ?? banner?.text ?? whyNone(run));
  const icon = banner && !gone && html`<${LevelIcon} level=${banner.level} />`;
  return html`${icon}<span class=${icon ? "" : "muted"} title=${text}>${text}</span>`;
}

function whyNone(run) {
  if (!(run.step > 0)) return "No step done yet";
  return run.has_all_metrics ? "No findings" : "Open it to see how it goes";
}

function matching(find) {
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  return ({ id, name, model, algorithm, path }) =>
    words.every((word) => [id, name, model, algorithm, path].join(" ").toLowerCase().includes(word));
}

function sorted(runs, value) {
  if (!value) return runs.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  return runs.sort((a, b) => (value(b) ?? -Infinity) - (value(a) ?? -Infinity));
}
