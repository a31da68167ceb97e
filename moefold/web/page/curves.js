// Curves over steps: one line a series, the range of joined steps as a band, all values at the pointer.

const FRAME = { left: 54, right: 14, top: 10, bottom: 40, height: 230 };

// series: [{name, curve: {first, last, mean, low?, high?}, colour: index, dash, dots}]
function curvePlot({ title, note, unit, series, zero = false, empty }) {
  const card = make("section", { class: "card" }, make("div", { class: "head" }, make("h3", {}, title)));
  if (note) card.append(make("p", { class: "note" }, note));
  const shown = series.filter((s) => s.curve && s.curve.mean.some((y) => y !== null));
  if (!shown.length) return card.append(make("div", { class: "empty" }, empty || "not measured in this run")), card;
  const legend = make("div", { class: "legend" });
  const plot = make("div", { class: "plot" });
  card.append(legend, plot);
  drawn(plot, (width) => {
    legend.replaceChildren(...(shown.length > 1 ? shown.map(legendEntry) : []));
    drawCurves(plot, width, shown, { title, unit, zero });
  });
  return card;
}

const colourOf = (s) => LINES[theme()][s.colour % LINES[theme()].length];

function legendEntry(s) {
  const stroke = { stroke: colourOf(s), "stroke-width": 2.5, "stroke-dasharray": DASHES[s.dash || 0] };
  const sign = make("svg", { width: 30, height: 10 }, make("line", { x1: 0, x2: 30, y1: 5, y2: 5, ...stroke }));
  if (s.dots) sign.append(make("circle", { cx: 15, cy: 5, r: 3.5, fill: colourOf(s) }));
  return make("span", {}, sign, s.name);
}

const middles = (curve) => curve.first.map((first, i) => (first + curve.last[i]) / 2);

function rangeOf(shown, zero) {
  const all = shown.flatMap((s) => [s.curve.mean, s.curve.low || [], s.curve.high || []]).flat().filter((y) => y !== null);
  let [low, high] = all.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
  if (zero) low = Math.min(low, 0);
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const marks = ticks(low, high, 6);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

function drawCurves(plot, width, shown, { title, unit, zero }) {
  const { left, right, top, bottom, height } = FRAME;
  const [w, h] = [Math.max(width - left - right, 20), height - top - bottom];
  const from = Math.min(...shown.map((s) => s.curve.first[0]));
  const to = Math.max(...shown.map((s) => s.curve.last.at(-1)), from + 1);
  const [low, high] = rangeOf(shown, zero);
  const x = (step) => left + ((step - from) / (to - from)) * w;
  const y = (value) => top + h - ((value - low) / (high - low)) * h;
  const svg = make("svg", { height, role: "img", "aria-label": `${title} over steps` });
  for (const value of ticks(low, high, 6)) {
    svg.append(make("line", { class: "grid-line", x1: left, x2: left + w, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(make("line", { class: "axis", x1: left, x2: left + w, y1: top + h, y2: top + h }));
  for (const step of ticks(from, to, Math.max(3, w / 70), true))
    svg.append(make("text", { x: x(step), y: top + h + 17, "text-anchor": "middle" }, short(step, 4)));
  svg.append(make("text", { x: left + w / 2, y: height - 5, "text-anchor": "middle" }, "step"));
  for (const s of shown) drawSeries(svg, s, x, y);
  const cross = svg.appendChild(make("line", { class: "cross", y1: top, y2: top + h, visibility: "hidden" }));
  svg.addEventListener("pointermove", (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    const step = from + ((px - left) / w) * (to - from);
    const near = shown.map((s) => nearest(s.curve, step));
    const at = near.reduce((a, b) => (Math.abs(b.middle - step) < Math.abs(a.middle - step) ? b : a));
    for (const [name, value] of [["x1", x(at.middle)], ["x2", x(at.middle)], ["visibility", "visible"]])
      cross.setAttribute(name, value);
    showTip(event, [stepsText(at.first, at.last), ...shown.map((s, i) => readOut(s, near[i], at, unit))].join("\n"));
  });
  svg.addEventListener("pointerleave", () => (hideTip(), cross.setAttribute("visibility", "hidden")));
  plot.replaceChildren(svg);
}

function nearest(curve, step) {
  const xs = middles(curve);
  let best = 0;
  xs.forEach((x, i) => Math.abs(x - step) < Math.abs(xs[best] - step) && (best = i));
  return { i: best, middle: xs[best], first: curve.first[best], last: curve.last[best] };
}

function readOut(s, near, at, unit) {
  const [mean, low, high] = ["mean", "low", "high"].map((key) => s.curve[key] && s.curve[key][near.i]);
  const band = low !== undefined && low !== high ? `  (${short(low, 4)} to ${short(high, 4)})` : "";
  const elsewhere = near.last < at.first || near.first > at.last ? `  at ${stepsText(near.first, near.last)}` : "";
  return `${s.name}  ${short(mean, 5)}${unit ? " " + unit : ""}${band}${elsewhere}`;
}

function drawSeries(svg, s, x, y) {
  const xs = middles(s.curve);
  const colour = colourOf(s);
  if (s.curve.low) {
    const up = xs.map((step, i) => `${x(step)},${y(s.curve.high[i])}`);
    const back = xs.map((step, i) => `${x(step)},${y(s.curve.low[i])}`).reverse();
    svg.append(make("path", { d: `M${[...up, ...back].join("L")}Z`, fill: colour, opacity: 0.18 }));
  }
  const line = { fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": DASHES[s.dash || 0] };
  const path = xs.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)},${y(s.curve.mean[i]).toFixed(1)}`).join("");
  svg.append(make("path", { d: path, "stroke-linejoin": "round", ...line }));
  if (s.dots || xs.length === 1)
    xs.forEach((step, i) => svg.append(make("circle", { cx: x(step), cy: y(s.curve.mean[i]), r: xs.length > 60 ? 1.6 : 3, fill: colour })));
}
