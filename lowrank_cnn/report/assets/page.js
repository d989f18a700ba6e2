"use strict";
// Draws the charts with Vega, sorts the tables, and keeps what is chosen in the address.
// Values from records reach the page as text nodes and attributes alone, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const { parse, View, compile, expressionInterpreter } = window.vegaCharts;
const at = (id) => document.getElementById(id);
const figureOf = (name) => document.querySelector(`[data-chart=${name}]`);
const unique = (values) => [...new Set(values)];
const tip = at("tip");

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// ---- What is chosen, kept in the address so that a view can be shared.

const DEFAULTS = {
  data: DATA.trade[0].data, recipe: "", metric: "top1", axis: "", scale: "", zoom: "",
  trained: DATA.curves[0]?.data ?? "", by: "", measure: "", smooth: "1", loss: "linear", epochs: "", hidden: "",
  layers: DATA.layers[0].title,
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

let showAgain = null;
const hideTip = () => { tip.hidden = true; showAgain = null; };

function showTip(title, rows, left, top) {
  tip.replaceChildren(html("b", {}, title), html("dl", {}, ...rows.flatMap(([k, v]) => [html("dt", {}, k), html("dd", {}, v)])));
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

// ---- Drawing: the specifications come with the page; here they get their data, size and scales.

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const theme = (print) => (isDark() && !print ? "dark" : "light");

function fill(value, parts) {
  if (typeof value === "string") return value in parts ? parts[value] : value;
  if (Array.isArray(value)) return value.map((inner) => fill(inner, parts));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, fill(v, parts)]));
  return value;
}

// Vega-Lite cannot place labels; Vega can.
function withLabels(vega) {
  const { transform, leaders } = DATA.labels;
  vega.marks = vega.marks.flatMap((mark) => {
    if (mark.type === "group") return [withLabels(mark)];
    return mark.name === "labels_marks" ? [{ ...mark, transform: [transform] }, leaders] : [mark];
  });
  return vega;
}

function makeView(spec, options) {
  const vega = withLabels(compile(spec, { config: DATA.themes[options.print ? "light" : theme()] }).spec);
  return new View(parse(vega, null, { ast: true }), { expr: expressionInterpreter, renderer: "svg", ...options });
}

// As wide as it is told, axes and legend included.
const sized = (spec, width) => ({ ...spec, width, autosize: { type: "fit", contains: "padding" } });

async function draw(figure, spec, title, rows) {
  hideTip();
  const box = html("div", { class: "plot" });
  figure.replaceChildren(box);
  const view = makeView(sized(spec, Math.max(240, figure.clientWidth)), { container: box });
  await view.tooltip(onHover).runAsync();
  for (const mark of box.querySelectorAll(".points_marks path, .bars_marks path")) makeReadable(mark);
  const bar = html("div", { class: "downloads" });
  figure.append(bar);
  button(bar, "PNG", () => savePicture(spec, title));
  button(bar, "CSV", () => save(`${title}.csv`, new Blob([csv(rows)], { type: "text/csv" })));
  return view;
}

