// Puts the charts on the page, and draws them again when the page changes its width or a choice is made.

const DATA = JSON.parse(document.getElementById("data").textContent);
const state = {};
const hidden = new Set();
const at = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];
const pairs = (values) => values.map((value) => [value, value]);

// How wide each of the columns of a grid is: charts are drawn at their true size, so that text stays readable.
function columnWidth(grid) {
  const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").map(parseFloat);
  return Math.max(260, Math.floor(columns[0] || grid.clientWidth));
}

// The scatter plots that agree with what is chosen.
const tradeOf = (...keys) => DATA.scatters.filter((chart) => keys.every((key) => chart[key] === state[key]));

function drawTrade() {
  const grid = at("trade-charts");
  grid.replaceChildren(html("i"), html("i"));
  const width = columnWidth(grid);
  const charts = tradeOf("data", "recipe", "metric");
  grid.replaceChildren(...charts.map((chart) => scatterFigure(chart, width)));
}

function offerTrade() {
  const box = at("trade-choices");
  box.replaceChildren();
  const sets = unique(DATA.scatters.map((chart) => chart.data));
  choices(box, "Data", pairs(sets), state.data, (value) => { state.data = value; offerTrade(); refocus(box, value); });
  const recipes = unique(tradeOf("data").map((chart) => chart.recipe));
  if (!recipes.includes(state.recipe)) state.recipe = recipes[0];
  choices(box, "Recipe", pairs(recipes), state.recipe, (value) => { state.recipe = value; offerTrade(); refocus(box, value); });
  const metrics = unique(tradeOf("data", "recipe").map((chart) => chart.metric));
  if (!metrics.includes(state.metric)) state.metric = metrics[0];
  const names = { top1: "top-1", top5: "top-5" };
  choices(box, "Accuracy", metrics.map((m) => [m, names[m]]), state.metric, (value) => { state.metric = value; drawTrade(); });
  drawTrade();
}

function refocus(box, value) {
  for (const input of box.querySelectorAll("input")) if (input.value === value) input.focus();
}

function drawTraining() {
  const grid = at("training-charts");
  const all = DATA.curves.filter((run) => run.data === state.trained && run.recipe === state.trainedBy);
  const groupNames = unique(all.map((run) => run.group));
  const last = Math.max(...all.flatMap((run) => run.epochs));
  const from = state.part === "all" ? 0 : last / 2;
  const runs = all.filter((run) => !hidden.has(run.group)).map((run) => since(run, from));
  const indexOf = (group) => groupNames.indexOf(group);
  grid.replaceChildren(html("i"), html("i"));
  const width = columnWidth(grid);
  const watched = unique(all.map((run) => run.watched)).join(", ");
  grid.replaceChildren(
    curveFigure(runs, "accuracy", "Accuracy while training", accuracyName(runs, watched), indexOf, width),
    curveFigure(runs, "loss", "Loss while training", "Mean training loss of an epoch", indexOf, width));
  return groupNames;
}

function accuracyName(runs, watched) {
  return runs.some(watchedOnce) ? `Accuracy: ${watched} (dots), training images (thin)` : `Accuracy (${watched})`;
}

function offerTraining() {
  const box = at("training-choices");
  box.replaceChildren();
  const again = (key) => (value) => { state[key] = value; offerTraining(); refocus(box, value); };
  choices(box, "Data", pairs(unique(DATA.curves.map((run) => run.data))), state.trained, again("trained"));
  const recipes = unique(DATA.curves.filter((run) => run.data === state.trained).map((run) => run.recipe));
  if (!recipes.includes(state.trainedBy)) state.trainedBy = recipes[0];
  choices(box, "Recipe", pairs(recipes), state.trainedBy, again("trainedBy"));
  const parts = [["all", "all"], ["last", "last half"]];
  choices(box, "Epochs", parts, state.part, (value) => { state.part = value; drawTraining(); });
  offerSeries(drawTraining());
}

function offerSeries(groupNames) {
  at("training-legend").replaceChildren(...groupNames.map((name, index) => {
    const line = svg("svg", { viewBox: "0 0 30 10" }, svg("path", { ...look(index), d: "M1 5H29" }));
    const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(name)) }, line, name);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      drawTraining();
    });
    return button;
  }));
}

function drawLayers() {
  const box = at("layers-chart");
  const chart = DATA.layers.find((c) => c.title === state.layers);
  box.replaceChildren(barFigure(chart, Math.max(260, Math.min(880, box.clientWidth))));
}

function drawAll() {
  drawTrade();
  if (state.trained) drawTraining();
  drawLayers();
}

function start() {
  for (const table of document.querySelectorAll("table[data-sortable]")) makeSortable(table);
  state.data = DATA.scatters[0].data;
  offerTrade();
  state.part = "all";
  if (DATA.curves.length) {
    state.trained = DATA.curves[0].data;
    offerTraining();
  }
  else at("training-charts").append(nothing("No training run among these records: lowrank train writes one."));
  const titles = DATA.layers.map((chart) => chart.title);
  state.layers = titles[0];
  choices(at("layers-choices"), "Network", pairs(titles), titles[0], (value) => { state.layers = value; drawLayers(); });
  drawLayers();
}

function followTheme() {
  const button = at("theme");
  const modes = ["as the system", "light", "dark"];
  let mode = 0;
  button.addEventListener("click", () => {
    mode = (mode + 1) % modes.length;
    if (mode) document.documentElement.dataset.theme = modes[mode];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${modes[mode]}`;
  });
}

start();
followTheme();
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  requestAnimationFrame(drawAll);
});
