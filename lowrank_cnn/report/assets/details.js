// ---- Test images: the specifications come complete; the worst images are a list.

const detailsOf = (trained) => DATA.details.filter((one) => one.trained === trained);

// The cells of a confusion matrix that hold an image, each with its share of the true class.
function cellsOf({ classes, confusion }) {
  return confusion.flatMap((row, i) => {
    const all = row.reduce((sum, n) => sum + n, 0);
    return row.flatMap((n, j) => {
      if (!n) return [];
      const [yes, said] = [classes[i], classes[j]], share = n / all, percent = `${(100 * share).toFixed(1)}%`;
      const label = i === j ? yes : `${yes} taken for ${said}`;
      return [{ true: yes, predicted: said, n, share, label, details: [["images", n], ["share of the class", percent]], spoken: `${label}: ${n} image${n === 1 ? "" : "s"}, ${percent}` }];
    });
  });
}

function detailsSpec(found, name, print) {
  const spec = fill(found.charts[name], { "{colour}": found.colours[theme(print)] });
  return name === "confusion" ? { ...spec, datasets: { cells: cellsOf(found) } } : spec;
}

async function drawDetails() {
  const found = detailsOf(state.tested).find((one) => one.network === state.details), box = at("details-charts");
  const names = Object.keys(found.charts), title = `${found.network} ${found.trained}`;
  box.replaceChildren(...names.map((name) => html("figure", { "data-chart": name }))); // all of them, before any is measured
  for (const name of names) {
    const specify = (print) => detailsSpec(found, name, print), [rows] = Object.values(specify().datasets);
    await draw(figureOf(name), specify, `${title} ${name}`, rows);
  }
  at("details-worst").replaceChildren(...(found.worst.length ? [html("h3", {}, "Most wrong: least probability for the right class"), worstImages(found.worst)] : []));
}

const shownShare = (value) => (value === null ? "" : ` (${(100 * value).toPrecision(2)}%)`);
function worstImages(images) {
  return html("ol", { class: "worst" }, ...images.map((one) => {
    const picture = one.thumbnail ? [html("img", { src: one.thumbnail, alt: one.image, title: one.image })] : [html("code", {}, one.image)];
    return html("li", {}, ...picture, html("span", {}, `${one.true}${shownShare(one.loss === null ? null : Math.exp(-one.loss))}, taken for ${one.predicted}${shownShare(one.probability)}`));
  }));
}

function offerDetails() {
  const box = at("details-choices");
  box.replaceChildren();
  choices(box, "Data", "tested", pairs(unique(DATA.details.map((one) => one.trained))), offerDetails);
  choices(box, "Network", "details", pairs(detailsOf(state.tested).map((one) => one.network)), drawDetails);
  return drawDetails();
}
