"use strict";
// What all parts of the page share: making elements, what is chosen (kept in the address), and the tooltip.
// Values from records reach the page as text nodes and attributes alone, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const { parse, View, compile, expressionInterpreter } = window.vegaCharts;
const at = (id) => document.getElementById(id);
const figureOf = (name) => document.querySelector(`[data-chart=${name}]`);
const unique = (values) => [...new Set(values)];
const tip = at("tip");
const trainedLabel = (data, recipe) => unique([data, recipe]).filter(Boolean).join(", ");

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// ---- What is chosen, kept in the address so that a view can be shared.

const DEFAULTS = {
  data: DATA.trade[0]?.data ?? "", recipe: "", metric: "top1", axis: "", scale: "",
  trained: DATA.curves[0]?.data ?? "", by: "", measure: "", loss: "linear", hidden: "",
  layers: DATA.layers[0]?.title ?? "", tested: "", details: "",
};
const state = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };

function choose(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([key, value]) => key in DEFAULTS && value !== DEFAULTS[key]);
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
}

// One of several: radio buttons, which arrow keys move through. The first option stands where the state has none.
let groups = 0;
function choices(parent, legend, key, options, redraw) {
  if (!options.some(([value]) => value === state[key])) state[key] = options[0]?.[0] ?? "";
  if (options.length < 2) return;
  const name = `choice-${groups++}`;
  const set = html("fieldset", {}, html("legend", {}, legend));
  for (const [value, shown] of options) {
    const input = html("input", { type: "radio", name, value });
    input.checked = value === state[key];
    input.addEventListener("change", () => {
      choose({ [key]: value });
      redraw();
      parent.querySelector("input:focus") ?? [...parent.querySelectorAll("input")].find((i) => i.value === value)?.focus();
    });
    set.append(html("label", {}, input, html("span", {}, shown)));
  }
  parent.append(set);
}
const pairs = (values) => values.map((value) => [value, value]);

function button(parent, text, act) {
  const made = html("button", { type: "button", class: "download" }, text);
  made.addEventListener("click", act);
  parent.append(made);
}

// ---- The tooltip.

const ONE_COLUMN = 20; // rows; more stand in two
let showAgain = null;
const hideTip = () => { tip.hidden = true; showAgain = null; };

function showTip(title, rows, left, top) {
  tip.replaceChildren(html("b", {}, title), html("dl", {}, ...rows.map(([k, v]) => html("div", {}, html("dt", {}, k), html("dd", {}, v)))));
  tip.classList.toggle("wide", rows.length > ONE_COLUMN);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = left + 14 + box.width > innerWidth ? left - 14 - box.width : left + 14;
  const y = top + 14 + box.height > innerHeight ? top - 14 - box.height : top + 14;
  tip.style.left = `${Math.min(Math.max(4, x), innerWidth - box.width - 4)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
addEventListener("scroll", () => { if (showAgain) showAgain(); else hideTip(); }, { passive: true });

const onHover = (_handler, event, _item, value) => {
  if (value?.details) showTip(value.label, value.details, event.clientX, event.clientY);
  else if (!showAgain) hideTip();
};