// Details on focus as on hover.
function makeReadable(mark) {
  const datum = mark.__data__?.datum;
  if (!datum?.details) return;
  mark.setAttribute("tabindex", "0");
  const show = () => {
    const box = mark.getBoundingClientRect();
    showTip(datum.label, datum.details, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
    showAgain = show;
  };
  mark.addEventListener("focus", show);
  mark.addEventListener("blur", hideTip);
}

async function savePicture(spec, title) {
  const view = makeView(sized(spec, 900), { renderer: "none", print: true });
  const address = await view.toImageURL("png", 2);
  save(`${title}.png`, blobOf(address));
}

function blobOf(address) {
  const [head, body] = address.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5).split(";")[0] });
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  html("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
function csv(rows) {
  const names = unique(rows.flatMap((row) => Object.keys(row))).filter((name) => name !== "details" && name !== "spoken");
  return [names.map(quoted), ...rows.map((row) => names.map((name) => quoted(row[name])))].map((line) => line.join(",")).join("\n");
}

// ---- Zoom: drag over a chart; the range goes into the address.

function zoomable(figure, view, key, reset, redraw) {
  const box = figure.querySelector(".plot");
  const [left, top] = view.origin();
  const area = { width: view.width(), height: view.height() };
  const inside = (event) => {
    const outer = box.getBoundingClientRect();
    return [event.clientX - outer.left - left, event.clientY - outer.top - top];
  };
  let from = null;
  const band = html("div", { class: "band", hidden: "" });
  box.append(band);
  box.addEventListener("pointerdown", (event) => { [from] = inside(event); });
  box.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const [to] = inside(event);
    band.hidden = Math.abs(to - from) < 6;
    band.style.left = `${left + Math.min(from, to)}px`;
    band.style.width = `${Math.abs(to - from)}px`;
    band.style.top = `${top}px`;
    band.style.height = `${area.height}px`;
  });
  box.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, inside(event)[0]].map((x) => Math.min(Math.max(x, 0), area.width)).sort((a, b) => a - b);
    from = null;
    band.hidden = true;
    if (ends[1] - ends[0] < 6) return;
    choose({ [key]: ends.map((x) => view.scale("x").invert(x).toPrecision(4)).join("~") });
    redraw();
  });
  if (state[key]) button(figure.querySelector(".downloads"), reset, () => { choose({ [key]: "" }); redraw(); });
}
const range = (text) => { const ends = text.split("~").map(Number); return ends.length === 2 && ends.every(Number.isFinite) ? ends : null; };

// ---- Accuracy against cost.

const tradeOf = (...keys) => DATA.trade.filter((chart) => keys.every((key) => chart[key] === state[key]));

function tradeSpec(chart, scale, zoom) {
  const parts = {
    "{x}": chart.x, "{y}": chart.y,
    "{colours}": { domain: chart.kinds, range: chart.kinds.map((kind) => DATA.kinds[kind][1]) },
    "{shapes}": { domain: chart.kinds, range: chart.kinds.map((kind) => DATA.kinds[kind][0]) },
  };
  const spec = fill(DATA.specs.trade, parts);
  spec.encoding.x.scale = { type: scale, nice: false, domain: zoom ?? chart.costs[scale] };
  spec.encoding.y.scale.domain = chart.domain;
  spec.layer = spec.layer.filter((layer) => chart[layer.data?.name ?? "points"].length);
  spec.datasets = { points: chart.points, arrows: chart.arrows, fronts: chart.fronts, labels: chart.labels };
  return spec;
}

function offerTrade() {
  const box = at("trade-choices");
  const again = () => { choose({ zoom: "" }); offerTrade(); };
  const others = () => { choose({ scale: "" }); again(); };
  box.replaceChildren();
  choices(box, "Data", "data", pairs(unique(DATA.trade.map((chart) => chart.data))), others);
  choices(box, "Recipe", "recipe", pairs(unique(tradeOf("data").map((chart) => chart.recipe))), again);
  const metrics = unique(tradeOf("data", "recipe").map((chart) => chart.metric));
  choices(box, "Accuracy", "metric", metrics.map((m) => [m, { top1: "top-1", top5: "top-5" }[m]]), again);
  const axes = Object.keys(DATA.axes).map((axis) => tradeOf("data", "recipe", "metric").find((c) => c.axis === axis)).filter(Boolean);
  const timed = axes.filter((chart) => chart.points.some((p) => p.kind.endsWith("here")));
  const names = { GPU: "GPU time", CPU: "CPU time", macs: "MACs", params: "parameters" };
  choices(box, "Against", "axis", (timed.length ? timed : axes).map((chart) => [chart.axis, names[chart.axis]]), others);
  const [chart] = tradeOf("data", "recipe", "metric", "axis");
  if (!state.scale) state.scale = chart.log ? "log" : "linear";
  choices(box, "Axis", "scale", pairs(["linear", "log"]), again);
  drawTrade();
}

async function drawTrade() {
  const [chart] = tradeOf("data", "recipe", "metric", "axis");
  const scale = Math.min(...chart.points.map((p) => p.x)) > 0 ? state.scale : "linear";
  const view = await draw(figureOf("trade"), tradeSpec(chart, scale, range(state.zoom)), `${chart.data} ${chart.axis}`, chart.points);
  zoomable(figureOf("trade"), view, "zoom", "Whole axis", drawTrade);
}

