// Questions: which prompts the run gets right over time, the answers to each by step, and the calls of tools that fail.

import { hasStep, isExport, runPath } from "cohort/api.js";
import { Chart } from "cohort/chart.js";
import { count, isNumber, number, percent, plural } from "cohort/format.js";
import { navigate, useData, useKeys, useQuery } from "cohort/hooks.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef } from "cohort/preact.js";
import { link } from "cohort/router.js";
import { Conversation, Cut, TextBlock } from "cohort/text.js";
import { Chip, Empty, Failure, Loading, Problems, Segmented, Select, Table } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";

const PAGE = 100;
const MOST_SHOWN = 1000; // in one answer of the server
const MOST_COLUMNS = 60; // of the server; then each stands for several steps
const KINDS = { eval: "Held-out", step: "Training" };

/** States of a question: the filter's label, the chip's text, level and title. */
const STATES = {
  never: ["Never right", "never", "bad", "No answer was ever right"],
  rarely: ["Rarely right", "rarely", "warning", "Some answers were right, but never half of them"],
  lost: ["Lost", "lost", "warning", "At least half right before, not now"],
  now: ["Now right", "now right", "good", "At least half right now, not before"],
  always: ["Always right", "always", "", "At least half right each time"],
  unscored: ["Not scored", "not scored", "", "No answer has a reward"],
};
const OFTEN_NONE = ["rarely", "unscored"];

const SORTS = Object.entries({
  order: "Never right first",
  changes: "Changed most often",
  seen: "Seen most often",
  share: "Lowest share right",
});

const NONE = {
  eval: "This run has no held-out evaluation yet.",
  step: "No completions of training steps are kept yet.",
};
const ADVICE = {
  eval: "Set eval.path and eval.every to evaluate on questions that are not trained on.",
  step: "They appear after the first step. If they never do, check run.completions_every.",
};

const sum = (totals) => Object.values(totals).reduce((total, num) => total + num, 0);
const isNone = (data) => !sum(data.num_questions) && !data.points.length;
const line = (text) => visibleLine(String(text ?? ""));
const range = ([first, last]) => (first === last ? count(first) : `${count(first)} to ${count(last)}`);

