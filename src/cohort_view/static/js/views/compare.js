// Several runs side by side: where they stand, in what their configurations differ, their curves over each other.

import { CurvesPanel } from "../curves_panel.js";
import { h, replace } from "../dom.js";
import { count, number, percent } from "../format.js";
import { link, splitList } from "../router.js";
import { MOST_RUNS, runAdder, runLegend, valueText } from "../run_legend.js";
import { empty, problems, stateChip, table, title } from "../ui.js";
import { whyNoBanner } from "./runs.js";

export async function render(root, params, context) {
  const { query } = params;
  const asked = [...new Set(splitList(query.runs))];
  const isKnown = (id) => context.runs.some((run) => run.id === id);
  const runs = asked.filter(isKnown).slice(0, MOST_RUNS);
  const unknown = asked.filter((id) => !isKnown(id)).map((id) => `There is no run named ${id} here.`);
  const show = (list) => context.navigate(link.compare({ ...params.query, runs: list }));
  context.setTitle("Compare");
  const adder = runAdder(context, runs, (run) => show([...runs, run]));
  if (!runs.length) {
    replace(
      root,
      title("Compare"),
      problems(unknown),
      empty("No runs are selected.", "Select two or more in the list of runs, or add one here."),
      adder,
    );
    return {};
  }
  const summary = h("div");
  const panelRoot = h("div.stack");
  const panel = new CurvesPanel(panelRoot, context, {
    runs,
    query,
    beside: adder,
    hrefOf: (names) =>
      link.compare({
        x: params.query.x,
        log: params.query.log,
        smooth: params.query.smooth,
        names,
        runs,
      }),
  });
  const { api, signal } = context;
  const [legend, differences] = await Promise.all([
    runLegend(context, runs, (run) => show(runs.filter((other) => other !== run))),
    runs.length > 1 ? api.get(api.path("/api/differences", { runs }), { signal }) : { keys: [], unknown: [] },
  ]);
  replace(
    root,
    title("Compare", h("span.muted", null, `${runs.length} of ${context.runs.length} runs`)),
    problems(unknown),
    legend,
    summary,
    panelRoot,
    differenceTable(differences, runs),
  );
  showSummary();
  await panel.load();
  panel.addKeys();

  function showSummary() {
    const entries = runs.map((id) => context.runs.find((run) => run.id === id)).filter(Boolean);
    replace(
      summary,
      table(
        [
          {
            label: "Run",
            class: "nowrap",
            value: (run) => [
              h("span.stroke", { class: `series-${(runs.indexOf(run.id) % 8) + 1}` }),
              " ",
              h("a", { href: link.now(run.id) }, run.id),
            ],
          },
          { label: "State", value: (run) => stateChip(run.state) },
          { label: "Step", align: "right", value: (run) => count(run.step) },
          { label: "Reward", align: "right", value: (run) => number(run.reward) },
          { label: "Held-out accuracy", align: "right", value: (run) => percent(run.accuracy) },
          {
            label: "How it goes",
            class: "wide",
            value: (run) => (run.gone ? null : run.banner?.text) ?? whyNoBanner(run),
          },
        ],
        entries,
        { caption: "Where the runs stand" },
      ),
    );
  }

  return {
    update(change) {
      if (runs.includes(change.run)) showSummary();
      return panel.update(change);
    },
    destroy: () => panel.destroy(),
  };
}

function differenceTable({ keys, unknown }, runs) {
  if (runs.length < 2) return null;
  const known = runs.filter((run) => !unknown.includes(run));
  const note = unknown.length
    ? h("p.muted", null, `Not compared, because config.yaml is missing or cannot be read: ${unknown.join(", ")}.`)
    : null;
  if (known.length < 2) return note;
  if (!keys.length)
    return [note, h("p.muted", null, `The configurations of ${note ? "the other" : "these"} runs are the same.`)];
  const columns = [
    { label: "Key", value: (key) => h("code", null, key.key) },
    ...known.map((run) => ({ label: run, class: "mono", value: (key) => valueText(key.values[run]) })),
  ];
  return h(
    "section.stack",
    null,
    h("h2", null, "Configuration keys that differ"),
    note,
    table(columns, keys, { caption: "Configuration keys that differ" }),
  );
}
