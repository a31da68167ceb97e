// The controls: each shows one key of the request and reports its changes.

const { models, gpus: cards, regions, presets, keys } = offered;
const doc = (key) => keys[key]?.doc || "";
const round = (n) => (n % 1024 ? String(n) : n % 1048576 ? `${n / 1024}k` : `${n / 1048576}M`); // 4096 -> 4k
const idOf = (key) => `c-${key.replace(/\W/g, "-")}`;

// A labelled line with a place for the problem of its value.
function control(key, label, head, ...body) {
  const problem = make("p", { class: "problem", id: `${idOf(key)}-problem`, hidden: "" });
  const element = make("div", { class: "control" }, make("div", { class: "line" }, ...head), ...body, problem);
  const complain = (texts) => {
    problem.hidden = !texts.length;
    problem.textContent = texts.join(" ");
    element.classList.toggle("wrong", texts.length > 0);
    for (const field of element.querySelectorAll("input, select")) {
      field.setAttribute("aria-invalid", texts.length > 0);
      texts.length ? field.setAttribute("aria-describedby", problem.id) : field.removeAttribute("aria-describedby");
    }
  };
  return { key, label, element, complain };
}

const labelFor = (id, label, about) => make("label", { for: id }, make("b", {}, label), ...(about ? [" ", make("span", { class: "doc" }, about)] : []));

// A slider over a list of values. moved(key, value, final): final when the thumb is let go.
function slider(key, label, about, moved, { values: given, free = false, max = 1e9 } = {}) {
  const id = idOf(key);
  const range = make("input", { type: "range", id, min: 0, step: 1 });
  const marks = make("div", { class: "ticks", "aria-hidden": "true" });
  const told = free
    ? make("input", { type: "number", min: 1, max, step: 1, id: `${id}-number`, "aria-label": `${label}, any number` })
    : make("output", { for: id });
  const made = control(key, label, [labelFor(id, label, about), told], range, marks);
  let values = given || [1];
  const chosen = () => values[Number(range.value)];
  const tell = (value) => {
    free ? (told.value = value) : (told.textContent = value);
    range.setAttribute("aria-valuetext", String(value));
    [...marks.children].forEach((mark) => mark.classList.toggle("now", mark.textContent === round(value)));
  };
  made.offer = (fresh) => (values = fresh);
  made.show = (value) => {
    const shown = [...new Set([...(given || values), Number(value)])].sort((a, b) => a - b);
    values = shown;
    range.max = shown.length - 1;
    range.value = shown.indexOf(Number(value));
    range.disabled = shown.length === 1;
    const every = Math.ceil(shown.length / 8);
    marks.replaceChildren(...shown.map((v, i) => make("span", {}, i % every ? "" : round(v))));
    tell(Number(value));
  };
  range.addEventListener("input", () => (tell(chosen()), moved(key, chosen(), false)));
  range.addEventListener("change", () => moved(key, chosen(), true));
  if (free) told.addEventListener("change", () => moved(key, told.value, true));
  return made;
}

function picker(key, label, options, moved) {
  const id = idOf(key);
  const select = make("select", { id });
  const made = control(key, label, [labelFor(id, label, "")], select);
  made.element.classList.add("pick");
  made.offer = (list) => select.replaceChildren(...list.map(([value, text]) => make("option", { value }, text)));
  made.offer(options);
  made.show = (value) => {
    if (![...select.options].some((option) => option.value === value)) select.append(make("option", { value }, value));
    select.value = value;
  };
  select.addEventListener("change", () => moved(key, select.value, true));
  return made;
}

function tick(key, label, about, moved) {
  const box = make("input", { type: "checkbox", id: idOf(key) });
  const made = control(key, label, [make("label", { class: "check", for: idOf(key) }, box, make("span", {}, label, " ", make("span", {}, about)))]);
  made.show = (value) => (box.checked = value === "true");
  box.addEventListener("change", () => moved(key, String(box.checked), true));
  return made;
}

// Several of a list, kept in one key as a,b,c.
function several(key, label, options, moved) {
  const boxes = Object.entries(options).map(([name, about]) => {
    const box = make("input", { type: "checkbox", value: name, id: `${idOf(key)}-${name}` });
    return [box, make("label", { class: "check", for: box.id }, box, make("span", {}, name, " ", make("span", {}, about)))];
  });
  const group = make("div", { role: "group", "aria-label": label }, ...boxes.map(([, line]) => line));
  const told = make("span", { class: "doc" });
  const made = control(key, label, [], make("details", {}, make("summary", {}, make("span", { class: "label" }, label, ": "), told), group));
  const chosen = () => boxes.filter(([box]) => box.checked).map(([box]) => box.value);
  made.show = (value) => {
    const names = value.split(",").filter(Boolean);
    for (const [box] of boxes) box.checked = names.includes(box.value);
    told.textContent = names.join(", ") || "nothing";
  };
  for (const [box] of boxes) box.addEventListener("change", () => moved(key, chosen().join(","), true));
  return made;
}

function field(key, label, about, attributes, moved) {
  const input = make("input", { id: idOf(key), spellcheck: "false", ...attributes });
  const made = control(key, label, [labelFor(input.id, label, about)], input);
  made.show = (value) => (input.value = value);
  input.addEventListener("change", () => moved(key, input.value.trim(), true));
  return made;
}
