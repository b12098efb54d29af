// Builds and changes elements. Text goes in as text only, so a name that is HTML stays a name.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are null or false are left out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const shown = new WeakMap(); // element -> the values that it shows, as text

/**
 * Let the children of `parent` be one element per row, in this order. An element whose row is unchanged stays as it is,
 * with its focus and whatever is unfolded in it. keyOf: a name of a row that it keeps. build: makes its element.
 */
export function keyed(parent, rows, keyOf, build) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  rows.forEach((row, place) => {
    const key = String(keyOf(row));
    const told = JSON.stringify(row);
    let element = old.get(key);
    old.delete(key);
    if (!element || shown.get(element) !== told) {
      const made = build(row);
      made.dataset.key = key;
      shown.set(made, told);
      if (element) element.replaceWith(made);
      element = made;
    }
    if (parent.children[place] !== element) parent.insertBefore(element, parent.children[place] ?? null);
  });
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
}

/** Change the text of an element, unless it is that already: a live region would tell it again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Change what an element says, unless it says that already: a reader may have selected it. The text is read by `prose`. */
export function write(element, text) {
  if (element.dataset.told === text) return;
  element.dataset.told = text;
  element.replaceChildren(...prose(text));
}

/** The parts of a text: what stands in backticks as code, and options such as --undo, in which no line ends. */
export function prose(text) {
  return text.split(/(`[^`]+`|--[\w-]+)/).map((part) => {
    if (part.startsWith("`")) return el("code", {}, part.slice(1, -1));
    return part.startsWith("--") ? el("span", { class: "whole" }, part) : part;
  });
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const NONE = "–";

/** A whole number with separators. */
export const count = (value) => (value === null || value === undefined ? NONE : plain.format(value));
/** A number with three significant digits. */
export const number = (value) => (value === null || value === undefined ? NONE : precise.format(value));
/** A share of 1 in percent. */
export const percent = (value) => (value === null || value === undefined ? NONE : `${plain.format(100 * value)}\u00a0%`);
/** A time: milliseconds below one second. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return value < 1 ? `${precise.format(1000 * value)}\u00a0ms` : `${precise.format(value)}\u00a0s`;
}
/** A size in the unit that fits. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${precise.format(value)}\u00a0${units[unit]}`;
}
/** The time of day of a Unix time, as the reader's clock has it. */
export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
