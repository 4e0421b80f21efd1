// What a token can be colored by: its values, the scale from values to color classes, and the legend's numbers.

import { number } from "./format.js";

export const LEVELS = 8; // color classes on each side of zero: q1..q8 and, for diverging scales, n1..n8

/** Element by element; null where an input is. */
function combine(a, b, compute) {
  if (!a || !b) return null;
  return a.map((value, index) => (value === null || b[index] === null ? null : compute(value, b[index])));
}

function map(values, compute) {
  return values && values.map((value) => (value === null ? null : compute(value)));
}

/** The logprobs a probability is made of: the trainer's, and the sampler's of tokens that were not trained. */
function policyLogprobs(sequence) {
  const { sampling_logprobs: sampler, logprobs: trainer } = sequence;
  return trainer ? trainer.map((value, index) => value ?? sampler?.[index] ?? null) : sampler;
}

function ratios(sequence) {
  return sequence.ratios ?? combine(sequence.logprobs, sequence.sampling_logprobs, (a, b) => Math.exp(a - b));
}

/** The gradient of the loss at each token's logit, negated: a sure token has nothing to gain. */
function pushes(sequence) {
  const weighted = combine(sequence.loss_weights, sequence.advantages, (a, b) => a * b);
  return combine(weighted, policyLogprobs(sequence), (push, logprob) => push * (1 - Math.exp(logprob)));
}

const LEAST_RATIO = 0.01; // log ratios below are rounding

/** The quantities that tell anything of a completion: the ratio only where trainer and sampler differ. */
export function quantitiesOf(sequences) {
  const differs = sequences.some((one) => ratios(one)?.some((r) => r !== null && Math.abs(Math.log(r)) >= LEAST_RATIO));
  return QUANTITIES.filter(({ name }) => name !== "ratio" || differs);
}

/**
 * Quantities in the order of the menu. `values(sequence)` gives one number or null per token, or null if the run did not
 * record them; `scale`: how they become colors; `low` and `high`: words for the legend's ends.
 */
export const QUANTITIES = [
  {
    name: "probability",
    label: "Probability",
    values: (sequence) => map(policyLogprobs(sequence), Math.exp),
    scale: { kind: "sequential", from: 1, to: 0 },
    format: (value) => number(value, 3),
    help: "Probability of the token under the policy. Strong color: an unlikely choice.",
  },
  {
    name: "ratio",
    label: "Ratio to the sampling policy",
    values: ratios,
    scale: { kind: "ratio" },
    format: (value) => number(value, 5),
    help: "Probability at the update divided by the probability when the token was sampled. Blue: now more likely; orange: now less likely.",
  },
  {
    name: "entropy",
    label: "Entropy",
    values: (sequence) => sequence.entropies,
    scale: { kind: "sequential", from: 0, to: null },
    format: (value) => number(value, 3),
    unit: "nats",
    help: "Entropy of the policy's distribution at the token, in nats. Strong color: many plausible choices.",
  },
  {
    name: "push",
    label: "Push",
    values: pushes,
    scale: { kind: "diverging" },
    format: (value) => number(value, 3),
    help: "Loss weight × advantage × (1 − probability): the gradient at the token's logit. Blue: made more likely; orange: made less likely.",
  },
];

/**
 * The scale of these values: {level(value) -> -LEVELS..LEVELS (0: no color), low, high (the ends), middle or null}; null if
 * all are 0 on a scale around 0.
 * The largest 0.5% of the values share the strongest color, so that one outlier does not hide all others.
 */
export function scaleOf(quantity, columns) {
  const { kind, from, to } = quantity.scale;
  const values = columns.flatMap((values) => values.filter((value) => value !== null));
  if (kind === "sequential") {
    const end = to ?? Math.max(quantile(values, 0.995), 1e-6);
    return {
      low: from,
      high: end,
      middle: null,
      level: (value) => clampLevel((value - from) / (end - from), 0),
    };
  }
  const spread = kind === "ratio" ? Math.log : (value) => value;
  const sizes = values.map((value) => Math.abs(spread(value)));
  const reach = Math.max(quantile(sizes, 0.995), kind === "ratio" ? LEAST_RATIO : 0);
  if (!reach) return null;
  const back = kind === "ratio" ? Math.exp : (value) => value;
  return {
    low: back(-reach),
    high: back(reach),
    middle: back(0),
    level: (value) => clampLevel(spread(value) / reach, -1),
  };
}

/** A share of the scale as a level; any value but 0 is at least faintly visible on the two outer thirds. */
function clampLevel(share, lowest) {
  return Math.round(Math.max(lowest, Math.min(1, share)) * LEVELS);
}

function quantile(values, share) {
  if (!values.length) return 0;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** The CSS class of a level: "" for 0. */
export function levelClass(level) {
  if (!level) return ""; // also NaN and -0
  return level > 0 ? `q${level}` : `n${-level}`;
}
