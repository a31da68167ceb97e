// The planner's four charts: memory by rank, time by cause, the pipeline, the Pareto front of memory and speed.

const PARTS = {
  weights: { light: "#1f5f9e", dark: "#5aa5e6", says: "weights" },
  gradients: { light: "#4c8fcc", dark: "#3f7db8", says: "gradients" },
  main: { light: "#8bbbe3", dark: "#2f5a86", says: "main weights in fp32" },
  moments: { light: "#bcd8ef", dark: "#264260", says: "optimizer moments" },
  activations: { light: "#d9731a", dark: "#f0954a", says: "activations kept for backward" },
  working: { light: "#efa35b", dark: "#b8672a", says: "temporaries" },
  margin: { light: "#f7cf9f", dark: "#7c4a24", says: "margin for uneven expert load" },
  buffers: { light: "#6b8f3c", dark: "#9fc46a", says: "communication buffers" },
  graphs: { light: "#a9c27f", dark: "#5f7f3a", says: "CUDA graph pools" },
  outside: { light: "#8b929b", dark: "#7d8793", says: "outside the allocator" },
};
const WALLS = {
  arithmetic: { light: "#1e845a", dark: "#4fc795" },
  compute: { light: "#3168bd", dark: "#6ba3f2" },
  host: { light: "#93b4e6", dark: "#3d5f94" },
  memory: { light: "#d9731a", dark: "#f0954a" },
  communication: { light: "#b0388f", dark: "#e07fc6" },
  bubble: { light: "#a3abb4", dark: "#626d79" },
};
const OPS = {
  F: { light: [49, 104, 189], dark: [93, 150, 235], says: "forward" },
  D: { light: [30, 132, 90], dark: [58, 176, 126], says: "backward, data gradient" },
  W: { light: [222, 148, 20], dark: [232, 170, 62], says: "weight gradient" },
};
const colourIn = (table, name) => table[name][theme()];
const share = (x) => `${(100 * x).toFixed(1)} %`;
const gib = (x) => `${x < 10 ? x.toFixed(2) : x.toFixed(1)} GiB`;
const seconds = (x) => (x >= 1 ? `${short(x, 4)} s` : x >= 1e-3 ? `${short(1000 * x, 3)} ms` : `${short(1e6 * x, 3)} µs`);
const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
const there = (answer) => Object.keys(PARTS).filter((part) => answer.memory_parts_by_rank.some((rank) => rank[part] > 0));

const memoryChart = () => chart({
  title: "Memory by pipeline rank",
  note: "Peak memory of each rank, and the memory of the GPU.",
  legend: (answer) => there(answer).map((part) => sign(colourIn(PARTS, part), PARTS[part].says)),
  table: (answer) => [["GiB", ...there(answer), "total"], answer.memory_parts_by_rank.map((parts, rank) =>
    [`rank ${rank}`, ...there(answer).map((part) => parts[part].toFixed(2)), total(parts).toFixed(2)])],
  draw: drawMemory,
});

