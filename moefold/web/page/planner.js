// The page: one request, held in the address; the planner's answer; and the search for better layouts.

const powers = (from, to) => Array.from({ length: Math.round(Math.log2(to / from)) + 1 }, (_, i) => from * 2 ** i);
const DEGREES = ["parallel.tp", "parallel.cp", "parallel.pp", "pipeline.vpp", "parallel.ep", "parallel.etp"];
const OPEN = [...DEGREES, "mbs", "overlap", "recompute"]; // what a search chooses
const DEFAULT = {
  model: "qwen3-30b-a3b", gpu: "h100", gpus: "16", precision: "bf16", seq: "4096", mbs: "2",
  "parallel.tp": "1", "parallel.cp": "1", "parallel.pp": "4", "pipeline.vpp": "4", "parallel.ep": "4", "parallel.etp": "1",
  overlap: "false", recompute: "", offload: "", sharding: "zero", graphs: "none", dispatcher: "auto", "pipeline.schedule": "1f1b", tokens: "1e12", price: "",
};
const OF_PAGE = ["price"]; // keys that the planner does not know
const asked = (request) => Object.fromEntries(Object.entries(request).filter(([key]) => !OF_PAGE.includes(key)));

// The address holds every key of the request, also keys without a control.
function fromAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const whole = { ...DEFAULT, ...given };
  return { gbs: String(8 * (Number(whole.gpus) || 16)), ...whole };
}
const withoutModelKeys = (request) => Object.fromEntries(Object.entries(request).filter(([key]) => !key.startsWith("model.")));
const toAddress = (state) => `#${new URLSearchParams(state)}`;

let state = fromAddress(); // the last request with no slider in motion
let shown = state; // the request on the page: while a thumb is dragged, ahead of `state`
let answer = null;
let found = null; // by a search

// Asks the server. A question of one kind cancels the one before.
const asking = {};
async function ask(kind, path, body) {
  asking[kind]?.abort();
  const mine = (asking[kind] = new AbortController());
  try {
    const response = await fetch(path, { method: "POST", signal: mine.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked(body)) });
    const reply = await response.json().catch(() => ({ problems: [`the server answered ${response.status}; its terminal shows the error`] }));
    if (asking[kind] !== mine) return null;
    return response.ok ? reply : { problems: reply.problems || [`the server answered ${response.status}`], refused: true };
  } catch (error) {
    if (error.name === "AbortError" || asking[kind] !== mine) return null;
    return { problems: ["the server does not answer: is moefold web still running?"], refused: true };
  }
}

// A control was moved. While a thumb is dragged, other controls follow from `state`.
let waiting = 0;
function moved(key, value, final) {
  clearTimeout(waiting);
  const before = key === "model" ? withoutModelKeys(state) : state; // those were of another model
  const wanted = key === "other" ? withOthers(state, value) : { ...before, [key]: String(value) };
  const card = cards.find((each) => each.name === wanted.gpu);
  const lacks = key === "gpu" && card && !card.precisions.includes(wanted.precision);
  if (lacks) wanted.precision = card.precisions.at(-1) === "bf16" ? "bf16" : card.precisions.find((each) => each !== "bf16") || "bf16";
  waiting = setTimeout(() => settle(wanted, { hold: key, final, mend: true }), final ? 0 : 120);
}

// Set controls, address and charts to a request; where it breaks rules, to the nearest legal one.
async function settle(wanted, { hold = "", final = false, mend = false } = {}) {
  results.classList.add("waits");
  const legal = await ask("legal", "/legal", { ...wanted, hold });
  if (!legal) return;
  let followed = [];
  if (mend && legal.changes) {
    followed = Object.entries(legal.changes).map(([key, value]) => `${nameOf(key)} ${wanted[key]} → ${value}`);
    wanted = { ...wanted, ...Object.fromEntries(Object.entries(legal.changes).map(([key, value]) => [key, String(value)])) };
  }
  if (mend && wanted.precision !== state.precision && hold === "gpu") followed.push(`precision ${state.precision} → ${wanted.precision}`);
  const broken = mend && legal.changes ? [] : legal.problems;
  if (final) commit(wanted);
  shown = wanted;
  showControls(wanted, legal.values, broken);
  const fresh = legal.refused ? legal : await ask("answer", "/answer", { ...wanted, search: false });
  if (!fresh) return;
  results.classList.remove("waits");
  if (fresh.refused) showRefused(wanted, fresh.problems, broken, legal.changes);
  else showAnswer(fresh, followed, final);
}

