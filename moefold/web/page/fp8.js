// Statistics of FP8 operands: maps of layers x steps, one kind of operand at a time, and the warnings.

const OPERANDS = { activation: "activations", gradient: "gradients", weight: "weights" };
const FP8_SHARES = [
  { name: "error", title: "Relative error", unit: "of the operand's norm", note: "Norm of the difference between an operand and its FP8 copy, of the operand's norm. About 2.6 % in E4M3 where the values fit their scales.", text: percent },
  { name: "underflow", title: "Underflow", unit: "of the values", note: "Values other than zero that become zero.", text: percent, calm: "no value became zero" },
  { name: "saturated", title: "Saturation", unit: "of the values", note: "Values beyond the range of their scale, which are clamped. Delayed scales alone allow it.", text: percent, calm: "no value was beyond its scale" },
];
const FP8_POWERS = [
  { name: "amax", title: "Largest magnitude", note: "Of all values of the operand." },
  { name: "scale_low", title: "Smallest scale", note: "Of all values other than zero." },
  { name: "scale_high", title: "Largest scale", note: "Of all values other than zero." },
];
const WORST_PRODUCT = " Each layer shows its worst product, each column its worst step.";

// Values on a scale of powers of two.
function powerMap(fp8, figures, { name, title, note }) {
  const logs = figures[name].map((column) => column.map((v) => (v ? Math.log2(v) : null)));
  const known = logs.flat().filter((v) => v !== null);
  const head = [make("h3", {}, title), make("p", { class: "note" }, note)];
  if (!known.length) return make("section", { class: "card" }, ...head, make("div", { class: "empty" }, "not measured in this run"));
  const ends = known.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const from = Math.floor(ends[0]);
  const to = Math.max(Math.ceil(ends[1]), from + 1);
  return heatMap({
    title, note: note + WORST_PRODUCT, rows: fp8.layers, rowTitle: "layer",
    columns: () => ({ count: logs.length, first: fp8.first, last: fp8.last }),
    value: (r, c) => logs[c][r],
    colours: () => {
      const ramp = along("SEQUENTIAL");
      return (v) => ramp((v - from) / (to - from));
    },
    bar: { at: (t) => from + t * (to - from), marks: ticks(from, to, 4, true).map((v) => [(v - from) / (to - from), `2^${v}`]), title: "powers of two" },
    say: (r, c) => `layer ${fp8.layers[r]}, ${stepsText(fp8.first[c], fp8.last[c])}\n${title.toLowerCase()} ${short(figures[name][c][r], 4)}`,
  });
}

function warningsOf({ warnings }) {
  if (!warnings.length) return make("p", { class: "note" }, "No layer's FP8 error grew.");
  return make("ul", { class: "warnings" }, ...warnings.map(([step, text]) => make("li", {}, `step ${step.toLocaleString("en")}: ${text}`)));
}

function fp8Maps(run) {
  const { fp8 } = run;
  if (!fp8) return [make("div", { class: "empty" }, "this run has no FP8 products, or none was recorded yet")];
  const kind = make("select", { "aria-label": "operands" }, ...Object.entries(OPERANDS).map(([value, text]) => make("option", { value }, text)));
  const maps = make("div", {});
  const show = () => {
    const figures = fp8.maps[kind.value];
    const asMaps = Object.fromEntries(Object.entries(figures).map(([name, values]) => [name, { first: fp8.first, last: fp8.last, values }]));
    const shares = FP8_SHARES.map((spec) => layerMap({ maps: asMaps, layers: fp8.layers }, { ...spec, note: spec.note + WORST_PRODUCT }));
    maps.replaceChildren(grid(...shares, ...FP8_POWERS.map((spec) => powerMap(fp8, figures, spec))));
  };
  kind.addEventListener("change", show);
  show();
  return [warningsOf(fp8), make("div", { class: "controls" }, "operands: ", kind), maps];
}
