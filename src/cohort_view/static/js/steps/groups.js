// The groups of a step as a dense table; a row opens its group.

import { count, isNumber, number, plural } from "cohort/format.js";
import { navigate } from "cohort/hooks.js";
import { html } from "cohort/preact.js";
import { Dots } from "cohort/steps/rewards.js";
import { excerpt } from "cohort/text.js";
import { Chip } from "cohort/ui.js";

/** Orders of the groups: [name in the address, label, the server's order, whether it descends]. */
export const SORTS = [
  ["spread", "Largest spread", "spread", 1],
  ["reward", "Highest reward", "reward", 1],
  ["lowest", "Lowest reward", "reward", 0],
  ["equal", "Equal rewards first", "equal", 1],
  ["length", "Longest", "length", 1],
  ["shortest", "Shortest", "length", 0],
  ["staleness", "Oldest weights", "staleness", 1],
  ["order", "Order in the file", "order", 0],
];

/** `shown`: index of the group beside the list, or null; `hrefOf(index)`: its address. */
export function Groups({ groups, kind, scale, shown, hrefOf }) {
  const hasFlags = groups.some((group) => flags(group, kind).length);
  const open = (event, href) => {
    const isOwn = event.target.closest("a") || event.ctrlKey || event.metaKey || event.shiftKey;
    if (!isOwn && !String(getSelection())) navigate(href);
  };
  const row = (group) => {
    const { index, prompt, rows, reward_mean: mean, reward_std: std, length_mean: length } = group;
    const href = hrefOf(index);
    const current = index === shown ? "true" : null;
    return html`<tr key=${index} class=${current && "is-current"} onClick=${(event) => open(event, href)}>
      <td class="group-prompt" dir="auto">
        <a href=${href} data-group=${index} aria-current=${current}>${excerpt(prompt, 200) || "(empty)"}</a>
      </td>
      <td><${Dots} rows=${rows} scale=${scale} /></td>
      <td class="right" title=${isNumber(std) ? `standard deviation ${number(std)}` : null}>${number(mean)}</td>
      <td class="right group-length">${number(length)}</td>
      ${hasFlags && html`<td>${flags(group, kind)}</td>`}
    </tr>`;
  };
  return html`<table class="groups">
    <caption class="visually-hidden">Groups of the step</caption>
    <thead>
      <tr>
        <th scope="col">Prompt</th>
        <th scope="col">Rewards</th>
        <th scope="col" class="right" title="Mean reward">Mean</th>
        <th scope="col" class="right" title="Mean length in tokens">Length</th>
        ${hasFlags && html`<th scope="col"><span class="visually-hidden">Notes</span></th>`}
      </tr>
    </thead>
    <tbody>${groups.map(row)}</tbody>
  </table>`;
}

function flags({ equal, clipped, broken, staleness, size }, kind) {
  const cut = `${plural(clipped, "completion")} of ${count(size)} hit the length limit`;
  return [
    [equal && size > 1 && kind !== "eval", "equal", "No reward differs, so every advantage is 0", "warning"],
    [clipped > 0, `${clipped} cut`, cut],
    [broken > 0, `${broken} broken`, "Trajectories that infrastructure broke", "bad"],
    [staleness > 0, `${staleness} old`, "Steps between the weights that sampled and the weights that were trained"],
  ]
    .filter(([isSet]) => isSet)
    .map(([, text, title, level]) => html`<${Chip} key=${text} kind=${level} title=${title}>${text}<//>`);
}
