// Training curves: one line per run, one colour and dash per network; the cursor reads all of them at an epoch.

const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const look = (index) => ({ class: `curve s${index % 6}`, "stroke-dasharray": DASHES[Math.floor(index / 6) % 4] });

function path(run, key, x, y) {
  let pen = "M";
  return run.epochs.map((epoch, i) => {
    if (run[key][i] === null) return "";
    const command = `${pen}${x(epoch).toFixed(1)} ${y(run[key][i]).toFixed(1)}`;
    pen = "L";
    return command;
  }).join("");
}

// Watched at the end alone, a run has a dot and no line: how it went there is then told by its training images.
const watchedOnce = (run) => run.accuracy.filter((value) => value !== null).length < 2 && run.trained.some((value) => value !== null);

function dots(run, index, x, y) {
  return run.epochs.flatMap((epoch, i) => (run.accuracy[i] === null ? []
    : [svg("circle", { class: `end f${index % 6}`, r: 4, cx: x(epoch), cy: y(run.accuracy[i]) })]));
}

const known = (runs, key) => runs.flatMap((run) => run[key].filter((value) => value !== null));
const showValue = { accuracy: percent, loss: (value) => value.toPrecision(4) };

// What every run had at an epoch, or at the last one before it that has a value.
function readings(runs, key, epoch) {
  const latest = (run, values) => run.epochs.findLastIndex((e, i) => e <= epoch && values[i] !== null);
  return runs.map((run) => {
    const at = latest(run, run[key]), before = at < 0 && key === "accuracy" ? latest(run, run.trained) : -1;
    if (before >= 0) return [run.label, `${percent(run.trained[before])} in training`];
    return [run.label, at < 0 ? "–" : showValue[key](run[key][at])];
  });
}

function addCursor({ root, area }, runs, key, x) {
  const line = svg("line", { class: "cursor", y1: area.top, y2: area.bottom, visibility: "hidden" });
  const epochs = [...new Set(runs.flatMap((run) => run.epochs))].sort((a, b) => a - b);
  let index = epochs.length - 1;
  root.append(line);
  const show = (left, top) => {
    fill(line, { x1: x(epochs[index]), x2: x(epochs[index]), visibility: "visible" }, []);
    showTip(`Epoch ${epochs[index]}`, readings(runs, key, epochs[index]).slice(0, 14), left, top);
  };
  const atLine = () => {
    const box = line.getBoundingClientRect();
    show(box.left, box.top + box.height / 3);
    showAgain = atLine;
  };
  const hide = () => { line.setAttribute("visibility", "hidden"); hideTip(); };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = (event.clientX - box.left) * root.viewBox.baseVal.width / box.width;
    index = epochs.reduce((best, e, i) => (Math.abs(x(e) - at) < Math.abs(x(epochs[best]) - at) ? i : best), 0);
    showAgain = null;
    show(event.clientX, event.clientY);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("focus", () => { fill(line, { x1: x(epochs[index]), x2: x(epochs[index]) }, []); atLine(); });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.min(Math.max(index + step, 0), epochs.length - 1);
    fill(line, { x1: x(epochs[index]), x2: x(epochs[index]) }, []);
    atLine();
  });
}

function drawCurves(runs, key, name, indexOf, width) {
  const height = Math.round(Math.min(360, Math.max(240, width * 0.6)));
  const parts = frame(width, height, { x: "Epoch", y: name });
  const { root, area } = parts;
  const x = scale(runs.flatMap((run) => run.epochs), area.left, area.right, { count: width < 420 ? 5 : 8, pad: 0 });
  const sparse = key === "accuracy" ? runs.filter(watchedOnce) : [];
  const limits = key === "accuracy" ? { most: 1, span: Math.max(...runs.map((run) => run.span)) } : {};
  const y = scale([...known(runs, key), ...known(sparse, "trained")], area.bottom, area.top, limits);
  x.ticks = x.ticks.filter(Number.isInteger);
  axes(parts, x, y, plainTick, key === "accuracy" ? percentTick : plainTick);
  for (const run of runs) {
    const thin = sparse.includes(run), line = look(indexOf(run.group));
    if (thin) line.class += " thin";
    root.append(svg("path", { ...line, d: path(run, thin ? "trained" : key, x, y), "data-run": run.label }));
    if (thin) root.append(...dots(run, indexOf(run.group), x, y));
  }
  fill(root, { tabindex: "0", role: "img", "aria-label": `${name} per epoch of ${runs.length} runs; arrow keys move the cursor` }, []);
  addCursor(parts, runs, key, x);
  return root;
}

// The part of a run from an epoch on.
function since(run, epoch) {
  const keep = (values) => values.filter((_, i) => run.epochs[i] >= epoch);
  return { ...run, epochs: keep(run.epochs), accuracy: keep(run.accuracy), trained: keep(run.trained), loss: keep(run.loss) };
}

function curveFigure(runs, key, title, name, indexOf, width) {
  const figure = html("figure", { "data-chart": `curves-${key}` }, html("h3", {}, title));
  figure.append(known(runs, key).length ? drawCurves(runs, key, name, indexOf, width) : nothing("No run has this figure."));
  return figure;
}
