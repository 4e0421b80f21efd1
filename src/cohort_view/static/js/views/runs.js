// All runs of this server: state, progress, reward, accuracy, banner; select some to compare.

import { h, replace } from "../dom.js";
import { ago, count, number, percent, plural } from "../format.js";
import { link } from "../router.js";
import { empty, levelIcon, progress, stateChip, title } from "../ui.js";
import { visibleLine } from "../visible.js";

const ORDERS = {
  updated: ["Last change", (run) => run.updated],
  reward: ["Reward", (run) => run.reward],
  accuracy: ["Held-out accuracy", (run) => run.accuracy],
  name: ["Name", null],
};
const MOST_COMPARED = 8;

export async function render(root, params, context) {
  const chosen = new Set();
  const state = { find: params.query.find ?? "", sort: params.query.sort in ORDERS ? params.query.sort : "updated" };
  const list = h("div");
  const compare = h("a.button.primary");
  const hint = h("span.muted", null, "Select two or more to compare them");
  context.setTitle("Runs");

  const field = h("input.input", {
    type: "search",
    placeholder: "Find a run",
    "aria-label": "Find a run",
    value: state.find,
    on: { input: (event) => change({ find: event.target.value.trim() }) },
  });
  const order = h(
    "select.select",
    { "aria-label": "Order", value: state.sort, on: { change: (event) => change({ sort: event.target.value }) } },
    Object.entries(ORDERS).map(([key, [label]]) => h("option", { value: key }, label)),
  );

  function change(changes) {
    Object.assign(state, changes);
    context.setQuery({ find: state.find, sort: state.sort === "updated" ? null : state.sort });
    show();
  }

  function show() {
    const focused = document.activeElement?.closest?.("[data-run]")?.dataset.run;
    const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = context.runs.filter((run) =>
      words.every((word) =>
        [run.id, run.name, run.model, run.algorithm, run.path].join(" ").toLowerCase().includes(word),
      ),
    );
    const [, value] = ORDERS[state.sort];
    runs.sort((a, b) =>
      value
        ? (value(b) ?? -Infinity) - (value(a) ?? -Infinity)
        : a.name.localeCompare(b.name, undefined, { numeric: true }),
    );
    heading.textContent = context.runs.length ? plural(context.runs.length, "run") : "";
    controls.hidden = context.runs.length < 2;
    const advice = "Start one with `cohort train` or `cohort demo`; it appears here once its folder exists.";
    const none = context.runs.length
      ? empty(`No run matches “${state.find}”.`)
      : empty("There are no runs in this folder yet.", advice);
    replace(list, runs.length ? h("ul.run-list", null, runs.map(row)) : none);
    if (focused) list.querySelector(`[data-run="${CSS.escape(focused)}"] a.run-link`)?.focus();
    showCompare();
  }

  function showCompare() {
    const ids = [...chosen];
    compare.hidden = ids.length < 2;
    hint.hidden = !compare.hidden;
    compare.textContent = `Compare ${plural(ids.length, "run")}`;
    compare.setAttribute("href", link.compare({ runs: ids }));
  }

  function row(run) {
    const box = h("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": `Select ${run.id} to compare`,
      on: {
        change: (event) => {
          if (event.target.checked && chosen.size < MOST_COMPARED) chosen.add(run.id);
          else chosen.delete(run.id);
          event.target.checked = chosen.has(run.id);
          showCompare();
        },
      },
    });
    const about = [run.model, run.algorithm, run.updated && `changed ${ago(run.updated)}`].filter(Boolean).join(" · ");
    return h(
      "li.card.run-card",
      { dataset: { run: run.id } },
      box,
      h(
        "div.run-main",
        null,
        h("div.row", null, h("a.run-link", { href: link.now(run.id), title: run.path }, run.id), stateChip(run.state)),
        h("p.small.muted", null, about),
      ),
      h(
        "div.run-number",
        null,
        h("span.stat-label", null, "Step"),
        h("span.run-value", null, count(run.step), run.steps && h("span.muted", null, ` of ${count(run.steps)}`)),
        run.steps > 0 && run.state === "running" && progress((run.step ?? 0) / run.steps, "Steps done"),
      ),
      h("div.run-number", null, h("span.stat-label", null, "Reward"), h("span.run-value", null, number(run.reward))),
      h(
        "div.run-number",
        null,
        h("span.stat-label", null, "Held-out"),
        h("span.run-value", null, percent(run.accuracy)),
      ),
      h(
        "div.run-banner",
        null,
        run.banner && !run.gone
          ? [levelIcon(run.banner.level), h("span", null, run.banner.text)]
          : h("span.muted", null, whyNoBanner(run)),
      ),
    );
  }

  const heading = h("span.muted");
  const controls = h("div.row", null, field, h("label.field", null, "Sort by", order), compare, hint);
  replace(root, title("Runs", heading), controls, list);
  show();
  context.keys.addList(() => [...list.querySelectorAll("a.run-link")], "run");
  context.keys.add("x", "Select the run to compare", () =>
    document.activeElement?.closest?.("[data-run]")?.querySelector("input").click(),
  );
  context.keys.add(
    "c",
    "Compare the selected runs",
    () => chosen.size > 1 && context.navigate(link.compare({ runs: [...chosen] })),
  );
  return { update: show };
}

/** What stands for the banner of a run without one. */
export function whyNoBanner(run) {
  if (run.gone) return visibleLine(run.gone);
  if (!(run.step > 0)) return "No step done yet";
  return run.has_all_metrics ? "Nothing to say about its curves" : "Open it to see how it goes";
}
