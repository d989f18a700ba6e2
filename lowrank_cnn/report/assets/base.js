"use strict";
// What all charts share: making elements, numbers for people, axes, and the tooltip.
// Values from records reach the page as text nodes and attributes alone, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");
const measure = document.createElement("canvas").getContext("2d");
measure.font = "11.5px system-ui, sans-serif";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

function si(value, digits = 3) {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= unit) return `${+(value / unit).toPrecision(digits)}${letter}`;
  return `${+value.toPrecision(digits)}`;
}
const percent = (value) => `${(100 * value).toFixed(2)}%`;
// Ticks are round numbers, written to their last digit: rounded, neighbours would read alike.
const TICK_DIGITS = 8;
const plainTick = (value) => `${+value.toPrecision(TICK_DIGITS)}`;
const percentTick = (value) => `${plainTick(100 * value)}%`;

function niceTicks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((m) => m * power >= rough * 0.9) || 10);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high, count) {
  let ticks = [];
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const step of steps) ticks.push(step * 10 ** power);
    ticks = ticks.filter((tick) => tick >= low && tick <= high);
    if (ticks.length <= count) break;
  }
  return ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0);
}

// At least so wide a range, around its middle; one that would pass its upper end reaches further down instead.
function widened(low, high, span, most) {
  const more = Math.max(0, span - (high - low));
  const top = Math.min(most, high + more / 2);
  return [Math.max(Math.min(low, 0), low - (more - (top - high))), top];
}

// A scale maps values to pixels, and knows its ticks.
function scale(values, from, to, { log = false, count = 5, zero = false, pad = 0.06, most = Infinity, span = 0 } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low /= 1.25; high *= 1.25;
  } else {
    const room = (high - low || Math.abs(high) * 0.1 || 1) * pad;
    low = zero ? 0 : low >= 0 ? Math.max(0, low - room) : low - room;
    [low, high] = widened(low, Math.min(high + room, most), span, most);
  }
  const place = log ? Math.log : (v) => v;
  const map = (v) => from + (to - from) * (place(v) - place(low)) / (place(high) - place(low) || 1);
  map.ticks = log ? logTicks(low, high, count) : niceTicks(low, high, count);
  return map;
}

// The frame of a chart: grid, ticks and the names of the axes. The name of y stands above it, where it is readable.
function frame(width, height, names) {
  const area = { left: 54, right: width - 10, top: 30, bottom: height - 44 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${names.y} against ${names.x}` });
  root.append(
    svg("text", { x: 0, y: 12, class: "axis-name" }, names.y),
    svg("text", { x: (area.left + area.right) / 2, y: height - 6, "text-anchor": "middle", class: "axis-name" }, names.x),
  );
  return { root, area };
}

function axes({ root, area }, x, y, showX, showY) {
  for (const value of y.ticks) {
    const at = y(value);
    root.append(svg("g", { class: "tick" },
      svg("line", { x1: area.left, x2: area.right, y1: at, y2: at }),
      svg("text", { x: area.left - 6, y: at + 4, "text-anchor": "end" }, showY(value))));
  }
  let free = -Infinity;
  for (const value of x.ticks) {
    const at = x(value), text = showX(value), half = measure.measureText(text).width / 2 + 4;
    if (at - half < free) continue; // no room beside the one before
    free = at + half;
    root.append(svg("g", { class: "tick" },
      svg("line", { x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4 }),
      svg("text", { x: at, y: area.bottom + 18, "text-anchor": "middle" }, text)));
  }
  root.append(svg("path", { class: "axis", d: `M${area.left} ${area.top}V${area.bottom}H${area.right}` }));
}

function showTip(title, pairs, left, top) {
  const rows = pairs.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
  tip.replaceChildren(html("b", {}, title), html("dl", {}, ...rows));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = left + 14 + box.width > innerWidth ? left - 14 - box.width : left + 14;
  const y = top + 14 + box.height > innerHeight ? top - 14 - box.height : top + 14;
  tip.style.left = `${Math.min(Math.max(4, x), innerWidth - box.width - 4)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
// What the tooltip belongs to moves with the page: a key press that brings it into view must not hide what it says.
let showAgain = null;
const hideTip = () => { tip.hidden = true; showAgain = null; };
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
addEventListener("scroll", () => { if (showAgain) showAgain(); else hideTip(); }, { passive: true });

// Details on hover and on focus, and to screen readers.
function describe(element, title, pairs) {
  const text = [title, ...pairs.map(([name, value]) => `${name} ${value}`)].join(", ");
  fill(element, { tabindex: "0", role: "img", "aria-label": text }, []);
  const show = () => {
    const box = element.getBoundingClientRect();
    showTip(title, pairs, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
    showAgain = show;
  };
  for (const kind of ["pointerenter", "focus"]) element.addEventListener(kind, show);
  for (const kind of ["pointerleave", "blur"]) element.addEventListener(kind, hideTip);
}

let groups = 0;
// One of several: radio buttons, which arrow keys move through.
function choices(parent, legend, options, chosen, change) {
  if (options.length < 2) return;
  const name = `choice-${groups++}`;
  const set = html("fieldset", {}, html("legend", {}, legend));
  for (const [value, shown] of options) {
    const input = html("input", { type: "radio", name, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => change(value));
    set.append(html("label", {}, input, html("span", {}, shown)));
  }
  parent.append(set);
}

const nothing = (...words) => html("p", { class: "none" }, ...words);
