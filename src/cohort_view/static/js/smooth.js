// Smoothing of curves.

import { isNumber } from "cohort/format.js";

/**
 * Exponential moving average without the bias of its start: the average of all earlier values, of which each weighs
 * `weight` times the next. Weights follow the distance in x, in units of `unit`, so that a downsampled curve is smoothed
 * as far as a full one. Missing values stay missing.
 *
 * @param {number[]} x increasing
 * @param {(number | null)[]} y
 * @param {number} weight at least 0 (no smoothing), below 1
 * @param {number} unit distance of x in which a value's weight shrinks by `weight`
 * @returns {(number | null)[]}
 */
export function smooth(x, y, weight, unit = 1) {
  if (!(weight > 0)) return y;
  let sum = 0;
  let total = 0;
  let last = null;
  return y.map((value, index) => {
    if (!isNumber(value)) return value === undefined ? undefined : null;
    const keep = last === null ? 0 : weight ** Math.max((x[index] - last) / unit, 1e-9);
    last = x[index];
    sum = keep * sum + (1 - weight) * value;
    total = keep * total + (1 - weight);
    return sum / total;
  });
}

/**
 * The distance in x to which a weight belongs: one step, and in long runs so many that a curve looks as smooth as that of a
 * short one. It only takes powers of two, so that it stays while a run goes on.
 *
 * @param {number} span of x
 * @param {number} step distance of two neighbors
 */
export function smoothingUnit(span, step) {
  const most = span / 200;
  return most > step ? step * 2 ** Math.floor(Math.log2(most / step)) : step;
}
