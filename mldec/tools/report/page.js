// Show the charts, the photos and the table of classes from the JSON block with the id "data".
// Class names come from the data set, so they are inserted as text nodes.

const data = JSON.parse(byId("data").textContent);
const { names, columns, edges } = data;
const numBins = edges.length - 1;

const ROWS_PER_PAGE = 100;
const DASH = "–";

function byId(id) {
  return document.getElementById(id);
}

/** Return a new element; children that are strings become text. */
function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Format a number. Very small thresholds have more decimals. */
function asText(value, decimals, signed = false) {
  if (value === null) return DASH;
  if (decimals === 3 && value > 0 && value < 0.01) return value.toPrecision(2);

  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  const sign = signed ? "exceptZero" : "negative";
  return value.toLocaleString("en-US", { ...options, signDisplay: sign }).replace("-", "−");
}

// -------------------------------------------------------------------------- the table of all classes

const table = { sorted: null, descending: false, rows: [], page: 0 };
const collator = new Intl.Collator("en", { numeric: true });

function cellText({ values, low, high, decimals, signed }, row) {
  const text = asText(values[row], decimals, signed);
  if (!low || low[row] === null) return text;
  return `${text} (${asText(low[row], decimals, signed)} to ${asText(high[row], decimals, signed)})`;
}

function makeHeadings() {
  const headings = ["Class", ...columns.map((column) => column.heading)];
  const cells = headings.map((heading, number) => {
    const button = element("button", { type: "button" }, heading);
    button.addEventListener("click", () => sortBy(number));
    const className = number ? "figure" : "";
    return element("th", { scope: "col", ariaSort: "none", className }, button);
  });
  byId("class-table").tHead.replaceChildren(element("tr", {}, ...cells));
}

/** Sort by a column: names ascending, numbers descending. The next click reverses the order. */
function sortBy(number) {
  table.descending = table.sorted === number ? !table.descending : number > 0;
  table.sorted = number;
  for (const [index, cell] of [...byId("class-table").tHead.rows[0].cells].entries()) {
    const direction = table.descending ? "descending" : "ascending";
    cell.ariaSort = index === number ? direction : "none";
  }
  selectRows();
}

/** Compare two rows for `sort`. Undefined values are last in both orders. */
function compareRows(one, other) {
  const values = table.sorted ? columns[table.sorted - 1].values : names;
  const [a, b] = [values[one], values[other]];
  if (a === null || b === null) return (a === null) - (b === null) || one - other;

  const order = table.sorted ? a - b : collator.compare(a, b);
  return (table.descending ? -order : order) || one - other;
}

/** Filter and sort the rows, and show the first page. */
function selectRows() {
  const text = byId("filter-text").value.trim().toLowerCase();
  const least = Number(byId("filter-positives").value) || 0;
  const positives = columns[0].values;
  table.rows = [...names.keys()].filter((row) =>
    names[row].toLowerCase().includes(text) && positives[row] >= least);
  if (table.sorted !== null) table.rows.sort(compareRows);

  byId("filter-result").textContent =
    `${asText(table.rows.length, 0)} of ${asText(names.length, 0)} classes`;
  showRows(0);
}

function showRows(page) {
  const first = page * ROWS_PER_PAGE;
  const rows = table.rows.slice(first, first + ROWS_PER_PAGE);
  table.page = page;
  byId("class-table").tBodies[0].replaceChildren(...rows.map((row) => {
    const button = element("button", { type: "button", className: "link" }, names[row]);
    button.addEventListener("click", () => chooseAndShow(row));
    const cells = columns.map((column) =>
      element("td", { className: "figure" }, cellText(column, row)));
    return element("tr", {}, element("th", { scope: "row" }, button), ...cells);
  }));

  const last = first + rows.length;
  byId("page-range").textContent = rows.length ? `rows ${first + 1} to ${last}` : "";
  byId("previous-page").disabled = page === 0;
  byId("next-page").disabled = last >= table.rows.length;
  byId("pages").hidden = table.rows.length <= ROWS_PER_PAGE;
}

const chosen = { index: 0, above: null, reference: 0, edge: 0 };

