// Which metrics to show: an overview, groups, those that match a search.

const OVERVIEW = [
  "reward",
  "eval/accuracy",
  "frac_all_right",
  "frac_all_wrong",
  "frac_reward_zero_std",
  "completions/mean_length",
  "completions/clipped_ratio",
  "entropy",
  "kl",
  "grad_norm",
  "sampling/sampling_logp_difference/mean",
  "turns/mean",
  "tools/failure_frequency",
  "tokens_per_second",
  "step_time",
];
const OVERVIEW_SIZE = 12;

const GROUPS = [
  "Reward",
  "Completions",
  "Turns and tools",
  "Policy",
  "Sampler",
  "Held-out",
  "Optimizer",
  "Time",
  "Memory",
  "Throughput",
  "Other",
];

/** The metrics to show first, of those that there are. @param {{name: string}[]} metrics */
export function overviewOf(metrics) {
  const found = OVERVIEW.map((name) => metrics.find((metric) => metric.name === name)).filter(Boolean);
  return found.slice(0, OVERVIEW_SIZE);
}

/** [name of the group, its metrics], in the order of docs/metrics.md. */
export function groupsOf(metrics) {
  const names = [...new Set(metrics.map((metric) => metric.group))];
  const place = (name) => (GROUPS.includes(name) ? GROUPS.indexOf(name) : GROUPS.length);
  names.sort((a, b) => place(a) - place(b));
  return names.map((name) => [name, metrics.filter((metric) => metric.group === name)]);
}

/** The metrics that have all words in their name, group or description; those with all in their name come first. */
export function findMetrics(metrics, text) {
  const words = text.toLowerCase().split(/\s+/);
  const has = (place) => words.every((word) => place.toLowerCase().includes(word));
  const found = metrics.filter((metric) => has(`${metric.name} ${metric.group} ${metric.description}`));
  return found.sort((a, b) => Number(has(b.name)) - Number(has(a.name)));
}
