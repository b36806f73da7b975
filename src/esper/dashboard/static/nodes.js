"use strict";
// Nodes of the page: elements, drawings, tables. Text from a run only ever becomes a text node.
// The scripts share one scope, so what a file declares is there for those that are loaded after it.

const SVG_SPACE = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

// An attribute that begins with "on" is a listener; one that is null, undefined or false is left out.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (isKnown(value) && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(isKnown));
  return node;
}

// `numeric` has the numbers of the columns whose cells are aligned as numbers.
function table(caption, head, rows, numeric = []) {
  const kind = (index) => (numeric.includes(index) ? "number" : null);
  const title = (name, index) => el("th", { scope: "col", class: kind(index) }, name);
  const cell = (value, index) =>
    el(index ? "td" : "th", { class: kind(index), scope: index ? null : "row" }, value);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, head.map(title))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

// Names and values side by side; a value of null leaves its name out.
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null);
  return el("dl", { class: "facts" },
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children);
}

// What is opened by those who want it.
function folded(title, ...children) {
  return el("details", {}, el("summary", {}, title), ...children);
}

// A small drawing inside of a line of text.
function swatch(box, ...parts) {
  return svg("svg", { class: "key", viewBox: box, "aria-hidden": "true" }, ...parts);
}
