// Axes of charts: ranges, and ticks with as few digits as tell them apart.

import { bytes, count, isNumber, number, seconds } from "cohort/format.js";

// Distances of ticks
const SECONDS = [
  0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2592000,
];
const STEPS = [1, 2, 5].flatMap((d) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((p) => d * p)).sort((a, b) => a - b);

/** The horizontal axis, as uPlot takes it. @param {"step" | "time"} x */
export function xAxis(x) {
  const text = x === "time" ? shortTime : count;
  return {
    size: 24,
    gap: 4,
    space: 56,
    incrs: x === "time" ? SECONDS : STEPS,
    values: (_, splits) => splits.map(text),
  };
}

/** The vertical axis, as uPlot takes it. */
export function yAxis(unit, isLog) {
  const values = (_, splits) => splits.map((value) => (value === null ? "" : axisText(value, unit, splits, isLog)));
  const axis = { size: axisWidth, gap: 4, space: 28, values };
  // uPlot's own choice for log scales labels nine values of each power of ten.
  return isLog ? { ...axis, splits: (_, __, low, high) => logSplits(low, high), filter: (_, splits) => splits } : axis;
}

/** The range of x that holds these values, never empty. */
export function xRange(low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

/** The range of y that holds these values, with some room. */
export function yRange(low, high, log) {
  if (!isNumber(low) || !isNumber(high)) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.2, high * 1.2];
  const pad = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

/** Powers of ten, with 2 and 5 times them if there are few. At most about 6. */
function logSplits(low, high) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const decades = Math.log10(high / low);
  const factors = decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 6));
  const splits = [];
  for (let power = first; power <= last; power += every)
    factors.forEach((factor) => splits.push(Number(`${factor}e${power}`)));
  return splits.filter((split) => split >= low && split <= high);
}

function axisWidth(plot, values) {
  const longest = Math.max(0, ...(values ?? []).map((text) => text?.length ?? 0));
  return Math.max(36, 10 + longest * 6.2);
}

/** A value of the vertical axis, with as many digits as tell neighbors apart. */
function axisText(value, unit, splits, isLog) {
  if (unit === "s" || unit === "seconds") return seconds(value);
  if (unit === "bytes" || unit === "B") return bytes(value);
  const distance = isLog || splits.length < 2 ? 0 : Math.abs(splits[1] - splits[0]);
  const digits = distance > 0 ? digitsFor(Math.max(...splits.map(Math.abs)), distance) : 3;
  if (unit === "share") return `${Number((value * 100).toPrecision(digits))}%`.replace("-", "\u2212");
  if (distance >= 1 && Math.abs(value) < 1e6) return count(value);
  return number(value, Math.max(digits, 2));
}

/** Significant digits of the largest value that show the distance of neighbors. */
function digitsFor(largest, distance) {
  const power = Math.floor(Math.log10(distance) + 1e-9);
  const first = distance / 10 ** power;
  const more = Math.abs(first - Math.round(first)) > 1e-6 ? 1 : 0; // 2.5 has a digit more than 2 and 5
  return Math.min(8, Math.max(1, Math.floor(Math.log10(largest) + 1e-9) - power + 1 + more));
}

function shortTime(value) {
  return value === 0 ? "0" : seconds(value);
}
