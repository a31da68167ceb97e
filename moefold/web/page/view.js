// How all curves are drawn: over steps, tokens or time, on a linear or log scale, smoothed or not. The address holds it.

const view = { x: "step", log: false, smooth: 0 };
const MOST_SMOOTH = 0.99;

function readView() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (AXES[given.get("x")]) view.x = given.get("x");
  view.log = given.get("log") === "1";
  view.smooth = Math.min(Math.max(Number(given.get("smooth")) || 0, 0), MOST_SMOOTH);
}
const writeView = () => history.replaceState(null, "", `#${new URLSearchParams({ x: view.x, log: Number(view.log), smooth: view.smooth })}`);

// title: of the axis. over: the same in a sentence. at(run) -> step -> place, or null where the run does not know. unit: of its marks.
const AXES = {
  step: () => ({ title: "step", over: "steps", at: () => (step) => step, unit: 1, say: () => "" }),
  tokens: () => ({ title: "tokens", over: "tokens", at: (run) => (step) => step * run.tokens_per_step, unit: 1, say: (x) => `${short(x, 4)} tokens` }),
  time: (shown) => {
    const longest = Math.max(0, ...shown.map(({ run }) => elapsedEnds(run)?.at(-1) || 0));
    const [unit, name] = [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => longest >= 2 * size) || [1, "s"];
    const at = (run) => (elapsedEnds(run) ? elapsedAt(run.curves.elapsed) : null);
    const missing = "this run did not record the time of its steps";
    return { title: `time of training steps (${name})`, over: "time", at, unit, say: (x) => `${short(x / unit, 4)} ${name}`, missing };
  },
};

// Seconds at the last step of each column.
const elapsedEnds = ({ curves: { elapsed } }) => elapsed && (elapsed.high || elapsed.mean);

// Step -> seconds; between the ends of columns on a line.
function elapsedAt({ first, last, mean, high }) {
  const [steps, ends] = [[first[0] - 1, ...last], [0, ...(high || mean)]];
  return (step) => {
    let [low, top] = [0, steps.length - 1];
    while (low < top) {
      const middle = (low + top) >> 1;
      if (steps[middle] >= step) top = middle;
      else low = middle + 1;
    }
    if (low === 0 || steps[low] <= step) return ends[low];
    const share = (step - steps[low - 1]) / (steps[low] - steps[low - 1]);
    return ends[low - 1] + share * (ends[low] - ends[low - 1]);
  };
}

// An exponential mean over the points so far, without the pull of its start.
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((v) => {
    if (v === null) return null;
    [sum, mass] = [sum * weight + v * (1 - weight), mass * weight + 1 - weight];
    return sum / mass;
  });
}

// A linear or log scale over the values: {y(value) -> 0..1, marks}. Values a log scale lacks are null.
function scaleOf(values, zero) {
  const positive = values.filter((v) => v > 0);
  if (view.log && positive.length) return logScale(positive);
  let [low, high] = extremes(values);
  if (zero) low = Math.min(low, 0);
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const marks = ticks(low, high, 6);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  return { y: (v) => (v - low) / (high - low), marks: ticks(low, high, 6) };
}

const extremes = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

function logScale(positive) {
  let [low, high] = extremes(positive);
  if (low === high) [low, high] = [low / 2, high * 2];
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const digits = to - from > 6 ? [1] : to - from > 2 ? [1, 3] : [1, 2, 5];
  const powers = Array.from({ length: Math.floor(to) - Math.floor(from) + 1 }, (_, i) => Math.floor(from) + i);
  let marks = powers.flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((v) => v >= low && v <= high);
  if (marks.length < 3) marks = ticks(low, high, 5).filter((v) => v > 0);
  return { y: (v) => (v > 0 ? (Math.log10(v) - from) / (to - from) : null), marks };
}

function viewControls() {
  readView();
  const x = make("select", { id: "view-x" }, ...Object.keys(AXES).map((name) => make("option", { value: name }, name)));
  const log = make("input", { id: "view-log", type: "checkbox" });
  const smooth = make("input", { id: "view-smooth", type: "range", min: 0, max: MOST_SMOOTH, step: 0.01 });
  const told = make("output", { for: "view-smooth" });
  const tell = () => (told.textContent = view.smooth ? short(view.smooth, 2) : "none");
  [x.value, log.checked, smooth.value] = [view.x, view.log, view.smooth];
  tell();
  const change = () => {
    Object.assign(view, { x: x.value, log: log.checked, smooth: Number(smooth.value) });
    tell();
    writeView();
    redrawAll();
  };
  x.addEventListener("change", change);
  log.addEventListener("change", change);
  smooth.addEventListener("input", change);
  return make("div", { class: "controls view" }, make("label", {}, "over ", x), make("label", {}, log, " log scale"), make("label", { class: "smooth" }, "smoothing ", smooth, told));
}
