// What a token can be colored by: its values, and the scale from values to colors.

import { number } from "cohort/format.js";

export const LEVELS = 8; // shades on each side of zero
const LEAST_RATIO = 0.01; // log ratios below are rounding
const STRONGEST = 0.995; // quantile above which all share the strongest color, so that an outlier hides no others

const map = (values, compute) => values && values.map((value) => (value === null ? null : compute(value)));

/** Element by element; null where an input is. */
const combine = (a, b, compute) =>
  a && b && a.map((value, index) => (value === null || b[index] === null ? null : compute(value, b[index])));

/** The logprobs that a probability is made of: the trainer's, and the sampler's of tokens that were not trained. */
function policyLogprobs({ sampling_logprobs: sampler, logprobs: trainer }) {
  return trainer ? trainer.map((value, index) => value ?? sampler?.[index] ?? null) : sampler;
}

/** The gradient of the loss at each token's logit, negated: a sure token has nothing to gain. */
function pushes(sequence) {
  const weighted = combine(sequence.loss_weights, sequence.advantages, (a, b) => a * b);
  return combine(weighted, policyLogprobs(sequence), (push, logprob) => push * (1 - Math.exp(logprob)));
}

/** `values(sequence)`: a number or null per token, or null if the run did not record them; `kind`: of the scale. */
const QUANTITIES = [
  { name: "probability", label: "Probability", kind: "falling", values: (one) => map(policyLogprobs(one), Math.exp),
    help: "Probability of the token under the policy. Strong color: an unlikely choice." },
  { name: "entropy", label: "Entropy", kind: "rising", unit: " nats", values: (one) => one.entropies,
    help: "Entropy of the distribution that the token was sampled from. Strong color: many plausible choices." },
  { name: "push", label: "Push", kind: "diverging", values: pushes,
    help: "Loss weight × advantage × (1 − probability). Blue: made more likely; orange: made less likely." },
  { name: "ratio", label: "Ratio", kind: "ratio", digits: 5, values: (one) => one.ratios,
    help: "Probability at the update / probability when sampled. Blue: now more likely; orange: now less likely." },
];

/** The quantities that tell anything of a completion: the ratio only where trainer and sampler differ. */
export function quantitiesOf(sequences) {
  const differs = (ratio) => ratio !== null && Math.abs(Math.log(ratio)) >= LEAST_RATIO;
  return QUANTITIES.filter(({ name }) => name !== "ratio" || sequences.some(({ ratios }) => ratios?.some(differs)));
}

/** A value of a quantity as text. */
export const asText = ({ digits = 3, unit = "" }, value) => (value === null ? "–" : number(value, digits) + unit);

/**
 * The scale of these columns: {level(value) -> -LEVELS..LEVELS (0: no color), low, high, isSequential}; null if nothing
 * is known, or all are 0 on a scale around 0.
 */
export function scaleOf({ kind }, columns) {
  const values = columns.flatMap((column) => column?.filter((value) => value !== null) ?? []);
  if (!values.length) return null;
  const scale = (low, high, shareOf) => ({
    low,
    high,
    isSequential: kind === "falling" || kind === "rising",
    level: (value) => Math.round(Math.max(-1, Math.min(1, shareOf(value))) * LEVELS),
  });
  if (kind === "falling") return scale(1, 0, (value) => 1 - value);
  const sorted = Float64Array.from(values, kind === "ratio" ? (value) => Math.abs(Math.log(value)) : Math.abs).sort();
  const reach = Math.max(sorted[Math.floor(STRONGEST * sorted.length)], kind === "ratio" ? LEAST_RATIO : 0);
  if (kind === "ratio") return scale(Math.exp(-reach), Math.exp(reach), (value) => Math.log(value) / reach);
  if (kind === "rising") return scale(0, reach, (value) => value / (reach || 1));
  return reach ? scale(-reach, reach, (value) => value / reach) : null;
}
