// Tables of the class "sortable": a click on a heading sorts the rows, and words in a box filter them.
"use strict";

const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function sort(table, column, button) {
  const heading = button.closest("th");
  const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  const key = (row) => row.cells[column].textContent.trim().replace(/(\d),(?=\d{3})/g, "$1");
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => (a === "") - (b === "") || direction * collator.compare(a, b)); // what is empty stays below
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function filter(table, words, count) {
  const wanted = words.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1").split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1");
    row.hidden = !wanted.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const [column, heading] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(table, column, button));
    heading.append(button);
  }
  const box = document.createElement("input");
  const count = document.createElement("output");
  Object.assign(box, { type: "search", placeholder: "interleaved 2024", ariaLabel: "words that a row must contain" });
  box.addEventListener("input", () => filter(table, box.value, count));
  const search = document.createElement("p");
  search.className = "sortable-search";
  search.append(box, count);
  (table.closest(".pst-scrollable-table-container") ?? table).before(search);
  filter(table, "", count);
}

// Pictures that are wider than a telephone scroll: keys have to reach their places.
for (const place of document.querySelectorAll(".bd-article section > div:is(.only-light, .only-dark)")) place.tabIndex = 0;