/** Show a class in the section of one class. */
function choose(index) {
  chosen.index = index;
  chosen.above = countsAbove(index);
  chosen.reference = nearestEdge(data.thresholds?.[index] ?? 0.5);

  byId("class-name").textContent = names[index];
  byId("class-select").value = String(index);
  byId("class-facts").replaceChildren(...columns.map((column) => element("div", {},
    element("dt", {}, column.heading), element("dd", {}, cellText(column, index)))));
  for (const examples of document.querySelectorAll(".examples")) {
    examples.hidden = Number(examples.dataset.class) !== index;
  }
  byId("no-examples").hidden = Boolean(document.querySelector(".examples:not([hidden])"));

  const outcomes = edges.slice(0, -1).map((threshold, edge) => ({ threshold, ...outcomeAt(edge) }))
    .filter(({ precision, recall }) => precision !== null && recall !== null);
  Plotly.restyle("precision-recall", {
    x: [outcomes.map((outcome) => outcome.recall)],
    y: [outcomes.map((outcome) => outcome.precision)],
    text: [outcomes.map((outcome) => asText(outcome.threshold, 3))],
  }, [0]);
  const counts = [grouped("positives"), grouped("negatives")];
  const ticks = { ...countTicks("yaxis", counts[0]), ...countTicks("yaxis2", counts[1]) };
  Plotly.update("scores", { y: counts }, ticks);
  if (!data.exclusive) moveThreshold(chosen.reference);
}

function chooseAndShow(index) {
  choose(index);
  byId("one-class").scrollIntoView();
}

/** Return the index of the edge nearest to a score, except the last edge. */
function nearestEdge(score) {
  const distances = edges.slice(0, -1).map((edge) => Math.abs(edge - score));
  return distances.indexOf(Math.min(...distances));
}

/** Return the numbers of positives and negatives with a score at or above each edge. */
function countsAbove(index) {
  const above = { positives: [0], negatives: [0] };
  for (let bin = numBins - 1; bin >= 0; bin -= 1) {
    for (const sign of ["positives", "negatives"]) {
      above[sign].unshift(above[sign][0] + data[sign][index][bin]);
    }
  }
  return above;
}

/** Return the counts of the chosen class in the bars of the chart of scores. */
function grouped(sign) {
  const counts = new Array(Math.max(...data.bars) + 1).fill(0);
  data.bars.forEach((group, bin) => {
    counts[group] += data[sign][chosen.index][bin];
  });
  return counts;
}

/** Return range and ticks of an axis of counts with a logarithmic scale, at least three ticks. */
function countTicks(axis, counts) {
  const most = Math.max(5, ...counts);
  const digits = most < 200 ? [1, 2, 5] : [1];
  const ticks = [...Array(10).keys()].flatMap((power) => digits.map((digit) => digit * 10 ** power));
  return {
    [`${axis}.range`]: [-0.2, Math.log10(most) + 0.1],
    [`${axis}.tickvals`]: ticks.filter((tick) => tick <= most),
  };
}

/** Return the metrics of the chosen class for a threshold at an edge. Undefined values are null. */
function outcomeAt(edge) {
  const { positives, negatives } = chosen.above;
  const [right, wrong] = [positives[edge], negatives[edge]];
  const missed = positives[0] - right;
  const percent = (part, whole) => (whole > 0 ? (100 * part) / whole : null);
  return {
    precision: percent(right, right + wrong),
    recall: percent(right, right + missed),
    f1: percent(2 * right, 2 * right + wrong + missed),
    predicted: right + wrong,
    right,
    wrong,
    missed,
  };
}

const OUTCOMES = { precision: 1, recall: 1, f1: 1, predicted: 0, right: 0, wrong: 0, missed: 0 };

/** Compare a threshold with the threshold of the report. */
function moveThreshold(edge) {
  chosen.edge = edge;
  const [now, before] = [outcomeAt(edge), outcomeAt(chosen.reference)];
  byId("threshold").value = String(edge);
  byId("threshold-value").textContent = asText(edges[edge], 3);
  byId("reference").textContent = `At ${asText(edges[chosen.reference], 3)}`;
  for (const [key, decimals] of Object.entries(OUTCOMES)) {
    const change = now[key] === null || before[key] === null ? null : now[key] - before[key];
    const [slider, reference, difference] = document.querySelectorAll(`#outcome-${key} td`);
    slider.textContent = asText(now[key], decimals);
    reference.textContent = asText(before[key], decimals);
    difference.textContent = asText(change, decimals, true);
  }

  Plotly.restyle("precision-recall", {
    x: [[before.recall], [now.recall]], y: [[before.precision], [now.precision]],
  }, [1, 2]);
  const line = { type: "line", yref: "paper", y0: 0, y1: 1 };
  const [start, end] = [edges[chosen.reference], edges[edge]];
  Plotly.relayout("scores", colored({ shapes: [
    { ...line, x0: start, x1: start, line: { dash: "dot", color: "#1f2933" } },
    { ...line, x0: end, x1: end, line: { color: "#D55E00" } },
  ] }));
}

