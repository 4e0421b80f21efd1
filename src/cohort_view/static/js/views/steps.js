// The Steps tab: why a step learned or not, its groups, and the completions of one; a filter over all completions.

import { isExport, runPath } from "cohort/api.js";
import { count, isNumber, number, percent, plural, seconds } from "cohort/format.js";
import { navigate, useData, useKeys, useMedia, useQuery, useRuns } from "cohort/hooks.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { Filter, KINDS, Matches, useSearch } from "cohort/steps/filter.js";
import { Group } from "cohort/steps/group.js";
import { Groups, SORTS } from "cohort/steps/groups.js";
import { rewardScale } from "cohort/steps/rewards.js";
import { Strip, useOutcomes } from "cohort/steps/strip.js";
import { Banner, Empty, Failure, Fold, Loading, Problems, Segmented, Select } from "cohort/ui.js";

const PAGE_SIZE = 100;
const MOST_GROUPS = 1000; // in one answer of the server
const METRICS = [
  ["reward", "Reward", number],
  ["frac_reward_zero_std", "Equal rewards", percent],
  ["frac_all_right", "All right", percent],
  ["frac_all_wrong", "All wrong", percent],
  ["completions/mean_length", "Mean length", number],
  ["completions/max_length", "Longest", count],
  ["completions/clipped_ratio", "Cut at the limit", percent],
  ["entropy", "Entropy", number],
  ["kl", "KL to the reference", number],
  ["grad_norm", "Gradient norm", number],
  ["step_time", "Time", seconds],
];

