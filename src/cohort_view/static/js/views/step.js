// A step: why it learned or not, its metrics, and its groups, each of which opens in place.

import { hasStep } from "../api.js";
import { h, replace } from "../dom.js";
import { count, isNumber, number, percent, plural, seconds } from "../format.js";
import { rewardRange, rewardStrip } from "../rewards.js";
import { link, parse, splitList } from "../router.js";
import { stepStrip } from "../step_strip.js";
import { breadcrumbs, empty, levelIcon, problems, segmented, stat, title } from "../ui.js";
import { visibleLine } from "../visible.js";
import { groupBody } from "./group.js";

const PAGE_SIZE = 50;
const SORTS = [
  ["spread", "Spread of reward"],
  ["reward", "Mean reward"],
  ["equal", "Equal rewards"],
  ["length", "Mean length"],
  ["staleness", "Staleness"],
  ["order", "Order in the file"],
];
const KINDS = { step: "Trained", replaced: "Replaced", dropped: "Dropped", eval: "Held-out" };

// [metric, label, format, metric shown below, its text]
const KEY_METRICS = [
  ["reward", "Reward", number, "reward_std", (value) => `± ${number(value)} in a group`],
  [
    "frac_reward_zero_std",
    "Equal groups",
    percent,
    "frac_all_right",
    (right, metrics) => `${percent(right)} all right, ${percent(metrics.frac_all_wrong)} all wrong`,
  ],
  ["completions/trained_ratio", "Trained", percent],
  [
    "completions/mean_length",
    "Length",
    (value) => `${number(value)} tokens`,
    "completions/max_length",
    (value) => `longest ${count(value)}`,
  ],
  ["completions/clipped_ratio", "Cut at the limit", percent],
  ["entropy", "Entropy", (value) => `${number(value)} nats`],
  ["kl", "KL to the reference", (value) => `${number(value)} nats`],
  ["grad_norm", "Gradient norm", number],
  ["step_time", "Time", seconds],
];

export async function render(root, params, context) {
  const { api, signal } = context;
  const id = params.id;
  const list = await api.get(api.runPath(id, "steps", params.step === null ? {} : { around: params.step }), { signal });
  const step = params.step ?? list.last;
  if (step === null) {
    replace(
      root,
      title("Steps"),
      empty(
        "This run has no completions.",
        "They appear after its first step, unless run.completions_every is 0 or their files were deleted.",
      ),
    );
    return {
      update: (change) =>
        change.parts.includes("completions") && context.navigate(link.step(id, null), { replace: true }),
    };
  }
  const state = {
    kind: params.query.kind ?? "step",
    sort: params.query.sort ?? "spread",
    descending: params.query.descending !== "0",
  };
  const view = new StepView(root, id, step, state, context);
  view.showSteps(list);
  await Promise.all([view.load(), view.loadStrip()]);
  return {
    update: (change) => view.update(change),
    navigate: ({ query }) => {
      Object.assign(state, {
        kind: query.kind ?? "step",
        sort: query.sort ?? "spread",
        descending: query.descending !== "0",
      });
      view.load();
      return true;
    },
  };
}

class StepView {
  constructor(root, id, step, state, context) {
    Object.assign(this, { id, step, state, context, api: context.api });
    context.setTitle(`Step ${step}`);
    this.heading = h("div", null);
    this.arrows = h("div.row", null);
    this.field = h("input.input.step-field", {
      type: "number",
      required: true,
      step: 1,
      value: step,
      on: { focus: () => this.field.select() },
    });
    const goTo = (event) => {
      event.preventDefault();
      context.navigate(this.link(this.field.valueAsNumber));
    };
    const form = h("form", { on: { submit: goTo } }, h("label.field", null, "Go to step", this.field));
    const nav = h("div.step-nav", null, this.heading, h("div.row", null, form, this.arrows));
    this.strip = h("div.step-strip", null);
    this.top = h("div.step-top", null);
    this.list = h("div.groups", null);
    replace(root, breadcrumbs(id, [[`Step ${step}`, null]]), nav, this.strip, this.top, this.list);
    context.keys.add(
      "[ | ArrowLeft",
      "Previous step",
      () => this.previous !== undefined && context.navigate(this.link(this.previous)),
    );
    context.keys.add(
      "] | ArrowRight",
      "Next step",
      () => this.next !== undefined && context.navigate(this.link(this.next)),
    );
    context.keys.add("#", "Go to a step", () => this.field.focus());
    context.keys.addList(() => [...this.list.querySelectorAll("summary.group-row")], "group");
  }

