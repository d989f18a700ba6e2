// ---- Layers.

function layersSpec(chart) {
  return { ...fill(DATA.specs.layers, { "{height}": chart.height, "{series}": chart.series }), datasets: { layers: chart.layers } };
}

async function drawLayers() {
  const chart = DATA.layers.find((c) => c.title === state.layers) ?? DATA.layers[0];
  await draw(figureOf("layers"), () => layersSpec(chart), chart.title, chart.layers);
  figureOf("layers").append(html("figcaption", {}, `${chart.note}.`));
}

function offerLayers() {
  at("layers-choices").replaceChildren();
  choices(at("layers-choices"), "Network", "layers", pairs(DATA.layers.map((chart) => chart.title)), drawLayers);
  return drawLayers();
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

const PRINTED = 195; // pixels of a chart's height: four rows fill a page
function drawForPrint() {
  const box = at("print-all");
  box.hidden = false;
  box.replaceChildren(html("h2", {}, "All data sets"));
  const add = (title, { title: own, ...spec }) => {
    const figure = html("figure", {}, html("h3", {}, own ? `${title}: ${own}` : title), html("div", { class: "plot" }));
    box.append(figure);
    makeView({ ...spec, width: 400, height: Math.min(spec.height, PRINTED) }, { container: figure.lastChild, print: true }).run();
    labelAllOrNone(figure);
  };
  for (const chart of DATA.trade) add(`${trainedLabel(chart.data, chart.recipe)}: ${chart.y}`, tradeSpec(chart, chart.log ? "log" : "linear", true));
  for (const key of unique(DATA.curves.map((run) => JSON.stringify([run.data, run.recipe])))) {
    const runs = curvesOf(...JSON.parse(key));
    const options = { measure: defaultMeasure(runs), log: false, print: true };
    add(`${trainedLabel(runs[0].data, runs[0].recipe)}: training`, curvesSpec(runs, looksOf(runs), options));
  }
  for (const trained of unique(DATA.details.map((one) => one.trained))) {
    const [found] = detailsOf(trained);
    for (const name of Object.keys(found.charts)) add(`${trained}: test images of ${found.network}`, detailsSpec(found, name, true));
  }
}

function clearPrint() {
  at("print-all").hidden = true;
  at("print-all").replaceChildren();
}

// ---- Start.

async function drawAll() {
  const parts = { trade: offerTrade, curves: offerTraining, details: offerDetails, layers: offerLayers };
  delete document.body.dataset.drawn;
  await Promise.all(Object.entries(parts).map(([name, offer]) => DATA[name].length && offer()));
  document.body.dataset.drawn = "";
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
if (!DATA.trade.length) figureOf("trade").append(html("p", { class: "none" }, "No network here has both an accuracy and a cost."));
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
