// Now: how the run goes in one sentence, where it is, and the numbers that matter, live.

import { h, replace } from "../dom.js";
import { ago, bytes, change, count, isNumber, MISSING, number, percent, plural, seconds } from "../format.js";
import { memoryBar } from "../memory_bar.js";
import { link } from "../router.js";
import { banner, linkify, problems, progress, sparkline, stepLink, title } from "../ui.js";

const PHASES = {
  rollout: "Sampling completions",
  reward: "Scoring",
  forward_only: "Computing logprobs",
  pack: "Packing",
  train: "Forward and backward",
  optim: "Optimizer step",
  publish: "Publishing weights",
  evaluation: "Evaluating",
  checkpoint: "Saving a checkpoint",
  starting: "Starting",
};
const SHOWN_WARNINGS = 5;

export async function render(root, params, context) {
  const { id } = params;
  const address = context.api.runPath(id, "now");
  const sections = new Sections(root);
  context.setTitle("Now");
  let data = null;

  async function load() {
    data = await context.api.get(address, { signal: context.signal });
    show();
  }

  function show() {
    const run = context.runs.find((entry) => entry.id === id);
    sections.show("title", [run?.name, run?.model, run?.algorithm], () => header(run, data));
    sections.show("banners", [data.banners, data.step, data.state], () => banners(data, id));
    sections.show("problems", data.problems, () => problems(data.problems));
    sections.show("progress", [data, Math.floor(Date.now() / 1000)], () => position(data));
    sections.show("numbers", [data.numbers, data.step], () => numbers(data, id));
    sections.show("bottom", [data.memory, data.warnings], () =>
      h("div.now-bottom", null, memory(data), warnings(data, id)),
    );
  }

  await load();
  // Durations go on between two changes.
  const timer = setInterval(() => data.state === "running" && !document.hidden && show(), 1000);
  return {
    update: (what) => (what.run === id ? load() : null),
    destroy: () => clearInterval(timer),
  };
}

/** Sections of a view, each rendered anew only if what it shows changed: links keep their focus, text its selection. */
class Sections {
  constructor(root) {
    this.root = root;
    this.slots = new Map();
  }

  show(name, what, build) {
    const state = JSON.stringify(what);
    let slot = this.slots.get(name);
    if (!slot) {
      slot = { node: h("div.slot"), state: null };
      this.slots.set(name, slot);
      this.root.append(slot.node);
    }
    if (slot.state === state) return;
    slot.state = state;
    const content = build();
    replace(slot.node, content);
    slot.node.hidden = !content;
  }
}

function header(run, data) {
  const about = [run?.model, run?.algorithm].filter(Boolean).join(" · ");
  return title(run?.name ?? data.id, about && h("span.muted", null, about));
}

function banners(data, id) {
  const [first, ...others] = data.banners ?? [];
  if (!first) return h("p.muted", null, unknown(data));
  const show = (one, options) => banner({ ...one, link: evidenceLink(one, id) }, options);
  return h(
    "div.stack.tight",
    { "aria-live": "polite" },
    show(first, { large: true }),
    others.length > 0 &&
      h(
        "details.fold",
        null,
        h("summary", null, `${count(others.length)} more about this run`),
        h("div.stack.tight", null, others.map((one) => show(one))),
      ),
  );
}

/** Why there is no sentence about the run. */
function unknown({ state, step }) {
  if (state === "finished" || state === "stopped")
    return step > 0
      ? "No rule has anything to say about this run’s curves."
      : "This run ended before its first step was done.";
  if (step > 0)
    return "It is too early to say how this run goes. A sentence about it appears here after some more steps.";
  return "The first step is not done yet. A sentence on how the run goes appears here after some steps.";
}

function evidenceLink(one, id) {
  return one.evidence?.length ? link.curves(id, { names: one.evidence }) : null;
}

function position(data) {
  const isRunning = data.state === "running" || data.state === "starting";
  const share = data.steps > 0 ? (data.step ?? 0) / data.steps : null;
  const since = isRunning && isNumber(data.phase_since) ? Date.now() / 1000 - data.phase_since : null;
  const steps = h(
    "div.now-step",
    null,
    h("span.now-step-label", null, "Step "),
    h("span.now-step-number", null, count(data.step ?? 0)),
    data.steps && h("span.muted", null, ` of ${count(data.steps)}`),
  );
  const times = h(
    "dl.now-times",
    null,
    isRunning &&
      pair(
        "Time left",
        isNumber(data.seconds_left) ? `about ${seconds(roundTime(data.seconds_left))}` : "known after a few steps",
      ),
    isNumber(data.elapsed_s) && pair(isRunning ? "Running for" : "Ran for", seconds(Math.round(data.elapsed_s))),
    isNumber(data.seconds_per_step) && pair("Per step", seconds(data.seconds_per_step)),
    isNumber(data.tokens_per_second) && pair("Throughput", `${number(data.tokens_per_second)} tokens/s`),
  );
  return h(
    "section.card.now-progress",
    { "aria-label": "Progress" },
    h("div.row.spread", null, steps, times),
    (isRunning || isNumber(share)) && progress(share, "Steps done"),
    isRunning && phase(data, since),
    data.stopped && h("p.muted", null, data.stopped),
  );
}

