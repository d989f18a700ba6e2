// ---- Accuracy against cost.

const tradeOf = (...keys) => DATA.trade.filter((chart) => keys.every((key) => chart[key] === state[key]));

function tradeSpec(chart, scale, print) {
  const parts = {
    "{x}": chart.x, "{y}": chart.y, "{format}": chart.format,
    "{colours}": { domain: chart.kinds, range: chart.kinds.map((kind) => DATA.kinds[kind][theme(print)]) },
    "{shapes}": { domain: chart.kinds, range: chart.kinds.map((kind) => DATA.kinds[kind].shape) },
  };
  const spec = fill(DATA.specs.trade, parts);
  spec.encoding.x.scale = { type: scale, nice: false, domain: chart.costs[scale] };
  spec.encoding.y.scale.domain = chart.domain;
  spec.layer = spec.layer.filter((layer) => chart[layer.data?.name ?? "points"].length);
  spec.datasets = { points: chart.points, arrows: chart.arrows, fronts: chart.fronts, labels: chart.labels };
  return spec;
}

function offerTrade() {
  const box = at("trade-choices");
  const others = () => { choose({ scale: "" }); offerTrade(); };
  box.replaceChildren();
  choices(box, "Data", "data", pairs(unique(DATA.trade.map((chart) => chart.data))), others);
  choices(box, "Recipe", "recipe", pairs(unique(tradeOf("data").map((chart) => chart.recipe))), offerTrade);
  const metrics = unique(tradeOf("data", "recipe").map((chart) => chart.metric));
  choices(box, "Accuracy", "metric", metrics.map((m) => [m, { top1: "top-1", top5: "top-5" }[m]]), offerTrade);
  const axes = Object.keys(DATA.axes).map((axis) => tradeOf("data", "recipe", "metric").find((c) => c.axis === axis)).filter(Boolean);
  const timed = axes.filter((chart) => chart.points.some((p) => !p.kind.startsWith("published")));
  const names = { GPU: "GPU time", CPU: "CPU time", macs: "MACs", params: "parameters" };
  choices(box, "Against", "axis", (timed.length ? timed : axes).map((chart) => [chart.axis, names[chart.axis]]), others);
  const [chart] = tradeOf("data", "recipe", "metric", "axis");
  if (!state.scale) state.scale = chart.log ? "log" : "linear";
  choices(box, "Axis", "scale", pairs(["linear", "log"]), offerTrade);
  return drawTrade();
}

async function drawTrade() {
  const [chart] = tradeOf("data", "recipe", "metric", "axis");
  const scale = Math.min(...chart.points.map((p) => p.x)) > 0 ? state.scale : "linear";
  const specify = (print) => tradeSpec(chart, scale, print);
  await draw(figureOf("trade"), specify, `${chart.data} ${chart.axis}`, chart.points);
}
