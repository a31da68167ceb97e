// The page: facts of the runs, training curves, balance of expert load, FP8 operands, faults. What is drawn is read from
// `runs` at each drawing: a page that follows runs changes `runs` and calls refresh().

const { name: command, runs } = JSON.parse(document.getElementById("data").textContent);
const several = runs.length > 1;

const fresheners = [];
// Do now, and whenever `runs` has changed.
const onNews = (act) => (fresheners.push(act), act());
function refresh() {
  for (const act of fresheners) act();
  redrawAll();
}
const renewed = (what) => {
  const holder = make("div", {});
  onNews(() => holder.replaceChildren(...what()));
  return holder;
};

const of = (name, label, style = {}) => () =>
  runs.map((run, i) => ({ name: several ? run.label : label, run, curve: run.curves[name], colour: i, dash: several ? i : 0, ...style }));
const both = (one, other) => () => [...one(), ...other()];
const grid = (...cards) => make("div", { class: "grid" }, ...cards);
const section = (title, text, ...parts) => [make("h2", {}, title), make("p", {}, text), ...parts];

function facts() {
  const known = runs.filter((run) => run.facts.length);
  if (!known.length) return [];
  const card = make("section", { class: "card facts" }, several ? factsTable(known) : factsList(known[0]));
  for (const run of known.filter((run) => run.strange.length))
    card.append(make("p", { class: "note" }, `${run.label}: config.yaml has keys that this version does not know: ${run.strange.join(", ")}`));
  return [card];
}

const factsList = (run) => make("dl", {}, ...run.facts.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));

function factsTable(known) {
  const head = make("thead", {}, make("tr", {}, make("th"), ...known.map((run) => make("th", {}, run.label))));
  const lines = known[0].facts.map(([name, text], i) => {
    const differs = known.some((run) => run.facts[i][1] !== text);
    return make("tr", { class: differs ? "differs" : "" }, make("th", {}, name), ...known.map((run) => make("td", {}, run.facts[i][1])));
  });
  return make("table", {}, head, make("tbody", {}, ...lines));
}

function tiles({ last }) {
  const shown = [
    ["loss", short(last.loss, 4), "last loss"],
    ["val_loss", short(last.val_loss, 4), "last validation loss"],
    ["tokens_per_s", `${short(last.tokens_per_s)} tok/s`, "last speed"],
    ["worst_violation", short(last.worst_violation), "last max violation, worst layer"],
    ["dead_experts", short(last.dead_experts, 6), "dead experts in the last step"],
    ["drop_rate", percent(last.drop_rate), "choices dropped in the last step"],
    ["memory_gib", `${short(last.memory_gib)} GiB`, "peak memory of the first rank"],
  ].filter(([name]) => last[name] !== undefined);
  return [make("div", { class: "tiles" }, ...shown.map(([, value, what]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, what))))];
}

function training() {
  const validation = { dots: true, ...(several ? {} : { colour: 1 }) };
  const losses = several
    ? [curvePlot({ title: "Training loss (nats per token)", series: of("loss") }), curvePlot({ title: "Validation loss (nats per token)", series: of("val_loss", "", validation) })]
    : [curvePlot({ title: "Loss (nats per token)", series: both(of("loss", "training"), of("val_loss", "validation", validation)) })];
  if (!several) losses[0].classList.add("wide");
  return grid(
    ...losses,
    curvePlot({ title: "Gradient norm, before clipping", series: of("grad_norm", "norm"), zero: true }),
    curvePlot({ title: "Learning rate", series: of("lr", "rate"), zero: true }),
    curvePlot({ title: "Speed (tokens/s)", series: of("tokens_per_s", "speed"), unit: "tok/s", zero: true }),
    curvePlot({ title: "Model arithmetic (TFLOP/s)", series: of("tflops", "arithmetic"), unit: "TFLOP/s", zero: true }),
    curvePlot({ title: "Peak memory of the first rank (GiB)", series: of("memory_gib", "memory"), unit: "GiB", zero: true }),
  );
}

function gpuCurves() {
  return grid(
    curvePlot({ title: "Power (W)", series: of("gpu_watts", "power"), unit: "W", zero: true }),
    curvePlot({ title: "Temperature (°C)", series: of("gpu_celsius", "temperature"), unit: "°C" }),
    curvePlot({ title: "Time with a kernel running", series: of("gpu_busy", "busy"), unit: "of the time", zero: true }),
    curvePlot({ title: "Clock (MHz)", series: of("gpu_mhz", "clock"), unit: "MHz", zero: true }),
  );
}

