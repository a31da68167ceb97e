const offered = JSON.parse(document.getElementById("data").textContent); // models, GPUs, choices, and their texts

// A chart explored with the pointer, or with the arrow keys when it has the focus. The item there is framed and
// described in the tooltip, which screen readers read out; Enter or a click applies it, where it has `take`.

// items: [{row, x, y, w, h, text, take?}] in pixels of the svg
function explore(plot, svg, items) {
  const frame = svg.appendChild(make("rect", { class: "mark", visibility: "hidden", rx: 2 }));
  const state = { items, at: null, frame, svg };
  plot.explored = state;
  if (plot.explorer) return;
  plot.explorer = true;
  const at = (event) => {
    const box = plot.explored.svg.getBoundingClientRect();
    return near(plot.explored.items, event.clientX - box.left, event.clientY - box.top);
  };
  const go = (item, event) => {
    plot.explored.at = item;
    if (!item) return hide();
    for (const [name, value] of Object.entries({ x: item.x - 1, y: item.y - 1, width: item.w + 2, height: item.h + 2, visibility: "visible" }))
      plot.explored.frame.setAttribute(name, value);
    showTip(event, item.text);
  };
  const hide = () => (hideTip(), plot.explored.frame.setAttribute("visibility", "hidden"));
  plot.addEventListener("pointermove", (event) => go(at(event), event));
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("click", (event) => at(event)?.take?.());
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (event.key === "Enter" && plot.explored.at) return plot.explored.at.take?.();
    if (!event.key.startsWith("Arrow") && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const item = beside(plot.explored.items, plot.explored.at, event.key);
    if (!item) return;
    if (item.x < plot.scrollLeft || item.x + item.w > plot.scrollLeft + plot.clientWidth)
      plot.scrollLeft = item.x - plot.clientWidth / 3;
    const box = plot.explored.svg.getBoundingClientRect();
    go(item, { clientX: box.left + item.x + item.w / 2, clientY: box.top + item.y + item.h });
  });
}

// The item under the pointer; of small ones the nearest within a finger's width.
function near(items, x, y) {
  let [best, least] = [null, 12];
  for (const item of items) {
    const far = Math.hypot(Math.max(item.x - x, 0, x - item.x - item.w), Math.max(item.y - y, 0, y - item.y - item.h));
    if (far < least) [best, least] = [item, far];
  }
  return best;
}

// The next one along a row, or the one above or below.
function beside(items, now, key) {
  if (!now) return items[0];
  const middle = (item) => item.x + item.w / 2;
  const row = (n) => items.filter((item) => item.row === n).sort((a, b) => a.x - b.x);
  const along = row(now.row);
  const place = along.indexOf(now);
  if (key === "ArrowLeft") return along[place - 1];
  if (key === "ArrowRight") return along[place + 1];
  if (key === "Home") return along[0];
  if (key === "End") return along.at(-1);
  const other = row(now.row + (key === "ArrowDown" ? 1 : -1));
  return other.reduce((a, b) => (a && Math.abs(middle(a) - middle(now)) <= Math.abs(middle(b) - middle(now)) ? a : b), null);
}

// A card with a heading, a chart that can be explored, and a text for screen readers.
// draw(svg, width, data) fills the svg and returns {height, items, label}.
function chart({ title, note, draw, legend, table, scrolls = false, controls }) {
  const heading = make("h2", {}, title);
  const plot = make("div", { class: scrolls ? "plot scroll" : "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": title });
  const [signs, words] = [make("div", { class: "legend" }), make("p", { class: "note" }, note || "")];
  const [inside, rows] = [make("div", { class: "scrolls" }), make("details", { hidden: "" }, make("summary", {}, "the same as a table"))];
  rows.append(inside);
  const card = make("section", { class: "card" }, make("div", { class: "head" }, heading, ...(controls || [])), words, signs, plot, rows);
  let data = null;
  drawn(plot, (width) => {
    if (!data) return;
    const svg = make("svg", { "aria-hidden": "true" });
    const { height, items, label, wide = width } = draw(svg, width, data);
    svg.setAttribute("height", height);
    svg.style.width = `${wide}px`;
    plot.replaceChildren(svg);
    plot.setAttribute("aria-label", `${title}. ${label} Arrow keys move through the chart.`);
    explore(plot, svg, items);
    if (legend) signs.replaceChildren(...legend(data));
  });
  card.update = (fresh) => {
    data = fresh;
    plot.redraw(true);
    if (!table) return;
    rows.hidden = false;
    inside.replaceChildren(numbers(...table(data)));
  };
  card.say = (text) => (words.textContent = text);
  card.redraw = () => plot.redraw(true);
  return card;
}

function numbers(head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell, i) => make(i ? tag : "th", {}, cell)));
  return make("table", { class: "numbers" }, make("thead", {}, line(head, "th")), make("tbody", {}, ...rows.map((row) => line(row, "td"))));
}

function sign(colour, text) {
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = colour;
  return make("span", {}, swatch, text);
}