function commit(wanted) {
  state = wanted;
  if (toAddress(wanted) !== location.hash) history.pushState(null, "", toAddress(wanted));
}

function returned() {
  state = fromAddress();
  settle(state);
}

// Controls
const panel = []; // all of them
function group(title, ...controls) {
  panel.push(...controls);
  return make("fieldset", {}, make("legend", {}, title), ...controls.map((each) => each.element));
}
const degree = (key, label) => slider(key, label, doc(key).split(":")[0], moved);
const selected = (key, label) => picker(key, label, keys[key].choices.map((name) => [name, name]), moved);
const groups = [
  group("Model and cluster",
    picker("model", "Model", models.map((m) => [m.name, `${m.name} (${short(m.parameters)}, ${short(m.active)} active)`]), moved),
    picker("gpu", "GPU", cards.map((c) => [c.name, `${c.name.toUpperCase()} (${c.about})`]), moved),
    slider("gpus", "GPUs", "", moved, { values: powers(1, 16384), free: true, max: 1e6 }),
    picker("precision", "Precision", [], moved),
    field("tokens", "Token budget", "for days and cost", { type: "text", inputmode: "numeric" }, moved),
    field("price", "Own price", "dollars a GPU hour; empty: the GPU's", { type: "number", min: 0, step: "any" }, moved)),
  group("Batch",
    slider("seq", "Sequence length", "tokens", moved, { values: powers(1024, 1048576), free: true }),
    slider("mbs", "Microbatch", "sequences of one microbatch of a rank", moved),
    slider("gbs", "Global batch", "sequences of a step", moved, { free: true })),
  group("Layout", degree("parallel.tp", "tp"), degree("parallel.cp", "cp"), degree("parallel.pp", "pp"), degree("pipeline.vpp", "vpp"),
    degree("parallel.ep", "ep"), degree("parallel.etp", "etp"), selected("pipeline.schedule", "Pipeline schedule"),
    tick("overlap", "Overlap", "expert communication overlaps with another microbatch's compute", moved)),
  group("Memory and speed",
    several("recompute", "Recompute", { ...regions, ...presets }, moved), several("offload", "Offload", regions, moved),
    selected("sharding", "Sharding over replicas"), selected("graphs", "CUDA graphs"), selected("dispatcher", "Dispatcher"),
    field("other", "Other keys", "as optim.moments=bf16 stack=megatron", { type: "text" }, moved)),
];
const nameOf = (key) => panel.find((each) => each.key === key)?.label || key;
const others = (wanted) => Object.entries(wanted).filter(([key]) => !panel.some((each) => each.key === key));
function withOthers(before, text) {
  const known = Object.fromEntries(Object.entries(before).filter(([key]) => panel.some((each) => each.key === key)));
  const given = text.split(/\s+/).filter(Boolean).map((word) => [word.split("=")[0], word.split("=").slice(1).join("=")]);
  return { ...known, ...Object.fromEntries(given) };
}

function showControls(wanted, values, broken) {
  const card = cards.find((each) => each.name === wanted.gpu);
  panel.find((each) => each.key === "precision").offer((card ? card.precisions : ["bf16"]).map((name) => [name, name]));
  for (const each of panel) {
    if (values?.[each.key] && each.offer) each.offer(values[each.key]);
    each.show(each.key === "other" ? others(wanted).map(([key, value]) => `${key}=${value}`).join(" ") : wanted[each.key]);
  }
  showProblems(broken);
}

function showProblems(problems) {
  for (const each of panel) each.complain(problems.filter((problem) => concerns(problem, each)).map((problem) => problem.text || problem));
}

// A problem of a rule names its keys; one of a value begins with it.
const concerns = (problem, { key, label }) =>
  problem.keys ? problem.keys.includes(key) : problem.startsWith(`${key} = `) || problem.startsWith(`no ${label} "`) || problem.startsWith(`no ${key} "`);

