// Where a run came from: what differs from the defaults, the whole configuration, versions, plan and files.

import { copyButton } from "../copy.js";
import { h, replace } from "../dom.js";
import { bytes, count, dateTime, isNumber, number, plural } from "../format.js";
import { empty, problems, table, title } from "../ui.js";
import { visibleLine } from "../visible.js";

export async function render(root, params, context) {
  const { api, signal } = context;
  const load = async () => {
    const data = await api.get(api.runPath(params.id, "config"), { signal });
    replace(
      root,
      title("Config"),
      problems(data.problems),
      h(
        "div.config-columns",
        null,
        h("div.stack", null, changed(data.changed, data.yaml), configuration(data.yaml)),
        h("div.stack", null, provenance(data), plan(data.plan), files(data.files)),
      ),
    );
  };
  context.setTitle("Config");
  await load();
  return { update: (change) => change.parts.includes("events") && load() };
}

function section(heading, ...content) {
  return h("section.card.stack", null, h("h2", null, heading), ...content);
}

/** A value as YAML would write it, in one line. */
function valueText(value) {
  if (value === null || value === undefined) return "null";
  return visibleLine(typeof value === "string" ? value : JSON.stringify(value));
}

function changed(keys, yaml) {
  if (!yaml) return null; // the next section says that there is none
  if (!keys?.length) return section("Changed from the defaults", empty("Every key has its default value."));
  const columns = [
    { label: "Key", value: (row) => h("code", null, visibleLine(row.key)) },
    { label: "Value", class: "wrap", value: (row) => h("code", null, valueText(row.value)) },
    {
      label: "Default",
      class: "wrap muted",
      value: (row) => h("code", null, row.default === null || row.default === undefined ? "–" : valueText(row.default)),
    },
  ];
  return section(
    `Changed from the defaults`,
    table(columns, keys, { caption: "Keys that differ from their defaults", stacked: true }),
  );
}

/** The resolved YAML; a search keeps the lines that match, and the keys they are below. */
function configuration(yaml) {
  if (!yaml) return section("Whole configuration", empty("config.yaml is missing, empty or cannot be read."));
  const lines = yaml.replace(/\n$/, "").split("\n");
  const nodes = lines.map((line) =>
    h("span.yaml-line", { class: /^\s*#/.test(line) ? "muted" : "" }, visibleLine(line), "\n"),
  );
  const status = h("span.muted", { role: "status" });
  const field = h("input.input", {
    type: "search",
    placeholder: "Find a key or value",
    "aria-label": "Find a key or value",
    on: { input: () => filter() },
  });
  const filter = () => {
    const wanted = field.value.trim().toLowerCase();
    const matches = lines.map((line) => wanted !== "" && line.toLowerCase().includes(wanted));
    const kept = wanted === "" ? lines.map(() => true) : withParents(lines, matches);
    nodes.forEach((node, index) => {
      node.hidden = !kept[index];
      node.classList.toggle("match", matches[index]);
    });
    status.textContent = wanted === "" ? "" : plural(matches.filter(Boolean).length, "line");
  };
  return section(
    "Whole configuration",
    h(
      "div.row.spread",
      null,
      h("div.row", null, field, status),
      copyButton("Copy YAML", () => yaml),
    ),
    h("pre.yaml", { tabindex: 0, "aria-label": "Configuration as YAML" }, nodes),
  );
}

/** Matching lines and the less indented lines that they belong to. */
export function withParents(lines, matches) {
  const indent = (line) => line.length - line.trimStart().replace(/^- /, "").length;
  const kept = matches.slice();
  matches.forEach((match, index) => {
    if (!match) return;
    let depth = indent(lines[index]);
    for (let above = index - 1; above >= 0 && depth > 0; above--) {
      if (lines[above].trim() && indent(lines[above]) < depth) {
        kept[above] = true;
        depth = indent(lines[above]);
      }
    }
  });
  return kept;
}

function provenance({ versions, command, commit, starts }) {
  const last = starts?.at(-1);
  const rows = [
    ["Command", command && h("code", null, visibleLine(Array.isArray(command) ? command.join(" ") : String(command)))],
    ["Commit", commit && h("code", null, commit)],
    ["Host", last?.host && visibleLine(String(last.host))],
    ["Processes", isNumber(last?.processes) && count(last.processes)],
    ...Object.entries(versions ?? {}).map(([name, version]) => [name, visibleLine(String(version))]),
  ].filter(([, value]) => value);
  if (!rows.length) {
    return section(
      "Provenance",
      empty(
        "This run did not record its command and versions.",
        "Runs of newer versions of Cohort write them to events.jsonl.",
      ),
    );
  }
  return section("Provenance", facts(rows), starts?.length > 1 ? startTable(starts) : null);
}

function startTable(starts) {
  const columns = [
    { label: "Started", value: (start) => dateTime(start.timestamp) },
    { label: "After step", align: "right", value: (start) => count(start.steps_done ?? start.step) },
    { label: "Process", align: "right", value: (start) => (start.pid ? String(start.pid) : "–") },
    { label: "Host", value: (start) => visibleLine(String(start.host ?? "–")) },
  ];
  return [h("h3", null, `Started ${starts.length} times`), table(columns, starts, { caption: "Starts of this run" })];
}

function facts(rows) {
  return h(
    "dl.facts-list",
    null,
    rows.map(([label, value]) => [h("dt", null, label), h("dd", null, value)]),
  );
}

const LAYOUT = [
  ["training_gpus", "Training devices", count],
  ["sampling_gpus", "Sampling devices", count],
  ["reason", "Layout", (value) => visibleLine(String(value))],
  ["num_steps", "Steps", count],
  ["prompts_per_step", "Prompts per step", count],
  ["completions_per_step", "Completions per step", count],
  ["micro_batch_tokens", "Tokens per micro-batch", count],
  ["micro_batches_per_step", "Micro-batches per step", count],
  ["steps_per_epoch", "Steps per epoch", number],
];

function plan(data) {
  if (!Object.keys(data ?? {}).length) return section("Plan", empty("plan.json is missing or cannot be read."));
  const { model, hardware, layout } = data;
  const rows = [
    ["Model", model?.name && `${visibleLine(String(model.name))}, ${number(model.parameters)} parameters`],
    ["Hardware", hardware?.gpu && `${visibleLine(String(hardware.gpu))}, ${bytes(hardware.gpu_memory_bytes)}`],
    ...LAYOUT.map(([key, label, format]) => [
      label,
      layout?.[key] !== undefined && layout[key] !== null && format(layout[key]),
    ]),
  ].filter(([, value]) => value);
  return section(
    "Plan",
    facts(rows),
    h(
      "details.fold",
      null,
      h("summary", null, h("b", null, "plan.json")),
      h("pre.yaml", { tabindex: 0 }, JSON.stringify(data, null, 2)),
    ),
  );
}

function files(list) {
  if (!list?.length) return null;
  const total = list.reduce((sum, file) => sum + (file.bytes ?? 0), 0);
  const numFiles = list.reduce((sum, file) => sum + (file.num_files ?? 1), 0);
  const columns = [
    { label: "File or folder", class: "wrap", value: (file) => visibleLine(file.path) },
    { label: "Files", align: "right", value: (file) => count(file.num_files ?? 1) },
    { label: "Size", align: "right", value: (file) => bytes(file.bytes) },
  ];
  const largest = [...list].sort((a, b) => b.bytes - a.bytes);
  return section(
    `${plural(numFiles, "file")}, ${bytes(total)}`,
    table(columns, largest, { caption: "Files of the run folder" }),
  );
}
