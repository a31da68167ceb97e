// Plans side by side, curves of what-if, and a model of one's own.

// Pinned plans: each a request with its answer, as columns beside the plan above.
const MOST_PINS = 5;
const pins = [];
const pinned = make("section", { class: "card pinned", hidden: "", "aria-label": "Plans side by side" });

function pinButton() {
  const button = make("button", { type: "button" }, "pin to compare");
  button.disabled = pins.length >= MOST_PINS || pins.some((each) => sameRequest(each.request, shown));
  button.addEventListener("click", () => {
    pins.push({ request: shown, answer });
    button.disabled = true;
    showPins();
    said.textContent = `Pinned. ${pins.length} plans are compared with the one above.`;
  });
  return button;
}
const sameRequest = (one, other) => toAddress(one) === toAddress(other);

// A row for each setting and figure; settings that are the same in all plans are left out.
const costOf = ({ budget: { gpu_hours, dollars } }, request) => `$${short(Number(request.price) > 0 ? gpu_hours * Number(request.price) : dollars)}`;
const FIGURES = {
  "fits": (a) => (a.fits ? "✓ yes" : "✗ no"),
  "GiB on the fullest rank": (a) => a.memory_gib.toFixed(1),
  "tokens/s a GPU": (a) => count(a.tokens_per_s_per_gpu),
  "expected": (a) => `${count(a.error_band.low)} to ${count(a.error_band.high)}`,
  "MFU": (a) => share(a.mfu),
  "a step": (a) => seconds(a.step_s),
  "days": (a) => short(a.budget.days),
  "cost": costOf,
};

function settingsOf(plans) {
  const names = [...new Set(plans.flatMap((plan) => Object.keys(plan.request)))];
  const values = (name) => plans.map((plan) => plan.request[name] || "–");
  return names.filter((name) => new Set(values(name)).size > 1).map((name) => [nameOf(name), values(name)]);
}

function showPins() {
  pinned.hidden = !pins.length;
  if (!pins.length) return;
  const plans = [...(answer ? [{ request: shown, answer }] : []), ...pins];
  const heads = plans.map((plan) => (pins.includes(plan) ? pinHead(plan) : make("th", { scope: "col" }, "the plan above")));
  const figures = Object.entries(FIGURES).map(([name, text]) => [name, plans.map((plan) => text(plan.answer, plan.request))]);
  const line = ([name, values], kind) => make("tr", { class: kind }, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value)));
  const fastest = Math.max(...plans.map((plan) => (plan.answer.fits ? plan.answer.tokens_per_s_per_gpu : 0)));
  const rows = [...settingsOf(plans).map((row) => line(row, "setting")), ...figures.map((row) => line(row, "figure"))];
  const speeds = rows.find((row) => row.firstChild.textContent === "tokens/s a GPU");
  plans.forEach((plan, i) => speeds.children[i + 1].classList.toggle("best", plan.answer.fits && plan.answer.tokens_per_s_per_gpu === fastest));
  const table = make("table", { class: "numbers sides" }, make("thead", {}, make("tr", {}, make("td", {}), ...heads)), make("tbody", {}, ...rows));
  pinned.replaceChildren(
    make("h2", {}, "Side by side"),
    make("p", { class: "note" }, "Settings that differ, and figures. The fastest plan that fits is bold."),
    make("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Plans side by side, as a table" }, table),
  );
}

function pinHead(plan) {
  const number = pins.indexOf(plan) + 1;
  const load = make("button", { type: "button", "aria-label": `apply pinned plan ${number}` }, `plan ${number}`);
  load.addEventListener("click", () => settle(plan.request, { final: true }));
  const drop = make("button", { type: "button", "aria-label": `remove pinned plan ${number}` }, "✕");
  drop.addEventListener("click", () => {
    pins.splice(pins.indexOf(plan), 1);
    showPins();
    verdict.querySelector(".row button").disabled = false;
  });
  return make("th", { scope: "col" }, load, " ", drop);
}

// What if: one key varied, all others as above; where a rule needs it the layout follows, as with a slider.
const VARIED = {
  gpus: { says: "GPUs", values: (now) => powers(1 / 4, 8).map((factor) => now * factor), least: 1, most: 16384 },
  seq: { says: "tokens of a sequence", values: (now) => powers(1 / 4, 8).map((factor) => now * factor), least: 512, most: 1048576 },
  mbs: { says: "sequences of a microbatch", values: () => powers(1, 16), least: 1, most: 64 },
};
const varied = make("select", { "aria-label": "key that is varied" }, ...Object.keys(VARIED).map((key) => make("option", { value: key }, nameOf(key))));
const draws = make("button", { type: "button" }, "draw");
const whatIf = chart({
  title: "What if",
  note: "Choose a key and draw: the plan above with other values of it.",
  controls: [varied, draws],
  table: ({ key, points }) => [[VARIED[key].says, "tokens/s a GPU", "GiB", "fits", "a step", "changed with it"],
    points.map(({ value, plan, followed }) => [count(value), count(plan.tokens_per_s_per_gpu), plan.memory_gib.toFixed(1), plan.fits ? "yes" : "no", seconds(plan.step_s), followed || "–"])],
  draw: drawCurve,
});

