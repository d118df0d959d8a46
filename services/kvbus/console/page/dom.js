// Elements without markup: whatever comes from the bus is set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** An element: h("td", { class: "n" }, "text", child). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/** Set text, only if it changed: what has not changed is not laid out again. */
export function say(element, text) {
  const value = String(text ?? "");
  if (element.textContent !== value) element.textContent = value;
}

export function mark(element, name, value) {
  const text = String(value ?? "");
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Rows of a table body, each kept as long as its key is there. make(row) gives { el, update(row) }. */
export class Rows {
  constructor(body, key, make) {
    this.body = body;
    this.key = key;
    this.make = make;
    this.known = new Map();
  }

  show(rows) {
    const keys = new Set();
    let place = this.body.firstElementChild;
    for (const row of rows) {
      const key = this.key(row);
      keys.add(key);
      let known = this.known.get(key);
      if (!known) {
        known = this.make(row);
        this.known.set(key, known);
      }
      known.update(row);
      known.row = row;
      if (known.el === place) place = place.nextElementSibling;
      else this.body.insertBefore(known.el, place);
    }
    for (const [key, known] of this.known) {
      if (keys.has(key)) continue;
      known.el.remove();
      this.known.delete(key);
    }
  }
}

/** Arrow keys go from link to link within a table. */
export function arrows(table) {
  table.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const links = [...table.querySelectorAll("tbody a")];
    const next = links[links.indexOf(document.activeElement) + step];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });
  table.addEventListener("click", (event) => {
    if (event.target.closest("a")) return;
    const link = event.target.closest("tr[data-id]")?.querySelector("a");
    if (link) link.click();
  });
}
