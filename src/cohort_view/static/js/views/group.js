// A group: its prompt and all completions side by side, compared with one of them.

import { hasStep } from "../api.js";
import { h, replace } from "../dom.js";
import { change, count, isNumber, number, plural, seconds } from "../format.js";
import { rewardClass, rewardParts, rewardRange } from "../rewards.js";
import { link } from "../router.js";
import { comparedBlock, diffBlock, textBlock } from "../texts.js";
import { conversation, folded } from "../turns.js";
import { breadcrumbs, problems, title } from "../ui.js";
import { visibleLine } from "../visible.js";

const ORDERS = [
  ["reward", "Reward"],
  ["length", "Length"],
  ["order", "Order in the file"],
];
const ENDS = {
  answer: "answered",
  max_turns: "out of turns",
  length: "cut at the limit",
  timeout: "timed out",
  environment_error: "environment failed",
};

export async function render(root, params, context) {
  const { api, signal } = context;
  const { id, step, group, query } = params;
  const kind = query.kind ?? "step";
  const [data, ofStep] = await Promise.all([
    api.get(api.runPath(id, `steps/${step}/groups/${group}`, { kind }), { signal }),
    api
      .get(api.runPath(id, `steps/${step}`, { kind, sort: "order", descending: 0, limit: 1 }), { signal })
      .catch(() => null),
  ]);
  const last = (ofStep?.num_groups ?? 0) - 1;
  const linkKind = kind === "step" ? null : kind;
  context.setTitle(`Step ${step}, group ${group}`);
  const to = (index) => link.group(id, step, index, { kind: linkKind });
  context.keys.add("[ | ArrowLeft", "Previous group", () => group > 0 && context.navigate(to(group - 1)));
  context.keys.add("] | ArrowRight", "Next group", () => group < last && context.navigate(to(group + 1)));
  context.keys.addList(() => [...root.querySelectorAll(".completion-card")], "completion");
  replace(
    root,
    breadcrumbs(id, [
      [`Step ${step}`, link.step(id, step, { kind: linkKind })],
      [`Group ${group}`, null],
    ]),
    h(
      "div.step-nav",
      null,
      title(`Group ${group}`, h("span.muted", null, plural(data.completions.length, "completion"))),
      h(
        "div.row",
        null,
        group > 0
          ? h("a.button", { href: to(group - 1), "aria-label": "Previous group" }, "←")
          : h("span.button.disabled", null, "←"),
        group < last
          ? h("a.button", { href: to(group + 1), "aria-label": "Next group" }, "→")
          : h("span.button.disabled", null, "→"),
      ),
    ),
    problems(data.problems),
    groupBody(data, id, context),
  );
  return {};
}

/** The prompt, a verdict, the controls and the cards of a group; also shown inside the step's list. */
export function groupBody(data, id, context) {
  const state = { order: "reward", reference: null, diff: false };
  const cards = h("div.completion-cards", null);
  const { completions } = data;
  const range = rewardRange([{ rows: completions }]);
  const show = () => {
    const reference = completions.find((item) => item.row === state.reference) ?? null;
    const sets = identical(sorted(completions, state.order));
    replace(
      cards,
      sets.map((set) => card(set, { data, id, context, range, reference, isDiff: state.diff })),
    );
  };
  show();
  return h(
    "div.group-body",
    null,
    promptBlock(data.prompt),
    h("p.verdict", null, verdict(completions)),
    completions.length > 1 ? controls(completions, state, show) : null,
    cards,
  );
}

/** A prompt: text, or chat messages. */
export function promptBlock(prompt) {
  const body = Array.isArray(prompt) ? conversation(prompt) : textBlock(prompt);
  return h("section.prompt", null, h("h3", null, "Prompt"), body);
}

/** One sentence: what this group taught. */
function verdict(completions) {
  const rewards = completions.map((item) => item.reward).filter(isNumber);
  if (!rewards.length) return "No completion of this group was scored, so it taught nothing.";
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  if (rewards.length === 1) return `One completion was scored: ${number(low)}.`;
  if (completions.some((item) => isNumber(item.advantage) && item.advantage !== 0)) {
    const better = completions.filter((item) => item.advantage > 0).length;
    const worse = completions.filter((item) => item.advantage < 0).length;
    return `Rewards from ${number(low)} to ${number(high)}: ${plural(better, "completion")} reinforced, ${count(worse)} discouraged.`;
  }
  if (low === high)
    return `All ${count(rewards.length)} rewards are ${number(low)}, so every advantage is 0 and this group taught nothing.`;
  return `Rewards from ${number(low)} to ${number(high)}.`;
}

