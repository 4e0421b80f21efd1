// Held-out questions over the run: accuracy with its confidence interval, pass@k, flips, and every question's answers.

import { hasStep, isExport } from "../api.js";
import { lineChart } from "../bands.js";
import { h, replace } from "../dom.js";
import { count, isNumber, percent, plural } from "../format.js";
import { troubles } from "../marks.js";
import { link } from "../router.js";
import { empty, problems, stat, table, title } from "../ui.js";
import { visibleLine } from "../visible.js";

export async function render(root, params, context) {
  const { api, signal, theme } = context;
  let charts = [];
  let shown = null;
  context.setTitle("Held-out");
  const load = async () => {
    const data = await api.get(api.runPath(params.id, "eval"), { signal });
    const { marks } = data.points.length
      ? await api.get(api.path("/api/curves", { runs: [params.id], points: 4 }), { signal })
      : {};
    const state = JSON.stringify([data, marks]);
    if (state === shown) return; // steps of training change nothing here
    shown = state;
    charts.forEach((chart) => chart.destroy());
    charts = [];
    if (!data.points.length) {
      replace(
        root,
        title("Held-out"),
        problems(data.problems),
        empty(
          "This run has no held-out evaluation yet.",
          "Set eval.path and eval.every to evaluate on questions that are not trained on.",
        ),
      );
      return;
    }
    const chart = accuracyChart(data.points, troubles(marks[params.id]), theme);
    charts = [chart];
    replace(
      root,
      title("Held-out"),
      problems(data.problems),
      summary(data.points),
      card(
        "Accuracy by step",
        chart.node,
        h("p.muted.small", null, bandText(data.points)),
      ),
      flips(data.flips),
      matrix(data, params, context),
    );
  };
  await load();
  return {
    update: (change) => change.parts.some((part) => part === "completions" || part === "events") && load(),
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

function card(heading, ...content) {
  return h("section.card.stack", null, h("h2", null, heading), ...content);
}

function bandText(points) {
  const band = "Band: 95% confidence interval (Wilson) of the share of right completions.";
  const without = points.filter((point) => !isNumber(point.low)).length;
  if (!without) return band;
  const all = without === points.length;
  const what = all ? "The completions" : `The completions of ${plural(without, "evaluation")}`;
  const known = `${what} cannot be read, so only the accuracy in metrics.jsonl is known.`;
  return all ? known : `${band} ${known}`;
}

function summary(points) {
  const known = points.filter((point) => isNumber(point.accuracy));
  if (!known.length) return null;
  const first = known[0];
  const last = known.at(-1);
  const best = known.reduce((a, b) => (b.accuracy > a.accuracy ? b : a));
  return h(
    "div.stats",
    null,
    stat(
      `Accuracy after step ${last.step}`,
      percent(last.accuracy),
      interval(last, `, ${plural(last.num ?? 0, "completion")}`),
    ),
    points.length > 1 &&
      stat(`Accuracy after step ${first.step}`, percent(first.accuracy), interval(first)),
    best.accuracy > last.accuracy && best !== first && stat(`Best, after step ${best.step}`, percent(best.accuracy)),
    Object.entries(last.pass_at ?? {})
      .filter(([k]) => k !== "1")
      .map(([k, value]) => stat(`pass@${k} after step ${last.step}`, percent(value))),
  );
}

/** The confidence interval, which needs the completions: without their file only the metric is known. */
function interval({ low, high }, more = "") {
  return isNumber(low) ? `${percent(low)} to ${percent(high)} (95%)${more}` : null;
}

function accuracyChart(points, marks, theme) {
  const ks = Object.keys(points.at(-1).pass_at ?? {}).filter((k) => k !== "1");
  const lines = [
    {
      label: "Accuracy",
      values: points.map((p) => p.accuracy),
      low: points.map((p) => p.low),
      high: points.map((p) => p.high),
    },
    ...ks.map((k) => ({ label: `pass@${k}`, values: points.map((p) => p.pass_at?.[k] ?? null) })),
  ];
  return lineChart({
    name: "held-out-accuracy",
    x: points.map((p) => p.step),
    lines,
    marks,
    format: (value) => percent(value, 0),
    xLabel: "Step",
    range: [0, 1],
    theme,
  });
}

function flips(list) {
  if (!list?.length) return null;
  const most = Math.max(1, ...list.map((flip) => Math.max(flip.num_gained, flip.num_lost)));
  const bar = (number, kind) =>
    h(
      "div.flip-bar",
      null,
      h(`span.flip-fill.${kind}`, { style: { "--share": number / most } }),
      h("span", null, count(number)),
    );
  const columns = [
    { label: "Steps", class: "nowrap", value: (flip) => `${flip.from} → ${flip.to}` },
    { label: "Wrong → right", value: (flip) => bar(flip.num_gained, "gained") },
    { label: "Right → wrong", value: (flip) => bar(flip.num_lost, "lost") },
    { label: "Net", align: "right", value: (flip) => signed(flip.num_gained - flip.num_lost) },
  ];
  return card(
    "Flips between evaluations",
    table(columns, [...list].reverse(), { caption: "Questions that flipped between evaluations" }),
  );
}

function signed(value) {
  return value === 0 ? "0" : value > 0 ? `+${count(value)}` : `−${count(-value)}`;
}

const MARKS = { true: ["right", "■"], false: ["wrong", "□"], null: ["not asked", "–"] };

const FILTERS = {
  all: "All",
  never: "Never right",
  lost: "Right before, wrong now",
  gained: "Wrong before, right now",
  always: "Always right",
};

/** Questions by evaluations: right or wrong. The counts are of all questions, the list has the first of each kind. */
function matrix({ points, questions, num_questions: totals }, { id, query }, context) {
  if (!questions?.length) return null;
  const state = { filter: query.show in FILTERS ? query.show : "all", shown: 50 };
  const all = Object.values(totals).reduce((sum, num) => sum + num, 0);
  const numOf = (filter) => (filter === "all" ? all : totals[filter]);
  const holder = h("div.stack", null);
  const show = () => {
    const kept = questions.filter(({ kind }) => state.filter === "all" || state.filter === kind);
    const left = numOf(state.filter) - kept.length;
    const rows = kept.slice(0, state.shown);
    replace(
      holder,
      rows.length ? grid(points, rows, id) : h("p.muted", null, "No such question."),
      kept.length > state.shown &&
        h(
          "p",
          null,
          h(
            "button.button",
            { type: "button", on: { click: () => ((state.shown += 150), show()) } },
            `Show the other ${count(kept.length - state.shown)}`,
          ),
        ),
      left > 0 && kept.length <= state.shown && h("p.muted", null, `${count(left)} more are not listed.`),
    );
  };
  const choose = (filter) => {
    state.filter = filter;
    context.setQuery({ show: filter === "all" ? null : filter });
    show();
  };
  const select = h(
    "select.select",
    { value: state.filter, on: { change: () => choose(select.value) } },
    Object.entries(FILTERS).map(([name, label]) => h("option", { value: name }, `${label} (${count(numOf(name))})`)),
  );
  show();
  return card(
    "Questions",
    h(
      "div.row.spread",
      null,
      h("p.muted", null, "Never right ones come first, then those that became wrong, became right, or were always right."),
      h("label.field", null, "Show ", select),
    ),
    h(
      "ul.plan-legend",
      { "aria-label": "Signs" },
      Object.values(MARKS).map(([name, mark]) =>
        h("li", null, h("span.cell", { class: name.replace(" ", "-"), "aria-hidden": "true" }, mark), ` ${name}`),
      ),
    ),
    holder,
  );
}

function grid(points, rows, id) {
  const head = h(
    "tr",
    null,
    h("th", { scope: "col" }, "Question"),
    points.map((point) =>
      h(
        "th.step-head",
        { scope: "col" },
        h(
          "a",
          {
            href: hasStep(id, point.step, { kind: "eval" }) ? link.step(id, point.step, { kind: "eval" }) : null,
            title: `Completions of the evaluation after step ${point.step}`,
          },
          count(point.step),
        ),
      ),
    ),
  );
  const cells = (question) =>
    question.right.map((right, index) => {
      const [name, mark] = MARKS[String(right)] ?? MARKS.null;
      return h("td.cell", { class: name.replace(" ", "-"), title: `After step ${points[index]?.step}: ${name}` }, mark);
    });
  return h(
    "div.table-scroll",
    { tabindex: 0, role: "region", "aria-label": "Questions by evaluation" },
    h(
      "table.matrix",
      null,
      h("thead", null, head),
      h(
        "tbody",
        null,
        rows.map((question) =>
          h(
            "tr",
            null,
            h(
              "th.question",
              { scope: "row", dir: "auto", title: visibleLine(String(question.prompt)) },
              h(
                "a",
                { href: isExport ? null : link.search(id, { where: `kind == "eval" and prompt_id == ${question.prompt_id}` }) },
                visibleLine(String(question.prompt).slice(0, 160)),
              ),
            ),
            cells(question),
          ),
        ),
      ),
    ),
  );
}
