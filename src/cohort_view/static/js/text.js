// Text that a model wrote: blocks that show both ends of a long one, and conversations.

import { count, plural } from "cohort/format.js";
import { html, useState } from "cohort/preact.js";
import { visibleControls, visibleLine } from "cohort/visible.js";

const SHOWN = 1500; // characters shown at once; each click shows ten times as many
const LINE = 50; // characters that a line counts as at least

/**
 * A block of text, isolated from the direction of what surrounds it: of a long one the beginning and, where the answer
 * is, the end. `shown`: characters shown at first.
 */
export function TextBlock({ text, shown = SHOWN }) {
  const [times, setTimes] = useState(1);
  const whole = String(text ?? "");
  if (!whole.trim()) {
    const what = whole ? `(only white space: ${plural(whole.length, "character")})` : "(empty)";
    return html`<div class="text-block muted">${what}</div>`;
  }
  const [end, start] = gap(whole, shown * times);
  const more = () => setTimes(10 * times);
  const left = `Show more (${count(start - end)} characters left out)`;
  return html`<div class="text-block" dir="auto">
    <span>${visibleControls(whole.slice(0, end))}</span>
    ${start > end && html`<button type="button" class="link-button" onClick=${more}>${left}</button>`}
    ${start > end && html`<span>${visibleControls(whole.slice(start).replace(/^\n/, ""))}</span>`}
  </div>`;
}

/** Says that the server left out the rest of a text. */
export const Cut = ({ what }) => html`<p class="muted small">${what} is cut here; the file has the rest.</p>`;

/** Where the middle of a text that is left out begins and ends; the end of the text for both if it is short. */
function gap(text, shown) {
  const isShort = text.length <= shown && text.split("\n", shown / LINE + 1).length <= shown / LINE;
  let end = isShort ? text.length : 0;
  let start = text.length;
  for (let left = shown / 2; end < start && left > 0; end++) left -= text[end] === "\n" ? LINE : 1;
  for (let left = shown / 2; start > end && left > 0; start--) left -= text[start - 1] === "\n" ? LINE : 1;
  if (start - end < LINE) return [text.length, text.length];
  const isHalf = (place) => /[\ud800-\udbff]/.test(text[place - 1]) && /[\udc00-\udfff]/.test(text[place]);
  return [isHalf(end) ? end - 1 : end, isHalf(start) ? start + 1 : start];
}

/** The first words of a text in one line. */
export function excerpt(text, length = 90) {
  const line = oneLine(text.slice(0, 2 * length));
  const isWhole = line.length <= length && text.length <= 2 * length;
  return isWhole ? line : `${[...line].slice(0, length).join("")}…`;
}

const oneLine = (text) => visibleLine(text.replace(/\s+/g, " ").trim());

/** Content as in chat messages: text, or a list of parts. */
export function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("");
  return JSON.stringify(content);
}

const ROLES = { assistant: "Model", user: "User", system: "System", developer: "Developer", tool: "Tool result" };

/** Chat messages: what model and user say in full; instructions, tool calls and results folded; errors open. */
export function Conversation({ messages }) {
  return html`<div class="turns">${messages.map((one, index) => html`<${Turn} key=${index} message=${one} />`)}</div>`;
}

function Turn({ message }) {
  const role = String(message.role ?? "message");
  const name = Object.hasOwn(ROLES, role) ? ROLES[role] : visibleLine(role);
  const text = contentText(message.content);
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  if (role === "tool") {
    const isError = isToolError(message);
    const summary = (message.name ? `${visibleLine(String(message.name))}: ` : "") + excerpt(text);
    const title = isError ? "Tool error" : name;
    return html`<${Folded} title=${title} text=${text} summary=${summary} isError=${isError} />`;
  }
  if (role === "system" || role === "developer") return html`<${Folded} title=${name} text=${text} />`;
  const reasoning = message.reasoning_content && String(message.reasoning_content);
  return html`<section class="turn">
    <h4>${name}</h4>
    ${reasoning && html`<${Folded} title="Reasoning" text=${reasoning} />`}
    ${(text || !calls.length) && html`<${TextBlock} text=${text} />`}
    ${calls.map((call, index) => html`<${ToolCall} key=${index} call=${call} />`)}
  </section>`;
}

/** Whether a message is the result of a tool that failed. */
export function isToolError({ role, content, is_error: isError }) {
  return role === "tool" && (isError ?? contentText(content).startsWith("Error: ")) === true;
}

function ToolCall({ call }) {
  const { name, arguments: values } = call?.function ?? call ?? {};
  const text = (indent) => (typeof values === "string" ? values : (JSON.stringify(values, null, indent) ?? ""));
  const summary = `${visibleLine(String(name ?? "?"))}(${excerpt(text())})`;
  return html`<${Folded} title="Tool call" text=${text(2)} summary=${summary} />`;
}

/** A text behind a line that says how it begins; errors are open. */
export function Folded({ title, text, summary = excerpt(text), isError = false }) {
  const [isOpen, setOpen] = useState(isError);
  const toggle = (event) => setOpen(event.currentTarget.open);
  return html`<details class=${isError ? "folded is-error" : "folded"} open=${isOpen} onToggle=${toggle}>
    <summary><b>${title}</b>${" "}<span class="excerpt">${!isOpen && summary}</span></summary>
    ${isOpen && html`<${TextBlock} text=${text} />`}
  </details>`;
}
