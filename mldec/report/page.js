// Fill the page of a report: tables, charts and pictures from the block of JSON with the id "data".
// Names of classes and files come from outside: they become text nodes, or `escaped` for Plotly.

const data = JSON.parse(byId("data").textContent);
const { names, columns, intervals } = data.classes;

const ROWS_PER_PAGE = 100;
const CALIBRATION_GROUPS = 10;
const SCORE_GROUPS = 50;
const MOST_DIFFERENCES = 40; // classes in the chart of differences; the rest is in the table
const FIRST_PICTURES = 18; // of a gallery, before its button is pressed
const NAME_LENGTH = 24; // characters of a class name beside an axis
const COUNTS = ["positives", "negatives", "images"]; // columns that are no percentages

// The colours of Okabe and Ito (2008), with patterns of dashes and symbols beside them.
const BLUE = "#0072B2";
const VERMILLION = "#D55E00";
const GREY = "#6b7280";
const CURVES = [BLUE, VERMILLION, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const STRIPES = { shape: "/", size: 5, fillmode: "overlay", fgcolor: "#ffffff", fgopacity: 0.5 };
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];

// ------------------------------------------------------------------------------------ small tools

function byId(id) {
  return document.getElementById(id);
}

/** Return a new element; children that are strings become text. */
function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Return the array that was compressed with zlib and written as base64. */
async function unpacked(text, ArrayType) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new ArrayType(await new Response(stream).arrayBuffer());
}

