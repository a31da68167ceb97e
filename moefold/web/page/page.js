// The page: facts of the run, training curves, balance of expert load, FP8 operands.

const { runs } = JSON.parse(document.getElementById("data").textContent);
const several = runs.length > 1;

const of = (name, label) => runs.map((run, i) => ({ name: several ? run.label : label, curve: run.curves[name], colour: i, dash: several ? i : 0 }));
const grid = (...cards) => make("div", { class: "grid" }, ...cards);
const section = (title, text, ...parts) => [make("h2", {}, title), make("p", {}, text), ...parts];

function facts() {
  const card = make("section", { class: "card facts" }, several ? factsTable() : factsList(runs[0]));
  for (const run of runs.filter((run) => run.strange.length))
    card.append(make("p", { class: "note" }, `${run.label}: config.yaml has keys that this version does not know: ${run.strange.join(", ")}`));
  return card;
}

const factsList = (run) => make("dl", {}, ...run.facts.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));

function factsTable() {
  const head = make("thead", {}, make("tr", {}, make("th"), ...runs.map((run) => make("th", {}, run.label))));
  const lines = runs[0].facts.map(([name, text], i) => {
    const differs = runs.some((run) => run.facts[i][1] !== text);
    return make("tr", { class: differs ? "differs" : "" }, make("th", {}, name), ...runs.map((run) => make("td", {}, run.facts[i][1])));
  });
  return make("table", {}, head, make("tbody", {}, ...lines));
}

function tiles(run) {
  const { last } = run;
  const shown = [
    ["loss", short(last.loss, 4), "last loss"],
    ["val_loss", short(last.val_loss, 4), "last validation loss"],
    ["tokens_per_s", `${short(last.tokens_per_s)} tok/s`, "last speed"],
    ["worst_violation", short(last.worst_violation), "last max violation, worst layer"],
    ["dead_experts", short(last.dead_experts, 6), "dead experts in the last step"],
    ["drop_rate", percent(last.drop_rate), "choices dropped in the last step"],
  ].filter(([name]) => last[name] !== undefined);
  return make("div", { class: "tiles" }, ...shown.map(([, value, what]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, what))));
}

function training() {
  const [loss, validation] = [of("loss", "training"), of("val_loss", "validation")];
  validation.forEach((s) => Object.assign(s, { dots: true, colour: several ? s.colour : 1 }));
  const losses = several
    ? [curvePlot({ title: "Training loss (nats per token)", series: loss }), curvePlot({ title: "Validation loss (nats per token)", series: validation })]
    : [curvePlot({ title: "Loss (nats per token)", series: [...loss, ...validation] })];
  if (!several) losses[0].classList.add("wide");
  return grid(
    ...losses,
    curvePlot({ title: "Gradient norm, before clipping", series: of("grad_norm", "norm"), zero: true }),
    curvePlot({ title: "Learning rate", series: of("lr", "rate"), zero: true }),
    curvePlot({ title: "Speed (tokens/s)", series: of("tokens_per_s", "speed"), unit: "tok/s", zero: true }),
    curvePlot({ title: "Model arithmetic (TFLOP/s)", series: of("tflops", "arithmetic"), unit: "TFLOP/s", zero: true }),
  );
}

function evaluations() {
  const figuresText = (figures) => figures.map(([name, value]) => `${name} ${value === null ? "not a number" : short(value, 5)}`).join(", ");
  const lines = runs.flatMap((run) => run.evaluations.map(([step, name, figures]) =>
    make("tr", {}, make("th", {}, several ? `${run.label}, step ${step}` : `step ${step}`), make("td", {}, name), make("td", {}, figuresText(figures)))));
  return make("section", { class: "card facts evaluations" }, make("table", {}, make("tbody", {}, ...lines)));
}

function violations() {
  const [worst, mean] = [of("worst_violation", "worst layer"), of("mean_violation", "mean over layers")];
  const empty = "no MoE layers were measured in this run";
  if (several) return grid(
    curvePlot({ title: "Max violation, worst layer", series: worst, zero: true, empty }),
    curvePlot({ title: "Max violation, mean over layers", series: mean, zero: true, empty }));
  mean.forEach((s) => Object.assign(s, { colour: 1, dash: 1 }));
  return curvePlot({ title: "Max violation", series: [...worst, ...mean], zero: true, empty });
}