// Results
const results = document.getElementById("results");
const [said, brief] = [document.getElementById("said"), document.getElementById("brief")];
const verdict = make("section", { class: "card verdict", "aria-label": "Verdict" });
const [memory, walls, pipeline] = [memoryChart(), wallsChart(), timelineChart()];
const front = frontChart(take);
const layouts = make("section", { class: "card", hidden: "" });
const charts = [memory, walls, pipeline];
const watchers = []; // called with every answer that is shown

const count = (x) => (x < 1e6 ? Number(x.toPrecision(4)).toLocaleString("en") : short(x, 4));
const tile = (big, small, band, grey) => make("div", { class: grey ? "tile grey" : "tile" }, make("b", {}, big), make("span", {}, small), make("span", { class: "range" }, band));
const missing = (layout) => (layout.not_in_trainer.length ? [`Not in the trainer yet: ${layout.not_in_trainer.join("; ")}.`] : []);
const launchBlock = (files) => Object.entries(files).flatMap(([name, text]) => [make("div", { class: "head" }, make("h3", {}, name), saver(name, text)), make("pre", {}, text)]);

// A button that saves a text as a file.
function saver(name, text) {
  const button = make("button", { type: "button", "aria-label": `save ${name}` }, "save");
  button.addEventListener("click", () => {
    const place = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    make("a", { href: place, download: name }).click();
    URL.revokeObjectURL(place);
  });
  return button;
}

// What is expected of a figure that grows with the speed, or shrinks with it: the error band of the speed carries over.
const bandOf = ({ error_band: { low, high }, tokens_per_s_per_gpu: speed }, text) => ({
  rising: (x) => `${text(x * (low / speed))} to ${text(x * (high / speed))}`,
  falling: (x) => `${text(x * (speed / high))} to ${text(x * (speed / low))}`,
});
const dollarsOf = ({ gpu_hours, dollars }) => (Number(shown.price) > 0 ? gpu_hours * Number(shown.price) : dollars);

function showAnswer(fresh, followed, final) {
  answer = fresh;
  const room = `${fresh.memory_gib.toFixed(1)} of ${fresh.memory_limit_gib.toFixed(1)} GiB`;
  const { budget, layout } = fresh;
  const word = fresh.fits ? "Fits" : "Does not fit";
  verdict.className = `card verdict ${fresh.fits ? "good" : "bad"}`;
  verdict.replaceChildren(
    make("h2", {}, make("b", {}, `${fresh.fits ? "✓" : "✗"} ${word}`), `: ${room} on the fullest rank`),
    make("div", { class: "tiles" },
      tile(count(fresh.tokens_per_s_per_gpu), "tokens/s a GPU", bandOf(fresh, count).rising(fresh.tokens_per_s_per_gpu)),
      tile(count(fresh.tflops_per_gpu), "TFLOP/s a GPU", bandOf(fresh, count).rising(fresh.tflops_per_gpu)),
      tile(share(fresh.mfu), `MFU (${layout.precision} peak)`, bandOf(fresh, share).rising(fresh.mfu)),
      tile(seconds(fresh.step_s), `a step of ${short(fresh.tokens_per_step)} tokens`, bandOf(fresh, seconds).falling(fresh.step_s)),
      tile(`${short(budget.days)} days`, `for ${short(budget.tokens)} tokens`, bandOf(fresh, short).falling(budget.days), !fresh.fits),
      tile(`$${short(dollarsOf(budget))}`, `${short(budget.gpu_hours)} GPU hours`, `$${bandOf(fresh, short).falling(dollarsOf(budget))}`, !fresh.fits)),
    ...missing(fresh).map((text) => make("p", { class: "problem" }, text)),
    ...(fresh.fits ? [] : [make("p", { class: "remedies" }, `What fits: ${fresh.remedies.join(", or ") || "another layout; see the search"}.`)]),
    ...(followed.length ? [make("p", { class: "followed" }, `Changed to keep the layout legal: ${followed.join(", ")}.`)] : []),
    ...bandAndAdvice(fresh),
    make("p", { class: "note" }, `dp ${layout.dp}, edp ${layout.edp}, ${layout.microbatches} microbatches of ${layout.mbs}. Dispatcher ${fresh.dispatcher}.`),
    make("div", { class: "row" }, pinButton()),
    make("details", {}, make("summary", {}, "as a command"), make("code", {}, command(fresh))),
    ...(fresh.launch ? [make("details", { class: "launch" }, make("summary", {}, "to launch"), ...launchBlock(fresh.launch))] : []),
  );
  brief.className = fresh.fits ? "good" : "bad";
  brief.textContent = `${fresh.fits ? "✓ fits" : "✗ does not fit"} · ${room} · ${short(fresh.tokens_per_s_per_gpu, 3)} tok/s`;
  if (final) said.textContent = `${word}: ${room}, ${short(fresh.tokens_per_s_per_gpu, 3)} tokens per second and GPU. ${followed.join(", ")}`;
  const { microbatches } = fresh.timeline;
  const part = microbatches < layout.microbatches ? `Of ${layout.microbatches} microbatches, ${microbatches} are drawn. ` : "";
  pipeline.say(layout.pp > 1 ? `${part}${layout.schedule}, stages ${layout.stages}. Numbers are microbatches; later stages of a rank are lighter; a box in two halves is a pair.` : "Without pipeline parallelism there is one rank, and no bubble.");
  for (const each of charts) (each.hidden = false), each.update(fresh);
  if (found) compare();
  for (const watch of watchers) watch();
}

