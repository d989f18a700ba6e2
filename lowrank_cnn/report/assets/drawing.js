// ---- Drawing: the specifications come with the page; here they get their data, size and scales.

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const NARROW = 480; // pixels
const theme = (print) => (isDark() && !print ? "dark" : "light");

function fill(value, parts) {
  if (typeof value === "string") return value in parts ? parts[value] : value;
  if (Array.isArray(value)) return value.map((inner) => fill(inner, parts));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, fill(v, parts)]));
  return value;
}

// Vega-Lite cannot place labels; Vega can. They stand in a group that clips: else a long label beside the chart,
// hidden because it found no place, would count as part of it, and the chart would shrink to make room.
function withLabels(vega) {
  const { transform, leaders, halo } = DATA.labels;
  vega.marks = vega.marks.map((mark) => {
    if (mark.type === "group") return withLabels(mark);
    if (mark.name !== "labels_marks") return mark;
    const update = { ...mark.encode.update, limit: { signal: "0.6 * width" } };
    const size = { width: { signal: "width" }, height: { signal: "height" } };
    const marks = [{ ...mark, encode: { update }, transform: [transform] }, leaders, ...halo];
    return { type: "group", name: "labels_area", clip: true, interactive: false, encode: { update: size }, marks };
  });
  return vega;
}

// On a narrow page the legend's entries stand below each other: side by side they would leave the page. On paper, two
// stand side by side.
function configOf(width, print) {
  const config = DATA.themes[theme(print)];
  return width < NARROW ? { ...config, legend: { ...config.legend, columns: print ? 2 : 1 } } : config;
}

function makeView(spec, options) {
  const vega = withLabels(compile(spec, { config: configOf(spec.width, options.print) }).spec);
  return new View(parse(vega, null, { ast: true }), { expr: expressionInterpreter, renderer: "svg", ...options });
}

// As wide as it is told, axes and legend included.
const sized = (spec, width) => ({ ...spec, width, autosize: { type: "fit", contains: "padding" } });

// `specify(print)` makes the specification, for the screen or for a picture on white.
async function draw(figure, specify, title, rows) {
  hideTip();
  const box = html("div", { class: "plot" });
  figure.replaceChildren(box);
  const view = makeView(sized(specify(false), Math.max(240, figure.clientWidth)), { container: box });
  await view.tooltip(onHover).runAsync();
  labelAllOrNone(figure);
  for (const mark of box.querySelectorAll(".points_marks path, .bars_marks path")) makeReadable(mark);
  const bar = html("div", { class: "downloads" });
  figure.append(bar);
  button(bar, "PNG", () => savePicture(specify(true), title));
  button(bar, "CSV", () => save(`${title}.csv`, new Blob([csv(rows)], { type: "text/csv" })));
  return view;
}

function labelAllOrNone(figure) {
  const lost = (text) => text.getAttribute("opacity") === "0" && !text.__data__.datum.block;
  figure.classList.toggle("unlabelled", [...figure.querySelectorAll(".labels_marks text")].some(lost));
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

// In an SVG, a label without a place; circles only keep labels off points.
const LOST_LABEL = /labels_marks"[^>]*>(?:<text[^>]*>[^<]*<\/text>)*?<text[^>]* opacity="0"[^>]*>[^\u25cf]/;
async function savePicture(spec, title) {
  const make = (labelled) => makeView(sized(labelled, 900), { renderer: "none", print: true });
  let view = make(spec);
  if (LOST_LABEL.test(await view.toSVG())) view = make({ ...spec, datasets: { ...spec.datasets, labels: [] } });
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
