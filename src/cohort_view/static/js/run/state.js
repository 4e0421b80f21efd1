// Where a run stands, in one line, and what is to be known about it: one cause with its evidence, the others folded.

import { hasStep } from "cohort/api.js";
import { count, isNumber, number, percent, plural, seconds } from "cohort/format.js";
import { useTick } from "cohort/hooks.js";
import { html, useMemo } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { Banner, Fold, Progress } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";
import { metricWords, phaseWords } from "cohort/run/words.js";

export const isLive = ({ state }) => state === "running" || state === "starting";

/** "Step 17 of 30 · ran for 22 s · 1.2 s per step"; of a live run also its phase and the time left. */
export function StateLine({ now }) {
  const live = isLive(now);
  useTick(1000, live);
  const steps = isNumber(now.steps) ? ` of ${count(now.steps)}` : "";
  // Of a live run, durations go on between two answers.
  const received = useMemo(() => Date.now(), [now]);
  const age = live ? (Date.now() - received) / 1000 : 0;
  const parts = [
    html`<strong>Step ${count(now.step ?? 0)}${steps}</strong>`,
    live && now.phase && phaseNow(now),
    live && isNumber(now.seconds_left) && `about ${seconds(roundTime(now.seconds_left - age))} left`,
    isNumber(now.elapsed_s) && `${live ? "running for" : "ran for"} ${seconds(Math.round(now.elapsed_s + age))}`,
    isNumber(now.seconds_per_step) && `${seconds(now.seconds_per_step)} per step`,
    isNumber(now.tokens_per_second) && `${number(now.tokens_per_second)} tokens/s`,
  ].filter(Boolean);
  return html`<div class="run-state">
    <p class="dotted">${parts.map((part, index) => html`<span key=${index}>${part}</span>`)}</p>
    ${live && now.steps > 0 && html`<${Progress} share=${(now.step ?? 0) / now.steps} label="Steps done" />`}
    ${now.stopped && html`<p class="muted">${visibleLine(now.stopped)}</p>`}
  </div>`;
}

function phaseNow({ phase, phase_since: since, progress }) {
  const { done, total } = progress ?? {};
  const far = isNumber(done) ? ` ${count(done)}${isNumber(total) ? ` of ${count(total)}` : ""}` : "";
  const took = isNumber(since) ? Math.floor(Date.now() / 1000 - since) : 0;
  return `${phaseWords(phase)}${far}${took >= 1 ? ` for ${seconds(took)}` : ""}`;
}

/** Estimates are not exact to the second. */
function roundTime(value) {
  const unit = value > 3600 ? 300 : value > 600 ? 60 : value > 60 ? 10 : 1;
  return Math.max(unit, Math.round(value / unit) * unit);
}

/** The first finding, large; the others folded. @param {{query: object}} props the query that links to evidence keep */
export function Findings({ id, now, query }) {
  const [first, ...others] = now.banners ?? [];
  const none = isLive(now) ? "It is too early to say how this run goes." : "No findings.";
  if (!first) return html`<p class="muted">${none}</p>`;
  const show = (finding, large) =>
    html`<${Finding} key=${finding.rule + finding.evidence} ...${{ id, finding, large, query }} />`;
  return html`<div class="stack tight" aria-live="polite">
    ${show(first, true)}
    ${others.length > 0 &&
    html`<${Fold} name="findings" title=${plural(others.length, "more finding")}>
      <div class="stack tight">${others.map((finding) => show(finding, false))}</div>
    <//>`}
  </div>`;
}

function Finding({ id, finding, large, query }) {
  const { level, text, advice, step, evidence } = finding;
  return html`<${Banner} ...${{ level, text, advice, large }}>
    <p class="dotted small">
      ${step > 0 && html`<span><${StepLink} id=${id} step=${step}>Step ${count(step)}<//></span>`}
      ${evidence?.length > 0 && html`<span>
        <a href=${link.run(id, { ...query, names: evidence })}>${evidence.map(metricWords).join(", ")}</a>
      </span>`}
    </p>
  <//>`;
}

/** A link to a step; only its text in an exported report without it. */
export function StepLink({ id, step, children }) {
  return hasStep(id, step) ? html`<a href=${link.steps(id, step)}>${children}</a>` : children;
}

const SMALL_SHARE = 0.01;

/** "Where the 84 s went: sampling 41 s (49%), ...", largest first; small phases are with the others. */
export function TimeSpent({ time }) {
  const phases = Object.entries(time ?? {}).filter(([, spent]) => spent > 0);
  const all = phases.reduce((sum, [, spent]) => sum + spent, 0);
  if (!(all > 0)) return null;
  const isShown = ([phase, spent]) => phase !== "other" && spent / all >= SMALL_SHARE;
  const other = phases.filter((one) => !isShown(one)).reduce((sum, [, spent]) => sum + spent, 0);
  const parts = [...phases.filter(isShown).sort((a, b) => b[1] - a[1]), ...(other > 0 ? [["other", other]] : [])];
  const text = ([phase, spent]) => `${phaseWords(phase).toLowerCase()} ${seconds(spent)} (${percent(spent / all, 0)})`;
  return html`<p><strong>Where the ${seconds(all)} went:</strong> ${parts.map(text).join(", ")}.</p>`;
}