function evaluations() {
  const figuresText = (figures) => figures.map(([name, value]) => `${name} ${value === null ? "not a number" : short(value, 5)}`).join(", ");
  const lines = runs.flatMap((run) => run.evaluations.map(([step, name, figures]) =>
    make("tr", {}, make("th", {}, several ? `${run.label}, step ${step}` : `step ${step}`), make("td", {}, name), make("td", {}, figuresText(figures)))));
  return make("section", { class: "card facts evaluations" }, make("table", {}, make("tbody", {}, ...lines)));
}

function violations() {
  const empty = "no MoE layers were measured in this run";
  if (several) return grid(
    curvePlot({ title: "Max violation, worst layer", series: of("worst_violation"), zero: true, empty }),
    curvePlot({ title: "Max violation, mean over layers", series: of("mean_violation"), zero: true, empty }));
  const mean = of("mean_violation", "mean over layers", { colour: 1, dash: 1 });
  return curvePlot({ title: "Max violation", series: both(of("worst_violation", "worst layer"), mean), zero: true, empty });
}

function rankRows() {
  if (several) return grid(
    curvePlot({ title: "Largest rank / mean, with clones", series: of("rank_rows"), zero: true }),
    curvePlot({ title: "Largest rank / mean, as it would be without", series: of("rank_rows_without"), zero: true }));
  const without = of("rank_rows_without", "without clones", { colour: 1, dash: 1 });
  return curvePlot({ title: "Largest rank / mean", series: both(of("rank_rows", "with clones"), without), zero: true });
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

// source(name) -> {map: {first, last, values}, layers}
function layerMap(source, { name, title, unit, note, worst, best = 0, whole = false, text = (v) => short(v, 4), calm }) {
  return heatMap({ title, note, rowTitle: "layer", shown: () => {
    const { map, layers } = source(name);
    if (!map) return { empty: "not measured in this run" };
    if (calm && map.values.every((column) => column.every((v) => !v))) return { empty: calm };
    const count = map.values[0].length;
    const rows = layers.length === count ? layers : [...Array(count).keys()];
    const joined = map.first.some((first, i) => first !== map.last[i]);
    const { from, to, beyond } = rangeOfMap(map.values, best, whole);
    const marks = ticks(from, to, 4, whole).map((far) => [(far - from) / (to - from), text(Number(Math.abs(best - far).toPrecision(6)))]);
    if (beyond) marks.at(-1)[1] = (best ? "≤ " : "≥ ") + marks.at(-1)[1];
    const ramp = along("SEQUENTIAL");
    return {
      rows, columns: { count: map.values.length, first: map.first, last: map.last },
      note: note + (joined ? (worst ? " Each column shows its worst step." : " Each column shows the mean of its steps.") : ""),
      value: (r, c) => map.values[c][r],
      colours: (v) => ramp((Math.abs(v - best) - from) / (to - from)),
      bar: { at: (t) => Math.abs(best - (from + t * (to - from))), marks, title: unit },
      say: (r, c) => `layer ${rows[r]}, ${stepsText(map.first[c], map.last[c])}\n${title.toLowerCase()} ${text(map.values[c][r])}`,
    };
  } });
}

// The load as multiples of the even share, out of the one-byte codes of a column, which are read when asked for.
function decode(load) {
  const [L, E] = [load.layers.length, load.experts];
  load.shares ||= [];
  const column = (c) => {
    const bytes = Uint8Array.from(atob(load.codes[c]), (letter) => letter.charCodeAt(0));
    const table = Array.from({ length: 256 }, (_, code) => 2 ** (load.low[c] + ((code - 1) / 253) * (load.high[c] - load.low[c])));
    [table[0], table[255]] = [0, NaN];
    return { bytes, table };
  };
  return (c, layer, expert) => {
    const { bytes, table } = (load.shares[c] ||= column(c));
    return table[bytes[layer * E + expert]];
  };
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
const NO_LOAD = "router.jsonl holds no load: a run with experts writes one line per observe.router_every steps";

// run() -> the run chosen
function loadMaps(run) {
  const say = (load, c, l, e) => {
    const v = decode(load)(c, l, e);
    const much = Number.isNaN(v) ? "not measured" : v === 0 ? "got no token" : `${short(v, 3)} × the even share (${percent(v / load.experts)} of choices)`;
    return `expert ${e} of layer ${load.layers[l]}, ${stepsText(load.first[c], load.last[c])}\n${much}`;
  };
  const slider = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0, "aria-label": "step", id: "step" });
  const told = make("output", { for: "step" });
  const layer = make("select", { "aria-label": "layer" });
  const at = () => Number(slider.value);
  const tell = () => (told.textContent = run().load ? stepsText(run().load.first[at()], run().load.last[at()]) : "");
  const overview = heatMap({
    title: "Load of every expert at one step", rowTitle: "layer",
    note: "As a multiple of the even share. The slider sets the step; a click on a layer shows it below.",
    shown: () => {
      const { load } = run();
      if (!load) return { empty: NO_LOAD };
      const share = decode(load);
      return {
        rows: load.layers, columns: { count: load.experts, title: "expert" }, bar: SHARE_BAR, colours: shareColours(),
        value: (r, c) => share(at(), r, c), say: (r, c) => say(load, at(), r, c),
      };
    },
    pick: (r) => ((layer.value = r), story.querySelector(".plot").redraw(true)),
    controls: make("div", { class: "controls" }, slider, told),
  });
  const story = heatMap({
    title: "Experts of one layer over the steps", rowTitle: "expert", note: "As a multiple of the even share.",
    shown: () => {
      const { load } = run();
      if (!load) return { empty: NO_LOAD };
      const share = decode(load);
      return {
        rows: [...Array(load.experts).keys()], columns: { count: load.first.length, first: load.first, last: load.last },
        bar: SHARE_BAR, colours: shareColours(),
        value: (r, c) => share(c, Number(layer.value), r), say: (r, c) => say(load, c, Number(layer.value), r),
      };
    },
    controls: make("div", { class: "controls" }, layer),
  });
  slider.addEventListener("input", () => (tell(), overview.querySelector(".plot").redraw(true)));
  layer.addEventListener("change", () => story.querySelector(".plot").redraw(true));
  onNews(() => {
    const load = run().load || { first: [], layers: [] };
    const newest = Math.max(0, load.first.length - 1);
    const follows = at() === Number(slider.max); // a slider at the newest step stays there
    slider.max = newest;
    if (follows) slider.value = newest;
    tell();
    const chosen = layer.value;
    layer.replaceChildren(...load.layers.map((n, i) => make("option", { value: i }, `layer ${n}`)));
    if (chosen && Number(chosen) < load.layers.length) layer.value = chosen;
  });
  return [overview, story];
}

