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
function powerMap(operands, { name, title, note }) {
  return heatMap({ title, note, rowTitle: "layer", shown: () => {
    const { fp8, figures } = operands();
    const logs = figures(name).map((column) => column.map((v) => (v ? Math.log2(v) : null)));
    const known = logs.flat().filter((v) => v !== null);
    if (!known.length) return { empty: "not measured in this run" };
    const ends = extremes(known);
    const from = Math.floor(ends[0]);
    const to = Math.max(Math.ceil(ends[1]), from + 1);
    const ramp = along("SEQUENTIAL");
    return {
      note: note + WORST_PRODUCT, rows: fp8.layers,
      columns: { count: logs.length, first: fp8.first, last: fp8.last },
      value: (r, c) => logs[c][r],
      colours: (v) => ramp((v - from) / (to - from)),
      bar: { at: (t) => from + t * (to - from), marks: ticks(from, to, 4, true).map((v) => [(v - from) / (to - from), `2^${v}`]), title: "powers of two" },
      say: (r, c) => `layer ${fp8.layers[r]}, ${stepsText(fp8.first[c], fp8.last[c])}\n${title.toLowerCase()} ${short(figures(name)[c][r], 4)}`,
    };
  } });
}

function warningsOf({ warnings }) {
  if (!warnings.length) return make("p", { class: "note" }, "No layer's FP8 error grew.");
  return make("ul", { class: "warnings" }, ...warnings.map(([step, text]) => make("li", {}, `step ${step.toLocaleString("en")}: ${text}`)));
}

// run() -> the run chosen
function fp8Maps(run) {
  const kind = make("select", { "aria-label": "operands" }, ...Object.entries(OPERANDS).map(([value, text]) => make("option", { value }, text)));
  const [warnings, none] = [make("div", {}), make("div", { class: "empty" }, "this run has no FP8 products, or none was recorded yet")];
  const nothing = { first: [], last: [], layers: [], warnings: [], values: [] };
  const operands = () => {
    const fp8 = run().fp8 || nothing;
    return { fp8, figures: (name) => fp8.values.map((column) => column[kind.value][name]) };
  };
  const mapOf = (name) => {
    const { fp8, figures } = operands();
    return { layers: fp8.layers, map: fp8.first.length ? { first: fp8.first, last: fp8.last, values: figures(name) } : null };
  };
  const shares = FP8_SHARES.map((spec) => layerMap(mapOf, { ...spec, note: spec.note + WORST_PRODUCT }));
  const found = make("div", {}, warnings, make("div", { class: "controls" }, "operands: ", kind), grid(...shares, ...FP8_POWERS.map((spec) => powerMap(operands, spec))));
  kind.addEventListener("change", () => redrawAll());
  onNews(() => {
    [found.hidden, none.hidden] = [!run().fp8, Boolean(run().fp8)];
    warnings.replaceChildren(warningsOf(run().fp8 || nothing));
  });
  return [none, found];
}