// ---- Training curves, grouped by network.

const curvesOf = (data, recipe) => DATA.curves.filter((run) => run.data === data && run.recipe === recipe);
const isAccuracy = (measure) => measure !== "train_loss";

// The mean of the last n known values, run by run.
function smoothed(values, n) {
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - n + 1), i + 1).filter((v) => v !== null);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

function curveRows(runs, measure, n) {
  return runs.flatMap((run) => {
    const values = smoothed(run[measure], n);
    return run.epochs.map((epoch, i) => ({ group: run.group, seed: run.seed, epoch, value: values[i] })).filter((row) => row.value !== null);
  });
}

function lookOf(names, print) {
  const colours = DATA.looks[theme(print)], dashes = DATA.looks.dashes;
  return names.map((_, i) => [colours[i % colours.length], dashes[Math.floor(i / colours.length) % dashes.length]]);
}

function curvesSpec(runs, names, { measure, smooth, log, zoom, print }) {
  const looks = lookOf(names, print);
  const watched = unique(runs.map((run) => run.watched)).join(", ");
  const spec = fill(DATA.specs.curves, {
    "{y}": measure === "accuracy" ? `Accuracy (${watched})` : DATA.measures[measure],
    "{format}": isAccuracy(measure) ? ".1~%" : "~g",
    "{colours}": { domain: names, range: looks.map(([colour]) => colour) },
    "{dashes}": { domain: names, range: looks.map(([, dash]) => dash) },
  });
  if (!print) spec.encoding.color.legend = spec.layer[1].encoding.strokeDash.legend = null;
  const rows = curveRows(runs, measure, smooth);
  const ends = runs.filter((run) => run.test !== null && isAccuracy(measure))
    .map((run) => ({ group: run.group, seed: run.seed, epoch: run.epochs.at(-1), value: run.test }));
  const within = (row) => !zoom || (row.epoch >= zoom[0] && row.epoch <= zoom[1]);
  if (zoom) spec.encoding.x.scale.domain = zoom;
  if (log) spec.layer[1].encoding.y.scale = { type: "log" };
  spec.datasets = { curves: rows.filter(within), ends: ends.filter(within) };
  return spec;
}

const defaultMeasure = (runs) => (runs.some((run) => run.accuracy.filter((v) => v !== null).length > 1) ? "accuracy" : "train_accuracy");

function offerTraining() {
  const box = at("training-choices");
  const again = () => { choose({ epochs: "" }); offerTraining(); };
  const others = () => { choose({ measure: "" }); again(); };
  box.replaceChildren();
  choices(box, "Data", "trained", pairs(unique(DATA.curves.map((run) => run.data))), others);
  choices(box, "Recipe", "by", pairs(unique(DATA.curves.filter((run) => run.data === state.trained).map((run) => run.recipe))), others);
  const runs = curvesOf(state.trained, state.by);
  const known = Object.keys(DATA.measures).filter((m) => runs.some((run) => run[m].some((v) => v !== null)));
  const names = { accuracy: "watched accuracy", train_accuracy: "training accuracy", train_loss: "training loss" };
  if (!known.includes(state.measure)) state.measure = known.includes(defaultMeasure(runs)) ? defaultMeasure(runs) : known[0];
  choices(box, "Show", "measure", known.map((m) => [m, names[m]]), again);
  choices(box, "Smoothing", "smooth", [["1", "none"], ["5", "5 epochs"], ["15", "15 epochs"]], again);
  choices(box, "Axis", "loss", pairs(["linear", "log"]), again);
  drawTraining();
}

