// A completion token by token, colored by what the policy thought of each token or what the update did to it.

import { hasStep } from "../api.js";
import { copyButton } from "../copy.js";
import { h, replace } from "../dom.js";
import { change, count, isNumber, number, plural } from "../format.js";
import { LEVELS, levelClass, quantitiesOf, scaleOf } from "../quantities.js";
import { rewardParts } from "../rewards.js";
import { link } from "../router.js";
import { TokenText } from "../token_text.js";
import { conversation } from "../turns.js";
import { breadcrumbs, problems, segmented, stat, title } from "../ui.js";
import { visibleLine } from "../visible.js";
import { ending, promptBlock } from "./group.js";

export async function render(root, params, context) {
  const { api, signal } = context;
  const { id, step, row, query } = params;
  const kind = query.kind ?? "step";
  const linkKind = kind === "step" ? null : kind;
  const address = api.runPath(id, `steps/${step}/completions/${row}`, { kind, offset: query.offset });
  const data = await api.get(address, { signal });
  context.setTitle(`Step ${step}, completion ${row}`);
  const view = new CompletionView(data, context, query.color);
  const crumbs = [[`Step ${step}`, link.step(id, step, { kind: linkKind })]];
  if (data.group !== null) crumbs.push([`Group ${data.group}`, link.group(id, step, data.group, { kind: linkKind })]);
  replace(
    root,
    breadcrumbs(id, [...crumbs, [`Completion ${row}`, null]]),
    h("div.step-nav", null, title(`Completion ${row}`), h("div.row", null, await neighbors(data, params, context))),
    problems(data.problems),
    summary(data),
    promptBlock(data.prompt),
    data.messages
      ? h("details.fold", null, h("summary", null, h("b", null, "Conversation")), conversation(data.messages))
      : null,
    pages(data, params),
    view.node,
  );
  return { destroy: () => view.destroy() };
}

/** Links to the completions of the group before and after this one. */
async function neighbors(data, { id, step, row, query }, context) {
  if (data.group === null) return null;
  const { api, signal } = context;
  const kind = query.kind ?? "step";
  const near = await api
    .get(api.runPath(id, `steps/${step}`, { kind, sort: "order", descending: 0, offset: data.group, limit: 1 }), {
      signal,
    })
    .catch(() => null);
  const rows = near?.groups[0]?.rows.map((item) => item.row) ?? [];
  const at = rows.indexOf(row);
  if (at < 0) return null;
  const to = (index) => link.completion(id, step, rows[index], { ...query, offset: null });
  const has = (index) => index in rows && hasStep(id, step, { kind, row: rows[index] });
  const arrow = (index, text, label) =>
    has(index)
      ? h("a.button", { href: to(index), "aria-label": label, title: label }, text)
      : h("span.button.disabled", { "aria-hidden": "true" }, text);
  context.keys.add("[", "Previous completion of the group", () => has(at - 1) && context.navigate(to(at - 1)));
  context.keys.add("]", "Next completion of the group", () => has(at + 1) && context.navigate(to(at + 1)));
  return [
    h("span.muted", null, `${at + 1} of ${rows.length} in its group`),
    arrow(at - 1, "←", "Previous completion of the group"),
    arrow(at + 1, "→", "Next completion of the group"),
  ];
}

function summary(data) {
  return h(
    "div.stats.completion-stats",
    null,
    stat("Reward", isNumber(data.reward) ? number(data.reward) : "not scored", rewardParts(data)),
    stat("Advantage", isNumber(data.advantage) ? change(data.advantage) : "–", direction(data.advantage)),
    stat("Length", `${count(data.length ?? data.num_tokens)} tokens`, ending(data)),
  );
}

function direction(value) {
  if (!isNumber(value)) return null;
  return value === 0 ? "not trained on" : value > 0 ? "made more likely" : "made less likely";
}

/** Links to the tokens before and after those shown, where a completion has more than one answer of the server holds. */
function pages(data, { id, step, row, query }) {
  const { offset, limit, num_tokens: total } = data;
  if (!(total > limit) && !offset) return null;
  const to = (start, text) =>
    h("a.button", { href: link.completion(id, step, row, { ...query, offset: start || null }) }, text);
  return h(
    "div.row",
    null,
    h(
      "span.muted",
      null,
      `Tokens ${count(offset + 1)} to ${count(Math.min(total, offset + limit))} of ${count(total)}`,
    ),
    offset > 0 ? to(Math.max(0, offset - limit), "Previous") : null,
    offset + limit < total ? to(offset + limit, "Next") : null,
  );
}

