// Curves of one run, with others over it.

import { CurvesPanel } from "../curves_panel.js";
import { h, replace } from "../dom.js";
import { link, splitList } from "../router.js";
import { MOST_RUNS, runAdder, runLegend } from "../run_legend.js";

export async function render(root, params, context) {
  const { id, query } = params;
  const others = splitList(query.runs).filter((run) => run !== id && context.runs.some((entry) => entry.id === run));
  const runs = [id, ...new Set(others)].slice(0, MOST_RUNS);
  const kept = () => ({ x: params.query.x, log: params.query.log, smooth: params.query.smooth });
  const show = (list) =>
    context.navigate(link.curves(id, { ...params.query, runs: list.filter((run) => run !== id) }));
  context.setTitle("Curves");

  const panelRoot = h("div.stack");
  const panel = new CurvesPanel(panelRoot, context, {
    runs,
    query,
    hrefOf: (names) => link.curves(id, { ...kept(), names, runs: others }),
    beside: runAdder(context, runs, (run) => show([...runs, run])),
  });
  const remove = (run) => show(runs.filter((other) => other !== run));
  const legend = runs.length > 1 ? await runLegend(context, runs, remove, id) : null;
  replace(root, h("h1.visually-hidden", null, "Curves"), legend, panelRoot);
  await panel.load();
  panel.addKeys();
  return {
    update: (change) => panel.update(change),
    destroy: () => panel.destroy(),
  };
}
