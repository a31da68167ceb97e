// Curves: one line a series, the range of joined steps as a band, all values at the pointer.

const FRAME = { left: 54, right: 14, top: 10, bottom: 40, height: 230 };

// series() -> [{name, run, curve: {first, last, mean, low?, high?}, colour: index, dash, dots}], asked for at each drawing
function curvePlot({ title, note, unit, series, zero = false, empty = "not measured in this run" }) {
  const card = make("section", { class: "card" }, make("div", { class: "head" }, make("h3", {}, title)));
  if (note) card.append(make("p", { class: "note" }, note));
  const legend = make("div", { class: "legend" });
  const plot = make("div", { class: "plot" });
  card.append(legend, plot);
  drawn(plot, (width) => {
    const known = series().filter((s) => s.curve && s.curve.mean.some((y) => y !== null));
    const axis = AXES[view.x](known);
    const shown = known.filter((s) => axis.at(s.run)).map((s) => ({ ...s, ...pointsOf(s, axis) }));
    legend.replaceChildren(...(shown.length > 1 ? shown.map(legendEntry) : []));
    if (shown.length) drawCurves(plot, width, shown, { title, unit, zero, axis });
    else plot.replaceChildren(make("div", { class: "empty" }, known.length ? axis.missing : empty));
  });
  return card;
}

// Where the points are on the axis, and their smoothed values. Points of validation are too few to smooth.
function pointsOf({ run, curve, dots }, axis) {
  const at = axis.at(run);
  const xs = curve.first.map((first, i) => at((first + curve.last[i]) / 2));
  return { xs, smooth: view.smooth && !dots ? smoothed(curve.mean, view.smooth) : null };
}

const colourOf = (s) => LINES[theme()][s.colour % LINES[theme()].length];

function legendEntry(s) {
  const stroke = { stroke: colourOf(s), "stroke-width": 2.5, "stroke-dasharray": DASHES[s.dash || 0] };
  const sign = make("svg", { width: 30, height: 10 }, make("line", { x1: 0, x2: 30, y1: 5, y2: 5, ...stroke }));
  if (s.dots) sign.append(make("circle", { cx: 15, cy: 5, r: 3.5, fill: colourOf(s) }));
  return make("span", {}, sign, s.name);
}

function drawCurves(plot, width, shown, { title, unit, zero, axis }) {
  const { left, right, top, bottom, height } = FRAME;
  const [w, h] = [Math.max(width - left - right, 20), height - top - bottom];
  const from = Math.min(...shown.map((s) => s.xs[0]));
  const to = Math.max(...shown.map((s) => s.xs.at(-1)), from + axis.unit);
  const scale = scaleOf(shown.flatMap((s) => [s.curve.mean, s.curve.low || [], s.curve.high || []]).flat().filter((y) => y !== null), zero);
  const x = (place) => left + ((place - from) / (to - from)) * w;
  const y = (value) => {
    const share = value === null ? null : scale.y(value);
    return share === null ? null : top + h - share * h;
  };
  const svg = make("svg", { height, role: "img", "aria-label": `${title} over ${axis.over}` });
  for (const value of scale.marks) {
    svg.append(make("line", { class: "grid-line", x1: left, x2: left + w, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(make("line", { class: "axis", x1: left, x2: left + w, y1: top + h, y2: top + h }));
  for (const mark of ticks(from / axis.unit, to / axis.unit, Math.max(4, w / 70), view.x !== "time"))
    svg.append(make("text", { x: x(mark * axis.unit), y: top + h + 17, "text-anchor": "middle" }, short(mark, 4)));
  svg.append(make("text", { x: left + w / 2, y: height - 5, "text-anchor": "middle" }, axis.title));
  for (const s of shown) drawSeries(svg, s, x, y);
  const cross = svg.appendChild(make("line", { class: "cross", y1: top, y2: top + h, visibility: "hidden" }));
  svg.addEventListener("pointermove", (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    const place = from + ((px - left) / w) * (to - from);
    const near = shown.map((s) => nearest(s, place));
    const at = near.reduce((a, b) => (Math.abs(b.x - place) < Math.abs(a.x - place) ? b : a));
    for (const [name, value] of [["x1", x(at.x)], ["x2", x(at.x)], ["visibility", "visible"]])
      cross.setAttribute(name, value);
    const where = [stepsText(at.first, at.last), axis.say(at.x)].filter(Boolean).join(", ");
    showTip(event, [where, ...shown.map((s, i) => readOut(s, near[i], at, unit))].join("\n"));
  });
  svg.addEventListener("pointerleave", () => (hideTip(), cross.setAttribute("visibility", "hidden")));
  plot.replaceChildren(svg);
}

function nearest({ curve, xs }, place) {
  let best = 0;
  xs.forEach((x, i) => Math.abs(x - place) < Math.abs(xs[best] - place) && (best = i));
  return { i: best, x: xs[best], first: curve.first[best], last: curve.last[best] };
}

function readOut(s, near, at, unit) {
  const [mean, low, high] = ["mean", "low", "high"].map((key) => s.curve[key] && s.curve[key][near.i]);
  const band = low !== undefined && low !== high ? `  (${short(low, 4)} to ${short(high, 4)})` : "";
  const smooth = s.smooth ? `  smoothed ${short(s.smooth[near.i], 5)}` : "";
  const elsewhere = near.last < at.first || near.first > at.last ? `  at ${stepsText(near.first, near.last)}` : "";
  return `${s.name}  ${short(mean, 5)}${unit ? " " + unit : ""}${band}${smooth}${elsewhere}`;
}

// A path through the points that the scale has.
function pathOf(xs, values, x, y) {
  let pen = "M";
  return xs.map((place, i) => {
    const height = y(values[i]);
    const move = height === null ? "" : `${pen}${x(place).toFixed(1)},${height.toFixed(1)}`;
    pen = height === null ? "M" : "L";
    return move;
  }).join("");
}

function drawSeries(svg, s, x, y) {
  const { xs, curve, smooth } = s;
  const colour = colourOf(s);
  const band = curve.low && !smooth ? [...curve.high.map((v, i) => [xs[i], y(v)]), ...curve.low.map((v, i) => [xs[i], y(v)]).reverse()].filter(([, v]) => v !== null) : [];
  if (band.length) svg.append(make("path", { d: `M${band.map(([place, v]) => `${x(place)},${v}`).join("L")}Z`, fill: colour, opacity: 0.18 }));
  const line = { fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round" };
  if (smooth) svg.append(make("path", { d: pathOf(xs, curve.mean, x, y), ...line, opacity: 0.25 }));
  svg.append(make("path", { d: pathOf(xs, smooth || curve.mean, x, y), ...line, "stroke-dasharray": DASHES[s.dash || 0] }));
  if (s.dots || xs.length === 1)
    xs.forEach((place, i) => y(curve.mean[i]) !== null && svg.append(make("circle", { cx: x(place), cy: y(curve.mean[i]), r: xs.length > 60 ? 1.6 : 3, fill: colour })));
}