/** The choice of a quantity, its legend, the tokens of all sequences, and the numbers of one token. */
class CompletionView {
  constructor(data, context, color) {
    Object.assign(this, { data, context });
    this.quantities = quantitiesOf(data.sequences);
    this.quantity = this.quantities.find(({ name }) => name === color) ?? this.quantities[0];
    this.legend = h("div.legend", null);
    this.note = h("p.token-note.muted", null);
    this.numbers = h("aside.token-numbers.card", { "aria-live": "polite", "aria-label": "Numbers of a token" });
    this.texts = [];
    this.values = data.sequences.map((sequence) =>
      Object.fromEntries(this.quantities.map(({ name, values }) => [name, values(sequence)])),
    );
    const sequences = data.sequences.map((sequence, index) => this.#sequence(sequence, index));
    this.node = h(
      "section.token-view",
      null,
      h(
        "div.token-controls",
        null,
        segmented(
          "Color by",
          this.quantities.map(({ name, label }) => [name, label]),
          this.quantity.name,
          (name) => this.choose(name),
        ),
        h(
          "div.row",
          null,
          copyButton("Copy text", () => data.text),
          copyButton("Copy JSON", () => JSON.stringify(exported(data), null, 1)),
        ),
      ),
      this.legend,
      this.note,
      h(
        "div.token-columns",
        null,
        h(
          "div.token-sequences",
          null,
          sequences.length ? sequences : h("p.muted", null, "No tokens were recorded for this completion."),
        ),
        this.numbers,
      ),
    );
    this.#describe(null);
    this.choose(this.quantity.name);
  }

  destroy() {
    this.texts.forEach(({ text }) => text.destroy());
  }

  choose(name) {
    this.quantity = this.quantities.find((quantity) => quantity.name === name);
    this.context.setQuery({ color: name === this.quantities[0].name ? null : name });
    const columns = this.values.map((values) => values[name]);
    const known = columns.filter((values) => values?.some((value) => value !== null));
    const scale = known.length ? scaleOf(this.quantity, known) : null;
    this.node.classList.toggle("sequential", this.quantity.scale.kind === "sequential");
    this.texts.forEach(({ text, sequence }) => text.recolor(scale ? columns[sequence] : null, scale));
    replace(this.legend, scale ? legend(this.quantity, scale) : null);
    this.note.textContent = scale ? this.quantity.help : missing(this.quantity, this.data, known.length > 0);
    this.note.classList.toggle("not-recorded", !scale);
  }

  /** A sequence: its prompt folded, then what follows. */
  #sequence(sequence, index) {
    const { prompt, prompt_tokens: numPrompt, tokens } = sequence;
    const text = new TokenText(tokens, sequence.loss_mask, (token) => this.#describe(index, token));
    this.texts.push({ text, sequence: index });
    return h(
      "div.token-sequence",
      null,
      this.data.sequences.length > 1 ? h("h3", null, `Sequence ${index + 1}`) : null,
      numPrompt > 0 && sequence.offset === 0 ? promptTokens(prompt, numPrompt) : null,
      tokens.ids.length ? text.node : h("p.muted", null, "No tokens follow this prompt."),
    );
  }

  /** All numbers of a token. */
  #describe(which, index) {
    this.numbers.classList.toggle("is-empty", which === null);
    if (which === null) {
      replace(this.numbers, h("p.muted", null, "Point at a token, or move with the arrow keys, to see its numbers."));
      return;
    }
    const sequence = this.data.sequences[which];
    const { ids, texts, special } = sequence.tokens;
    const value = (name) => sequence[name]?.[index] ?? null;
    const rows = [
      ["Position", count(sequence.offset + index + 1)],
      ["Token id", String(ids[index])],
      ...this.quantities.map((quantity) => [
        quantity.label,
        withUnit(quantity, this.values[which][quantity.name]?.[index] ?? null),
      ]),
      ["Sampler's logprob", number(value("sampling_logprobs"))],
      ["Trainer's logprob", number(value("logprobs"))],
      ["Reference logprob", number(value("reference_logprobs"))],
      ["Advantage", number(value("advantages"))],
      ["Loss weight", number(value("loss_weights"))],
      ["Trained", value("loss_mask") ? "yes" : "no, masked"],
    ];
    replace(
      this.numbers,
      h(
        "h3.token-name",
        null,
        texts ? visibleLine(texts[index]).replaceAll(" ", "·") : `id ${ids[index]}`,
        special?.[index] ? h("span.chip", null, "special") : null,
      ),
      h(
        "dl",
        null,
        rows.filter(([, text]) => text !== "–").map(([label, text]) => [h("dt", null, label), h("dd", null, text)]),
      ),
    );
  }
}

