// All steps of a run in a row of cells, colored by the share of groups whose rewards are all equal: those teach nothing.

import { h } from "./dom.js";
import { count, isNumber, percent } from "./format.js";

const CELL_PX = 6;

/**
 * The strip of a curve of `frac_reward_zero_std`; null for fewer than two steps. A cell of a long run stands for several
 * steps: its color is their mean, and it opens the one with the largest share.
 * @param {{x: number[], y: (number | null)[], means: (number | null)[] | null}} curve
 * @param {number} current step that is marked
 * @param {(step: number) => string | null} hrefOf
 */
export function stepStrip(curve, current, hrefOf) {
  const cells = cellsOf(curve, Math.max(20, Math.floor(window.innerWidth / CELL_PX)));
  if (!cells.length) return null;
  return [
    h(
      "nav.step-cells",
      { "aria-label": "Steps by share of groups with equal rewards" },
      cells.map(({ from, to, worst, share }) => {
        const steps = from === to ? `Step ${count(from)}` : `Steps ${count(from)} to ${count(to)}`;
        return h("a.step-cell", {
          href: hrefOf(worst),
          tabindex: -1, // the field beside the title is for the keyboard
          class: current >= from && current <= to ? "is-current" : "",
          style: { "--share": share ?? 0 },
          title: `${steps}: ${isNumber(share) ? `${percent(share)} of groups have equal rewards` : "not known"}`,
        });
      }),
    ),
    h(
      "p.muted.small.step-legend",
      null,
      "Groups with equal rewards: 0%",
      [0, 0.25, 0.5, 0.75, 1].map((share) => h("span.step-cell", { style: { "--share": share } })),
      "100% (nothing to learn)",
    ),
  ];
}

/** The steps in at most `most` cells of equally many: {from, to, worst, share: mean or null}. */
function cellsOf({ x, y, means }, most) {
  if (x.length < 2) return [];
  const [first, last] = [x[0], x.at(-1)];
  const width = Math.ceil((last - first + 1) / most);
  const cells = [];
  for (let from = first; from <= last; from += width)
    cells.push({ from, to: Math.min(last, from + width - 1), worst: from, most: -1, shares: [] });
  x.forEach((step, index) => {
    const cell = cells[Math.floor((step - first) / width)];
    if (!isNumber(y[index])) return;
    if (y[index] > cell.most) Object.assign(cell, { worst: step, most: y[index] });
    cell.shares.push(means?.[index] ?? y[index]);
  });
  return cells.map(({ shares, ...cell }) => ({
    ...cell,
    share: shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null,
  }));
}
