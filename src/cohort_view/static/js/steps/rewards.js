// Rewards as dots, and their parts with what the reward functions tell of each.

import { count, isNumber, number, plural } from "cohort/format.js";
import { html } from "cohort/preact.js";
import { TextBlock } from "cohort/text.js";
import { visibleLine } from "cohort/visible.js";

const LEVELS = 5;
const OUTER = 0.05; // share of the rewards at each end that cannot stretch the scale
const MOST_DOTS = 24;

/** A function from rewards to levels: 0 (low) to LEVELS, null for none. Single rewards far off do not stretch it. */
export function rewardScale(rewards) {
  const sorted = Float64Array.from(rewards.filter(isNumber)).sort();
  const [least, most] = [sorted[0], sorted.at(-1)];
  const low = sorted[Math.floor(OUTER * (sorted.length - 1))];
  const high = sorted[Math.ceil((1 - OUTER) * (sorted.length - 1))];
  const share = (reward) => {
    if (high > low) return Math.max(0, Math.min(1, (reward - low) / (high - low)));
    if (reward !== low) return reward > low ? 1 : 0;
    if (least < low && most > high) return 0.5;
    return least === most ? Math.max(0, Math.min(1, reward)) : Number(least < low);
  };
  return (reward) => (isNumber(reward) ? Math.round(share(reward) * LEVELS) : null);
}

/** One reward as a dot: darker for a higher reward, hollow for the lowest, dashed for none. */
export function Dot({ level }) {
  const kind = level === null ? "is-none" : level === 0 ? "is-low" : "";
  return html`<i class=${`reward-dot ${kind}`} style=${{ "--fill": (level ?? 0) / LEVELS }}></i>`;
}

/** The rewards of a group as dots, best first; of a large group, as many evenly chosen ones as fit. */
export function Dots({ rows, scale }) {
  const rewards = rows.map((row) => row.reward).sort((a, b) => (b ?? -Infinity) - (a ?? -Infinity));
  const size = Math.min(MOST_DOTS, rewards.length);
  const place = (dot) => Math.round((dot * (rewards.length - 1)) / Math.max(1, size - 1));
  const [best, worst] = [number(rewards[0]), number(rewards.at(-1))];
  const label = `Rewards of ${plural(rewards.length, "completion")}: ${best === worst ? best : `${best} to ${worst}`}`;
  return html`<span class="dots" role="img" aria-label=${label} title=${label}>
    ${Array.from({ length: size }, (_, dot) => html`<${Dot} key=${dot} level=${scale(rewards[place(dot)])} />`)}
  </span>`;
}

/** Every reward by name with its reason, such as test results; then what else functions tell of the completion. */
export function RewardParts({ reward, rewards, details }) {
  const isKnown = (name) => Object.hasOwn(details ?? {}, name) && (details[name] ?? "") !== "";
  const names = Object.keys(rewards ?? {});
  const others = Object.keys(details ?? {}).filter((name) => !names.includes(name) && isKnown(name));
  const isPlain = names.length === 1 && rewards[names[0]] === reward && !isKnown(names[0]);
  const shown = [...(isPlain ? [] : names), ...others];
  if (!shown.length) return null;
  const part = (name) => html`<div key=${name}>
    <dt>${visibleLine(name)}</dt>
    <dd>
      ${names.includes(name) && html`<b>${isNumber(rewards[name]) ? number(rewards[name]) : "not scored"}</b>`}
      ${isKnown(name) && html`<${Detail} value=${details[name]} />`}
    </dd>
  </div>`;
  return html`<dl class="reward-parts">${shown.map(part)}</dl>`;
}

const LINE_CHARACTERS = 120;
const SHOWN_CHARACTERS = 600;
const SHOWN_ENTRIES = 30;
const MAX_DEPTH = 4;

/** What a reward function tells, for reading: a line, a block of text, or values by name. */
function Detail({ value, depth = 0 }) {
  if (typeof value === "string" && value.trim() && value.length <= LINE_CHARACTERS && !value.includes("\n"))
    return html`<span class="detail-line" dir="auto">${visibleLine(value)}</span>`;
  if (typeof value === "string") return html`<${TextBlock} text=${value} shown=${SHOWN_CHARACTERS} />`;
  if (typeof value === "number") return number(value, 4);
  if (value === null || typeof value !== "object") return value === null ? "none" : value ? "yes" : "no";
  if (Array.isArray(value) && value.every(isNumber)) return html`<${Detail} value=${value.join(", ") || "none"} />`;
  if (depth >= MAX_DEPTH) return html`<${Detail} value=${JSON.stringify(value, null, 1)} />`;
  const entries = Array.isArray(value) ? groupEqual(value) : Object.entries(value);
  const more = entries.length - SHOWN_ENTRIES;
  if (more > 0) entries.splice(SHOWN_ENTRIES, more, ["…", `${count(more)} more`]);
  const entry = ([key, one]) =>
    html`<div key=${key}><dt>${visibleLine(key)}</dt><dd><${Detail} value=${one} depth=${depth + 1} /></dd></div>`;
  return html`<dl class="detail">${entries.map(entry)}</dl>`;
}

/** Items of a list by their places, equal ones that follow each other once: [["1 to 4", "passed"], ["5", "failed"]]. */
function groupEqual(items) {
  const found = [];
  items.forEach((item, index) => {
    const text = JSON.stringify(item);
    const last = found.at(-1);
    if (last?.text === text) last.to = index + 1;
    else found.push({ text, item, from: index + 1, to: index + 1 });
  });
  const place = ({ from, to }) => (from === to ? `${from}` : found.length === 1 ? `all ${to}` : `${from} to ${to}`);
  return found.map((one) => [place(one), one.item]);
}