const withUnit = (quantity, value) =>
  value === null ? "–" : quantity.format(value) + (quantity.unit ? ` ${quantity.unit}` : "");

/** The tokens of a prompt, folded; the server sends the last of a long one. */
function promptTokens(tokens, total) {
  const body = h("div.fold-body", null);
  const left = total - tokens.ids.length;
  const details = h(
    "details.fold",
    null,
    h("summary", null, h("b", null, "Prompt as tokens"), ` ${plural(total, "token")}, not trained`),
    body,
  );
  details.addEventListener("toggle", () => {
    if (!details.open || body.hasChildNodes()) return;
    if (left > 0) body.append(h("p.muted", null, `The first ${count(left)} tokens are left out.`));
    body.append(new TokenText(tokens, null, () => {}).node);
  });
  return details;
}

/** Why a quantity colors nothing, and what would record it. */
function missing(quantity, data, isKnown) {
  if (isKnown) {
    const why = data.advantage === 0 ? "this completion's advantage is 0" : "every token was certain";
    return `Every value is 0: ${why}, so the update did not push its tokens.`;
  }
  if (quantity.name === "probability") return "This completion has no logprobs.";
  if (data.kind !== "step") return `${quantity.label} is recorded only of completions that are trained on.`;
  if (!data.recorded) {
    const isExplained = data.problems.some((text) => text.includes("run.record_tokens"));
    return `${quantity.label} was not recorded for this step.${isExplained ? "" : " Set run.record_tokens: true to record it."}`;
  }
  if (data.advantage === 0) return "Not computed: this completion's advantage is 0, so it was not trained on.";
  if (data.trained === false) return "Not computed: the loss leaves this completion out.";
  return `${quantity.label} is missing for this completion. Older steps are thinned out to stay below run.record_tokens_max_size.`;
}

/** The scale from its low end to its high end, with numbers, and what a hatched token means. */
function legend(quantity, scale) {
  const levels = [];
  for (let level = scale.middle === null ? 0 : -LEVELS; level <= LEVELS; level++) levels.push(level);
  const text = (value) => withUnit(quantity, value);
  return [
    h(
      "div.legend-scale",
      { role: "img", "aria-label": `Colors from ${text(scale.low)} to ${text(scale.high)}` },
      h("span", null, text(scale.low)),
      h(
        "span.legend-bar",
        null,
        levels.map((level) => h("span", { class: `token ${levelClass(level)}` })),
      ),
      h("span", null, text(scale.high)),
    ),
    h("span.legend-item", null, h("span.token.masked", null, "abc"), " masked: not trained"),
  ];
}

/** What "Copy JSON" gives: the completion's numbers and one object per token. */
function exported(data) {
  const names = [
    "loss_mask",
    "sampling_logprobs",
    "logprobs",
    "entropies",
    "reference_logprobs",
    "advantages",
    "loss_weights",
  ];
  const sequences = data.sequences.map((sequence) => {
    const columns = names.map((name) => [name, sequence[name]]).filter(([, values]) => values);
    const { ids, texts } = sequence.tokens;
    return {
      prompt_token_ids: sequence.prompt?.ids ?? [],
      tokens: ids.map((id, index) => ({
        id,
        text: texts?.[index] ?? null,
        ...Object.fromEntries(columns.map(([name, values]) => [name, values[index]])),
      })),
    };
  });
  const { step, kind, row, group, prompt, text, reward, rewards, advantage } = data;
  return { step, kind, row, group, prompt, text, reward, rewards, advantage, sequences };
}
