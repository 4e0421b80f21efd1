// Where time and memory go: phases of a step, memory against the plan, and what went wrong.

import { stackedChart } from "../bands.js";
import { h, replace } from "../dom.js";
import { bytes, count, isNumber, percent, plural, seconds } from "../format.js";
import { troubles } from "../marks.js";
import { partClass } from "../memory_bar.js";
import { empty, problems, stepLink, table, title } from "../ui.js";
import { visibleLine } from "../visible.js";

const PHASES = {
  rollout: "Rollout",
  reward: "Reward",
  forward_only: "Forward only",
  pack: "Packing",
  train: "Training",
  optim: "Optimizer",
  publish: "Publishing weights",
  evaluation: "Evaluation",
  checkpoint: "Checkpoints",
  other: "Other (start, files)",
  run: "The whole run",
};
// In the order of colors: the two long phases first
const COLORED = ["rollout", "train", "reward", "forward_only", "pack", "optim", "publish", "evaluation", "checkpoint"];
const seriesClass = (index) => `series-${((index + 8) % 8) + 1}`;
const phaseName = (phase) => PHASES[phase] ?? visibleLine(String(phase));

export async function render(root, params, context) {
  const { api, signal, theme } = context;
  let charts = [];
  const stop = () => charts.forEach((chart) => chart.destroy());
  context.setTitle("Machine");
  const load = async () => {
    const data = await api.get(api.runPath(params.id, "machine"), { signal });
    stop();
    charts = [];
    const show = (chart) => (charts.push(chart), chart.node);
    const events = troubles(data.marks);
    replace(
      root,
      title("Machine"),
      problems(data.problems),
      time(data, events, show, theme),
      memory(data.memory),
      marks(data.marks, params.id),
    );
  };
  await load();
  return {
    update: (change) => change.parts.some((part) => part === "metrics" || part === "events") && load(),
    destroy: stop,
  };
}

function card(heading, ...content) {
  return h("section.card.stack", null, h("h2", null, heading), ...content);
}

/** Seconds of each step by phase, stacked, and the share of each phase. */
function time({ phases, x, seconds: spent, totals: exact, num_steps: steps }, events, show, theme) {
  const used = (phases ?? []).filter((phase) => spent[phase]?.some((value) => value > 0));
  if (!x?.length || !used.length)
    return card("Time by phase", empty("No step is complete yet.", "Times appear after the first step."));
  const totals = Object.entries(exact).filter(([, total]) => total > 0);
  const all = totals.reduce((sum, [, total]) => sum + total, 0);
  const colorOf = (phase) => (COLORED.indexOf(phase) + 8) % 8; // the same in every run
  const chart = stackedChart({
    name: "time-by-phase",
    x,
    theme,
    format: seconds,
    xLabel: "Step",
    marks: events,
    layers: used.map((phase) => ({ label: phaseName(phase), values: spent[phase], color: colorOf(phase) })),
  });
  const columns = [
    {
      label: "Phase",
      class: "nowrap",
      value: ([phase]) => [used.includes(phase) && h(`span.swatch.${seriesClass(colorOf(phase))}`), phaseName(phase)],
    },
    { label: "Per step", align: "right", value: ([, total]) => seconds(total / steps) },
    { label: "Total", align: "right", value: ([, total]) => seconds(total) },
    { label: "Share", align: "right", value: ([, total]) => percent(total / all) },
  ];
  const rows = [...totals.sort((a, b) => b[1] - a[1]), ["run", all]];
  return card(
    "Time by phase",
    h("div.chart-and-table", null, show(chart), table(columns, rows, { caption: "Time by phase" })),
  );
}

// Names of the plan's phases
const PLANNED = { sampling: "Rollout", logprobs: "Forward only", backward: "Training", optimizer: "Optimizer" };

/** Per phase: the plan's parts as one stacked bar, and a line at the measured peak. */
function memory({ plan, peaks, capacity_bytes: capacity }) {
  if (!plan.length) return null;
  const most = 1.02 * Math.max(1, ...plan.map(({ total }) => total), ...Object.values(peaks));
  const parts = [
    ...new Set(
      plan.flatMap((phase) => phase.parts.filter((part) => part.bytes > most * 0.005).map((part) => part.name)),
    ),
  ];
  const shownPhases = plan.filter(({ total }) => total > 0);
  const bar = ({ phase, measured: by, parts: list, total }) => {
    const label = PLANNED[phase] ?? phaseName(phase);
    const peak = peaks[by];
    return h(
      "div.plan-row",
      null,
      h("div.plan-label", null, label),
      h(
        "div.plan-bar",
        {
          role: "img",
          "aria-label": `${label}: ${bytes(total)} planned${isNumber(peak) ? `, ${bytes(peak)} measured` : ""}`,
        },
        list
          .filter((part) => parts.includes(part.name))
          .map((part) =>
            h("span.plan-part", {
              class: partClass(part.name),
              style: { "--share": part.bytes / most },
              title: `${part.name}: ${bytes(part.bytes)}`,
            }),
          ),
        isNumber(peak) &&
          h("span.plan-peak", { style: { "--share": peak / most }, title: `Measured peak: ${bytes(peak)}` }),
      ),
      h(
        "div.plan-numbers",
        null,
        `${bytes(total)} planned`,
        h("br"),
        h("span.muted", null, isNumber(peak) ? `${bytes(peak)} measured` : "not measured"),
      ),
    );
  };
  return card(
    "Memory per process",
    isNumber(capacity) && h("p.muted", null, `The device has ${bytes(capacity)}.`),
    shownPhases.length
      ? [
          h("div.plan-bars", null, shownPhases.map(bar)),
          h(
            "div.plan-legend",
            null,
            parts.map((name) => h("span", null, h(`span.swatch.${partClass(name)}`), visibleLine(name))),
            h("span", null, h("span.line"), "measured peak"),
          ),
        ]
      : null,
  );
}

const KINDS = {
  restart: "Restart",
  warning: "Message",
  checkpoint: "Checkpoint",
  fault: "Fault",
  evaluation: "Evaluation",
};

/** Restarts, faults and messages, latest first; checkpoints and evaluations only as numbers. */
function marks(list, id) {
  const told = (list ?? []).filter((mark) => mark.kind !== "evaluation" && mark.kind !== "checkpoint");
  const checkpoints = (list ?? []).filter((mark) => mark.kind === "checkpoint").length;
  const columns = [
    {
      label: "Step",
      align: "right",
      value: (mark) => stepLink(id, Math.max(1, Math.round(mark.x)), count(mark.x)),
    },
    {
      label: "What",
      value: (mark) =>
        h(
          "span.chip",
          { class: mark.kind === "fault" ? "chip-bad" : mark.kind === "restart" ? "chip-warning" : "" },
          KINDS[mark.kind] ?? mark.kind,
        ),
    },
    { label: "Message", class: "wrap", value: (mark) => visibleLine(mark.text ?? "") },
  ];
  return card(
    "Events",
    told.length
      ? table(columns, [...told].reverse(), { caption: "Restarts, faults and messages" })
      : h("p.muted", null, "No restarts, faults or warnings."),
    checkpoints ? h("p.muted", null, `${plural(checkpoints, "checkpoint")} saved.`) : null,
  );
}