function phase(data, since) {
  const name = PHASES[data.phase] ?? data.phase;
  if (!name) return null;
  const { done, total } = data.progress ?? {};
  const far = isNumber(done) && (isNumber(total) ? `${count(done)} of ${count(total)}` : count(done));
  return h(
    "div.now-phase",
    null,
    h("span", null, name),
    far && h("span.muted", null, far),
    isNumber(since) && since >= 1 && h("span.muted", null, `for ${seconds(Math.floor(since))}`),
    far && isNumber(total) && total > 0 && progress(done / total, `${name}: share done`),
  );
}

const NUMBERS = [
  ["reward", "Reward", number],
  ["eval/accuracy", "Held-out accuracy", percent, "", (difference) => `${change(100 * difference)} points`],
  ["completions/mean_length", "Completion length", number, "tokens"],
  ["entropy", "Entropy", number, "nats"],
];

/** The last value of each metric, what changed since its first, and the step that it is of unless that is the last. */
function numbers({ numbers: measured, step }, id) {
  if (!Object.values(measured).some(({ last }) => isNumber(last))) return null;
  const cards = NUMBERS.map(([metric, label, format, unit = "", formatChange = change]) => {
    const { first, first_step: since, last, last_step: at, spark } = measured[metric];
    const changed = at > since && `${formatChange(last - first)} since step ${count(since)}`;
    const isOld = isNumber(last) && at < step;
    const below = [isOld && `at step ${count(at)}`, changed].filter(Boolean).join(", ");
    const value = format(last);
    return h(
      "a.card.number-card",
      { href: link.curves(id, { names: metric }), "aria-label": `${label}: ${value} ${unit} ${below}` },
      h("span.stat-label", null, label),
      h(
        "span.stat-value",
        { class: value === MISSING || isOld ? "muted" : "" },
        value,
        unit && value !== MISSING && h("span.stat-unit", null, ` ${unit}`),
      ),
      h("span.stat-below", null, below || (isNumber(last) ? "\u00a0" : "Not measured so far")),
      sparkline(spark, `${label} so far`),
    );
  });
  return h("div.now-numbers", null, cards);
}

function memory(data) {
  const { memory: sizes } = data;
  if (!sizes || !(isNumber(sizes.peak_bytes) || isNumber(sizes.predicted_bytes))) return null;
  const facts = [
    isNumber(sizes.peak_bytes) ? `Measured peak ${bytes(sizes.peak_bytes)}` : "Not measured yet",
    isNumber(sizes.predicted_bytes) && `${ofThePlan(sizes)}${bytes(sizes.predicted_bytes)}`,
    isNumber(sizes.capacity_bytes) && `${bytes(sizes.capacity_bytes)} available`,
  ].filter(Boolean);
  return h(
    "section.card.stack",
    { "aria-label": "Memory" },
    h(
      "div.row.spread",
      null,
      h("h2", null, "Memory per process"),
      h("a.small", { href: link.view(data.id, "machine") }, "By phase"),
    ),
    h("p", null, facts.join(" · ")),
    memoryBar(sizes),
  );
}

/** How the measured peak compares with what the plan predicts. */
function ofThePlan({ peak_bytes: peak, predicted_bytes: predicted }) {
  const more = peak / predicted - 1;
  if (!isNumber(peak) || !isNumber(more)) return "the plan predicts ";
  if (Math.abs(more) < 0.005) return "as the plan predicts: ";
  return `${percent(Math.abs(more), 0)} ${more > 0 ? "more" : "less"} than the plan predicts: `;
}

function warnings(data, id) {
  const all = [...(data.warnings ?? [])].reverse();
  const item = (one) =>
    h(
      "li",
      null,
      h("p", null, linkify(one.text), one.num > 1 && h("span.chip", null, `× ${count(one.num)}`)),
      h(
        "p.small.muted",
        null,
        isNumber(one.step) && [
          stepLink(id, one.step, `Step ${count(one.step)}`),
          isNumber(one.timestamp) && " · ",
        ],
        isNumber(one.timestamp) && ago(one.timestamp),
      ),
    );
  return h(
    "section.card.stack",
    { "aria-label": "Warnings" },
    h("h2", null, all.length ? plural(all.length, "warning") : "Warnings"),
    all.length
      ? h("ul.plain-list", null, all.slice(0, SHOWN_WARNINGS).map(item))
      : h("p.muted", null, "This run has shown none."),
    all.length > SHOWN_WARNINGS &&
      h(
        "details",
        null,
        h("summary", null, `${all.length - SHOWN_WARNINGS} earlier`),
        h("ul.plain-list", null, all.slice(SHOWN_WARNINGS).map(item)),
      ),
  );
}

function pair(label, value) {
  return h("div", null, h("dt", null, label), h("dd", null, value));
}

/** Estimates are not exact to the second. */
function roundTime(value) {
  const unit = value > 3600 ? 300 : value > 600 ? 60 : value > 60 ? 10 : 1;
  return Math.max(unit, Math.round(value / unit) * unit);
}