async function drawTraining() {
  const all = curvesOf(state.trained, state.by);
  const names = unique(all.map((run) => run.group));
  const hidden = new Set(state.hidden ? state.hidden.split("|") : []);
  const runs = all.filter((run) => !hidden.has(run.group));
  const options = { measure: state.measure, smooth: Number(state.smooth) || 1, log: state.loss === "log", zoom: range(state.epochs) };
  const spec = curvesSpec(runs, names, options);
  offerSeries(names, hidden);
  const view = await draw(figureOf("curves"), spec, `${state.trained} ${state.measure}`, spec.datasets.curves);
  zoomable(figureOf("curves"), view, "epochs", "All epochs", drawTraining);
  addCursor(figureOf("curves"), view, runs);
}

function offerSeries(names, hidden) {
  const looks = lookOf(names);
  at("training-legend").replaceChildren(...names.map((name, i) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [key, value] of Object.entries({ d: "M1 5H29", stroke: looks[i][0], "stroke-dasharray": looks[i][1].join(" "), "stroke-width": 2.5 }))
      path.setAttribute(key, value);
    line.setAttribute("viewBox", "0 0 30 10");
    line.append(path);
    const made = html("button", { type: "button", "aria-pressed": String(!hidden.has(name)) }, line, name);
    made.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      choose({ hidden: [...hidden].join("|") });
      drawTraining();
      [...at("training-legend").children][i].focus();
    });
    return made;
  }));
}

// What every network has at an epoch, best first. A network without a value there says from which epoch it is.
function readings(runs, epoch) {
  const measure = state.measure, shown = isAccuracy(measure) ? (v) => `${(100 * v).toFixed(2)}%` : (v) => v.toPrecision(4);
  const found = unique(runs.map((run) => run.group)).map((group) => {
    const mine = runs.filter((run) => run.group === group);
    const latest = Math.max(...mine.flatMap((run) => run.epochs.filter((e, i) => e <= epoch && run[measure][i] !== null)));
    const values = mine.flatMap((run) => run.epochs.flatMap((e, i) => (e === latest && run[measure][i] !== null ? [run[measure][i]] : [])));
    const mean = values.reduce((sum, v) => sum + v, 0) / values.length;
    const more = [latest < epoch ? `at epoch ${latest}` : "", values.length > 1 ? `mean of ${values.length}` : ""].filter(Boolean).join(", ");
    return { group, mean, text: values.length ? `${shown(mean)}${more ? ` (${more})` : ""}` : "–" };
  });
  const better = (a, b) => (Number.isNaN(a.mean) ? 1 : Number.isNaN(b.mean) ? -1 : (isAccuracy(measure) ? b.mean - a.mean : a.mean - b.mean));
  const rows = found.sort(better).map(({ group, text }) => [group, text]);
  return rows.length > 20 ? [...rows.slice(0, 20), ["", `and ${rows.length - 20} more`]] : rows;
}

function addCursor(figure, view, runs) {
  const epochs = unique(runs.flatMap((run) => run.epochs)).sort((a, b) => a - b);
  if (!epochs.length) return;
  const box = figure.querySelector(".plot"), scale = view.scale("x");
  const [left, top] = view.origin();
  const [low, high] = scale.domain();
  const seen = epochs.filter((e) => e >= low && e <= high);
  const line = html("div", { class: "cursor", hidden: "" });
  box.append(line);
  let index = seen.length - 1;
  const show = (x, y) => {
    line.hidden = false;
    line.style.left = `${left + scale(seen[index])}px`;
    line.style.top = `${top}px`;
    line.style.height = `${view.height()}px`;
    showTip(`Epoch ${seen[index]}`, readings(runs, seen[index]), x, y);
  };
  const atLine = () => {
    const at = box.getBoundingClientRect();
    show(at.left + left + scale(seen[index]), at.top + top + 20);
    showAgain = atLine;
  };
  const hide = () => { line.hidden = true; hideTip(); };
  box.setAttribute("tabindex", "0");
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `Training curves of ${runs.length} runs; arrow keys move the cursor`);
  box.addEventListener("pointermove", (event) => {
    const x = event.clientX - box.getBoundingClientRect().left - left;
    index = seen.reduce((best, e, i) => (Math.abs(scale(e) - x) < Math.abs(scale(seen[best]) - x) ? i : best), 0);
    showAgain = null;
    show(event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("focus", atLine);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.min(Math.max(index + step, 0), seen.length - 1);
    atLine();
  });
}