function controls(completions, state, show) {
  const diff = h("input", {
    type: "checkbox",
    disabled: true,
    on: { change: () => ((state.diff = diff.checked), show()) },
  });
  const reference = h(
    "select.select",
    {
      on: {
        change: () => {
          state.reference = reference.value ? Number(reference.value) : null;
          diff.disabled = state.reference === null;
          show();
        },
      },
    },
    h("option", { value: "" }, "nothing"),
    completions.map((item) =>
      h("option", { value: item.row }, `completion ${item.row} (reward ${number(item.reward)})`),
    ),
  );
  const order = h(
    "select.select",
    { value: state.order, on: { change: () => ((state.order = order.value), show()) } },
    ORDERS.map(([value, label]) => h("option", { value }, label)),
  );
  return h(
    "div.row.group-controls",
    null,
    h("label.field", null, "Sort by ", order),
    h("label.field", null, "Compare with ", reference),
    h("label.field", { title: "Mark the words that differ from the completion compared with" }, diff, " Mark words"),
  );
}

function sorted(items, order) {
  const by = {
    reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    length: (a, b) => (b.length ?? 0) - (a.length ?? 0),
    order: () => 0,
  };
  return [...items].sort(by[order]);
}

/** Completions of the same text, rewards and end as one set each; order stays. */
function identical(items) {
  const sets = new Map();
  for (const item of items) {
    const { text, messages, rewards, reward, advantage: value, end, error, length } = item;
    const key = JSON.stringify([text, messages, rewards, reward, value, end, error, length]);
    if (sets.has(key)) sets.get(key).push(item);
    else sets.set(key, [item]);
  }
  return [...sets.values()];
}

/** One completion, or several that are the same: its numbers, and what the model wrote. */
function card(set, { data, id, context, range, reference, isDiff }) {
  const item = set[0];
  const kind = data.kind === "step" ? null : data.kind;
  const isReference = set.some(({ row }) => row === reference?.row);
  const tokens = (row, text) =>
    hasStep(id, data.step, { kind, row })
      ? h("a", { href: link.completion(id, data.step, row, { kind }), title: `Completion ${row}, token by token` }, text)
      : h("span.muted", { title: "Not part of this report" }, text);
  return h(
    "article.completion-card",
    { tabindex: -1, "aria-label": `Completion ${item.row}`, class: isReference ? "is-reference" : "" },
    h(
      "header.completion-head",
      null,
      h("span", { class: rewardClass(item.reward, range), "aria-hidden": "true" }),
      h("b.completion-reward", { title: "Reward" }, item.reward === null ? "not scored" : number(item.reward)),
      advantage(item.advantage),
      h("span.muted", null, `${count(item.length)} tokens`),
      ending(item),
      set.length > 1
        ? h("span.chip.completion-times", { title: "Completions with this text" }, `× ${set.length}`)
        : null,
    ),
    rewardParts(item),
    isDiff && reference && !isReference
      ? wordDifferences(data, id, reference.row, item.row, context)
      : body(item, isReference ? null : reference),
    item.error ? errorBlock(item.error) : null,
    environment(item),
    h(
      "footer.completion-foot",
      null,
      "Token by token: ",
      set.map(({ row }, index) => [index > 0 && ", ", tokens(row, count(row))]),
      isReference ? h("span.muted", null, " · the others are compared with this one") : null,
    ),
  );
}

/** An advantage with its sign, colored by direction as in the token view. */
export function advantage(value) {
  if (!isNumber(value)) return null;
  const direction = value > 0 ? "up" : value < 0 ? "down" : "zero";
  return h(
    `span.advantage.advantage-${direction}`,
    { title: "Advantage" },
    `Adv. ${value === 0 ? "0" : change(value, (size) => number(size, 2))}`,
  );
}

/** How a completion ended, as a chip where it was not by itself. */
export function ending({ end }) {
  if (!end) return null;
  return h(
    end === "answer" ? "span.muted" : "span.chip.chip-warning",
    { title: `end: ${visibleLine(end)}` },
    ENDS[end] ?? visibleLine(end),
  );
}

function body(item, reference) {
  if (item.messages) return conversation(item.messages);
  return comparedBlock(item.text, reference?.text ?? null, { cut: item.cut });
}

/** What has to change in the text of row `a` to become that of row `b`, as soon as the server has compared them. */
function wordDifferences({ step, kind }, id, a, b, { api, signal }) {
  const place = h("div", null, h("p.muted", null, "Comparing…"));
  api.get(api.runPath(id, `steps/${step}/diff`, { kind, a, b }), { signal }).then(
    ({ ops }) => replace(place, diffBlock(ops)),
    (error) => replace(place, h("p.muted", null, error.message)),
  );
  return place;
}

function errorBlock(error) {
  const details = folded("Error", error);
  details.classList.add("turn-error");
  details.open = true;
  return details;
}

function environment(item) {
  const values = Object.entries(item.environment ?? {}).filter(([, value]) => value !== null);
  const rows = values.map(([name, value]) => [visibleLine(name), number(value)]);
  if (isNumber(item.tool_calls)) rows.push(["Tool calls", count(item.tool_calls)]);
  if (isNumber(item.model_s)) rows.push(["Model", seconds(item.model_s)]);
  if (isNumber(item.environment_s) && item.environment_s > 0)
    rows.push(["Tools and environment", seconds(item.environment_s)]);
  if (!rows.length) return null;
  return h(
    "dl.reward-parts.environment",
    null,
    rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );
}