export function QuestionsView({ id }) {
  const [query, setQuery] = useQuery();
  const kind = query.kind === "step" ? "step" : "eval";
  const shown = Math.min(MOST_SHOWN, Math.max(PAGE, Number(query.shown) || 0));
  const listed = { show: query.show in STATES ? query.show : null, sort: query.sort, limit: shown };
  // An exported report has the first page of each kind
  const page = (of) => (isExport ? {} : of === kind ? listed : { limit: 1 });
  const ask = (of) => useData(runPath(id, "questions", { kind: of, ...page(of) }), ["completions"]);
  const answers = { eval: ask("eval"), step: ask("step") };
  const { error, reload } = answers[kind];
  // While another filter or order is on its way, the list stays
  const last = useRef(null);
  if (answers[kind].data) last.current = answers[kind].data;
  const data = last.current?.kind === kind ? last.current : null;

  const [evaluated, trained] = [answers.eval.data, answers.step.data];
  const isOnlyTraining = !query.kind && evaluated && trained && isNone(evaluated) && !isNone(trained);
  useEffect(() => isOnlyTraining && setQuery({ kind: "step" }), [isOnlyTraining]);

  const sizes = Object.entries(KINDS).map(([of, label]) => {
    const totals = answers[of].data?.num_questions;
    return [of, totals ? `${label} (${count(sum(totals))})` : label];
  });
  const choose = (value) => setQuery({ kind: value, show: null, shown: null, question: null });
  return html`
    <div class="row">
      <h1>Questions</h1>
      <${Segmented} label="Questions of" options=${sizes} value=${kind} onChange=${choose} />
    </div>
    ${error && html`<${Failure} error=${error} retry=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && html`<${Problems} list=${data.problems} />`}
    ${data?.points.length > 0 && html`<${Accuracy} id=${id} points=${data.points} />`}
    ${data && isNone(data) && html`<${Empty} title=${NONE[kind]} advice=${ADVICE[kind]} />`}
    ${data && sum(data.num_questions) > 0 && html`<${Questions} ...${{ id, data, kind, shown, query, setQuery }} />`}
    <${Tools} id=${id} />
  `;
}

/** Held-out accuracy with its interval, and in words. */
function Accuracy({ id, points }) {
  const lines = useMemo(() => {
    const of = (name) => points.map((point) => point[name] ?? null);
    return [{ label: "accuracy", color: 0, x: of("step"), y: of("accuracy"), low: of("low"), high: of("high") }];
  }, [points]);
  const open = (_, step) => hasStep(id, step, { kind: "eval" }) && navigate(link.steps(id, step, { kind: "eval" }));
  const title = "Share of right answers to held-out questions; the band is its 95% confidence interval (Wilson)";
  return html`
    <section class="accuracy">
      <h2 class="visually-hidden">Accuracy</h2>
      <${Chart} label="Held-out accuracy" title=${title} unit="share" lines=${lines} x="step" height=${180}
        range=${[0, 1]} onOpen=${open} />
      <p>${inWords(points.filter((point) => isNumber(point.accuracy)))}</p>
    </section>
  `;
}

function inWords(known) {
  if (!known.length) return "";
  const [first, last] = [known[0], known.at(-1)];
  const best = known.reduce((a, b) => (b.accuracy > a.accuracy ? b : a));
  const without = known.filter((point) => !isNumber(point.low)).length;
  const of = isNumber(last.num_questions) ? ` to ${plural(last.num_questions, "question")}` : "";
  const interval = isNumber(last.low) ? ` (95% interval ${percent(last.low)} to ${percent(last.high)})` : "";
  const from = first === last ? "" : `, from ${percent(first.accuracy)} after step ${count(first.step)}`;
  const tries = Object.entries(last.pass_at ?? {}).filter(([k]) => k !== "1");
  const solved = ([k, share], index) =>
    `${percent(share)} ${index ? `within ${k}` : `of the questions are solved within ${k} tries`} (pass@${k})`;
  return [
    `After step ${count(last.step)}, ${percent(last.accuracy)} of the answers${of} are right${interval}${from}.`,
    best.accuracy > last.accuracy ? `The best was ${percent(best.accuracy)} after step ${count(best.step)}.` : "",
    tries.length > 0 && `${tries.map(solved).join(", ")}.`,
    without ? `The completions of ${plural(without, "evaluation")} cannot be read, so no interval is known.` : "",
  ].filter(Boolean).join(" ");
}

/** The list of questions, with its filter and order. */
function Questions({ id, data, kind, shown, query, setQuery }) {
  const list = useRef(null);
  const { num_questions: totals, steps } = data;
  const isOpen = (question) => !isExport && String(question.prompt_id) === query.question;
  const toggle = (question) => setQuery({ question: isOpen(question) ? null : question.prompt_id }, { push: true });
  const show = query.show in STATES ? query.show : "";
  const questions = data.questions.filter(({ state }) => !isExport || !show || state === show);
  const filters = Object.entries(STATES)
    .filter(([name]) => totals[name] > 0 || show === name || !OFTEN_NONE.includes(name))
    .map(([name, [label]]) => [name, `${label} (${count(totals[name] ?? 0)})`]);
  const sort = (value) => setQuery({ sort: value === "order" ? null : value, shown: null });
  // The filter or the page of the list may leave out the open question
  const other = { prompt_id: query.question, prompt: "This question is not in the list below" };
  const isListed = isExport || !query.question || questions.some(isOpen);
  const rows = isListed ? questions : [other, ...questions];
  const rest = (isExport && show ? totals[show] : data.total) - questions.length;
  const hasMore = !isExport && shown < MOST_SHOWN;
  const over = steps.length ? `Right, steps ${range([steps[0], steps.at(-1)])}` : "Right";
  const heads = ["Question", "State", "Seen", over, "Last", "Last answer"];
  useFocusKept(list);
  useKeys([
    ["j", "Next question", () => moveFocus(list.current, 1)],
    ["k", "Previous question", () => moveFocus(list.current, -1)],
  ]);
  return html`
    <section class="questions" ref=${list}>
      <h2 class="visually-hidden">All questions</h2>
      <div class="row spread">
        <${Segmented} label="Show" options=${[["", `All (${count(sum(totals))})`], ...filters]} value=${show}
          onChange=${(value) => setQuery({ show: value, shown: null })} />
        ${!isExport && html`<${Select} label="Sort by" options=${SORTS} value=${query.sort ?? "order"} onChange=${sort} />`}
      </div>
      ${!rows.length && html`<p class="muted">No such question.</p>`}
      ${rows.length > 0 && html`
        <table class="table question-list">
          <caption class="visually-hidden">Questions, with the share of right answers by step</caption>
          <thead>
            <tr>
              ${heads.map((head) => html`<th scope="col">${head}</th>`)}
            </tr>
          </thead>
          <tbody>
            ${rows.map((question) => html`
              <${Question} key=${question.prompt_id} ...${{ id, kind, question, steps, toggle }}
                isOpen=${isOpen(question)} />
            `)}
          </tbody>
        </table>
      `}
      ${rest > 0 && !hasMore && html`<p class="muted">${count(rest)} more are not listed here.</p>`}
      ${rest > 0 && hasMore && html`
        <button type="button" class="button" onClick=${() => setQuery({ shown: shown + PAGE })}>
          Show ${rest > PAGE ? `${PAGE} more of ${count(rest)}` : `the other ${count(rest)}`}
        </button>
      `}
    </section>
  `;
}

/** A question, and its answers below it if it is open. */
function Question({ id, kind, question, steps, isOpen, toggle }) {
  const [, label, level, title] = STATES[question.state] ?? [];
  const prompt = line(question.prompt) || "(empty)";
  const after = isNumber(question.last_step) ? `After step ${count(question.last_step)}` : null;
  return html`
    <tr class="question-row" data-question=${question.prompt_id} onClick=${isExport ? null : () => toggle(question)}>
      <th scope="row" class="question-prompt" title=${prompt}>
        ${isExport && html`<bdi>${prompt}</bdi>`}
        ${!isExport && html`
          <button type="button" class="question-open" aria-expanded=${String(isOpen)}><bdi>${prompt}</bdi></button>
        `}
      </th>
      <td>${label && html`<${Chip} kind=${level} title=${title}>${label}<//>`}</td>
      <td class="right" data-label="Seen">${count(question.seen)}</td>
      <td class="question-strip"><${Strip} steps=${steps} right=${question.right ?? []} /></td>
      <td class="right" data-label="Last" title=${after}>${percent(question.last_share, 0)}</td>
      <td class="question-last"><bdi>${line(question.last_answer)}</bdi></td>
    </tr>
    ${isOpen && html`
      <tr class="question-answers"><td colspan="6"><${Answers} ...${{ id, kind, question }} /></td></tr>
    `}
  `;
}

/** The share of right answers by step as bars; a gap where the question was not asked. */
function Strip({ steps, right }) {
  const known = right.map((share, index) => [share, steps[index]]).filter(([share]) => isNumber(share));
  if (!known.length) return html`<span class="muted">–</span>`;
  const changes = known.filter(([share], index) => share !== known[index - 1]?.[0]);
  const text = changes.map(([share, step]) => `${percent(share, 0)} from step ${count(step)}`).join(", ");
  const until = steps.length < MOST_COLUMNS ? "Step" : "Up to step";
  const bar = (share, index) => {
    if (!isNumber(share)) return html`<i class="gap" />`;
    const title = `${until} ${count(steps[index])}: ${percent(share, 0)} right`;
    return html`<i class=${share > 0 ? "" : "none"} style=${{ "--share": share }} title=${title} />`;
  };
  return html`<span class="strip" role="img" aria-label=${`Right: ${text}`}>${right.map(bar)}</span>`;
}

/** The whole prompt, what is expected, and what the model answered at each step. */
function Answers({ id, kind, question }) {
  const address = runPath(id, `questions/${encodeURIComponent(question.prompt_id)}`, { kind });
  const { data, error, reload } = useData(address, ["completions"]);
  if (!data) return error ? html`<${Failure} error=${error} retry=${reload} />` : html`<${Loading} />`;
  const columns = [
    { label: "Step", class: "nowrap", value: (time) => html`<${StepLink} id=${id} at=${{ ...time, row: time.best.row }} />` },
    { label: "Right", class: "nowrap", value: (time) => `${count(time.num_right)} of ${count(time.num)}` },
    { label: "Reward", align: "right", title: "Mean of the answers", value: (time) => number(time.reward_mean) },
    { label: "End of the best answer", value: ({ best }) => html`<${Best} best=${best} />` },
  ];
  const more = data.num_times - data.times.length;
  const keyOf = ({ step, group }) => `${step}/${group}`;
  return html`
    <div class="answers">
      <div>
        <${Problems} list=${data.problems} />
        <h3>Prompt</h3>
        <${Array.isArray(data.prompt) ? Conversation : TextBlock} messages=${data.prompt} text=${data.prompt} />
        ${data.prompt_cut && html`<${Cut} what="The prompt" />`}
        <h3>Expected answer</h3>
        ${data.answer === null && html`<p class="muted">The run has not recorded it.</p>`}
        ${data.answer !== null && html`<${TextBlock} text=${data.answer} />`}
        ${data.answer_cut && html`<${Cut} what="The answer" />`}
      </div>
      <div>
        <h3>Answers by step, newest first</h3>
        <${Table} caption="Answers by step" columns=${columns} rows=${data.times} keyOf=${keyOf} />
        ${more > 0 && html`<p class="muted">${count(more)} older ones are not listed.</p>`}
      </div>
    </div>
  `;
}

function StepLink({ id, at: { step, kind, group, row } }) {
  const label = `Step ${count(step)}`;
  if (!hasStep(id, step, { kind })) return label;
  return html`<a href=${link.steps(id, step, { group, row, kind: kind === "step" ? null : kind })}>${label}</a>`;
}

function Best({ best }) {
  const cut = best.end === "length" && html` <${Chip} kind="warning">cut at the token limit<//>`;
  return html`<bdi class="mono">${line(best.end_of_text) || "(empty)"}</bdi>${cut}`;
}

