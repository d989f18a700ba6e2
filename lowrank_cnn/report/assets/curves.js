// ---- Training curves, grouped by network.

const curvesOf = (data, recipe) => DATA.curves.filter((run) => run.data === data && run.recipe === recipe);
const isAccuracy = (measure) => measure !== "train_loss";

const curveRows = (runs, measure) => runs.flatMap((run) =>
  run.epochs.map((epoch, i) => ({ group: run.group, seed: run.seed, epoch, value: run[measure][i] })).filter((row) => row.value !== null));

// Every network's colour and dash: as many as there are networks, also where some are hidden.
const looksOf = (runs) => Object.fromEntries(runs.map((run) => [run.group, run.look]));

function curvesSpec(runs, looks, { measure, log, print }) {
  const names = Object.keys(looks);
  const dots = measure === "train_accuracy" && runs.some((run) => run.test !== null) ? ", dots: test images" : "";
  const watched = unique(runs.map((run) => run.watched)).join(", ");
  const spec = fill(DATA.specs.curves, {
    "{y}": measure === "accuracy" ? `Accuracy (${watched})` : DATA.measures[measure] + dots,
    "{format}": isAccuracy(measure) ? ".1~%" : "~g",
    "{colours}": { domain: names, range: names.map((name) => looks[name][theme(print)]) },
    "{dashes}": { domain: names, range: names.map((name) => looks[name].dash) },
  });
  if (!print) spec.encoding.color.legend = spec.layer[1].encoding.strokeDash.legend = null;
  const rows = curveRows(runs, measure);
  const ends = runs.filter((run) => run.test !== null && isAccuracy(measure))
    .map((run) => ({ group: run.group, seed: run.seed, epoch: run.epochs.at(-1), value: run.test }));
  const alone = (row) => rows.every((other) => other.group !== row.group || other.epoch === row.epoch); // no line
  ends.push(...rows.filter(alone));
  spec.layer[1].encoding.y.scale = log ? { type: "log" } : { zero: false, nice: false, padding: 6 }; // dots at the edge stay whole
  spec.datasets = { curves: rows, ends };
  return spec;
}

const defaultMeasure = (runs) => (runs.some((run) => run.accuracy.filter((v) => v !== null).length > 1) ? "accuracy" : "train_accuracy");

function offerTraining() {
  const box = at("training-choices");
  const others = () => { choose({ measure: "" }); offerTraining(); };
  box.replaceChildren();
  choices(box, "Data", "trained", pairs(unique(DATA.curves.map((run) => run.data))), others);
  choices(box, "Recipe", "by", pairs(unique(DATA.curves.filter((run) => run.data === state.trained).map((run) => run.recipe))), others);
  const runs = curvesOf(state.trained, state.by);
  const known = Object.keys(DATA.measures).filter((m) => runs.some((run) => run[m].some((v) => v !== null)));
  const names = { accuracy: "watched accuracy", train_accuracy: "training accuracy", train_loss: "training loss" };
  if (!known.includes(state.measure)) state.measure = known.includes(defaultMeasure(runs)) ? defaultMeasure(runs) : known[0];
  choices(box, "Show", "measure", known.map((m) => [m, names[m]]), offerTraining);
  choices(box, "Axis", "loss", pairs(["linear", "log"]), offerTraining);
  return drawTraining();
}

async function drawTraining() {
  const all = curvesOf(state.trained, state.by);
  const looks = looksOf(all);
  const hidden = new Set(state.hidden ? state.hidden.split("|") : []);
  const runs = all.filter((run) => !hidden.has(run.group));
  const options = { measure: state.measure, log: state.loss === "log" };
  const specify = (print) => curvesSpec(runs, looks, { ...options, print });
  offerSeries(looks, hidden);
  const view = await draw(figureOf("curves"), specify, `${state.trained} ${state.measure}`, specify().datasets.curves);
  addCursor(figureOf("curves"), view, runs);
}

function offerSeries(looks, hidden) {
  at("training-legend").replaceChildren(...Object.entries(looks).map(([name, look], i) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [key, value] of Object.entries({ d: "M1 5H29", stroke: look[theme()], "stroke-dasharray": look.dash.join(" "), "stroke-width": 2.5 }))
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
  const most = 3 * ONE_COLUMN; // what a screen holds
  return rows.length > most ? [...rows.slice(0, most), ["", `and ${rows.length - most} more`]] : rows;
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
