// MACs beside time, per layer, each as a share of its total: equal bars mean that time follows MACs.

const BAR = 9, GAP = 9;

function barRow(chart, index, top, left, width, most) {
  const tall = chart.series.length * BAR;
  const row = svg("g", { class: "row", transform: `translate(0 ${top})` },
    svg("rect", { class: "hit", x: 0, y: -GAP / 2, width, height: tall + GAP, rx: 3 }),
    svg("text", { x: left - 8, y: tall / 2 + 4, "text-anchor": "end" }, chart.layers[index]));
  chart.series.forEach((series, place) => {
    const long = Math.max(1, series.shares[index] / most * (width - left - 50));
    row.append(svg("rect", { class: `bar f${place}`, x: left, y: place * BAR, width: long, height: BAR - 1 }));
  });
  const reach = Math.max(...chart.series.map((series) => series.shares[index])) / most * (width - left - 50);
  row.append(svg("text", { class: "label", x: left + reach + 6, y: tall / 2 + 4 }, `${(100 * chart.series[0].shares[index]).toFixed(1)}%`));
  describe(row, chart.layers[index], chart.series.map((s) => [s.name, `${s.texts[index]}, ${(100 * s.shares[index]).toFixed(1)}%`]));
  return row;
}

function drawBars(chart, width) {
  const step = chart.series.length * BAR + GAP;
  const height = chart.layers.length * step + GAP;
  const longest = Math.max(...chart.layers.map((name) => measure.measureText(name).width * 1.06));
  const left = Math.min(longest + 12, width * 0.45);
  const most = Math.max(...chart.series.flatMap((series) => series.shares));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `MACs and time per layer: ${chart.title}` });
  root.style.maxWidth = `${width}px`;
  chart.layers.forEach((_, index) => root.append(barRow(chart, index, GAP + index * step, left, width, most)));
  return root;
}

function barFigure(chart, width) {
  const legend = html("ul", { class: "legend" }, ...chart.series.map((series, place) => html("li", {},
    svg("svg", { class: "mark", viewBox: "0 0 16 16" }, svg("rect", { class: `f${place}`, y: 3, width: 16, height: 10 })),
    ` ${series.name}${place ? "" : " (with its share of the total)"}`)));
  const found = Object.entries(chart.correlations).filter(([, r]) => r !== null);
  const text = found.map(([device, r]) => `${device} r = ${r.toFixed(2)}`).join(", ");
  const correlation = text ? `Correlation of time with MACs over the layers (Pearson): ${text}. ` : "";
  return html("figure", { "data-chart": "layers" }, html("h3", {}, chart.title), legend, drawBars(chart, width),
    html("figcaption", {}, `${correlation}${chart.note}.`));
}