/** Calls of tools by what came of them. Nothing for runs without tools. */
function Tools({ id }) {
  const { data } = useData(runPath(id, "tools"), ["completions"]);
  if (!data?.tools.length && !data?.malformed) return null;
  const calls = new Map();
  for (const { name, calls: num } of data.tools) calls.set(name, (calls.get(name) ?? 0) + num);
  const result = ({ error }) =>
    error === null
      ? html`<span class="muted">worked</span>`
      : html`<${Chip} kind="bad">failed<//> <bdi class="mono">${line(error)}</bdi>`;
  const columns = [
    { label: "Tool", class: "mono", value: (entry) => line(entry.name) },
    { label: "Result", value: result },
    { label: "Calls", align: "right", value: (entry) => count(entry.calls) },
    { label: "Share", align: "right", value: (entry) => percent(entry.calls / calls.get(entry.name)) },
    { label: "Steps", class: "nowrap", value: (entry) => range(entry.steps) },
    { label: "Example", class: "nowrap", value: (entry) => html`<${StepLink} id=${id} at=${entry.example} />` },
  ];
  const keyOf = ({ name, error }) => `${name}\n${error}`;
  return html`
    <section class="tools">
      <h2>Tool calls</h2>
      <p class="muted">
        ${data.steps && `In the completions of steps ${range(data.steps)}.`}
        ${data.malformed > 0 && ` ${plural(data.malformed, "call")} could not be parsed, so no tool ran.`}
      </p>
      <${Problems} list=${data.problems} />
      <${Table} caption="Tool calls" columns=${columns} rows=${data.tools} keyOf=${keyOf} />
    </section>
  `;
}

/** Keep the focus on a row's button, which moving the row in the document would take away. */
function useFocusKept(list) {
  const row = list.current?.contains(document.activeElement) && document.activeElement.closest("[data-question]");
  const question = row ? row.dataset.question : null;
  useLayoutEffect(() => {
    if (question === null || document.activeElement !== document.body) return;
    list.current.querySelector(`[data-question="${CSS.escape(question)}"] button`)?.focus({ preventScroll: true });
  });
}

function moveFocus(list, by) {
  const buttons = [...list.querySelectorAll(".question-open")];
  buttons[Math.min(Math.max(buttons.indexOf(document.activeElement) + by, 0), buttons.length - 1)]?.focus();
}
