// Line charts and the chart of biases, drawn as SVG at the size they have on the page, so that type keeps its size.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** About `count` round numbers within [low, high]. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) found.push(k * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((value) => ({ value, label: value.toFixed(digits).replace("-", "−") }));
}

/** [low, high] with some room, and never empty. */
function roomy(values, floor) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  const room = Math.max(0.06 * (high - low), 0.05, 1e-3 * Math.abs(high));
  high += room;
  low = floor === undefined ? low - room : floor;
  return [low, high];
}

function meanCurve(runs, name) {
  return runs[0].curves[name].map((_, i) => mean(runs.map((each) => each.curves[name][i])));
}

/** A frame with axes; gives the functions that place values in it. */
function frame(svg, { x, y, xLabel, yLabel, left = 50, yTicks = true }) {
  const width = svg.clientWidth;
  const height = svg.clientHeight;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const box = { left, right: width - 20, top: 24, bottom: height - 40 };
  const toX = (value) => box.left + ((value - x[0]) / (x[1] - x[0])) * (box.right - box.left);
  const toY = (value) => box.bottom - ((value - y[0]) / (y[1] - y[0])) * (box.bottom - box.top);
  for (const { value, label } of ticks(x[0], x[1], Math.max(3, Math.floor((box.right - box.left) / 90)))) {
    svg.append(element("line", { class: "grid", x1: toX(value), x2: toX(value), y1: box.top, y2: box.bottom }));
    svg.append(element("text", { class: "tick", x: toX(value), y: box.bottom + 16, "text-anchor": "middle" }, label));
  }
  if (yTicks) {
    for (const { value, label } of ticks(y[0], y[1], Math.max(3, Math.floor((box.bottom - box.top) / 45)))) {
      svg.append(element("line", { class: "grid", x1: box.left, x2: box.right, y1: toY(value), y2: toY(value) }));
      svg.append(element("text", { class: "tick", x: box.left - 8, y: toY(value) + 4, "text-anchor": "end" }, label));
    }
  }
  const middle = (box.left + box.right) / 2;
  svg.append(element("text", { class: "axis", x: middle, y: height - 6, "text-anchor": "middle" }, xLabel));
  if (yLabel) svg.append(element("text", { class: "axis", x: 2, y: 12 }, yLabel));
  return { box, toX, toY };
}

const path = (xs, ys, { toX, toY }) =>
  xs.map((x, i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(ys[i]).toFixed(1)}`).join("");

/**
 * Curves over steps: each run faintly, their mean, and the mean of other runs in grey. `levels` are lines with a word:
 * {value, label, always}; those that are not to be seen always do not widen the axis.
 */
function lines(svg, { name, study, other, levels, steps, yLabel, floor, empty }) {
  const drawn = empty ? [] : study.runs;
  const values = levels.filter((level) => level.always).map((level) => level.value);
  for (const each of drawn) for (const value of each.curves[name]) values.push(value);
  const otherMean = other && other.runs.length > 0 ? meanCurve(other.runs, name) : null;
  for (const value of otherMean ?? []) values.push(value);
  const y = roomy(values.length > 0 ? values : [0, 1], floor);
  const scale = frame(svg, { x: [0, steps], y, xLabel: "step", yLabel });
  const words = []; // on top of the curves
  let below = scale.box.bottom + (floor === undefined ? 20 : 0);
  for (const { value, label } of levels) {
    const height = scale.toY(value);
    // Not those outside, nor one whose word would lie on the axis or on the word below.
    if (value < y[0] || value > y[1] || height > below - 14) continue;
    below = height;
    svg.append(element("line", { class: "level", x1: scale.box.left, x2: scale.box.right, y1: height, y2: height }));
    words.push(element("text", { class: "word", x: scale.box.right - 4, y: height - 5, "text-anchor": "end" }, label));
  }
  const all = element("g", {});
  for (const each of drawn) {
    all.append(element("path", { class: "run", d: path(each.curves.step, each.curves[name], scale) }));
  }
  if (otherMean) all.append(element("path", { class: "other", d: path(other.runs[0].curves.step, otherMean, scale) }));
  if (drawn.length > 0) {
    all.append(element("path", { class: "mean", d: path(drawn[0].curves.step, meanCurve(drawn, name), scale) }));
  } else {
    const { box } = scale;
    const at = { class: "axis", x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" };
    all.append(element("text", at, empty ?? "every run diverges"));
  }
  svg.append(all, ...words);
}

/** One row for each policy: every run a dot, their mean with twice its standard error. */
function biases(svg, { studies, chosen, xLabel }) {
  const known = studies.filter((study) => study.runs.length > 0);
  const x = roomy([0, ...known.flatMap((study) => study.away)]);
  const rows = Object.keys(POLICIES);
  const scale = frame(svg, { x, y: [rows.length - 0.5, -0.5], xLabel, left: 110, yTicks: false });
  const zero = scale.toX(0);
  svg.append(element("line", { class: "level", x1: zero, x2: zero, y1: scale.box.top, y2: scale.box.bottom }));
  svg.append(element("text", { class: "word", x: zero, y: 14, "text-anchor": "middle" }, "optimum"));
  for (const study of studies) {
    const height = scale.toY(rows.indexOf(study.policy));
    const row = element("g", { class: study.policy === chosen ? "row chosen" : "row" });
    row.append(element("text", { class: "name", x: 100, y: height + 4, "text-anchor": "end" }, named(study.policy)));
    for (const away of study.away) row.append(element("circle", { class: "one", cx: scale.toX(away), cy: height, r: 3 }));
    if (study.runs.length > 0) {
      const [low, high] = [-2, 2].map((k) => scale.toX(study.bias + k * study.error));
      row.append(element("line", { class: "range", x1: low, x2: high, y1: height, y2: height }));
      row.append(element("circle", { class: "centre", cx: scale.toX(study.bias), cy: height, r: 5 }));
    } else {
      row.append(element("text", { class: "tick", x: scale.box.left + 8, y: height + 4 }, "every run diverges"));
    }
    svg.append(row);
  }
}
