// Tables are sorted by the buttons in their headings: numbers as numbers, what is missing always last.

const order = new Intl.Collator(undefined, { numeric: true });

function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? order.compare(a, b) : x - y;
}

function sortBy(table, index, direction) {
  const body = table.tBodies[0];
  const key = (row) => row.cells[index].dataset.value;
  const rows = [...body.rows].sort((r, s) => {
    const [a, b] = [key(r), key(s)];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return direction * compare(a, b);
  });
  body.append(...rows);
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, index) => {
    heading.querySelector("button").addEventListener("click", () => {
      const rising = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      sortBy(table, index, rising ? 1 : -1);
    });
  });
}
