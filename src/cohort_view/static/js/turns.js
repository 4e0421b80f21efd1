// A conversation: model turns in full, tool calls and results folded, errors open.

import { h } from "./dom.js";
import { textBlock } from "./texts.js";
import { visibleLine } from "./visible.js";

const ROLES = { assistant: "Model", user: "User", system: "System", tool: "Tool result" };

/** All messages, one below the other. */
export function conversation(messages) {
  return h("div.turns", null, messages.map(message));
}

function message(item) {
  const text = contentText(item.content);
  const role = item.role ?? "message";
  const calls = item.tool_calls ?? [];
  if (role === "tool") return toolResult(item, text);
  return h(
    "section",
    { class: `turn turn-${ROLES[role] ? role : "other"}` },
    h("h4", null, ROLES[role] ?? visibleLine(String(role))),
    item.reasoning_content ? folded("Reasoning", String(item.reasoning_content)) : null,
    text || !calls.length ? textBlock(text) : null,
    calls.map(toolCall),
  );
}

function toolCall(call) {
  const { name, arguments: values } = call.function ?? call;
  const text = (indent) => (typeof values === "string" ? values : (JSON.stringify(values, null, indent) ?? ""));
  return folded("Tool call", text(2), `${visibleLine(String(name ?? "?"))}(${excerpt(text())})`);
}

function toolResult(item, text) {
  const isError = item.is_error === true || /^\s*(error|traceback)\b/i.test(text);
  const title = isError ? "Tool error" : "Tool result";
  const details = folded(title, text, `${item.name ? `${visibleLine(String(item.name))}: ` : ""}${excerpt(text)}`);
  details.classList.add(isError ? "turn-error" : "turn-tool");
  if (isError) details.open = true;
  return details;
}

/** A `details` whose content is made when it is first opened. */
export function folded(title, text, summary = excerpt(text)) {
  const body = h("div.fold-body", null);
  const details = h(
    "details",
    { class: "fold" },
    h("summary", null, h("b", null, title), " ", h("span.excerpt", null, summary)),
    body,
  );
  details.addEventListener("toggle", () => {
    if (details.open && !body.hasChildNodes()) body.append(textBlock(text));
  });
  return details;
}

/** Content as in chat messages: text, or a list of parts. */
export function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("");
  return JSON.stringify(content);
}

/** The first words of a text in one line. */
export function excerpt(text, length = 90) {
  const line = visibleLine(
    text
      .slice(0, length * 2)
      .replace(/\s+/g, " ")
      .trim(),
  );
  return line.length > length || text.length > length * 2 ? `${line.slice(0, length)}…` : line;
}