const MAPS = [
  { name: "max_violation", title: "Max violation", unit: "most loaded / mean - 1", note: "Most loaded expert / mean - 1: 0 is even, 1 is an expert with twice its share.", worst: true },
  { name: "load_entropy", title: "Load entropy", unit: "of log(experts)", note: "1 is even, 0 is all load on one expert.", best: 1 },
  { name: "dead_experts", title: "Dead experts", unit: "experts", note: "Experts that no token chose.", worst: true, whole: true, calm: "every expert got tokens in every step" },
  { name: "drop_rate", title: "Drop rate", unit: "of the layer's choices", note: "Choices dropped for lack of capacity, of all choices made.", text: percent, calm: "no choice was dropped" },
  { name: "moved_bytes", title: "Bytes moved", unit: "a step", note: "Bytes of tokens sent between ranks by dispatch and combine in forward, summed over all ranks; backward sends as many again.", text: (v) => `${short(v)}B`, calm: "nothing was sent to other ranks" },
];

// The range of colours in round numbers. Two in a hundred values may lie beyond, so that one outlier does not compress
// the scale; where all values are in the upper half, the range starts there.
function rangeOfMap(values, best, whole) {
  const far = values.flat().filter((v) => v !== null).map((v) => Math.abs(v - best)).sort((a, b) => a - b);
  const top = (!whole && far[Math.floor(far.length * 0.98)]) || far.at(-1);
  if (!top) return { from: 0, to: 1, beyond: false };
  const from = far[0] > top * 0.5 && far[0] < top * 0.9 && !whole ? far[0] : 0;
  const marks = ticks(from, top, 4, whole);
  const step = marks.length > 1 ? marks[1] - marks[0] : (top - from) / 2;
  const to = Math.ceil(top / step - 1e-9) * step;
  return { from: Math.floor(from / step + 1e-9) * step, to, beyond: far.at(-1) > to };
}

function layerMap(run, { name, title, unit, note, worst, best = 0, whole = false, text = (v) => short(v, 4), calm }) {
  const map = run.maps[name];
  const plain = (what) => make("section", { class: "card" }, make("h3", {}, title), make("p", { class: "note" }, note), make("div", { class: "empty" }, what));
  if (!map) return plain("not measured in this run");
  if (calm && map.values.every((column) => column.every((v) => !v))) return plain(calm);
  const count = map.values[0].length;
  const rows = run.layers.length === count ? run.layers : [...Array(count).keys()];
  const columns = { count: map.values.length, first: map.first, last: map.last };
  const joined = map.first.some((first, i) => first !== map.last[i]);
  const { from, to, beyond } = rangeOfMap(map.values, best, whole);
  const at = (t) => Math.abs(best - (from + t * (to - from)));
  const marks = ticks(from, to, 4, whole).map((far) => [(far - from) / (to - from), text(Number(Math.abs(best - far).toPrecision(6)))]);
  if (beyond) marks.at(-1)[1] = (best ? "≤ " : "≥ ") + marks.at(-1)[1];
  return heatMap({
    title, rows, rowTitle: "layer", columns: () => columns,
    note: note + (joined ? (worst ? " Each column shows its worst step." : " Each column shows the mean of its steps.") : ""),
    value: (r, c) => map.values[c][r],
    colours: () => {
      const ramp = along("SEQUENTIAL");
      return (v) => ramp((Math.abs(v - best) - from) / (to - from));
    },
    bar: { at, marks, title: unit },
    say: (r, c) => `layer ${rows[r]}, ${stepsText(map.first[c], map.last[c])}\n${title.toLowerCase()} ${text(map.values[c][r])}`,
  });
}

// The load as multiples of the even share, out of its one-byte codes.
function decode(load) {
  const bytes = Uint8Array.from(atob(load.codes), (letter) => letter.charCodeAt(0));
  const table = Array.from({ length: 256 }, (_, code) => 2 ** (load.low + ((code - 1) / 253) * (load.high - load.low)));
  [table[0], table[255]] = [0, NaN];
  const [L, E] = [load.layers.length, load.experts];
  return (column, layer, expert) => table[bytes[(column * L + layer) * E + expert]];
}

