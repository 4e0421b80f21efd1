// All metrics of a run: by group, or those that a search finds.

import { count } from "cohort/format.js";
import { html, useMemo } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { Empty, Fold } from "cohort/ui.js";
import { MetricCharts, metricSpec } from "cohort/run/charts.js";
import { metricWords } from "cohort/run/words.js";

/** @param {{id: string, metrics: object[], query: object, setQuery: Function}} props all others go to the charts */
export function AllMetrics({ id, metrics, query, setQuery, ...props }) {
  const find = (query.find ?? "").trim();
  const found = useMemo(() => find && findMetrics(metrics, find), [metrics, find]);
  const hrefOf = (name) => link.run(id, { ...query, names: [name] });
  const charts = (list) => html`<${MetricCharts} specs=${list.map(metricSpec)} hrefOf=${hrefOf} ...${props} />`;
  const search = ({ target }) => setQuery({ find: target.value });
  return html`<div class="stack tight">
    <div class="row">
      <input class="input metric-search" type="search" placeholder="Find a metric" aria-label="Find a metric"
        value=${query.find ?? ""} onInput=${search} />
      <span class="muted" role="status">${found && `${count(found.length)} of ${count(metrics.length)}`}</span>
    </div>
    ${!found &&
    [...Map.groupBy(metrics, (metric) => metric.group)].map(
      ([name, list]) =>
        html`<${Fold} key=${name} name=${`metrics ${name}`} title=${name} summary=${count(list.length)}>
          ${charts(list)}
        <//>`,
    )}
    ${found && found.length > 0 && charts(found)}
    ${found && !found.length && html`<${Empty} title=${`No metric matches “${find}”.`} advice=${NO_MATCH} />`}
  </div>`;
}

const NO_MATCH = "Search looks at names, groups and descriptions. Clear the field to see all.";

/** The metrics that have all words in their name, group or description; those with all in their name come first. */
function findMetrics(metrics, text) {
  const words = text.toLowerCase().split(/\s+/);
  const has = (place) => words.every((word) => place.toLowerCase().includes(word));
  const nameOf = ({ name }) => `${name} ${metricWords(name)}`;
  const found = metrics.filter((metric) => has(`${nameOf(metric)} ${metric.group} ${metric.description}`));
  return found.sort((a, b) => Number(has(nameOf(b))) - Number(has(nameOf(a))));
}