async function drawWhatIf() {
  const key = varied.value;
  const { values, least, most } = VARIED[key];
  const from = shown;
  const wanted = values(Number(from[key])).filter((value) => Number.isInteger(value) && value >= least && value <= most);
  const points = [];
  draws.disabled = true;
  for (const value of wanted) {
    whatIf.say(`Planning ${nameOf(key)} ${count(value)}, ${points.length} of ${wanted.length} done.`);
    const point = await planWith(from, key, value);
    if (point) points.push(point);
  }
  draws.disabled = false;
  whatIf.asked = from;
  if (!points.length) return whatIf.say("No value of this key gives a legal layout.");
  whatIf.say(`All but ${nameOf(key)} as above; hollow dots do not fit. A click or Enter applies a value.`);
  whatIf.update({ key, points });
  said.textContent = `Drawn: ${points.length} values of ${nameOf(key)}.`;
}

async function planWith(from, key, value) {
  const request = { ...from, [key]: String(value) };
  const legal = await ask("varied", "/legal", { ...request, hold: key });
  if (!legal || legal.refused || !legal.changes) return null;
  for (const [name, changed] of Object.entries(legal.changes)) request[name] = String(changed);
  const plan = await ask("varied", "/answer", { ...request, search: false });
  if (!plan || plan.refused) return null;
  const followed = Object.entries(legal.changes).map(([name, changed]) => `${nameOf(name)} ${changed}`).join(", ");
  return { value, request, plan, followed };
}

// Values at even distances, speed upwards.
function drawCurve(svg, width, { key, points }) {
  const [left, right, top, height] = [62, 24, 26, 260];
  const [w, h] = [Math.max(width - left - right, 40), height - top - 46];
  const most = Math.max(...points.map(({ plan }) => plan.tokens_per_s_per_gpu)) * 1.08;
  const x = (i) => left + ((i + 0.5) / points.length) * w;
  const y = (value) => top + h - (value / most) * h;
  for (const value of ticks(0, most, 5)) {
    svg.append(make("line", { class: "grid-line", x1: left, x2: left + w, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value, 4)));
  }
  svg.append(make("text", { x: 4, y: 12 }, "tokens/s a GPU"), make("text", { x: left + w / 2, y: height - 8, "text-anchor": "middle" }, VARIED[key].says));
  const colour = LINES[theme()][0];
  const way = points.map(({ plan }, i) => `${i ? "L" : "M"}${x(i)},${y(plan.tokens_per_s_per_gpu)}`).join("");
  svg.append(make("path", { d: way, fill: "none", stroke: colour, "stroke-width": 1.5 }));
  const items = points.map(({ value, request, plan, followed }, i) => {
    const [px, py] = [x(i), y(plan.tokens_per_s_per_gpu)];
    svg.append(make("circle", { cx: px, cy: py, r: 5, fill: plan.fits ? colour : css("--card"), stroke: colour, "stroke-width": 2 }));
    svg.append(make("text", { x: px, y: top + h + 16, "text-anchor": "middle" }, round(value)));
    const text = `${nameOf(key)} ${count(value)}: ${count(plan.tokens_per_s_per_gpu)} tokens/s a GPU\n${gib(plan.memory_gib)}, ${plan.fits ? "fits" : "does not fit"}${followed ? `\nwith ${followed}` : ""}`;
    return { x: px - 7, y: py - 7, w: 14, h: 14, row: 0, text, take: () => settle(request, { final: true }) };
  });
  const fitting = points.filter(({ plan }) => plan.fits).length;
  return { height, items, label: `${points.length} values of ${nameOf(key)}, ${fitting} of them fit.` };
}

// A model of one's own: config.json becomes keys of the nearest preset.
const pasted = make("textarea", { id: "own-text", rows: 6, spellcheck: "false", placeholder: '{"model_type": "qwen3_moe", ...}' });
const useOwn = make("button", { type: "button" }, "use this model");
const ownProblem = make("p", { class: "problem", role: "alert" });
const ownModel = make("details", { class: "own" }, make("summary", {}, "own model: paste a config.json"),
  make("label", { for: "own-text", class: "doc" }, "Of any family that moefold reads."), pasted, make("div", { class: "row" }, useOwn), ownProblem);

async function takeOwnModel() {
  const reply = await ask("model", "/model", { config_json: pasted.value });
  if (!reply) return;
  ownProblem.textContent = reply.refused ? reply.problems.join(" ") : "";
  if (reply.refused) return;
  ownProblem.textContent = "";
  settle({ ...withoutModelKeys(shown), model: reply.model, ...reply.keys }, { hold: "model", final: true, mend: true });
}

draws.addEventListener("click", drawWhatIf);
useOwn.addEventListener("click", takeOwnModel);
watchers.push(showPins);
watchers.push(() => whatIf.asked && !sameRequest(whatIf.asked, shown) && whatIf.say("Drawn for the plan as it was before. Draw again for the plan above."));
