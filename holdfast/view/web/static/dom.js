// Builds the page's elements. Text goes in as text, never as markup, so nothing that a job says (a log line,
// a traceback, a host's name) can become part of the page.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) set(node, key, value);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function set(node, key, value) {
  if (value === null || value === undefined || value === false) return;
  if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
  else if (key === "vars") for (const [name, given] of Object.entries(value)) node.style.setProperty(name, given);
  else if (key === "class") node.className = value;
  else node.setAttribute(key, value === true ? "" : value);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Change an element's text only if it differs: screen readers and selections are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function card(title, body, ...beside) {
  return el("section", { class: "card", "aria-label": title },
    el("header", {}, el("h2", {}, title), beside), el("div", { class: "body" }, body));
}

export function pill(text, tone = "") {
  return el("span", { class: tone ? `pill is-${tone}` : "pill" }, text);
}

/** A table: columns are [heading, "num" or ""], rows are lists of cells (nodes or text). Of the kind "is-cards" it is
    a card for each row on a phone. */
export function table(caption, columns, rows, foot = null, kind = null) {
  const cell = (tag, content, index) => el(tag, { class: columns[index][1] || null, "data-name": kind && columns[index][0] }, content);
  return el("table", { class: kind },
    el("caption", { class: "sr" }, caption),
    el("thead", {}, el("tr", {}, columns.map(([heading, kind]) => el("th", { scope: "col", class: kind || null }, heading)))),
    el("tbody", {}, rows.map((row) => row instanceof Node ? row : el("tr", {}, row.map((content, index) =>
      index === 0 ? el("th", { scope: "row", class: columns[0][1] || null }, content) : cell("td", content, index))))),
    foot && el("tfoot", {}, el("tr", {}, foot.map((content, index) => cell("td", content, index)))));
}

/** A picture's alternative for those who would rather read: built when it is first opened. */
export function instead(summary, build) {
  const body = el("div", { class: "flush" });
  const details = el("details", { ontoggle: () => details.open && refresh() }, el("summary", {}, summary), body);
  const refresh = () => fill(body, build());
  details.refresh = () => details.open && refresh();
  return details;
}

/** Call at most once in a frame. */
export function once(draw) {
  let asked = 0;
  return () => {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); });
  };
}
