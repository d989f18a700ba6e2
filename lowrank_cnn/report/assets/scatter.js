// Accuracy against a cost: points with labels that do not overlap, and the Pareto front as a staircase.

const DIAMOND = "M0-6.5L6.5 0L0 6.5L-6.5 0Z";
const PLACES = [[9, 4, "start"], [-9, 4, "end"], [0, -10, "middle"], [0, 19, "middle"],
  [8, -8, "start"], [8, 15, "start"], [-8, -8, "end"], [-8, 15, "end"]];
const SPOTS = [1, 2, 3, 4.5, 6].flatMap((ring) => PLACES.map(([dx, dy, anchor]) => [ring * dx, ring * dy, anchor, ring > 1]));

function labelBox(text, x, y, anchor) {
  const width = measure.measureText(text).width + 4;
  const left = anchor === "start" ? x : anchor === "end" ? x - width : x - width / 2;
  return { left, right: left + width, top: y - 11, bottom: y + 3 };
}
const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const within = (box, area) => box.left >= area.left && box.right <= area.right + 8 && box.top >= area.top - 8 && box.bottom <= area.bottom;

// A line from a point to its label as dots, from beyond the mark on: it may cross the front, but no label and no mark.
function leaderDots(mark, dx, dy) {
  const length = Math.hypot(dx, dy);
  return Array.from({ length: Math.floor(length / 4) }, (_, i) => (4 * i + 2) / length)
    .filter((part) => part * length > 12)
    .map((part) => ({ x: mark.x + part * dx, y: mark.y + part * dy }))
    .map(({ x, y }) => ({ left: x - 1, right: x + 1, top: y - 1, bottom: y + 1 }));
}

// The first free place around each point, further out with a line to it; a label that finds none is left to the tooltip.
function placeLabels(marks, lines, area) {
  const taken = marks.map(({ x, y }) => ({ left: x - 6, right: x + 6, top: y - 6, bottom: y + 6 }));
  const labels = [];
  for (const mark of marks) {
    const spot = SPOTS.find(([dx, dy, anchor, far]) => {
      const box = labelBox(mark.text, mark.x + dx, mark.y + dy, anchor);
      if (!within(box, area) || [...taken, ...lines].some((other) => overlap(box, other))) return false;
      const dots = far ? leaderDots(mark, dx, dy - 4) : [];
      if (dots.some((dot) => taken.some((other) => overlap(dot, other)))) return false;
      return taken.push(box, ...dots);
    });
    if (spot) labels.push({ mark, x: mark.x + spot[0], y: mark.y + spot[1], anchor: spot[2], far: spot[3] });
  }
  return labels;
}

function drawLabel({ mark, x, y, anchor, far }) {
  const text = svg("text", { class: "label", x, y, "text-anchor": anchor }, mark.text);
  return far ? [svg("line", { class: "leader", x1: mark.x, y1: mark.y, x2: x, y2: y - 4 }), text] : [text];
}

function staircase(points, x, y) {
  return points.map((p, i) => (i ? `H${x(p.x)}V${y(p.y)}` : `M${x(p.x)} ${y(p.y)}`)).join("");
}

// The same stairs as thin boxes, which labels keep clear of.
function stairBoxes(points, x, y) {
  return points.slice(1).flatMap((p, i) => {
    const [left, low, right, high] = [x(points[i].x), y(points[i].y), x(p.x), y(p.y)];
    return [{ left, right, top: low - 1, bottom: low + 1 }, { left: right - 1, right: right + 1, top: high, bottom: low }];
  });
}

const showCost = (chart, value, digits = 3) => (chart.axis === "macs" || chart.axis === "params" ? si(value, digits) : `${+value.toPrecision(digits)}`);

// How far the seeds lie apart: one standard deviation up and down.
const reach = (p) => (p.spread ? [p.y - p.spread, Math.min(1, p.y + p.spread)] : [p.y]);

function whisker(point, x, y) {
  const [low, high] = reach(point).map(y);
  return svg("path", { class: "whisker", d: `M${x(point.x)} ${low}V${high}m-3 0h6M${x(point.x) - 3} ${low}h6` });
}

function whiskerBox(point, x, y) {
  const [low, high] = reach(point).map(y);
  return { left: x(point.x) - 3, right: x(point.x) + 3, top: high - 1, bottom: low + 1 };
}

function mark(chart, point, x, y) {
  const shape = point.source === "ours"
    ? svg("circle", { class: "dot ours", r: 6 }) : svg("path", { class: "dot published", d: DIAMOND });
  const spot = svg("g", { class: "point", transform: `translate(${x} ${y})`, "data-source": point.source },
    svg("circle", { class: "hit", r: 11 }), shape);
  describe(spot, `${point.label} (${point.source})`,
    [[chart.y, percent(point.y)], [chart.x, showCost(chart, point.x)], ...point.details]);
  return spot;
}

function drawScatter(chart, width) {
  const height = Math.round(Math.min(400, Math.max(270, width * 0.66)));
  const parts = frame(width, height, { x: chart.x, y: chart.y });
  const { root, area } = parts;
  const x = scale(chart.points.map((p) => p.x), area.left, area.right, { log: chart.log, count: width < 420 ? 4 : 6, pad: 0.12 });
  const y = scale(chart.points.flatMap(reach), area.bottom, area.top, { pad: 0.12, most: 1, count: 6, span: chart.span });
  axes(parts, x, y, (v) => showCost(chart, v, TICK_DIGITS), percentTick);
  const front = chart.front.map((index) => chart.points[index]);
  if (front.length > 1) root.append(svg("path", { class: "front", d: staircase(front, x, y) }));
  const first = (p) => (p.source === "ours" ? 0 : front.includes(p) ? 1 : 2);
  const ordered = [...chart.points].sort((p, q) => first(p) - first(q));
  const marks = ordered.map((p) => ({ x: x(p.x), y: y(p.y), text: p.label }));
  const lines = [...stairBoxes(front, x, y), ...ordered.filter((p) => p.spread).map((p) => whiskerBox(p, x, y))];
  for (const label of placeLabels(marks, lines, area)) root.append(...drawLabel(label));
  // Ours last: drawn over the published ones.
  root.append(...ordered.filter((p) => p.spread).map((p) => whisker(p, x, y)));
  for (const point of ordered.reverse()) root.append(mark(chart, point, x(point.x), y(point.y)));
  return root;
}

const TITLES = { macs: "Multiply-accumulates", params: "Parameters", CPU: "CPU time", GPU: "GPU time" };

function scatterFigure(chart, width) {
  const timed = chart.axis === "CPU" || chart.axis === "GPU";
  const figure = html("figure", { "data-chart": `scatter-${chart.axis}` }, html("h3", {}, TITLES[chart.axis]));
  const command = `lowrank time NETWORK --device ${chart.axis === "GPU" ? "cuda" : "cpu"} --json`;
  const empty = timed ? ["Not measured for this data set yet: save what ", html("code", {}, command), " prints among the runs."]
    : ["No point has this figure."];
  figure.append(chart.points.length ? drawScatter(chart, width) : nothing(...empty));
  return figure;
}