function asCount(value) {
  return value === null ? "–" : value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function asPercent(value) {
  return value === null ? "–" : value.toFixed(1);
}

/** Return a score or threshold with three decimals, or more if it is very small. */
function asScore(value) {
  if (value === null) return "–";
  return value > 0 && value < 0.01 ? value.toPrecision(2) : value.toFixed(3);
}

/** Return the text of a number with its sign, or without one if it is rounded to zero. */
function signed(text, value) {
  if (/^-?[0.]+$/.test(text)) return text.replace("-", "");
  return value > 0 ? `+${text}` : text.replace("-", "−");
}

function capitalized(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Return text for Plotly, which would take tags for its own. */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function shortened(name) {
  const letters = [...name];
  const isLong = letters.length > NAME_LENGTH;
  return escaped(isLong ? `${letters.slice(0, NAME_LENGTH - 1).join("")}…` : name);
}

// ------------------------------------------------------------------------------------------ charts

const CONFIG = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"]],
};

/**
 * Draw a chart that fills its element.
 *
 * `label` describes it to those who cannot see it; `height` is in pixels. The element gets the
 * height, not the layout, because Plotly drops that of the layout when the window changes.
 */
function draw(target, label, traces, { height, ...layout }) {
  const axes = Object.fromEntries(
    Object.entries(layout)
      .filter(([key]) => /^[xy]axis/.test(key))
      .map(([key, axis]) => [key, { ...axisStyle, ...axis, title: axisTitle(axis.title) }]),
  );
  const isEmpty = traces.every((trace) => !(trace.x ?? []).length);

  target.setAttribute("role", "img");
  target.setAttribute("aria-label", label);
  target.style.height = `${height}px`;
  return Plotly.react(target, traces, {
    font: { family: "system-ui, sans-serif", size: 13, color: "#1f2933" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 16, t: 28, b: 48 },
    hovermode: "closest",
    hoverlabel: { bgcolor: "#ffffff", font: { color: "#1f2933" }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#9aa5b1", activecolor: BLUE },
    legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0 },
    autosize: true,
    annotations: isEmpty ? [noData] : [],
    ...layout,
    ...axes,
  }, CONFIG);
}

const axisStyle = {
  gridcolor: "#e4e7eb", linecolor: "#9aa5b1", zeroline: false, automargin: true, ticks: "outside",
  tickcolor: "#9aa5b1",
};
const noData = {
  text: "no image to draw", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false,
  font: { color: GREY },
};

function axisTitle(text) {
  return { text: text ?? "", standoff: 8 };
}

/** Draw one row per entry: a mark with its interval, the first entry at the top. */
function drawIntervals(target, label, entries, title) {
  const rows = entries.map((_, row) => row);
  const longest = Math.max(...entries.map((entry) => shortened(entry.name).length));
  draw(target, label, [{
    type: "scatter",
    mode: "markers",
    x: entries.map((entry) => entry.value),
    y: rows,
    text: entries.map(({ name, value, low, high }) => {
      const bounds = low === null ? "" : ` (${low.toFixed(2)} to ${high.toFixed(2)})`;
      return `${escaped(name)}: ${value.toFixed(2)}${bounds}`;
    }),
    hovertemplate: "%{text}<extra></extra>",
    marker: { color: BLUE, size: 9 },
    error_x: {
      type: "data",
      symmetric: false,
      array: entries.map(({ value, high }) => (high === null ? 0 : high - value)),
      arrayminus: entries.map(({ value, low }) => (low === null ? 0 : value - low)),
      color: BLUE,
      thickness: 1.5,
      width: 4,
    },
  }], {
    height: 24 * entries.length + 90,
    margin: { l: 7 * Math.min(longest, NAME_LENGTH) + 24, r: 16, t: 28, b: 48 },
    xaxis: { title, zeroline: true, zerolinecolor: GREY },
    yaxis: {
      tickvals: rows,
      ticktext: entries.map((entry) => shortened(entry.name)),
      range: [entries.length - 0.5, -0.5],
      automargin: false,
    },
  });
}

function drawMetrics() {
  const entries = Object.entries(data.metrics)
    .map(([name, interval]) => ({ name, ...interval }))
    .filter((entry) => entry.value !== null);
  if (!entries.length) return byId("metrics-chart").remove();
  return drawIntervals(
    byId("metrics-chart"), "Metrics with their intervals, as in the table", entries, "percent",
  );
}

/** Draw losses and percentages apart: they have different units. */
function drawLearningCurves() {
  const isLoss = (curve) => curve.name.includes("loss");
  const groups = [
    ["Loss", "loss", data.curves.filter(isLoss)],
    ["Metrics", "percent", data.curves.filter((curve) => !isLoss(curve))],
  ];
  for (const [heading, unit, curves] of groups) {
    if (!curves.length) continue;

    const chart = element("div", { className: "chart" });
    const caption = element("figcaption", {}, element("h3", {}, heading));
    byId("learning-charts").append(element("figure", {}, caption, chart));
    draw(chart, `${heading} over the steps of training`, curves.map((curve, number) => ({
      type: "scatter",
      mode: curve.steps.length > 60 ? "lines" : "lines+markers",
      name: escaped(curve.name),
      x: curve.steps,
      y: curve.values,
      line: { color: CURVES[number % CURVES.length], dash: DASHES[number % DASHES.length] },
      marker: { symbol: SYMBOLS[number % SYMBOLS.length], size: 7 },
      hovertemplate: `step %{x:,}: %{y:.4~g}<extra>${escaped(curve.name)}</extra>`,
    })), { height: 340, xaxis: { title: "step" }, yaxis: { title: unit }, showlegend: true });
  }
}

function drawDifferences() {
  const ranked = data.differences
    .map((interval, index) => ({ name: names[index], ...interval }))
    .filter((entry) => entry.value !== null)
    .sort((one, other) => other.value - one.value);

  let shown = ranked;
  let text = "Difference of the average precision, with its 95 % interval: above zero, A is better.";
  if (ranked.length > MOST_DIFFERENCES) {
    const half = MOST_DIFFERENCES / 2;
    shown = [...ranked.slice(0, half), ...ranked.slice(-half)];
    text += ` Shown are the ${half} highest and the ${half} lowest of ${asCount(ranked.length)};`;
    text += " the table of all classes has every one.";
  }
  byId("differences-text").textContent = text;
  if (!shown.length) return byId("differences-chart").remove();
  return drawIntervals(
    byId("differences-chart"), "Difference of the average precision per class", shown,
    "difference of AP (points)",
  );
}

// -------------------------------------------------------------------------- the table of all classes

/** Return the columns of the table: heading, values to sort by, and text of a row. */
function tableColumns() {
  const list = [{ heading: "Class", values: names, isText: true }];
  for (const [key, values] of Object.entries(columns)) {
    list.push({
      heading: headingOf(key), values, text: (row) => valueText(key, values[row]), key,
    });
    if (key === "AP" && intervals !== null) {
      const [low, high] = intervals;
      list.push({ heading: "AP, 95 % interval (%)", values: low, text: (row) => rangeText(low[row], high[row]) });
    }
  }
  if (data.differences !== null) {
    list.push({
      heading: "AP of A − B (points)",
      values: data.differences.map((difference) => difference.value),
      text: (row) => differenceText(data.differences[row]),
    });
  }
  return list;
}

function headingOf(key) {
  if (key === "threshold") return "Threshold";
  return `${capitalized(key)}${COUNTS.includes(key) ? "" : " (%)"}`;
}

function valueText(key, value) {
  if (key === "threshold") return asScore(value);
  return COUNTS.includes(key) ? asCount(value) : asPercent(value);
}

function rangeText(low, high) {
  return low === null ? "–" : `${asPercent(low)} to ${asPercent(high)}`;
}

function differenceText({ value, low, high }) {
  if (value === null) return "–";
  const range = low === null ? "" : ` (${signed(asPercent(low), low)} to ${signed(asPercent(high), high)})`;
  return `${signed(asPercent(value), value)}${range}`;
}

const table = { columns: tableColumns(), sorted: null, descending: false, rows: [], page: 0 };
const collator = new Intl.Collator("en", { numeric: true });

function makeHeadings() {
  const cells = table.columns.map((column, number) => {
    const button = element("button", { type: "button" }, column.heading);
    button.addEventListener("click", () => sortBy(number));
    const cell = element("th", { scope: "col", ariaSort: "none" }, button);
    cell.classList.toggle("figure", !column.isText);
    return cell;
  });
  byId("class-table").tHead.replaceChildren(element("tr", {}, ...cells));
}

/** Sort by a column: names from A, numbers from the highest, and the other way at the next click. */
function sortBy(number) {
  const isAgain = table.sorted === number;
  table.descending = isAgain ? !table.descending : !table.columns[number].isText;
  table.sorted = number;
  for (const [index, cell] of [...byId("class-table").tHead.rows[0].cells].entries()) {
    const direction = table.descending ? "descending" : "ascending";
    cell.ariaSort = index === number ? direction : "none";
  }
  selectRows();
}

/** Return whether row `one` comes before row `other`; undefined values are last in both orders. */
function compareRows(one, other) {
  const { values, isText } = table.columns[table.sorted];
  const [a, b] = [values[one], values[other]];
  if (a === null || b === null) return (a === null) - (b === null) || one - other;

  const order = isText ? collator.compare(a, b) : a - b;
  return (table.descending ? -order : order) || one - other;
}

/** Apply filter and order, and show the first rows. */
function selectRows() {
  const text = byId("filter-text").value.trim().toLowerCase();
  const least = Number(byId("filter-positives").value) || 0;
  table.rows = names
    .map((_, row) => row)
    .filter((row) => names[row].toLowerCase().includes(text))
    .filter((row) => least === 0 || (columns.positives?.[row] ?? 0) >= least);
  if (table.sorted !== null) table.rows.sort(compareRows);

  byId("filter-result").textContent =
    `${asCount(table.rows.length)} of ${asCount(names.length)} classes`;
  showPage(0);
}

function showPage(page) {
  const first = page * ROWS_PER_PAGE;
  const rows = table.rows.slice(first, first + ROWS_PER_PAGE);
  const [body] = byId("class-table").tBodies;
  table.page = page;
  body.replaceChildren(...rows.map(tableRow));
  markChosenRow();

  const last = first + rows.length;
  byId("page-range").textContent = rows.length ? `rows ${asCount(first + 1)} to ${asCount(last)}` : "";
  byId("previous-page").disabled = page === 0;
  byId("next-page").disabled = last >= table.rows.length;
  byId("pages").hidden = table.rows.length <= ROWS_PER_PAGE;
}

function tableRow(row) {
  const [, ...figures] = table.columns;
  const button = element("button", { type: "button", className: "link" }, names[row]);
  const cells = figures.map((column) => {
    const cell = element("td", { className: "figure" }, column.text(row));
    // A bar behind the number helps the eye; the number is what counts.
    if (column.key === "AP") {
      cell.classList.add("bar");
      cell.style.setProperty("--share", `${column.values[row] ?? 0}%`);
    }
    return cell;
  });
  const line = element("tr", {}, element("th", { scope: "row" }, button), ...cells);
  line.dataset.row = row;
  return line;
}

function markChosenRow() {
  for (const line of byId("class-table").tBodies[0].rows) {
    const isChosen = Number(line.dataset.row) === chosen.index;
    line.classList.toggle("chosen", isChosen);
    line.querySelector("button").ariaCurrent = isChosen ? "true" : null;
  }
}

function listenToTable() {
  byId("filter").addEventListener("input", selectRows);
  byId("filter").addEventListener("submit", (event) => event.preventDefault());
  byId("previous-page").addEventListener("click", () => showPage(table.page - 1));
  byId("next-page").addEventListener("click", () => showPage(table.page + 1));
  byId("class-table").tBodies[0].addEventListener("click", (event) => {
    const line = event.target.closest("tr");
    choose(Number(line.dataset.row));
    byId("one-class").focus({ preventScroll: true });
    byId("one-class").scrollIntoView();
  });
}

// ------------------------------------------------------------------------------------ the one class

const histograms = data.histograms;
const edges = histograms.edges;
const numBins = edges.length - 1;
const chosen = { index: 0, above: null, reportEdge: 0, edge: 0 };

/** Show another class in all charts, numbers and pictures of its section. */
function choose(index) {
  chosen.index = index;
  chosen.above = countsAbove(index);
  chosen.reportEdge = nearestEdge(reportThreshold() ?? 0.5);
  chosen.edge = chosen.reportEdge;

  byId("class-name").textContent = names[index];
  byId("class-select").value = String(index);
  byId("class-facts").replaceChildren(...table.columns.slice(1).map((column) =>
    element("div", {}, element("dt", {}, column.heading), element("dd", {}, column.text(index)))));
  markChosenRow();

  drawPrecisionRecall();
  drawCalibration();
  drawScores();
  if (!data.exclusive) prepareSlider();
  for (const kind of ["right", "wrong", "missed"]) showExamples(kind);
}

function reportThreshold() {
  return columns.threshold?.[chosen.index] ?? null;
}

/** Return what the slider is compared with: a class without threshold is decided at 0.5. */
function referenceName() {
  return reportThreshold() === null ? "0.5" : "report";
}

/** Return the number of the edge that is nearest to a score; the last edge is none to stop at. */
function nearestEdge(score) {
  let nearest = 0;
  for (let edge = 1; edge < numBins; edge += 1) {
    if (Math.abs(edges[edge] - score) < Math.abs(edges[nearest] - score)) nearest = edge;
  }
  return nearest;
}

/** Return, for each edge, how many positives and negatives have a score at or above it. */
function countsAbove(index) {
  const above = { positives: new Array(numBins + 1).fill(0), negatives: new Array(numBins + 1).fill(0) };
  for (let bin = numBins - 1; bin >= 0; bin -= 1) {
    for (const sign of ["positives", "negatives"]) {
      above[sign][bin] = above[sign][bin + 1] + histograms[sign][index * numBins + bin];
    }
  }
  return above;
}

/** Return what a threshold at an edge means for the chosen class; null where it is undefined. */
function outcomeAt(edge) {
  const { positives, negatives } = chosen.above;
  const [right, wrong] = [positives[edge], negatives[edge]];
  const missed = positives[0] - right;
  const percent = (part, whole) => (whole > 0 ? (100 * part) / whole : null);
  return {
    right,
    wrong,
    missed,
    predicted: right + wrong,
    precision: percent(right, right + wrong),
    recall: percent(right, right + missed),
    f1: percent(2 * right, 2 * right + wrong + missed),
  };
}

/** Return the numbers of the edges that part the scores into about equal ranges. */
function groupBounds(groups) {
  const bounds = [];
  for (let group = 0; group < groups; group += 1) bounds.push(nearestEdge(group / groups));
  return [...new Set(bounds), numBins];
}

/** Return positives, negatives and mean score of the chosen class per range of scores. */
function grouped(groups) {
  const bounds = groupBounds(groups);
  return bounds.slice(0, -1).map((first, group) => {
    const end = bounds[group + 1];
    const sums = { positives: 0, negatives: 0, scores: 0, low: edges[first], high: edges[end] };
    for (let bin = first; bin < end; bin += 1) {
      const place = chosen.index * numBins + bin;
      const [positives, negatives] = [histograms.positives[place], histograms.negatives[place]];
      const share = histograms.positions[place] / 255;
      sums.positives += positives;
      sums.negatives += negatives;
      sums.scores += (positives + negatives) * (edges[bin] + share * (edges[bin + 1] - edges[bin]));
    }
    return sums;
  });
}

function drawPrecisionRecall() {
  const points = edges.slice(0, -1)
    .map((threshold, edge) => ({ threshold, ...outcomeAt(edge) }))
    .filter((point) => point.precision !== null && point.recall !== null);
  const traces = [{
    type: "scatter",
    mode: "lines",
    name: "precision",
    x: points.map((point) => point.recall),
    y: points.map((point) => point.precision),
    text: points.map((point) => asScore(point.threshold)),
    line: { color: BLUE, width: 2.5 },
    hovertemplate:
      "threshold %{text}<br>recall %{x:.1f} %<br>precision %{y:.1f} %<extra></extra>",
  }];
  if (points.length) {
    const share = points[0].precision;
    traces.push({
      type: "scatter", mode: "lines", name: "chance", x: [0, 100], y: [share, share],
      line: { color: GREY, dash: "dot", width: 1.5 },
      hovertemplate: "precision of chance: %{y:.1f} %<extra></extra>",
    });
    if (!data.exclusive) {
      const mark = { type: "scatter", mode: "markers", hovertemplate: "%{x:.1f} %, %{y:.1f} %" };
      traces.push(
        { ...mark, ...markAt(chosen.reportEdge), name: referenceName(),
          marker: { symbol: "circle-open", size: 13, color: "#000000", line: { width: 2 } } },
        { ...mark, ...markAt(chosen.edge), name: "slider",
          marker: { symbol: "diamond", size: 11, color: VERMILLION } },
      );
    }
  }
  draw(byId("precision-recall"), `Precision over recall of ${names[chosen.index]}`, traces, {
    height: 400,
    xaxis: { title: "recall (%)", range: [-2, 102] },
    yaxis: { title: "precision (%)", range: [-2, 104] },
    showlegend: true,
  });
}

/** Return the coordinates of a threshold on the curve of precision and recall. */
function markAt(edge) {
  const { precision, recall } = outcomeAt(edge);
  return { x: [recall], y: [precision] };
}

/** Return the bounds of the 95 % interval of Wilson (1927) of a share, in percent. */
function wilson(part, whole) {
  const z = 1.96;
  const share = part / whole;
  const centre = share + (z * z) / (2 * whole);
  const spread = z * Math.sqrt((share * (1 - share)) / whole + (z * z) / (4 * whole * whole));
  const scale = 100 / (1 + (z * z) / whole);
  return [scale * (centre - spread), scale * (centre + spread)];
}

function drawCalibration() {
  const groups = grouped(CALIBRATION_GROUPS)
    .map((group) => ({ ...group, count: group.positives + group.negatives }));
  const counts = groups.map((group) => group.count);
  const points = groups.filter((group) => group.count > 0);
  const shares = points.map((point) => (100 * point.positives) / point.count);
  const bounds = points.map((point) => wilson(point.positives, point.count));
  draw(byId("calibration"), `Calibration of ${names[chosen.index]}`, [
    {
      type: "scatter", mode: "lines", name: "perfect", x: [0, 1], y: [0, 100], hoverinfo: "skip",
      line: { color: GREY, dash: "dash", width: 1.5 },
    },
    {
      type: "scatter",
      mode: "markers+lines",
      name: "this class",
      x: points.map((point) => point.scores / point.count),
      y: shares,
      error_y: {
        type: "data",
        symmetric: false,
        array: bounds.map(([, high], index) => Math.max(high - shares[index], 0)),
        arrayminus: bounds.map(([low], index) => Math.max(shares[index] - low, 0)),
        thickness: 1.5,
        width: 3,
        color: BLUE,
      },
      line: { color: BLUE, width: 1.5 },
      marker: { size: 8, color: BLUE },
      text: points.map((point) => `${asCount(point.positives)} of ${asCount(point.count)} images`),
      hovertemplate: "mean score %{x:.3f}<br>%{y:.1f} % show it: %{text}<extra></extra>",
    },
    bars(groups, counts, GREY, "images", "y2"),
  ], {
    height: 400,
    xaxis: { title: "score", range: [-0.02, 1.02], anchor: "y2" },
    yaxis: { title: "show the class (%)", range: [-4, 104], domain: [0.36, 1] },
    yaxis2: { ...logAxis("images", counts), domain: [0, 0.24] },
    showlegend: true,
  });
}

function drawScores() {
  const groups = grouped(SCORE_GROUPS);
  const [positives, negatives] = ["positives", "negatives"].map((sign) =>
    groups.map((group) => group[sign]));
  draw(byId("scores"), `Scores of positives and negatives of ${names[chosen.index]}`, [
    bars(groups, positives, BLUE, "positives", "y"),
    { ...bars(groups, negatives, VERMILLION, "negatives", "y2"),
      marker: { color: VERMILLION, pattern: STRIPES } },
  ], {
    height: 400,
    xaxis: { title: "score", range: [-0.02, 1.02], anchor: "y2" },
    yaxis: { ...logAxis("positives", positives), domain: [0.54, 1] },
    yaxis2: { ...logAxis("negatives", negatives), domain: [0, 0.46] },
    shapes: data.exclusive ? [] : thresholdLines(),
    showlegend: true,
    bargap: 0,
  });
}

function bars(groups, counts, color, name, axis) {
  return {
    type: "bar",
    name,
    x: groups.map((group) => (group.low + group.high) / 2),
    y: counts,
    width: groups.map((group) => group.high - group.low),
    yaxis: axis,
    marker: { color },
    text: groups.map((group) => `${asScore(group.low)} to ${asScore(group.high)}`),
    textposition: "none",
    hovertemplate: `score %{text}: %{y:,} ${name}<extra></extra>`,
  };
}

function logAxis(title, counts) {
  const highest = Math.log10(Math.max(...counts, 1));
  return { title, type: "log", range: [-0.3, Math.max(highest * 1.08, 1)], dtick: 1, exponentformat: "none" };
}

function thresholdLines() {
  const line = (edge, style) => ({
    type: "line", xref: "x", yref: "paper", x0: edges[edge], x1: edges[edge], y0: 0, y1: 1, line: style,
  });
  return [
    line(chosen.reportEdge, { color: "#000000", width: 1.5, dash: "dot" }),
    line(chosen.edge, { color: VERMILLION, width: 2 }),
  ];
}

// ---------------------------------------------------------------------------------------- the slider

const OUTCOMES = [
  ["precision", "Precision (%)", asPercent],
  ["recall", "Recall (%)", asPercent],
  ["f1", "F1 (%)", asPercent],
  ["predicted", "Predicted (images)", asCount],
  ["right", "True positives (images)", asCount],
  ["wrong", "False positives (images)", asCount],
  ["missed", "Missed positives (images)", asCount],
];

function prepareSlider() {
  const threshold = reportThreshold();
  const step = edges[chosen.reportEdge];
  let text = "Images with a score at or above the threshold are predicted. Move the slider, also with the arrow keys. ";
  if (threshold === null) {
    text += "The report knows no threshold of this class, so the comparison is with 0.5.";
  } else {
    text += `The report's threshold is ${asScore(threshold)}`;
    const isRounded = asScore(threshold) !== asScore(step);
    text += isRounded ? `; the nearest step of the slider is ${asScore(step)}, which the numbers belong to.` : ".";
  }
  byId("threshold-text").textContent = text;
  byId("reference").textContent = capitalized(referenceName());
  byId("to-reference").textContent =
    threshold === null ? "Back to 0.5" : "Back to the report's threshold";
  byId("threshold").max = String(numBins - 1);
  byId("threshold").value = String(chosen.edge);
  showThreshold();
}

function showThreshold() {
  const [now, before] = [outcomeAt(chosen.edge), outcomeAt(chosen.reportEdge)];
  const value = asScore(edges[chosen.edge]);
  byId("threshold-value").textContent = value;
  byId("threshold").ariaValueText =
    `threshold ${value}: precision ${asPercent(now.precision)} %, recall ${asPercent(now.recall)} %`;
  byId("threshold-table").tBodies[0].replaceChildren(...OUTCOMES.map(([key, heading, format]) => {
    const isDefined = now[key] !== null && before[key] !== null;
    const change = isDefined ? now[key] - before[key] : null;
    return element("tr", {},
      element("th", { scope: "row" }, heading),
      element("td", { className: "figure" }, format(now[key])),
      element("td", { className: "figure" }, format(before[key])),
      element("td", { className: "figure" }, isDefined ? signed(format(change), change) : "–"));
  }));
}

function moveThreshold(edge) {
  chosen.edge = edge;
  byId("threshold").value = String(edge);
  showThreshold();

  const mark = markAt(edge);
  const trace = byId("precision-recall").data.findIndex((one) => one.name === "slider");
  if (trace >= 0) Plotly.restyle("precision-recall", { x: [mark.x], y: [mark.y] }, [trace]);
  Plotly.relayout("scores", { shapes: thresholdLines() });
}

/** Return the edge with the highest F1 of the chosen class, the highest one of equals. */
function bestEdge() {
  let best = chosen.reportEdge;
  for (let edge = 0; edge < numBins; edge += 1) {
    if ((outcomeAt(edge).f1 ?? -1) >= (outcomeAt(best).f1 ?? -1)) best = edge;
  }
  return best;
}

function listenToSlider() {
  byId("threshold").addEventListener("input", (event) => moveThreshold(Number(event.target.value)));
  byId("to-reference").addEventListener("click", () => moveThreshold(chosen.reportEdge));
  byId("to-best").addEventListener("click", () => moveThreshold(bestEdge()));
}

// -------------------------------------------------------------------------------------- the pictures

/** Return a list item with a picture, a heat map over it if there is one, and lines of text. */
function pictureItem({ image, class_index: index, heat }, ...lines) {
  const picture = data.pictures[image];
  const labels = picture.labels.length ? `labels: ${picture.labels.join(", ")}` : "no label";
  const frame = element("div", { className: "frame" }, element("img", {
    src: `data:image/jpeg;base64,${picture.jpeg}`, alt: `Image ${picture.name}; ${labels}`,
    decoding: "async",
  }));
  if (heat) {
    frame.append(element("img", {
      src: `data:image/png;base64,${heat}`, alt: `Where the model looked for ${names[index]}`,
      className: "heat",
    }));
  }
  return element("li", {}, frame, ...lines.map((line) => element("p", {}, ...[line].flat())),
    element("p", { className: "small" }, picture.name),
    element("p", { className: "small" }, capitalized(labels)));
}

/** Show pictures in a list; a button at the end of a long one shows the rest. */
function fillGallery(id, items) {
  const wide = (...children) => element("li", { className: "wide" }, ...children);
  if (!items.length) return byId(id).replaceChildren(wide("No such image in this report."));

  byId(id).replaceChildren(...items.slice(0, FIRST_PICTURES));
  if (items.length > FIRST_PICTURES) {
    const button = element("button", { type: "button" }, `Show all ${asCount(items.length)} images`);
    button.addEventListener("click", () => byId(id).replaceChildren(...items));
    byId(id).append(wide(button));
  }
}

function showExamples(kind) {
  const examples = data.examples.filter((example) =>
    example.class_index === chosen.index && example.kind === kind);
  fillGallery(kind, examples.map((example) =>
    pictureItem(example, ["score ", element("b", {}, asScore(example.score))])));
}

function labelText({ present }) {
  return `labelled ${present ? "present" : "absent"}`;
}

function showSuspects() {
  fillGallery("suspect-list", data.suspects.map((suspect) => pictureItem(
    suspect,
    [element("b", {}, names[suspect.class_index])],
    [labelText(suspect)],
    [`probability ${asScore(suspect.probability)}`],
  )));
}

/** Show the images that one model alone decides right. */
function showChanged() {
  const item = (image) => pictureItem(
    image,
    [element("b", {}, names[image.class_index])],
    ...(data.exclusive ? [] : [[labelText(image)]]),
    [`score A\u00a0${asScore(image.score)}, B\u00a0${asScore(image.other_score)}`],
  );
  fillGallery("fixed", data.changed.filter((image) => image.fixed).map(item));
  fillGallery("broken", data.changed.filter((image) => !image.fixed).map(item));
}

// -------------------------------------------------------------------------------- pairs of classes

/**
 * Return which share of the images of each row's class is in each column, in percent.
 *
 * `ofClasses` has the number of images of each class on its diagonal.
 */
function shares(matrix, ofClasses) {
  return matrix.map((row, index) => {
    const whole = ofClasses[index][index];
    return row.map((count) => (whole > 0 ? (100 * count) / whole : null));
  });
}

function drawPairs() {
  const { names: labels, labels: labelled, predictions: predicted } = data.coOccurrence;
  const size = labels.length;
  if (!size) return byId("pairs-chart").remove();

  const view = data.exclusive ? "predictions" : byId("pairs-view").value;
  const ofLabels = shares(labelled, labelled);
  const ofPredictions = shares(predicted, data.exclusive ? labelled : predicted);
  const z = { labels: ofLabels, predictions: ofPredictions }[view] ?? ofPredictions.map((row, one) =>
    row.map((share, other) => (share === null || ofLabels[one][other] === null
      ? null : share - ofLabels[one][other])));

  // The diagonal of a co-occurrence is 100 % everywhere and would outshine the pairs.
  const isShown = (row, column) => data.exclusive || row !== column;
  const shown = z.map((row, one) => row.map((value, other) => (isShown(one, other) ? value : null)));
  const isDifference = view === "difference";
  const highest = Math.max(1, ...shown.flat().map((value) => Math.abs(value ?? 0)));

  const cell = size <= 12 ? 52 : size <= 30 ? 28 : 14;
  const side = 8 * Math.min(Math.max(...labels.map((name) => name.length)), NAME_LENGTH) + 40;
  const ticks = { tickvals: labels.map((_, index) => index), ticktext: labels.map(shortened), showgrid: false };
  byId("pairs-chart").style.width = `${side + size * cell + 110}px`;
  return draw(byId("pairs-chart"), `Pairs of classes: ${view}; the table below has the numbers`, [{
    type: "heatmap",
    x: ticks.tickvals,
    y: ticks.tickvals,
    z: shown,
    zmin: isDifference ? -highest : 0,
    zmax: data.exclusive ? 100 : highest,
    colorscale: isDifference
      ? [[0, BLUE], [0.5, "#f7f7f7"], [1, VERMILLION]]
      : [[0, "#f3f7fb"], [1, BLUE]],
    colorbar: { title: { text: isDifference ? "points" : "%" }, thickness: 14, outlinewidth: 0 },
    xgap: 1,
    ygap: 1,
    hoverongaps: false,
    texttemplate: size <= 12 ? "%{z:.0f}" : "",
    text: shown.map((row, one) => row.map((value, other) => pairText(one, other, value, isDifference))),
    hovertemplate: "%{text}<extra></extra>",
  }], {
    height: 0.9 * side + size * cell + 28,
    margin: { l: side, r: 16, t: 28, b: 0.9 * side },
    xaxis: { ...ticks, side: "bottom", tickangle: -60, automargin: false },
    yaxis: { ...ticks, autorange: "reversed", automargin: false },
  });
}

function pairText(row, column, value, isDifference) {
  const { names: labels, labels: labelled, predictions: predicted } = data.coOccurrence;
  const share = value === null ? "–" : `${asPercent(value)} ${isDifference ? "points" : "%"}`;
  const pair = `${escaped(labels[row])}, ${escaped(labels[column])}<br>${share}`;
  if (data.exclusive) return `${pair}<br>${asCount(predicted[row][column])} images`;
  return `${pair}<br>${asCount(labelled[row][column])} images labelled with both` +
    `<br>${asCount(predicted[row][column])} images predicted with both`;
}

// ------------------------------------------------------------------------------------- all together

for (const field of ["positives", "negatives"]) {
  histograms[field] = await unpacked(histograms[field], Uint32Array);
}
histograms.positions = await unpacked(histograms.positions, Uint8Array);

byId("class-select").append(...names.map((name, index) => new Option(name, index)));
byId("class-select").addEventListener("change", (event) => choose(Number(event.target.value)));
if (!data.exclusive) {
  listenToSlider();
  byId("pairs-view").addEventListener("change", drawPairs);
}

makeHeadings();
selectRows();
listenToTable();
drawMetrics();
if (data.curves.length) drawLearningCurves();
choose(0);
drawPairs();
if (data.suspects.length) showSuspects();
if (data.differences !== null) {
  drawDifferences();
  showChanged();
}
byId("content").ariaBusy = "false";