function balanceOf(run) {
  const source = (name) => ({ map: run().maps[name], layers: run().layers });
  const [violation, ...others] = MAPS.map((map) => layerMap(source, map));
  return [violation, grid(...others), ...loadMaps(run)];
}

const faultsOf = () => runs.flatMap(({ label, faults }) => faults.map(({ step, text }) => `${several ? `${label}, ` : ""}step ${step.toLocaleString("en")}: ${text}`));

// A section that is there when `needed()`.
function sectionWhen(needed, parts) {
  const holder = make("div", {}, ...parts);
  onNews(() => (holder.hidden = !needed()));
  return holder;
}

function build() {
  document.querySelector("h1").append(runs.map((run) => run.label).join(" · "), " ", make("small", {}, command));
  const chosen = make("select", { "aria-label": "run" }, ...runs.map((run, i) => make("option", { value: i }, run.label)));
  const run = () => runs[Number(chosen.value)];
  chosen.addEventListener("change", refresh);
  const maps = make("div", {}, ...balanceOf(run));
  document.querySelector("main").replaceChildren(
    renewed(facts),
    ...(several ? [] : [renewed(() => tiles(runs[0]))]),
    sectionWhen(() => faultsOf().length, section("Faults and restarts", "As the run's files have them, the last ones.",
      renewed(() => [make("ul", { class: "warnings" }, ...faultsOf().map((text) => make("li", {}, text)))]))),
    ...section("Training", "Where several steps share a point, the line is their mean and the band their range.", viewControls(), training()),
    sectionWhen(() => runs.some((run) => run.curves.gpu_watts), section("GPU", "Of the first rank, about once a second, as its driver measures it.", gpuCurves())),
    sectionWhen(() => runs.some((run) => run.evaluations.length), section("Evaluations", "Results of moefold eval, by the step of the checkpoint.", renewed(() => [evaluations()]))),
    ...section("Balance", "Balance of expert load, over the whole global batch.", violations()),
    sectionWhen(() => runs.some((run) => run.curves.rank_rows), section("Clones", "Rows of experts on the largest rank over the mean of ranks, in the worst layer.", rankRows())),
    ...section("Layers and experts", several ? "One run at a time: " : "Point at a cell for its numbers.", maps),
    sectionWhen(() => runs.some((run) => run.fp8), section("FP8 operands", several ? "Of the run chosen above, over all ranks and microbatches." : "Over all ranks and microbatches of a recorded step.", ...fp8Maps(run))),
  );
  if (several) maps.previousElementSibling.append(chosen);
}

build();
redrawAll(false); // at once: a page in the background gets no frame, and the watcher waits for one