/** Move to the threshold of the highest F1 of the chosen class. */
function moveToBest() {
  const scores = [...edges.keys()].slice(0, -1).map((edge) => outcomeAt(edge).f1 ?? 0);
  moveThreshold(scores.indexOf(Math.max(...scores)));
}

/** Return the empty charts of one class by the ids of their elements. `choose` fills them. */
function chartsOfClass() {
  const [blue, vermillion] = ["#0072B2", "#D55E00"];
  const marks = [
    { name: "report", marker: { symbol: "circle-open", size: 13, color: "#000000", line: { width: 2 } } },
    { name: "slider", marker: { symbol: "diamond", size: 11, color: vermillion } },
  ];
  const curve = {
    name: "precision", mode: "lines", line: { color: blue, width: 2.5 },
    hovertemplate: "threshold %{text}<br>recall %{x:.1f} %<br>precision %{y:.1f} %<extra></extra>",
  };
  const count = Math.max(...data.bars) + 1;
  const bars = {
    type: "bar", x: Array.from({ length: count }, (_, group) => (group + 0.5) / count),
    hovertemplate: "score about %{x:.2f}: %{y:,} images<extra></extra>",
  };
  const pattern = { shape: "/", size: 5, fgcolor: "#ffffff", fgopacity: 0.5 };
  const axis = (title, own) => ({ automargin: true, title: { text: title, standoff: 8 }, ...own });
  const log = { type: "log" };
  return {
    "precision-recall": {
      data: [curve, ...(data.exclusive ? [] : marks.map((mark) => ({ ...mark, mode: "markers" })))],
      layout: {
        ...data.layout, showlegend: true,
        xaxis: axis("recall (%)", { range: [-2, 102] }),
        yaxis: axis("precision (%)", { range: [-2, 104], showgrid: true }),
      },
    },
    scores: {
      data: [
        { ...bars, name: "positives", marker: { color: blue } },
        { ...bars, name: "negatives", marker: { color: vermillion, pattern }, yaxis: "y2" },
      ],
      layout: {
        ...data.layout, showlegend: true, bargap: 0,
        xaxis: axis("score", { range: [-0.02, 1.02], anchor: "y2" }),
        yaxis: axis("positives", { ...log, domain: [0.54, 1] }),
        yaxis2: axis("negatives", { ...log, domain: [0, 0.46] }),
      },
    },
  };
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
// Colors of the charts, which plotly and this file name, on a light page and on a dark page.
const COLORS = new Map([
  ["#ffffff", "#14181d"], ["#000000", "#ffffff"], ["#1f2933", "#e4e7eb"], ["#6b7280", "#9aa5b1"],
  ["rgb(36,36,36)", "#9aa5b1"], ["rgb(232,232,232)", "#323a44"], ["#0072B2", "#56b4e9"],
  ["#f3f7fb", "#1d242c"], ["#f7f7f7", "#29323c"],
]);

/** Return a copy of a figure with the colors of the page. */
function colored(figure) {
  return JSON.parse(JSON.stringify(figure), (_, value) => (dark.matches && COLORS.get(value)) || value);
}

async function drawCharts() {
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
  for (const [id, figure] of Object.entries({ ...data.figures, ...chartsOfClass() })) {
    const { data: traces, layout } = colored(figure);
    await Plotly.react(id, traces, layout, config);
  }
}

// -------------------------------------------------------------------------- photos

const KINDS = {
  right: "true positive",
  wrong: "false positive",
  missed: "false negative",
  unknown: "predicted, not annotated",
};
const isError = (kind) => kind === "wrong" || kind === "missed";

/** Show the photos with a decision that fits all filters, the most confident ones first. */
function selectPhotos() {
  const [index, kind, low, high] =
    ["class", "kind", "low", "high"].map((name) => byId(`photo-${name}`).value);
  const fits = ([ownIndex, ownKind, score]) =>
    (index === "" || ownIndex === Number(index)) &&
    (kind === "" || ownKind === kind || (kind === "error" && isError(ownKind))) &&
    score >= Number(low) && score <= Number(high || 1);

  let rows = [...data.gallery];
  if (index || kind || Number(low) > 0 || Number(high || 1) < 1) {
    rows = rows.filter((row) => data.photos[row].decisions.some(fits));
    // The decisions of a photo are sorted by their score. A low score makes a false negative worse.
    const best = (row) => (kind === "missed"
      ? -data.photos[row].decisions.findLast(fits)[2] : data.photos[row].decisions.find(fits)[2]);
    rows.sort((one, other) => best(other) - best(one));
  }
  byId("photo-result").textContent =
    `${asText(rows.length, 0)} of ${asText(data.gallery.length, 0)} photos`;

  byId("photo-grid").replaceChildren(...rows.map((row) => {
    const { name, thumbnail, decisions } = data.photos[row];
    const className = decisions.some(([, own]) => isError(own)) ? "frame error" : "frame";
    const image = element("img", { loading: "lazy", src: thumbnail, alt: `Image ${name}` });
    const button = element("button", { type: "button", className, title: name }, image);
    button.dataset.row = row;
    return button;
  }));
}

/** Return zero or one table row with the training photos that speak for a prediction. */
function trainingRow(found) {
  if (!found.length) return [];
  const photos = found.map(([number, contribution]) => {
    const [name, src] = data.training[number];
    const image = element("img", { src, alt: `Training photo ${name}`, title: name });
    return element("figure", {}, image, asText(contribution, 2, true));
  });
  return [element("tr", {}, element("td", { colSpan: 3, className: "training" }, ...photos))];
}

/** Show a photo with its labels, predictions and path. `heat` is the image of a heat map. */
function enlarge(row, heat) {
  const { name, link, decisions, picture, thumbnail, speaking } = data.photos[row];
  const image = element("img", { src: picture ?? thumbnail, alt: name });
  const frame = element("div", { className: "frame" }, image);
  const parts = [];
  if (heat) {
    frame.append(heat.cloneNode());
    const box = element("input", { type: "checkbox", className: "show-heat", checked: true });
    parts.push(element("label", {}, box, ` ${heat.alt}`));
  }
  const rows = decisions.flatMap(([index, kind, score]) => [
    element("tr", {},
      element("th", { scope: "row" }, names[index]),
      element("td", {}, KINDS[kind]),
      element("td", { className: "figure" }, asText(score, 3))),
    ...trainingRow(speaking[index] ?? [])]);
  if (Object.values(speaking).some((found) => found.length)) {
    parts.push(element("p", { className: "small" }, "Below a prediction: the training photos that "
      + "raise its logit most, and their contributions."));
  }
  const title = link ? element("a", { href: link, target: "_blank" }, name) : name;
  byId("viewer").replaceChildren(
    element("button", { type: "button", className: "close" }, "Close"),
    element("h3", { id: "viewer-name" }, title),
    frame, ...parts,
    rows.length ? element("table", {}, element("tbody", {}, ...rows)) : "No label and no prediction.",
  );
  byId("viewer").showModal();
}

for (const image of document.querySelectorAll("[data-row] > img:first-child")) {
  const { picture, thumbnail } = data.photos[image.parentNode.dataset.row];
  image.src = picture ?? thumbnail;
}
await drawCharts();

makeHeadings();
selectRows();
byId("filter").addEventListener("input", selectRows);
byId("filter").addEventListener("submit", (event) => event.preventDefault());
byId("previous-page").addEventListener("click", () => showRows(table.page - 1));
byId("next-page").addEventListener("click", () => showRows(table.page + 1));

for (const button of document.querySelectorAll("button[data-class]")) {
  button.addEventListener("click", () => chooseAndShow(Number(button.dataset.class)));
}
byId("class-select").append(...names.map((name, index) => new Option(name, index)));
byId("photo-class").append(new Option("any", ""), ...names.map((name, index) => new Option(name, index)));
const kinds = { "": "any", error: "any error", ...KINDS };
byId("photo-kind").append(...Object.entries(kinds).map(([kind, text]) => new Option(text, kind)));
selectPhotos();
byId("photo-filter").addEventListener("change", selectPhotos);
byId("photo-filter").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("click", ({ target }) => {
  const photo = target.closest("[data-row]");
  if (photo) enlarge(photo.dataset.row, photo.querySelector(".heat"));
  if (target === byId("viewer") || target.closest(".close")) byId("viewer").close();
});
dark.addEventListener("change", () => drawCharts().then(() => choose(chosen.index)));
byId("class-select").addEventListener("change", (event) => choose(Number(event.target.value)));
if (!data.exclusive) {
  byId("threshold").max = String(numBins - 1);
  byId("threshold").addEventListener("input", (event) => moveThreshold(Number(event.target.value)));
  byId("to-reference").addEventListener("click", () => moveThreshold(chosen.reference));
  byId("to-best").addEventListener("click", moveToBest);
}
choose(0);
byId("content").ariaBusy = "false";
