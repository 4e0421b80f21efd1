// Builds DOM nodes. Text only ever becomes text nodes: nothing in the page parses HTML from data.

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

const SVG = "http://www.w3.org/2000/svg";
const SAFE_LINK = /^(#|\/(?!\/)|https?:\/\/|blob:)/i;

/**
 * Create an element: `h("a.link", {href: "#/", on: {click: handler}}, "text", child)`.
 *
 * The tag may have classes (`div.card.wide`). Properties: `class` adds classes; `on` maps events to handlers; `dataset`
 * and `style` are objects (custom properties too: `{"--share": 0.4}`); `value`, `checked`, `selected`, `disabled`,
 * `open` and `hidden` are set as properties; all others are attributes, omitted if null or false and empty if true.
 * Links with another scheme than http(s) are dropped.
 *
 * @param {string} tag
 * @param {Record<string, any> | null} [props]
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export function h(tag, props, ...children) {
  return build((name) => document.createElement(name), tag, props, children);
}

/** Create an SVG element, as `h` does for HTML. */
export function svg(tag, props, ...children) {
  return build((name) => document.createElementNS(SVG, name), tag, props, children);
}

/** Replace all children of a node. */
export function replace(node, ...children) {
  node.replaceChildren(...flatten(children));
  return node;
}

/** Append children, given as in `h`. */
export function append(node, ...children) {
  node.append(...flatten(children));
  return node;
}

const AS_PROPERTY = new Set(["value", "checked", "selected", "disabled", "open", "hidden", "indeterminate"]);

function build(create, tag, props, children) {
  const [name, ...classes] = tag.split(".");
  const node = create(name);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class")
      value
        .split(" ")
        .filter(Boolean)
        .forEach((c) => node.classList.add(c));
    else if (key === "on") Object.entries(value).forEach(([event, handler]) => node.addEventListener(event, handler));
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key === "style") setStyle(node, value);
    else if (key === "value")
      continue; // after the children: a select needs its options first
    else if (AS_PROPERTY.has(key)) node[key] = value;
    else if (key === "href" && !SAFE_LINK.test(String(value))) continue;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...flatten(children));
  if (props && props.value !== null && props.value !== undefined) node.value = props.value;
  return node;
}

function setStyle(node, style) {
  for (const [key, value] of Object.entries(style)) {
    if (value !== null && value !== undefined) node.style.setProperty(key, String(value));
  }
}

function flatten(children) {
  const nodes = [];
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) nodes.push(...flatten(child));
    else nodes.push(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return nodes;
}
