// Runs that go on: asks the server for what is new, adds it to `runs`, and draws again.

const PERIOD = 2000; // milliseconds between questions
const LOST = "moefold watch does not answer: the page shows what it had";
const BY_COLUMN = ["first", "last", "mean", "low", "high", "values", "codes"]; // lists with one entry for each column

// A series with its new columns behind those that stay.
function extendSeries(old, fresh) {
  if (!old || !fresh.from) return fresh;
  const lists = BY_COLUMN.filter((name) => fresh[name]).map((name) => [name, [...old[name].slice(0, fresh.from), ...fresh[name]]]);
  return { ...fresh, ...Object.fromEntries(lists) };
}
const extendAll = (old, fresh) => ({ ...old, ...Object.fromEntries(Object.entries(fresh).map(([name, series]) => [name, extendSeries(old[name], series)])) });

// fresh: the state of a run, and what is new in it; all of it where `whole`.
function extendRun(old, fresh) {
  if (!fresh.curves) return { ...old, ...fresh };
  if (fresh.whole) return fresh;
  const [curves, maps] = [extendAll(old.curves, fresh.curves), extendAll(old.maps, fresh.maps)];
  const [load, fp8] = ["load", "fp8"].map((name) => (fresh[name] ? extendSeries(old[name], fresh[name]) : old[name]));
  return { ...fresh, curves, maps, load, fp8 };
}

const states = document.getElementById("states");
function showStates(lost = "") {
  const lines = runs.map(({ label, state }) => make("li", { class: state.is_bad ? "bad" : "" }, `${several ? `${label}: ` : ""}${state.text}`));
  states.replaceChildren(...(lost ? [make("li", { class: "bad" }, lost)] : []), ...lines);
}

async function askNews() {
  const told = encodeURIComponent(JSON.stringify(runs.map((run) => run.told)));
  const response = await fetch(`/news?told=${told}`);
  const reply = await response.json();
  if (!response.ok) throw new Error(reply.problems.join(" "));
  return reply.runs;
}

function takeNews(news) {
  news.forEach((fresh, i) => (runs[i] = extendRun(runs[i], fresh)));
  showStates();
  if (news.some((fresh) => fresh.curves)) refresh();
}

async function follow() {
  try {
    takeNews(await askNews());
  } catch (error) {
    showStates(error instanceof TypeError ? LOST : error.message); // fetch fails with a TypeError
  }
  setTimeout(follow, PERIOD);
}

showStates();
setTimeout(follow, PERIOD);