const OCTAVES = 2; // range of the colours: a quarter of the even share to four times it
const shareColours = () => {
  const [ramp, dead] = [along("DIVERGING"), hex(css("--ink"))];
  return (v) => (v === 0 ? dead : ramp(0.5 + Math.log2(v) / (2 * OCTAVES)));
};
const SHARE_BAR = {
  at: (t) => 2 ** ((2 * t - 1) * OCTAVES), title: "× the even share", none: "dead: no token",
  marks: [[0, "≤ ¼"], [0.25, "½"], [0.5, "1"], [0.75, "2"], [1, "≥ 4"]],
};

function loadMaps(run) {
  const { load } = run;
  if (!load) return [make("section", { class: "card" }, make("div", { class: "empty" },
    "router.jsonl holds no load: a run with experts writes one line per observe.router_every steps"))];
  const share = decode(load);
  const say = (c, l, e) => {
    const v = share(c, l, e);
    const much = Number.isNaN(v) ? "not measured" : v === 0 ? "got no token" : `${short(v, 3)} × the even share (${percent(v / load.experts)} of choices)`;
    return `expert ${e} of layer ${load.layers[l]}, ${stepsText(load.first[c], load.last[c])}\n${much}`;
  };
  const last = load.first.length - 1;
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, value: last, "aria-label": "step", id: "step" });
  const told = make("output", { for: "step" });
  const layer = make("select", { "aria-label": "layer" }, ...load.layers.map((n, i) => make("option", { value: i }, `layer ${n}`)));
  const at = () => Number(slider.value);
  const tell = () => (told.textContent = stepsText(load.first[at()], load.last[at()]));
  tell();
  const overview = heatMap({
    title: "Load of every expert at one step", rowTitle: "layer", rows: load.layers, bar: SHARE_BAR, colours: shareColours,
    note: "As a multiple of the even share. The slider sets the step; a click on a layer shows it below.",
    columns: () => ({ count: load.experts, title: "expert" }),
    value: (r, c) => share(at(), r, c),
    say: (r, c) => say(at(), r, c),
    pick: (r) => ((layer.value = r), story.querySelector(".plot").redraw(true)),
    controls: make("div", { class: "controls" }, slider, told),
  });
  const story = heatMap({
    title: "Experts of one layer over the steps", rowTitle: "expert", rows: [...Array(load.experts).keys()],
    note: "As a multiple of the even share.", bar: SHARE_BAR, colours: shareColours,
    columns: () => ({ count: load.first.length, first: load.first, last: load.last }),
    value: (r, c) => share(c, Number(layer.value), r),
    say: (r, c) => say(c, Number(layer.value), r),
    controls: make("div", { class: "controls" }, layer),
  });
  slider.addEventListener("input", () => (tell(), overview.querySelector(".plot").redraw(true)));
  layer.addEventListener("change", () => story.querySelector(".plot").redraw(true));
  return [overview, story];
}

function balanceOf(run) {
  const [violation, ...others] = MAPS.map((map) => layerMap(run, map));
  return [violation, grid(...others), ...loadMaps(run)];
}

function build() {
  document.querySelector("h1").append(runs.map((run) => run.label).join(" · "), " ", make("small", {}, "moefold report"));
  const [maps, operands] = [make("div", {}), make("div", {})];
  const chosen = make("select", { "aria-label": "run" }, ...runs.map((run, i) => make("option", { value: i }, run.label)));
  const show = () => {
    const run = runs[Number(chosen.value)];
    maps.replaceChildren(...balanceOf(run));
    operands.replaceChildren(...fp8Maps(run));
  };
  chosen.addEventListener("change", show);
  document.querySelector("main").replaceChildren(
    facts(),
    ...(several ? [] : [tiles(runs[0])]),
    ...section("Training", "Where several steps share a point, the line is their mean and the band their range.", training()),
    ...(runs.some((run) => run.evaluations.length) ? section("Evaluations", "Results of moefold eval, by the step of the checkpoint.", evaluations()) : []),
    ...section("Balance", "Balance of expert load, over the whole global batch.", violations()),
    ...section("Layers and experts", several ? "One run at a time: " : "Point at a cell for its numbers.", maps),
    ...(runs.some((run) => run.fp8) ? section("FP8 operands", several ? "Of the run chosen above, over all ranks and microbatches." : "Over all ranks and microbatches of a recorded step.", operands) : []),
  );
  if (several) maps.previousElementSibling.append(chosen);
  show();
}

build();