  link(step) {
    const { kind, sort } = this.state;
    return link.step(this.id, step, { kind: kind === "step" ? null : kind, sort: sort === "spread" ? null : sort });
  }

  /** The title with links to the steps before and after. */
  showSteps(list) {
    this.steps = list;
    const steps = list.steps.filter((file) => file.kinds.includes(this.state.kind)).map((file) => file.step);
    this.kinds = list.steps.find((file) => file.step === this.step)?.kinds ?? ["step"];
    this.previous = steps.filter((step) => step < this.step).at(-1);
    this.next = steps.find((step) => step > this.step);
    const arrow = (step, text, label) =>
      step === undefined
        ? h("span.button.disabled", { "aria-hidden": "true" }, text)
        : h("a.button", { href: this.link(step), "aria-label": `${label}: ${step}`, title: `${label}: ${step}` }, text);
    const { steps: of, step: done } = this.context.run ?? {};
    replace(this.heading, title(`Step ${count(this.step)}`, of ? h("span.muted", null, `of ${count(of)}`) : null));
    replace(this.arrows, arrow(this.previous, "←", "Previous step"), arrow(this.next, "→", "Next step"));
    this.field.min = this.state.kind === "eval" ? 0 : 1;
    this.field.max = Math.max(list.last ?? 0, done ?? 0, this.step);
  }

  /** All steps of the run in a row, by their share of groups with equal rewards. */
  async loadStrip() {
    const query = { runs: [this.id], names: ["frac_reward_zero_std"], x: "step" };
    const { curves } = await this.api.get(this.api.path("/api/curves", query), { signal: this.context.signal });
    const hrefOf = (step) => (hasStep(this.id, step) ? link.step(this.id, step) : null);
    replace(this.strip, curves.length > 0 && stepStrip(curves[0], this.step, hrefOf));
  }

  async load() {
    const { kind, sort, descending } = this.state;
    this.data = await this.fetch(0);
    const { data } = this;
    replace(
      this.top,
      problems(data.problems),
      kind === "step" || kind === "replaced" ? explanation(data.explanation) : null,
      metricTiles(data.metrics),
      h(
        "div.row.spread.step-controls",
        null,
        h("h2", null, data.num_groups ? plural(data.num_groups, "group") : "Groups"),
        h(
          "div.row",
          null,
          this.kinds.length > 1 &&
            segmented(
              "Completions",
              this.kinds.map((name) => [name, KINDS[name] ?? name]),
              kind,
              (value) => this.choose({ kind: value }),
            ),
          data.num_groups > 1 && [
            sortMenu(sort, (value) => this.choose({ sort: value })),
            h(
              "button.button",
              {
                type: "button",
                "aria-pressed": String(!descending),
                title: "Reverse the order",
                on: { click: () => this.choose({ descending: !this.state.descending }) },
              },
              descending ? "High to low" : "Low to high",
            ),
          ],
        ),
      ),
    );
    this.list.classList.toggle(
      "has-flags",
      data.groups.some((group) => groupFlags(group).some(Boolean)),
    );
    replace(this.list, data.groups.length ? this.groups(data.groups) : this.nothing(), this.moreButton());
  }

  fetch(offset) {
    const { kind, sort, descending } = this.state;
    const query = { kind, sort, descending: descending ? 1 : 0, offset, limit: PAGE_SIZE };
    return this.api.get(this.api.runPath(this.id, `steps/${this.step}`, query), { signal: this.context.signal });
  }

  choose(changes) {
    Object.assign(this.state, changes);
    const { kind, sort, descending } = this.state;
    if (changes.kind) this.showSteps(this.steps);
    this.context.setQuery({
      kind: kind === "step" ? null : kind,
      sort: sort === "spread" ? null : sort,
      descending: descending ? null : 0,
    });
    return this.load();
  }

  nothing() {
    if (this.data.problems?.length) {
      return empty(`There are no completions of step ${this.step} to show.`, "What the metrics say of the step is above.");
    }
    const file = `completions/${this.state.kind}-${String(this.step).padStart(6, "0")}.parquet`;
    return empty(
      `There are no completions of step ${this.step}.`,
      `${file} does not exist. run.completions_every sets which steps keep theirs.`,
    );
  }

  moreButton() {
    const left = this.data.num_groups - this.data.groups.length;
    if (left <= 0) return null;
    const button = h(
      "button.button",
      {
        type: "button",
        on: {
          click: async () => {
            const next = await this.fetch(this.data.groups.length);
            this.data.groups.push(...next.groups);
            button.replaceWith(...this.groups(next.groups), this.moreButton() ?? "");
          },
        },
      },
      `Show ${count(Math.min(left, PAGE_SIZE))} more of ${plural(left, "group")}`,
    );
    return button;
  }