// ---- Layers.

function layersSpec(chart) {
  return { ...fill(DATA.specs.layers, { "{height}": chart.height }), datasets: { layers: chart.layers } };
}

async function drawLayers() {
  const chart = DATA.layers.find((c) => c.title === state.layers) ?? DATA.layers[0];
  await draw(figureOf("layers"), layersSpec(chart), chart.title, chart.layers);
  figureOf("layers").append(html("figcaption", {}, `${chart.note}.`));
}

function offerLayers() {
  at("layers-choices").replaceChildren();
  choices(at("layers-choices"), "Network", "layers", pairs(DATA.layers.map((chart) => chart.title)), drawLayers);
  drawLayers();
}

// ---- Tables are sorted by their headings: numbers as numbers, what is missing always last.

const order = new Intl.Collator(undefined, { numeric: true });
function compareCells(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? order.compare(a, b) : x - y;
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, index) => heading.querySelector("button").addEventListener("click", () => {
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => row.cells[index].dataset.value;
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((r, s) => {
      const [a, b] = [key(r), key(s)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return (rising ? 1 : -1) * compareCells(a, b);
    }));
  }));
}

function tableCsv(table) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const rows = [...table.tBodies[0].rows].map((row) => Object.fromEntries([...row.cells].flatMap((cell, i) => {
    const small = cell.querySelector(":scope > small")?.textContent;
    const shown = cell.dataset.value ?? cell.firstChild?.textContent.trim();
    return small ? [[names[i], shown], [`${names[i]}, note`, small]] : [[names[i], shown]];
  })));
  return csv(rows);
}

// ---- Printed, the page shows every data set.

function drawForPrint() {
  const box = at("print-all");
  box.hidden = false;
  box.replaceChildren(html("h2", {}, "All data sets"));
  const add = (title, spec) => {
    const figure = html("figure", {}, html("h3", {}, title), html("div", { class: "plot" }));
    box.append(figure);
    makeView({ ...spec, width: 520 }, { container: figure.lastChild, print: true }).run();
  };
  for (const chart of DATA.trade) add(`${chart.data} ${chart.recipe}: ${chart.y}`, tradeSpec(chart, chart.log ? "log" : "linear", null));
  for (const key of unique(DATA.curves.map((run) => JSON.stringify([run.data, run.recipe])))) {
    const runs = curvesOf(...JSON.parse(key));
    const options = { measure: defaultMeasure(runs), smooth: 1, log: false, zoom: null, print: true };
    add(`${runs[0].data}, ${runs[0].recipe}: training`, curvesSpec(runs, unique(runs.map((run) => run.group)), options));
  }
}

function clearPrint() {
  at("print-all").hidden = true;
  at("print-all").replaceChildren();
}

// ---- Start.

function drawAll() {
  offerTrade();
  if (DATA.curves.length) offerTraining();
  offerLayers();
}

function followTheme() {
  const modes = ["as the system", "light", "dark"];
  let mode = 0;
  at("theme").addEventListener("click", () => {
    mode = (mode + 1) % modes.length;
    if (mode) document.documentElement.dataset.theme = modes[mode];
    else delete document.documentElement.dataset.theme;
    at("theme").textContent = `Theme: ${modes[mode]}`;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

for (const table of document.querySelectorAll("table[data-sortable]")) makeSortable(table);
for (const made of document.querySelectorAll("button[data-csv]"))
  made.addEventListener("click", () => save(`${made.dataset.csv}.csv`, new Blob([tableCsv(at(made.dataset.csv))], { type: "text/csv" })));
for (const link of document.querySelectorAll("nav a, .skip, .meta a")) link.addEventListener("click", (event) => {
  event.preventDefault(); // the address keeps what is chosen
  at(link.getAttribute("href").slice(1)).scrollIntoView();
});
if (!DATA.curves.length) figureOf("curves").append(html("p", { class: "none" }, "No training run among these records: lowrank train writes one."));
drawAll();
followTheme();
addEventListener("beforeprint", drawForPrint);
addEventListener("afterprint", clearPrint);
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  requestAnimationFrame(drawAll);
});
