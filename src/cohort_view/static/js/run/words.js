// Words for what a run's files call by keys: metrics and phases.

import { visibleLine } from "cohort/visible.js";

const METRICS = {
  reward_std: "Spread of rewards in a group",
  "eval/accuracy": "Held-out accuracy",
  frac_all_wrong: "Groups all wrong",
  frac_all_right: "Groups all right",
  frac_reward_zero_std: "Groups with equal rewards",
  frac_unscored: "Unscored completions",
  "completions/mean_length": "Completion length",
  "completions/max_length": "Longest completion",
  "completions/clipped_ratio": "Completions cut at the limit",
  "completions/trained_ratio": "Completions with a gradient",
  kl: "KL to the reference",
  grad_norm: "Gradient norm",
  step_time: "Time per step",
  "sampling/sampling_logp_difference/mean": "Logprobs, sampler against trainer: mean difference",
  "sampling/sampling_logp_difference/max": "Logprobs, sampler against trainer: largest difference",
};

/** A metric in words: "turns/mean" -> "Turns: mean", "rewards/right/mean" -> "Reward “right”". */
export function metricWords(name) {
  if (Object.hasOwn(METRICS, name)) return METRICS[name];
  if (/^eval\/./.test(name)) return `Held-out: ${metricWords(name.slice("eval/".length))}`;
  const [, reward, what] = name.match(/^rewards\/(.+)\/(\w+)$/) ?? [];
  const parts = reward ? [`reward “${reward}”`, what] : name.replace(/(_s|_bytes)$/, "").split("/");
  if (what === "mean") parts.pop();
  const [first, ...others] = parts.map((part) => part.replaceAll("_", " "));
  const text = others.length ? `${first}: ${others.join(", ")}` : first;
  return visibleLine(text.charAt(0).toUpperCase() + text.slice(1) || name);
}

const PHASES = {
  rollout: "Sampling",
  reward: "Scoring",
  forward_only: "Logprobs",
  pack: "Packing",
  train: "Training",
  optim: "Optimizer",
  publish: "Publishing weights",
  evaluation: "Evaluating",
  checkpoint: "Saving checkpoints",
  starting: "Starting",
  other: "Other (loading, files)",
};

/** The phases of a step in the order of their colors. */
export const STEP_PHASES = ["rollout", "train", "reward", "forward_only", "pack", "optim", "publish"];

/** A phase in words. */
export const phaseWords = (phase) => (Object.hasOwn(PHASES, phase) ? PHASES[phase] : metricWords(phase));
