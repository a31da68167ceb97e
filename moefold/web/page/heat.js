// Heat-maps: cells on a canvas, axes and the colour bar as SVG around it.

const ROOM = { left: 54, right: 14, top: 6, bottom: 40 };

// shown() -> what to draw, asked for at each drawing: {empty: text}, or {note?, rows, columns, value, colours, bar, say}.
// rows: labels. columns: {count, first, last} of steps, or {count, title} of things. value(r, c) -> number, NaN if unknown.
// colours: v -> [r, g, b], in the present theme. bar: {at(t) -> v, marks: [[t, text]], title, none?: text}. say(r, c) -> text for the tooltip.
function heatMap({ title, note, rowTitle, shown, pick, controls }) {
  const card = make("section", { class: pick ? "card pick" : "card" });
  const [words, plot, scale] = [make("p", { class: "note" }, note), make("div", { class: "plot" }), make("div", { class: "plot" })];
  card.append(make("div", { class: "head" }, make("h3", {}, title)), words, ...(controls ? [controls] : []), plot, scale);
  drawn(plot, (width) => {
    const spec = shown();
    words.textContent = spec.note || note;
    if (controls) controls.hidden = Boolean(spec.empty);
    if (spec.empty) return plot.replaceChildren(make("div", { class: "empty" }, spec.empty)), scale.replaceChildren();
    drawHeat(plot, width, { title, rowTitle, pick, colour: spec.colours, ...spec });
    drawBar(scale, width, spec.bar, spec.colours);
  });
  return card;
}

const heightOf = (rows) => Math.round(rows <= 12 ? rows * 22 : rows <= 40 ? rows * 12 : Math.max(480, rows * 2));

function drawHeat(plot, width, spec) {
  const { rows, columns, say, pick } = spec;
  const [w, h] = [Math.max(width - ROOM.left - ROOM.right, 20), Math.max(heightOf(rows.length), 44)];
  const svg = make("svg", { height: h + ROOM.top + ROOM.bottom });
  const every = Math.ceil(15 / (h / rows.length));
  const stride = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 500, 1000, 5000, 20000].find((n) => n >= every) || every;
  rows.forEach((label, r) => {
    if (r % stride === 0)
      svg.append(make("text", { x: ROOM.left - 7, y: ROOM.top + ((r + 0.5) * h) / rows.length + 4, "text-anchor": "end" }, label));
  });
  for (const [place, text] of columnMarks(columns, w))
    svg.append(make("text", { x: ROOM.left + place * w, y: ROOM.top + h + 16, "text-anchor": "middle" }, text));
  const across = ROOM.left + w / 2;
  svg.append(make("text", { x: across, y: ROOM.top + h + 34, "text-anchor": "middle" }, columns.title || "step"));
  const turn = `rotate(-90 12 ${ROOM.top + h / 2})`;
  svg.append(make("text", { x: 12, y: ROOM.top + h / 2, "text-anchor": "middle", transform: turn }, spec.rowTitle));
  const canvas = make("canvas", { role: "img", "aria-label": spec.title });
  Object.assign(canvas.style, { left: `${ROOM.left}px`, top: `${ROOM.top}px`, width: `${w}px`, height: `${h}px` });
  paint(canvas, w, h, spec);
  const cell = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (part, whole, count) => Math.min(count - 1, Math.max(0, Math.floor((part / whole) * count)));
    return [at(event.clientY - box.top, box.height, rows.length), at(event.clientX - box.left, box.width, columns.count)];
  };
  canvas.addEventListener("pointermove", (event) => showTip(event, say(...cell(event))));
  canvas.addEventListener("pointerleave", hideTip);
  if (pick) canvas.addEventListener("click", (event) => pick(...cell(event)));
  plot.replaceChildren(svg, canvas);
}

function paint(canvas, w, h, { rows, columns, value, colour }) {
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(w * ratio), Math.round(h * ratio)];
  const small = make("canvas", { width: columns.count, height: rows.length });
  const cells = new ImageData(columns.count, rows.length);
  const unknown = hex(css("--shade"));
  for (let r = 0, k = 0; r < rows.length; r++)
    for (let c = 0; c < columns.count; c++, k += 4) {
      const v = value(r, c);
      const [red, green, blue] = v === null || Number.isNaN(v) ? unknown : colour(v);
      cells.data[k] = red;
      cells.data[k + 1] = green;
      cells.data[k + 2] = blue;
      cells.data[k + 3] = 255;
    }
  small.getContext("2d").putImageData(cells, 0, 0);
  const brush = canvas.getContext("2d");
  brush.imageSmoothingEnabled = false;
  brush.drawImage(small, 0, 0, canvas.width, canvas.height);
  const [cw, ch] = [canvas.width / columns.count, canvas.height / rows.length];
  if (Math.min(cw, ch) < 7 * ratio) return;
  brush.fillStyle = css("--card"); // a thin gap, where cells are large enough for one
  for (let c = 1; c < columns.count; c++) brush.fillRect(Math.round(c * cw), 0, ratio, canvas.height);
  for (let r = 1; r < rows.length; r++) brush.fillRect(0, Math.round(r * ch), canvas.width, ratio);
}

// Where to write what along the columns: round steps at the column that holds them, or round numbers of things.
function columnMarks(columns, w) {
  const n = columns.count;
  if (!columns.first) return ticks(0, n - 1, w / 50, true).map((i) => [(i + 0.5) / n, short(i, 4)]);
  const wanted = ticks(columns.first[0], columns.last[n - 1], Math.min(Math.max(4, w / 80), n), true);
  const found = new Map();
  for (const step of wanted) {
    const c = columns.last.findIndex((last) => last >= step);
    if (c >= 0 && !found.has(c)) found.set(c, columns.first[c] <= step ? step : columns.first[c]);
  }
  return [...found].map(([c, step]) => [(c + 0.5) / n, short(step, 4)]);
}

function drawBar(scale, width, bar, colour) {
  const narrow = width < 480; // then the words stand below the bar
  const long = Math.min(300, width - ROOM.left - ROOM.right);
  const svg = make("svg", { height: narrow ? 58 : 38, "aria-label": "colours" });
  const n = 60;
  for (let i = 0; i < n; i++) {
    const place = { x: ROOM.left + (i * long) / n, y: 2, width: long / n + 0.6, height: 11 };
    svg.append(make("rect", { ...place, fill: `rgb(${colour(bar.at((i + 0.5) / n))})` }));
  }
  for (const [t, text] of bar.marks) {
    const anchor = t < 0.02 ? "start" : t > 0.98 ? "end" : "middle";
    svg.append(make("text", { x: ROOM.left + t * long, y: 28, "text-anchor": anchor }, text));
  }
  const words = narrow ? [ROOM.left, 50] : [ROOM.left + long + 12, 12];
  svg.append(make("text", { x: words[0], y: words[1] }, bar.title));
  if (bar.none) {
    const [x, y] = narrow ? [ROOM.left + 130, 50] : [words[0], 30];
    svg.append(make("rect", { x, y: y - 10, width: 14, height: 11, fill: `rgb(${colour(0)})` }));
    svg.append(make("text", { x: x + 20, y }, bar.none));
  }
  scale.replaceChildren(svg);
}
