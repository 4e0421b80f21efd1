// Rewards as dots and numbers.

import { h } from "./dom.js";
import { count, number } from "./format.js";
import { visibleLine } from "./visible.js";

const LEVELS = 6;

/** The range of all rewards in these groups: {low, high}. */
export function rewardRange(groups) {
  const rewards = groups.flatMap((group) => group.rows.map((row) => row.reward)).filter((reward) => reward !== null);
  return rewards.length ? { low: Math.min(...rewards), high: Math.max(...rewards) } : { low: 0, high: 1 };
}

/** The class of a dot: darker for a higher reward, hollow for the lowest, crossed for none. */
export function rewardClass(reward, { low, high }) {
  if (reward === null || reward === undefined) return "reward-dot level-none";
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return `reward-dot level-${Math.round(share * (LEVELS - 1))}`;
}

/** A strip of dots, best first: one per completion. */
export function rewardStrip(rows, range) {
  const sorted = [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const rewards = sorted.map((row) => number(row.reward));
  return h(
    "span",
    { class: "strip", role: "img", "aria-label": `Rewards: ${rewards.join(", ")}` },
    sorted.map((row, index) =>
      h("span", {
        class: rewardClass(row.reward, range),
        title: `Reward ${rewards[index]} · ${count(row.length)} tokens`,
      }),
    ),
  );
}

const SHOWN_CHARACTERS = 80; // of a detail, before it is opened

/** Every reward by name with its detail, such as test results; then what else functions tell of the completion. */
export function rewardParts({ rewards, details }) {
  const names = Object.keys(rewards ?? {});
  if (!names.length) return null;
  const others = Object.keys(details ?? {}).filter((name) => !(name in rewards) && detailText(details[name]) !== null);
  const part = (name, value) => {
    const detail = detailText(details?.[name]);
    return h("div", null, h("dt", null, visibleLine(name)), h("dd", null, value, detail && detailBlock(detail)));
  };
  return h(
    "dl",
    { class: "reward-parts" },
    names.map((name) => part(name, rewards[name] === null ? "not scored" : number(rewards[name]))),
    others.map((name) => part(name, "")),
  );
}

/** A detail, folded after its beginning if it is long. */
function detailBlock(text) {
  if (text.length <= SHOWN_CHARACTERS) return h("span.muted", null, ` ${text}`);
  return h(
    "details.reward-detail",
    null,
    h("summary.muted", null, `${text.slice(0, SHOWN_CHARACTERS)}…`),
    h("p", null, text),
  );
}

function detailText(detail) {
  if (detail === null || detail === undefined) return null;
  return visibleLine(typeof detail === "string" ? detail : JSON.stringify(detail)).slice(0, 2000);
}
