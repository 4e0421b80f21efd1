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

/** A strip of dots, best first: one per completion, each a link to it. */
export function rewardStrip(rows, range, linkOf) {
  const sorted = [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const rewards = sorted.map((row) => number(row.reward));
  return h(
    "span",
    { class: "strip", role: "img", "aria-label": `Rewards: ${rewards.join(", ")}` },
    sorted.map((row, index) =>
      h("a", {
        class: rewardClass(row.reward, range),
        href: linkOf(row),
        tabindex: "-1",
        title: `Reward ${rewards[index]} · ${count(row.length)} tokens`,
      }),
    ),
  );
}

const SHOWN_CHARACTERS = 80; // of a detail; its title has more

/** Every reward by name, its detail as a title; then what else functions tell of the completion. */
export function rewardParts({ rewards, details }) {
  const names = Object.keys(rewards ?? {});
  if (!names.length) return null;
  const others = Object.keys(details ?? {}).filter((name) => !(name in rewards) && detailText(details[name]) !== null);
  const part = (name, shown) =>
    h("div", null, h("dt", null, visibleLine(name)), h("dd", { title: detailText(details?.[name]) }, shown));
  return h(
    "dl",
    { class: "reward-parts" },
    names.map((name) => part(name, rewards[name] === null ? "not scored" : number(rewards[name]))),
    others.map((name) => part(name, detailText(details[name]).slice(0, SHOWN_CHARACTERS))),
  );
}

function detailText(detail) {
  if (detail === null || detail === undefined) return null;
  return visibleLine(typeof detail === "string" ? detail : JSON.stringify(detail)).slice(0, 2000);
}
