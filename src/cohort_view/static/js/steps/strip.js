// All steps of a run in a row: the outcome of their groups or, while there is a filter, how many completions match.

import { hasStep, path } from "cohort/api.js";
import { count, isNumber, percent, plural } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html } from "cohort/preact.js";

const SHARES = { frac_reward_zero_std: "equal", frac_all_right: "right", frac_all_wrong: "wrong" };
const CELL_PX = 6;
const LABEL_PX = 24; // width of a cell that has room for a number

/** The curves that the strip draws, whether they are loaded, and the last step that has metrics (-1: none). */
export function useOutcomes(id) {
  const { data } = useData(path("/api/curves", { runs: [id], names: Object.keys(SHARES), x: "step" }), ["metrics"]);
  const curves = data?.curves ?? [];
  return { curves, isLoaded: data !== null, last: Math.max(...curves.map(({ x }) => x.at(-1) ?? -1), -1) };
}

/** `files`: {first, last} steps with completions; `matches`: number of matches by step, or null; `hrefOf(step)`. */
export function Strip({ id, curves, files, current, matches, hrefOf }) {
  const cells = cellsOf(curves, files, matches, Math.max(20, Math.floor((window.innerWidth - 80) / CELL_PX)));
  if (cells.length < 2) return null;
  const highest = Math.max(1, ...cells.map((cell) => cell.matches));
  const hasRoom = matches && window.innerWidth / cells.length > LABEL_PX;
  const cell = ({ from, to, opens, right, wrong, mixed, matches: found }) => {
    const steps = from === to ? `Step ${count(from)}` : `Steps ${count(from)} to ${count(to)}`;
    const label = `${steps}: ${matches ? plural(found, "match", "matches") : outcome(right, wrong, mixed)}`;
    const isCurrent = current >= from && current <= to;
    const props = {
      title: label,
      class: `strip-cell ${isCurrent ? "is-current" : ""} ${matches || isNumber(mixed) ? "" : "is-unknown"}`,
      style: { "--right": right ?? 0, "--wrong": wrong ?? 0, "--between": mixed ?? 0, "--found": found / highest },
    };
    const content = html`<span class="visually-hidden">${label}</span>
      ${hasRoom && found > 0 && html`<span aria-hidden="true">${count(found)}</span>`}`;
    // not in the order of Tab: the field beside the title and the brackets are for the keyboard
    return hasStep(id, opens)
      ? html`<a key=${from} href=${hrefOf(opens)} tabindex="-1" ...${props}>${content}</a>`
      : html`<span key=${from} ...${props}>${content}</span>`;
  };
  const [areJudged, areNot] = [true, false].map((isJudged) =>
    cells.some(({ right, mixed }) => isNumber(mixed) && isNumber(right) === isJudged),
  );
  const swatches = [
    ["right", "all right", areJudged],
    ["mixed", areJudged ? "mixed" : "different rewards", areJudged || areNot],
    ["equal", "equal rewards", areNot],
    ["wrong", "all wrong", areJudged],
  ].filter(([, , isShown]) => isShown);
  const legend = ([name, label]) => html`<span key=${name}><i class=${`swatch swatch-${name}`}></i>${label}</span>`;
  return html`<div class="step-strip">
    <nav class=${matches ? "strip-cells has-matches" : "strip-cells"} aria-label="Steps">${cells.map(cell)}</nav>
    ${!matches && html`<p class="strip-legend row small muted">Groups: ${swatches.map(legend)}</p>`}
  </div>`;
}

function outcome(right, wrong, mixed) {
  if (!isNumber(mixed)) return "not known";
  if (!isNumber(right)) return `${percent(1 - mixed, 0)} of the groups with equal rewards`;
  return `${percent(mixed, 0)} of the groups mixed, ${percent(right, 0)} all right, ${percent(wrong, 0)} all wrong`;
}

/**
 * The steps in at most `most` cells of equally many, with the means of their shares: all right, all wrong and the rest, as
 * in the chart of outcomes; equal and different rewards in runs without these metrics. A cell of several opens the one with
 * most matches or the largest share of equal rewards.
 */
function cellsOf(curves, files, matches, most) {
  const found = Object.entries(matches ?? {}).map(([step, num]) => [Number(step), num]);
  const ends = [[files?.first, files?.last], found.map(([step]) => step), ...curves.map(({ x }) => [x[0], x.at(-1)])];
  const known = ends.flat().filter(isNumber);
  if (!known.length) return [];
  const [first, last] = [Math.min(...known), Math.max(...known)];
  const width = Math.ceil((last - first + 1) / most);
  const cells = [];
  for (let from = first; from <= last; from += width)
    cells.push({ from, to: Math.min(last, from + width - 1), opens: from, best: -1, matches: 0, shares: {} });
  const cellOf = (step) => cells[Math.floor((step - first) / width)];
  const prefer = (step, size) => size > cellOf(step).best && Object.assign(cellOf(step), { opens: step, best: size });
  for (const { name, x, y, means } of curves)
    x.forEach((step, index) => {
      if (!isNumber(y[index])) return;
      (cellOf(step).shares[SHARES[name]] ??= []).push(means?.[index] ?? y[index]);
      if (SHARES[name] === "equal" && !matches) prefer(step, y[index]);
    });
  for (const [step, num] of found) {
    cellOf(step).matches += num;
    prefer(step, num);
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return cells.map(({ shares: { right, wrong, equal }, ...cell }) => {
    if (right && wrong) {
      const [all, none] = [mean(right), mean(wrong)];
      return { ...cell, right: all, wrong: none, mixed: Math.max(0, 1 - all - none) };
    }
    return equal ? { ...cell, mixed: 1 - mean(equal) } : cell;
  });
}
