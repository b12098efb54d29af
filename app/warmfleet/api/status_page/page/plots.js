// Small plots with axes, drawn as SVG: one line for each name, the last 15 minutes from left to right.

import { el, svg } from "./dom.js";

const HEIGHT = 170;
const LEFT = 52; // room for the numbers of the upright axis
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 24; // room for the minutes
const MINUTES = [15, 10, 5, 0];

/**
 * Draw into a figure. lines: at most three of {name, values}; a null is a gap. ages: of each value, seconds before the last one.
 * format: a value as text. top: the highest value of the axis, if it is fixed.
 */
export function draw(figure, { title, lines, ages, format, top }) {
  const width = Math.max(240, figure.clientWidth);
  const known = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const step = niceStep(top ?? Math.max(...known, 0));
  const highest = top ?? Math.max(step, step * Math.ceil(Math.max(...known, 0) / step));
  const x = (age) => LEFT + (1 - Math.min(age / (60 * MINUTES[0]), 1)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - Math.min(value / highest, 1)) * (HEIGHT - TOP - BOTTOM);
  const parts = [...upright(width, highest, step, y, format), ...level(x)];
  if (!known.length) parts.push(svg("text", { x: (LEFT + width) / 2, y: HEIGHT / 3, "text-anchor": "middle" }, "no values yet"));
  lines.forEach((line, place) => parts.push(...drawn(line.values, ages, x, y, `s${place + 1}`)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": inWords(title, lines, format) });
  picture.append(...parts);
  figure.replaceChildren(el("figcaption", {}, el("b", {}, title), ...legend(lines, format)), picture);
}

function legend(lines, format) {
  return lines.map((line, place) => {
    const key = svg("svg", { class: "keyline", viewBox: "0 0 26 10", "aria-hidden": "true" });
    key.append(svg("line", { class: `key s${place + 1}`, x1: 0, y1: 5, x2: 26, y2: 5 }));
    return el("span", {}, key, ` ${line.name} `, el("span", { class: "now" }, format(line.values.at(-1) ?? null)));
  });
}

function upright(width, highest, step, y, format) {
  const parts = [];
  for (let value = 0; value <= highest * 1.001; value += step) {
    const at = y(value);
    parts.push(svg("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    parts.push(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, format(value)));
  }
  return parts;
}

function level(x) {
  return MINUTES.flatMap((minutes) => {
    const at = x(60 * minutes);
    const label = minutes ? (minutes === MINUTES[0] ? `${minutes} min ago` : `${minutes}`) : "now";
    const anchor = minutes === MINUTES[0] ? "start" : minutes ? "middle" : "end";
    return [
      svg("line", { class: "axis", x1: at, x2: at, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
      svg("text", { x: at, y: HEIGHT - 6, "text-anchor": anchor }, label),
    ];
  });
}

/** The pieces of one line between its gaps; a value between two gaps is a dot. */
function drawn(values, ages, x, y, name) {
  const parts = [];
  let piece = [];
  const end = () => {
    if (piece.length === 1) parts.push(svg("circle", { class: `plot-dot ${name}`, cx: piece[0][0], cy: piece[0][1], r: 2 }));
    if (piece.length > 1) parts.push(svg("polyline", { class: `plot-line ${name}`, points: piece.map((at) => at.join()).join(" ") }));
    piece = [];
  };
  values.forEach((value, place) => {
    if (value === null) end();
    else piece.push([x(ages[place]).toFixed(1), y(value).toFixed(1)]);
  });
  end();
  return parts;
}

/** 1, 2 or 5 times a power of ten, so that about four steps reach the highest value. */
function niceStep(highest) {
  if (highest <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(highest / 4));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => highest / step <= 4.5);
}

function inWords(title, lines, format) {
  const told = lines.map(({ name, values }) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return `${name}: no values`;
    const [least, most] = [Math.min(...known), Math.max(...known)];
    return `${name}: now ${format(values.at(-1) ?? null)}, ${format(least)} to ${format(most)} in the last 15 minutes`;
  });
  return `${title}. ${told.join(". ")}.`;
}
