// A group: its prompt, the expected answer and its completions, of which one unfolds with its tokens.

import { isExport, runPath } from "cohort/api.js";
import { change, count, isNumber, number, plural, seconds } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html, useEffect, useLayoutEffect, useRef } from "cohort/preact.js";
import { Dot, RewardParts } from "cohort/steps/rewards.js";
import { Tokens } from "cohort/steps/tokens.js";
import { contentText, Conversation, Cut, Folded, isToolError, TextBlock } from "cohort/text.js";
import { Chip, CopyButton, Empty, Failure, Loading, Problems, Segmented } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";

const PROMPT_CHARACTERS = 1200;
const CLOSED_CHARACTERS = 500; // of a completion's text
const LAST_CHARACTERS = 300; // of a conversation's last message
const VIEWS = [["text", "Text"], ["tokens", "Tokens"]];
const ENDS = {
  max_turns: "out of turns",
  length: "cut at the limit",
  timeout: "timed out",
  environment_error: "environment failed",
};

/** `row`: the completion that is open, or null; `color`: what its tokens show; `onOpen(row)`, `onColor(name)`. */
export function Group({ index, scale, row, ...props }) {
  const { id, step, kind } = props;
  const { data, error, reload } = useData(runPath(id, `steps/${step}/groups/${index}`, { kind }));
  const title = useRef(null);
  useLayoutEffect(() => {
    const isAbove = title.current.getBoundingClientRect().top < 0;
    if (isAbove && history.state?.top === undefined) title.current.scrollIntoView(); // else the way back
  }, []);
  const heading = html`<h2 tabindex="-1" class="group-title" ref=${title}>Group ${count(index)}</h2>`;
  if (error && !data) return html`${heading}<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`${heading}<${Loading} />`;
  const { prompt, answer, completions, problems } = data;
  if (!completions.length) return html`${heading}<${Empty} title=${problems[0] ?? "This group has no completions."} />`;
  const completion = (set) => {
    const open = set.find((one) => one.row === row);
    return html`<${Completion} key=${set[0].row} ...${props} set=${set} scale=${scale} open=${open} />`;
  };
  return html`${heading}
    <${Problems} list=${problems} />
    <section class="part">
      <h3>Prompt</h3>
      ${
        Array.isArray(prompt)
          ? html`<${Conversation} messages=${prompt} />`
          : html`<${TextBlock} text=${prompt} shown=${PROMPT_CHARACTERS} />`
      }
      ${data.prompt_cut && html`<${Cut} what="The prompt" />`}
    </section>
    ${
      (answer ?? null) !== null &&
      html`<section class="part expected">
        <h3>Expected answer</h3><${TextBlock} text=${answer} shown=${CLOSED_CHARACTERS} />
        ${data.answer_cut && html`<${Cut} what="The answer" />`}
      </section>`
    }
    <section class="part">
      <h3>${plural(completions.length, "completion")}</h3>
      ${completions.length > 1 && html`<p class="muted">${verdict(completions, kind)}</p>`}
      <ul class="completions">${sets(completions).map(completion)}</ul>
    </section>`;
}

/** One sentence: the rewards and, of groups to train on, what they taught. */
function verdict(completions, kind) {
  const isTrained = kind !== "eval";
  const rewards = completions.map((item) => item.reward).filter(isNumber);
  if (!rewards.length) return `None was scored${isTrained ? ", so the group taught nothing" : ""}.`;
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const better = completions.filter((item) => item.advantage > 0).length;
  const worse = completions.filter((item) => item.advantage < 0).length;
  const all = `All ${count(rewards.length)} rewards are ${number(low)}`;
  const range = low === high ? all : `Rewards from ${number(low)} to ${number(high)}`;
  if (better || worse) return `${range}: ${count(better)} made more likely, ${count(worse)} less.`;
  return `${range}${isTrained && low === high ? ", so every advantage is 0 and the group taught nothing" : ""}.`;
}

/** Completions of the same text and rewards as one set each, best first. */
function sets(completions) {
  const found = new Map();
  for (const item of [...completions].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity))) {
    const { text, messages, rewards, details, reward, advantage, end, error } = item;
    const key = JSON.stringify([text, messages, rewards, details, reward, advantage, end, error]);
    found.set(key, [...(found.get(key) ?? []), item]);
  }
  return [...found.values()];
}

/** One completion, or several that are the same. `open`: the one of them that is unfolded. */
function Completion({ set, open, scale, onOpen, ...props }) {
  const item = open ?? set[0];
  const { row, reward, length, end, error } = item;
  const root = useRef(null);
  useEffect(() => open && root.current.scrollIntoView({ block: "nearest" }), []);
  const toggle = () => onOpen(open ? null : row);
  const rows = `Equal completions: rows ${set.map((one) => one.row).join(", ")}`;
  return html`<li class=${open ? "completion is-open" : "completion"} ref=${root}>
    <button type="button" class="completion-head row" aria-expanded=${`${!!open}`} onClick=${toggle}>
      <${Dot} level=${scale(reward)} />
      <b title="Reward">${isNumber(reward) ? number(reward) : "not scored"}</b>
      <${Advantage} value=${item.advantage} />
      <span class="muted">${plural(length, "token")}</span>
      ${end && end !== "answer" && html`<${Chip} kind="warning">${Object.hasOwn(ENDS, end) ? ENDS[end] : visibleLine(end)}<//>`}
      ${set.length > 1 && html`<${Chip} title=${rows}>× ${set.length}<//>`}
      <span class="completion-row muted small">row ${count(row)}</span>
    </button>
    <${RewardParts} reward=${reward} rewards=${item.rewards} details=${item.details} />
    ${error && html`<${Folded} title="Error" text=${error} isError />`}
    ${open ? html`<${Whole} item=${item} ...${props} />` : html`<${Closed} item=${item} />`}
    ${item.cut && html`<${Cut} what="A long text of this completion" />`}
    <${Environment} item=${item} withTimes=${Boolean(open)} />
  </li>`;
}

/** Both ends of a completion; of a conversation, its last message. */
function Closed({ item: { text, messages } }) {
  if (!messages) return html`<${TextBlock} text=${text} shown=${CLOSED_CHARACTERS} />`;
  const turns = messages.filter((message) => message.role === "assistant").length;
  const calls = messages.flatMap((message) => (Array.isArray(message.tool_calls) ? message.tool_calls : [])).length;
  const failed = messages.filter(isToolError).length;
  const made = `${plural(turns, "turn")}, ${plural(calls, "tool call")}${failed ? `, ${count(failed)} failed` : ""}`;
  const last = messages.findLast(({ content }) => contentText(content).trim());
  return html`
    <p class="muted small">${made}; the last message:</p>
    <${TextBlock} text=${contentText(last?.content)} shown=${LAST_CHARACTERS} />
  `;
}

/** A whole completion: as text or conversation, or as tokens, which are no part of a report. */
function Whole({ item: { row, text, advantage, messages }, color, ...props }) {
  const view = isExport || color === "text" || (!color && messages) ? "text" : "tokens";
  const choose = (name) => props.onColor(name === "text" ? "text" : "probability");
  return html`
    <div class="row spread">
      ${!isExport && html`<${Segmented} label="Show" options=${VIEWS} value=${view} onChange=${choose} />`}
      <${CopyButton} label="Copy text" text=${() => text || JSON.stringify(messages, null, 1)} />
    </div>
    ${view === "tokens" && html`<${Tokens} key=${row} ...${props} ...${{ row, text, advantage, color }} />`}
    ${view === "text" && messages && html`<${Conversation} messages=${messages} />`}
    ${view === "text" && !messages && html`<${TextBlock} text=${text} />`}
  `;
}

/** An advantage with its sign, colored by direction as tokens are. */
function Advantage({ value }) {
  if (!isNumber(value)) return null;
  const direction = value > 0 ? "advantage-up" : value < 0 ? "advantage-down" : "muted";
  return html`<span class=${direction}>advantage ${value ? change(value, (size) => number(size, 2)) : "0"}</span>`;
}

/** What the environment measured, and where the time of an open completion went. */
function Environment({ item: { environment, model_s: model, environment_s: others }, withTimes }) {
  const rows = Object.entries(environment ?? {}).map(([name, value]) => [visibleLine(name), number(value)]);
  if (withTimes) rows.push(["model", seconds(model)], ["tools and environment", seconds(others || null)]);
  const known = rows.filter(([, text]) => text !== "–");
  if (!known.length) return null;
  const row = ([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`;
  return html`<dl class="environment muted small">${known.map(row)}</dl>`;
}