/** `step`: null for the newest, which then gets into the address: it must not change under the reader. */
export function StepsView({ id, step: asked }) {
  const [query, setQuery] = useQuery();
  const isPhone = useMedia("(max-width: 800px)");
  const outcomes = useOutcomes(id);
  const around = asked === null ? {} : { around: asked };
  const list = useKept(useData(runPath(id, "steps", around), ["completions"]), id);
  const step = asked ?? (list.data && (list.data.last ?? (outcomes.last < 0 ? null : outcomes.last)));
  useEffect(() => {
    if (asked === null && step !== null) location.replace(link.steps(id, step, query));
  }, [asked, step]);
  const kindsOf = (one) => list.data?.steps.find((file) => file.step === one)?.kinds ?? [];
  const kinds = kindsOf(step);
  const kind = query.kind ?? (kinds.includes("step") ? "step" : (kinds[0] ?? (step === 0 ? "eval" : "step")));
  const search = useSearch(id, isExport ? {} : query, step, kind);
  const found = search?.wrong ? null : search; // with a mistake in the condition, the groups stay
  if (list.error && !list.data) return html`<${Failure} error=${list.error} retry=${list.reload} />`;
  if (step === null && !(list.data && outcomes.isLoaded)) return html`<h1>Steps</h1><${Loading} />`;
  if (step === null) {
    const advice = "Steps appear here as the run finishes them.";
    return html`<h1>Steps</h1><${Empty} title="No step of this run is done." advice=${advice} />`;
  }

  /** The address of a step, or of one of its groups. */
  const hrefOf = (changes, to = step) =>
    link.steps(id, to, { ...query, group: null, row: null, kind: kind === "step" ? null : kind, ...changes });
  const toStep = (to) => hrefOf(kindsOf(to).length && !kindsOf(to).includes(kind) ? { kind: null } : {}, to);
  const withKind = list.data?.steps.filter((file) => file.kinds.includes(kind)).map((file) => file.step);
  const steps = list.data?.last === null ? (outcomes.curves[0]?.x ?? []) : (withKind ?? []);
  const isPage = isPhone && asNumber(query.group) !== null; // the group has the page for itself
  const onFilter = (changes) => setQuery(changes, { push: true });
  const filter =
    !isExport &&
    list.data?.last !== null &&
    html`<${Filter} id=${id} query=${query} wrong=${search?.wrong} onFilter=${onFilter} />`;
  const strip = { curves: outcomes.curves, files: list.data, matches: found && (found.progress?.by_step ?? {}) };
  const props = { id, step, kind, kinds, query, setQuery, search: found, hrefOf, isPhone, isPage };
  return html`<div class="steps">
    <${StepNav} id=${id} step=${step} steps=${steps} toStep=${toStep} groupsHref=${isPage ? hrefOf({}) : null} />
    ${!isPage && html`<${Strip} id=${id} current=${step} hrefOf=${toStep} ...${strip} />`}
    <${StepBody} ...${props}
      filter=${filter && isPhone ? html`<${Fold} name="filter" title="Filter">${filter}<//>` : filter} />
  </div>`;
}

const asNumber = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);

/** An answer with the last data of the same `key` while the next one is on its way. */
function useKept(answer, key) {
  const kept = useRef({});
  if (answer.data) kept.current = { key, data: answer.data };
  return answer.data || kept.current.key !== key ? answer : { ...answer, data: kept.current.data };
}

/** The title, and ways to other steps; on a group's own page, the way back. */
function StepNav({ id, step, steps, toStep, groupsHref }) {
  const of = useRuns().find((run) => run.id === id)?.steps;
  const field = useRef(null);
  const [before, after] = [steps.findLast((one) => one < step), steps.find((one) => one > step)];
  const go = (to) => isNumber(to) && navigate(toStep(to));
  useKeys([
    ["[", "Previous step", () => go(before)],
    ["]", "Next step", () => go(after)],
    ["#", "Go to a step", () => field.current?.select()],
  ]);
  const submit = (event) => {
    event.preventDefault();
    go(field.current.valueAsNumber);
  };
  const arrow = (to, sign, label) =>
    isNumber(to)
      ? html`<a class="button" href=${toStep(to)} aria-label=${label} title=${`${label}: ${to}`}>${sign}</a>`
      : html`<button type="button" class="button" disabled aria-label=${label}>${sign}</button>`;
  return html`<div class="step-nav row spread">
    <h1>Step ${count(step)}${of > 0 && html` <span class="muted">of ${count(of)}</span>`}</h1>
    ${
      groupsHref
        ? html`<a class="button" href=${groupsHref}>← Groups</a>`
        : html`<form class="row" onSubmit=${submit}>
            <label class="field">
              Go to step
              <input key=${step} class="input" type="number" required min="0" defaultValue=${step} ref=${field} />
            </label>
            ${arrow(before, "←", "Previous step")}${arrow(after, "→", "Next step")}
          </form>`
    }
  </div>`;
}

/** What is known of the step: its sentence and metrics, the list of groups or of matches, and the open group. */
function StepBody({ id, step, kind, kinds, query, setQuery, search, hrefOf, isPhone, isPage, filter }) {
  const limit = Math.min(MOST_GROUPS, Math.max(PAGE_SIZE, asNumber(query.shown) ?? 0));
  const [isSettled, setSettled] = useState(true);
  const [sort, , key, descending] = SORTS.find(([name]) => name === query.sort) ?? SORTS[0];
  const address = runPath(id, `steps/${step}`, { kind, sort: key, descending, limit });
  const answer = useKept(useData(address, isSettled ? [] : ["completions", "metrics"]), `${step} ${kind}`);
  const { data, error } = answer;
  useEffect(() => {
    if (data || error) setSettled(data?.groups.length > 0 && Object.keys(data.metrics).length > 0);
  }, [data, error]);
  const groups = data?.groups ?? [];
  const scale = useMemo(() => rewardScale(groups.flatMap(({ rows }) => rows.map((row) => row.reward))), [data]);
  const shown = asNumber(query.group) ?? (isPhone || search ? null : (groups[0]?.index ?? null));
  const panes = useRef(null);

  const links = () => [...panes.current.querySelectorAll(".pane-list :is(a[data-group], a.match)")];
  const move = (by) => {
    const all = links();
    const focused = all.indexOf(document.activeElement);
    const from = focused >= 0 ? focused : all.findIndex((one) => one.ariaCurrent === "true");
    const next = all[Math.max(0, Math.min(all.length - 1, from + by))];
    next?.focus();
    if (next?.dataset.group && !isPhone) location.replace(next.href);
  };
  useKeys([
    ["j", search ? "Next match" : "Next group", () => move(1)],
    ["k", search ? "Previous match" : "Previous group", () => move(-1)],
  ]);
  // Enter on a row goes on to the group that it opens
  const follow = (event) => {
    if (event.detail === 0 && links().includes(event.target))
      setTimeout(() => panes.current?.querySelector(".group-title")?.focus());
  };

  if (error && !data) return html`${filter}<${Failure} error=${error} retry=${answer.reload} />`;
  const group =
    shown !== null &&
    html`<section class="pane-group" aria-label="Group">
      <${Group} key=${`${step} ${kind} ${shown}`} id=${id} step=${step} kind=${kind} index=${shown} scale=${scale}
        row=${asNumber(query.row)} onOpen=${(row) => setQuery({ group: shown, row }, { push: true })}
        color=${query.color} onColor=${(color) => setQuery({ color })} />
    </section>`;
  if (isPage) return group;
  const { explanation, metrics, problems = [], num_groups: total } = data ?? {};
  const more = () => setQuery({ shown: limit + 300 });
  const matchHref = (match) =>
    hrefOf({ group: match.group, row: match.row, kind: match.kind === "step" ? null : match.kind }, match.step);
  const isCurrent = (match) => match.step === step && match.kind === kind && match.row === asNumber(query.row);
  const list = html`
    ${
      kinds.length > 1 &&
      html`<${Segmented} label="Completions" options=${kinds.map((name) => [name, KINDS[name] ?? name])} value=${kind}
        onChange=${(name) => navigate(hrefOf({ kind: name }))} />`
    }
    ${!data && html`<${Loading} />`}
    ${
      data &&
      !groups.length &&
      html`<${Empty} title=${problems[0] ?? `There are no completions of step ${step}.`}
        advice=${isNumber(metrics.reward) ? "Above is what its metrics say." : null} />`
    }
    ${
      groups.length > 0 &&
      html`<div class="row spread">
          <h2>${plural(total, "group")}</h2>
          <${Select} label="Sort" options=${SORTS} value=${sort} onChange=${(name) => setQuery({ sort: name })} />
        </div>
        <${Problems} list=${problems} />
        <${Groups} ...${{ groups, kind, scale, shown }} hrefOf=${(index) => hrefOf({ group: index })} />`
    }
    ${
      total > groups.length &&
      (limit < MOST_GROUPS
        ? html`<button type="button" class="button" onClick=${more}>Show more groups</button>`
        : html`<p class="muted">${count(total - groups.length)} more are not listed here.</p>`)
    }
  `;
  return html`
    ${explanation && html`<${Banner} level=${explanation.level} text=${explanation.text} />`}
    ${!data && html`<div class="sentence-place"></div>`}
    <${Metrics} metrics=${metrics} />
    ${filter}
    <div class="panes" ref=${panes} onClick=${follow}>
      <${ListPane} place=${`${id} ${step} ${kind} ${Boolean(search)}`}>
        ${search ? html`<${Matches} search=${search} hrefOf=${matchHref} isCurrent=${isCurrent} />` : list}
      <//>
      ${group}
    </div>
  `;
}

function Metrics({ metrics }) {
  const shown = METRICS.filter(([name]) => isNumber(metrics?.[name]));
  const metric = ([name, label, format]) =>
    html`<div key=${name} title=${name}><dt>${label}</dt><dd>${format(metrics[name])}</dd></div>`;
  return shown.length > 0 && html`<dl class="step-metrics">${shown.map(metric)}</dl>`;
}

const scrolls = new Map(); // of lists, for the way back

/** The list, which scrolls by itself where it is beside a group. */
function ListPane({ place, children }) {
  const pane = useRef(null);
  useLayoutEffect(() => void (pane.current.scrollTop = scrolls.get(place) ?? 0), [place]);
  const remember = () => scrolls.set(place, pane.current.scrollTop);
  return html`<section class="pane-list" aria-label="List" ref=${pane} onScroll=${remember}>${children}</section>`;
}