// The error band of the speed, a warning where plans for the GPU are known to be off, and the advice.
function bandAndAdvice({ error_band, advice }) {
  const speed = `${count(error_band.low)} to ${count(error_band.high)} tokens/s a GPU`;
  return [
    make("p", { class: "band" }, `Expect ${speed}: ${error_band.text}.`),
    ...(error_band.warning ? [make("p", { class: "problem" }, `Warning: ${error_band.warning}.`)] : []),
    make("details", { class: "advice" }, make("summary", {}, `advice (${advice.length})`),
      make("ul", {}, ...advice.map((each) => make("li", {}, `${each.about}: ${each.text} (${each.source})`)))),
  ];
}

// The search's results beside the layout above, which may have another model or cluster since.
function compare() {
  const same = Object.entries(found.asked).every(([key, value]) => key === "tokens" || shown[key] === value);
  layouts.querySelector("h2").textContent = `Best layouts for ${found.name} on ${found.gpus} x ${found.gpu}${same ? "" : " (settings have changed since)"}`;
  front.update({ found, now: same ? answer : null });
  for (const row of layouts.querySelectorAll("tbody tr")) {
    const taken = same && Object.entries(requestOf(row.layout)).every(([key, value]) => shown[key] === value);
    row.classList.toggle("now", taken);
    row.querySelector("button").setAttribute("aria-pressed", taken);
  }
}

// The same question for the command line.
function command({ name, gpus }) {
  const quoted = (value) => (/^[\w.,+-]+$/.test(value) ? value : `'${value.replaceAll("'", "'\\''")}'`);
  const flags = { overlap: "overlap" };
  const flag = ([key, value]) => (flags[key] ? `--${value === "true" ? "" : "no-"}${flags[key]}` : `--${key} ${quoted(value)}`);
  return `moefold plan ${name} --gpus ${gpus} ${Object.entries(asked(shown)).filter(([key, value]) => !["model", "gpus"].includes(key) && value !== "").map(flag).join(" ")}`;
}

function showRefused(wanted, problems, broken, changes) {
  answer = null;
  const legal = Object.entries(changes || {});
  const nearest = make("button", { type: "button", class: "main" }, `take the nearest: ${legal.map(([key, value]) => `${nameOf(key)} ${value}`).join(", ")}`);
  nearest.addEventListener("click", () => settle({ ...wanted, ...Object.fromEntries(legal.map(([key, value]) => [key, String(value)])) }, { final: true }));
  verdict.className = "card verdict bad";
  verdict.replaceChildren(
    make("h2", {}, make("b", {}, "✗ Not possible")),
    make("ul", {}, ...problems.map((text) => make("li", {}, text))),
    ...(legal.length ? [make("div", { class: "row" }, nearest)] : []),
  );
  brief.className = "bad";
  brief.textContent = "✗ not possible: see below";
  said.textContent = `Not possible. ${problems.join(" ")}`;
  showProblems([...broken, ...problems]);
  for (const each of charts) each.hidden = true;
  for (const watch of watchers) watch();
}