function drawMemory(svg, width, answer) {
  const ranks = answer.memory_parts_by_rank;
  const [left, right, top, limit] = [58, 52, 22, answer.memory_limit_gib];
  const row = Math.max(9, Math.min(30, 440 / ranks.length));
  const [w, h] = [Math.max(width - left - right, 40), row * ranks.length];
  const most = Math.max(limit, ...ranks.map(total));
  const x = (value) => left + (value / most) * w;
  gridX(svg, ticks(0, most, w / 60), x, top, h, (value) => short(value));
  const items = [];
  const every = Math.ceil(14 / row);
  ranks.forEach((parts, rank) => {
    const y = top + rank * row + 1;
    let from = 0;
    for (const part of there(answer)) {
      const box = { x: x(from), y, w: Math.max(x(from + parts[part]) - x(from), 0), h: row - Math.min(5, row / 4) };
      svg.append(make("rect", { x: box.x, y, width: box.w, height: box.h, fill: colourIn(PARTS, part) }));
      if (parts[part] > 0) items.push({ ...box, row: rank, text: `rank ${rank}: ${PARTS[part].says} ${gib(parts[part])}\nof ${gib(total(parts))} in total, the GPU has ${gib(limit)}` });
      from += parts[part];
    }
    if (rank % every) return;
    const middle = y + row / 2 + 2;
    svg.append(make("text", { x: left - 7, y: middle, "text-anchor": "end" }, `rank ${rank}`));
    svg.append(make("text", { x: left + w + 10, y: middle, class: from > limit ? "over" : "strong" }, from.toFixed(1)));
  });
  svg.append(make("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top - 5, y2: top + h + 3 }));
  svg.append(make("text", { class: "limit-text", x: x(limit) + (limit > most * 0.8 ? 4 : 0), y: top - 8, "text-anchor": limit > most * 0.8 ? "end" : "middle" }, `card ${gib(limit)}`));
  const fullest = answer.largest_rank;
  const label = `Rank ${fullest.rank} is fullest, with ${gib(total(ranks[fullest.rank]))} of ${gib(limit)}, in ${fullest.at}.`;
  return { height: top + h + 34, items, label };
}

// Vertical lines at round numbers, which stand below.
function gridX(svg, marks, x, top, h, text) {
  for (const value of marks) {
    svg.append(make("line", { class: "grid-line", x1: x(value), x2: x(value), y1: top, y2: top + h }));
    svg.append(make("text", { x: x(value), y: top + h + 17, "text-anchor": "middle" }, text(value)));
  }
}

const wallsChart = () => chart({
  title: "Where the time of a step goes",
  note: "Arithmetic at the GPU's peak, and the time that the three walls and the pipeline bubble add.",
  legend: (answer) => [make("table", { class: "numbers" }, make("tbody", {}, ...Object.entries(answer.time_by_wall).filter(([, s]) => s > 0)
    .map(([name, s]) => make("tr", {}, make("th", { scope: "row" }, sign(colourIn(WALLS, name), offered.walls[name])), make("td", {}, seconds(s)), make("td", {}, share(s / answer.step_s))))))],
  draw: drawWalls,
});

function drawWalls(svg, width, answer) {
  const [top, h] = [4, 42];
  const [w, items] = [Math.max(width - 2, 40), []];
  let from = 0;
  for (const [name, s] of Object.entries(answer.time_by_wall)) {
    const box = { x: 1 + (from / answer.step_s) * w, y: top, w: (s / answer.step_s) * w, h };
    from += s;
    if (s <= 0) continue;
    svg.append(make("rect", { x: box.x, y: top, width: box.w, height: h, fill: colourIn(WALLS, name) }));
    items.push({ ...box, row: 0, text: `${offered.walls[name]}\n${seconds(s)} of ${seconds(answer.step_s)}, ${share(s / answer.step_s)}` });
    if (box.w > 46) svg.append(inside(box.x + box.w / 2, top + h / 2 + 4, colourIn(WALLS, name), share(s / answer.step_s)));
  }
  const label = Object.entries(answer.time_by_wall).map(([name, s]) => `${offered.walls[name]} ${share(s / answer.step_s)}`).join(", ");
  return { height: top + h + 6, items, label: `${seconds(answer.step_s)} a step: ${label}.` };
}

// A text on a coloured box, in the ink that is legible there.
function inside(x, y, colour, text) {
  const element = make("text", { class: "inside", x, y }, text);
  element.style.fill = inkOn(colour);
  return element;
}
const inkOn = (colour) => {
  const [red, green, blue] = colour.startsWith("#") ? hex(colour) : colour.match(/\d+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140 ? "#fff" : "#1b1f24";
};

// One row per rank, time to the right, one box per slot; later chunks of a rank are lighter. A pair has two halves.
function timelineChart() {
  const zoom = make("input", { type: "range", min: 0, max: 4, step: 1, value: 0, id: "zoom", "aria-valuetext": "1 times" });
  const card = chart({
    title: "The pipeline",
    scrolls: true,
    controls: [make("label", { class: "zoom", for: "zoom" }, "zoom", zoom)],
    legend: ({ timeline }) => {
      const drawn = new Set(timeline.spans.flatMap(drawnOf).map((op) => op[0]));
      return [...drawn].sort().reverse().map((kind) => sign(shade(kind, 0), OPS[kind].says));
    },
    draw: (svg, width, answer) => drawTimeline(svg, width * 2 ** Number(zoom.value), answer),
  });
  zoom.addEventListener("input", () => (zoom.setAttribute("aria-valuetext", `${2 ** Number(zoom.value)} times`), card.redraw()));
  return card;
}

function shade(kind, chunk) {
  const [to, share] = theme() === "dark" ? [40, 1 - 0.83 ** Math.min(chunk, 3)] : [255, 1 - 0.7 ** Math.min(chunk, 3)];
  return `rgb(${OPS[kind][theme()].map((c) => Math.round(c + (to - c) * share)).join(",")})`;
}

function drawTimeline(svg, width, answer) {
  const { spans, bubble } = answer.timeline;
  const ranks = bubble.length;
  const [left, right, top] = [58, 76, 4];
  const row = Math.max(10, Math.min(32, 480 / ranks));
  const [w, h, gap] = [Math.max(width - left - right, 40), row * ranks, Math.min(5, row / 5)];
  const until = Math.max(...spans.map((span) => span.end)); // of a long step only the first part is in the answer
  const x = (t) => left + (t / until) * w;
  const every = Math.ceil(14 / row);
  for (let rank = 0; rank < ranks; rank++) {
    svg.append(make("rect", { x: left, y: top + rank * row, width: w, height: row - gap, fill: css("--shade") }));
    if (rank % every) continue;
    svg.append(make("text", { x: left - 7, y: top + rank * row + row / 2 + 2, "text-anchor": "end" }, `rank ${rank}`));
    svg.append(make("text", { x: left + w + 7, y: top + rank * row + row / 2 + 2 }, `idle ${(100 * bubble[rank]).toFixed(1)} %`));
  }
  const [paths, labels, items] = [{}, [], []];
  for (const span of spans) {
    const box = { x: x(span.start), y: top + span.rank * row, w: Math.max(x(span.end) - x(span.start), 0.5), h: row - gap };
    items.push({ ...box, row: span.rank, text: `rank ${span.rank}: ${span.ops.map(opText).join(" with ")}\n${seconds(span.start)} to ${seconds(span.end)}, ${seconds(span.end - span.start)}` });
    drawnOf(span).forEach((op, i, shown) => {
      const [kind, stage, microbatch] = readOp(op);
      const fill = shade(kind, Math.floor(stage / ranks));
      const [y, tall] = [box.y + (i * box.h) / shown.length, box.h / shown.length];
      const wide = Math.max(box.w - (box.w > 3 ? 0.8 : 0.2), 0.3).toFixed(1);
      paths[fill] = `${paths[fill] || ""}M${box.x.toFixed(1)},${y.toFixed(1)}h${wide}v${tall.toFixed(1)}h-${wide}z`;
      if (box.w > 7 * String(microbatch).length + 5 && tall > 11)
        labels.push(inside(box.x + box.w / 2, y + tall / 2 + 4, fill, microbatch));
    });
  }
  for (const [fill, d] of Object.entries(paths)) svg.append(make("path", { d, fill }));
  svg.append(...labels);
  gridX(svg, ticks(0, until, w / 90), x, top + h - gap, 4, seconds);
  const idle = (100 * Math.max(...bubble)).toFixed(1);
  return { height: top + h + 24, wide: width, items, label: `${ranks} ranks, ${spans.length} slots in ${seconds(until)}; the largest idle share of a rank is ${idle} %.` };
}

const readOp = (op) => {
  const [, kind, stage, microbatch] = op.match(/^([A-Z])(\d+)\.(\d+)$/);
  return [kind, Number(stage), Number(microbatch)];
};
// Of a slot's ops those that have a box: the forward, and the first of the backward.
const drawnOf = (span) => [span.ops.find((op) => op[0] === "F"), span.ops.find((op) => op[0] !== "F")].filter(Boolean);
const opText = (op) => {
  const [kind, stage, microbatch] = readOp(op);
  return `${OPS[kind].says} of microbatch ${microbatch} on stage ${stage}`;
};

// found: an answer with a search; now: the answer above, if it is for the same question; take(layout)
const frontChart = (take) => chart({
  title: "Memory against speed",
  note: "Dots: layouts that no other beats in both memory and speed. Diamonds: the fastest few. All are simulated. Cross: the layout above. A click or Enter applies a layout.",
  draw: (svg, width, data) => drawFront(svg, width, data, take),
});

function drawFront(svg, width, { found, now }, take) {
  const [left, right, top, height] = [62, 20, 26, 320];
  const [w, h] = [Math.max(width - left - right, 40), height - top - 46];
  const limit = found.memory_limit_gib;
  const all = [...found.front, ...found.layouts, ...(now ? [now] : [])];
  const [lowX, highX] = rangeWithin(all.map((p) => p.memory_gib).concat(limit));
  const [lowY, highY] = rangeWithin(all.map((p) => p.tokens_per_s_per_gpu));
  const x = (value) => left + ((value - lowX) / (highX - lowX)) * w;
  const y = (value) => top + h - ((value - lowY) / (highY - lowY)) * h;
  gridX(svg, ticks(lowX, highX, w / 60), x, top, h, (value) => short(value));
  for (const value of ticks(lowY, highY, 5)) {
    svg.append(make("line", { class: "grid-line", x1: left, x2: left + w, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value, 4)));
  }
  svg.append(make("text", { x: left + w / 2, y: height - 8, "text-anchor": "middle" }, "GiB on the fullest rank"));
  svg.append(make("text", { x: 4, y: 12 }, "tokens/s a GPU"));
  svg.append(make("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top, y2: top + h }), make("text", { class: "limit-text", x: x(limit), y: top - 6, "text-anchor": x(limit) > left + w * 0.8 ? "end" : "middle" }, `card ${gib(limit)}`));
  const colour = LINES[theme()];
  const stairs = found.front.map((p, i) => (i ? `V${y(p.tokens_per_s_per_gpu)}H${x(p.memory_gib)}` : `M${x(p.memory_gib)},${y(p.tokens_per_s_per_gpu)}`)).join("");
  svg.append(make("path", { d: stairs, fill: "none", stroke: colour[0], "stroke-width": 1.5, opacity: 0.7 }));
  const items = [];
  const point = (p, draw, says, row) => {
    const [px, py] = [x(p.memory_gib), y(p.tokens_per_s_per_gpu)];
    svg.append(draw(px, py));
    const text = `${says}\n${short(p.tokens_per_s_per_gpu, 4)} tokens/s a GPU, ${gib(p.memory_gib)}`;
    items.push({ x: px - 6, y: py - 6, w: 12, h: 12, row, text, take: p.text && (() => take(p.layout)) });
  };
  for (const p of found.front) point(p, (cx, cy) => make("circle", { cx, cy, r: 5, fill: colour[0] }), `front: ${describe(p)}`, 0);
  for (const p of found.layouts) point(p, (px, py) => make("path", { d: `M${px},${py - 7}l7,7l-7,7l-7,-7z`, fill: css("--card"), stroke: colour[1], "stroke-width": 2 }), `among the fastest: ${describe(p)}`, 1);
  if (now) point(now, (px, py) => make("path", { d: `M${px - 7},${py}h14M${px},${py - 7}v14`, stroke: css("--ink"), "stroke-width": 2.5 }), "the layout above", 2);
  const label = `${found.front.length} layouts on the front, from ${gib(Math.min(...found.front.map((p) => p.memory_gib)))} on; the fastest does ${short(found.front[0].tokens_per_s_per_gpu, 4)} tokens/s a GPU.`;
  return { height, items, label };
}

const describe = (p) => `${p.text}${p.layout.recompute.length ? `; recompute ${p.layout.recompute.join(", ")}` : ""}`;

function rangeWithin(values) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [Math.max(0, low - room), high + room];
}