  groups(groups) {
    const range = rewardRange(this.data.groups);
    return groups.map((group) => this.group(group, range));
  }

  /** One group: a row that opens to all its completions. */
  group(group, range) {
    const kind = this.state.kind === "step" ? null : this.state.kind;
    const body = h("div.group-open", null);
    const row = h(
      "details.group",
      null,
      h(
        "summary.group-row",
        null,
        h("span.group-prompt", { dir: "auto" }, visibleLine(oneLine(group.prompt))),
        rewardStrip(group.rows, range),
        h("span.group-numbers", null, groupNumbers(group)),
        h("span.group-flags", null, groupFlags(group)),
      ),
      body,
    );
    row.addEventListener("toggle", async () => {
      this.remember(group.index, row.open);
      if (!row.open || body.hasChildNodes()) return;
      replace(body, h("p.muted", null, "Loading…"));
      try {
        const { api } = this;
        const data = await api.get(
          api.runPath(this.id, `steps/${this.step}/groups/${group.index}`, { kind: this.state.kind }),
          { signal: this.context.signal },
        );
        replace(
          body,
          h(
            "p.group-link",
            null,
            h("a", { href: link.group(this.id, this.step, group.index, { kind }) }, "Open as a page"),
          ),
          groupBody(data, this.id, this.context),
        );
      } catch (error) {
        replace(body, empty(error.message));
      }
    });
    row.open = this.opened().includes(String(group.index));
    return row;
  }

  /** Groups that are open, as the address says. */
  opened() {
    return splitList(parse(location.hash).params.query.open);
  }

  remember(index, isOpen) {
    const others = this.opened().filter((one) => one !== String(index));
    this.context.setQuery({ open: isOpen ? [...others, String(index)] : others });
  }

  async update(change) {
    if (change.parts.includes("metrics")) await this.loadStrip();
    if (!change.parts.includes("completions")) return;
    const { api } = this;
    this.showSteps(
      await api.get(api.runPath(this.id, "steps", { around: this.step }), { signal: this.context.signal }),
    );
    if (!this.data.groups.length) await this.load();
  }
}

/** Why the step learned, or why not, with the facts behind it. */
function explanation(data) {
  if (!data) return null;
  return h(
    `div.banner.large.level-${data.level}`,
    null,
    levelIcon(data.level),
    h(
      "div.banner-body",
      null,
      h("span.banner-text", null, data.text),
      data.facts?.length
        ? h(
            "ul.facts",
            null,
            data.facts.map((fact) => h("li", null, fact.link ? h("a", { href: fact.link }, fact.text) : fact.text)),
          )
        : null,
    ),
  );
}

function metricTiles(metrics) {
  const shown = KEY_METRICS.filter(([name]) => isNumber(metrics?.[name]));
  if (!shown.length) return null;
  const tiles = shown.map(([name, label, format, below, belowText]) =>
    stat(label, format(metrics[name]), isNumber(metrics[below]) ? belowText(metrics[below], metrics) : null, {
      title: `Metric ${name}`,
    }),
  );
  return h("div.stats.step-metrics", null, tiles);
}

function sortMenu(chosen, onChoose) {
  const select = h(
    "select.select",
    { value: chosen, on: { change: () => onChoose(select.value) } },
    SORTS.map(([value, label]) => h("option", { value }, label)),
  );
  return h("label.field", null, "Sort by ", select);
}

function groupNumbers({ reward_mean: mean, reward_std: std, length_mean: length, equal }) {
  return [
    h("b", { title: "Mean reward" }, number(mean)),
    h(
      "span.muted",
      { title: "Standard deviation of the reward" },
      !equal && isNumber(std) ? `± ${number(std, 2)}` : "",
    ),
    h("span.muted", { title: "Mean length" }, `${number(length)} tokens`),
  ];
}

function groupFlags({ equal, clipped, broken, staleness, size }) {
  return [
    equal && size > 1 && h("span.chip.chip-warning", { title: "No reward differs, so every advantage is 0" }, "equal"),
    clipped > 0 && h("span.chip", { title: "Completions that hit the length limit" }, `${clipped} of ${size} cut`),
    broken > 0 && h("span.chip.chip-bad", { title: "Trajectories that infrastructure broke" }, `${broken} broken`),
    staleness > 0 &&
      h(
        "span.chip",
        { title: "Steps between the weights that sampled and the weights that were trained" },
        `${staleness} old`,
      ),
  ];
}

function oneLine(text) {
  return String(text ?? "")
    .replace(/\s+/g, " ")
    .trim();
}