// The search
const find = make("button", { type: "button", class: "main" }, "Find the best layouts");
const cancel = make("button", { type: "button", hidden: "" }, "cancel");
const going = make("progress", { "aria-label": "searching", hidden: "" });
const clock = make("span", { class: "doc" });

async function search() {
  const fixed = Object.fromEntries(Object.entries(asked(shown)).filter(([key]) => !OPEN.includes(key)));
  const began = Date.now();
  const tick = setInterval(() => (clock.textContent = `searching, ${Math.round((Date.now() - began) / 1000)} s`), 250);
  busy(true);
  const reply = await ask("search", "/answer", { ...fixed, search: true });
  clearInterval(tick);
  clock.textContent = "";
  busy(false);
  if (!reply) return;
  if (reply.refused) return showNothingFound(reply.problems);
  found = { ...reply, asked: fixed };
  showFound();
  said.textContent = `${reply.layouts.length} layouts found, of ${reply.searched} tried.`;
  layouts.scrollIntoView({ block: "nearest" });
}

function busy(yes) {
  find.disabled = yes;
  cancel.hidden = going.hidden = !yes;
}

function showNothingFound(problems) {
  found = null;
  front.hidden = true;
  layouts.hidden = false;
  layouts.replaceChildren(make("h2", {}, "No layout found"), ...problems.map((text) => make("p", { class: "problem" }, text)));
  said.textContent = `No layout found. ${problems.join(" ")}`;
  layouts.scrollIntoView({ block: "nearest" });
}

function showFound() {
  const head = ["layout", "tokens/s a GPU", "GiB", "s/step", "TFLOP/s", "MFU"];
  const rows = found.layouts.map((each) => {
    const button = make("button", { type: "button" }, each.text);
    button.addEventListener("click", () => take(each.layout));
    const cells = [count(each.tokens_per_s_per_gpu), each.memory_gib.toFixed(1), short(each.step_s, 4), count(each.tflops_per_gpu), share(each.mfu)];
    const row = make("tr", {}, make("th", { scope: "row" }, button), ...cells.map((cell) => make("td", {}, cell)), make("td", { class: "text" }, [each.layout.recompute.join(", ") || "–", ...missing(each)].join(". ")));
    row.layout = each.layout;
    return row;
  });
  const left = found.rejected.map((each) => make("li", {}, `${each.count} for ${each.reason}, such as: ${each.example}`));
  layouts.replaceChildren(
    make("div", { class: "head" }, make("h2", {})),
    make("p", { class: "note" }, `The best of ${found.searched.toLocaleString("en")} layouts tried. A click on a layout applies it. Sequence length, global batch, precision, sharding and graphs are not searched.`),
    make("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Best layouts" }, make("table", { class: "numbers" }, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)), make("th", { scope: "col", class: "text" }, "recompute"))), make("tbody", {}, ...rows))),
    ...(left.length ? [make("details", {}, make("summary", {}, "refused layouts and reasons"), make("ul", {}, ...left))] : []),
  );
  layouts.hidden = front.hidden = false;
  compare();
}

// A layout of the search becomes the request.
const requestOf = (layout) => ({
  ...Object.fromEntries(DEGREES.map((key) => [key, String(layout[key.split(".")[1]])])),
  mbs: String(layout.mbs), overlap: String(layout.overlap), recompute: layout.recompute.join(","),
});
function take(layout) {
  settle({ ...shown, ...requestOf(layout) }, { final: true });
  verdict.scrollIntoView({ block: "nearest" });
}

function build() {
  const form = document.getElementById("controls");
  form.replaceChildren(make("div", { class: "row" }, find, cancel, going, clock), ...groups);
  groups[0].append(ownModel);
  form.addEventListener("submit", (event) => event.preventDefault());
  find.addEventListener("click", search);
  cancel.addEventListener("click", () => (asking.search?.abort(), busy(false)));
  front.hidden = true;
  for (const each of charts) each.hidden = true;
  verdict.append(make("h2", {}, "…"));
  results.append(verdict, pinned, make("div", { class: "grid charts" }, memory, walls), pipeline, whatIf, layouts, front);
  const copy = document.getElementById("copy");
  copy.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(location.href).then(() => "copied", () => "copy the address above");
    copy.textContent = done;
    setTimeout(() => (copy.textContent = "copy link"), 2000);
  });
  addEventListener("popstate", returned);
  settle(state);
}
