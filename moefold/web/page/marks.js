"use strict";
// Elements, numbers, ticks and colours of all plots.

const SVG = document.getElementById("svg").namespaceURI;

// An element with attributes and children; texts are texts, never HTML.
function make(tag, attributes = {}, ...children) {
  const inside = ["svg", "g", "path", "line", "text", "circle", "rect"].includes(tag);
  const element = inside ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

// 12345 -> 12.3k, 0.00042 -> 4.2e-4, 1.5 -> 1.5
function short(x, digits = 3) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const size = Math.abs(x);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit * 0.9995) return Number((x / unit).toPrecision(digits)) + letter;
  if (size !== 0 && size < 1e-3) return x.toExponential(Math.max(0, digits - 2)).replace(".0e", "e");
  return String(Number(x.toPrecision(digits)));
}

const percent = (x) => (x === null ? "–" : `${short(100 * x)} %`);

// About `count` round numbers from low to high.
function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / Math.max(count, 1), whole ? 1 : 0) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || rough;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

const stepsText = (first, last) =>
  first === last ? `step ${first.toLocaleString("en")}` : `steps ${first.toLocaleString("en")}–${last.toLocaleString("en")}`;

// Colours. In both ramps lightness alone gives the order, for colour-blind readers and for print; low values are near
// the page's own colour, high values have contrast. Blue is below the even share, orange above.
const SEQUENTIAL = {
  light: ["#faf6ea", "#f6dca6", "#eeb567", "#d8803f", "#a9483a", "#6d2440", "#37103a"],
  dark: ["#252b33", "#4b3152", "#85415f", "#c25f4b", "#e8923f", "#f6c965", "#fff6c4"],
};
const DIVERGING = {
  light: ["#08519c", "#3f8cc6", "#a5cbe4", "#f3f3f1", "#fdc38d", "#e97824", "#9c3b00"],
  dark: ["#4fa6f2", "#397fbf", "#2a5580", "#2b3037", "#71441d", "#b96a22", "#f59537"],
};
const LINES = {
  light: ["#0060a8", "#c8500a", "#00795a", "#a8447f", "#7d5a00", "#3a86c8", "#5b4bb5", "#4d4d4d"],
  dark: ["#56b4e9", "#ff9a4d", "#3fcf9f", "#e79ac6", "#e6c229", "#8fb8ff", "#b9a6ff", "#d0d0d0"],
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "1 2", "14 3 4 3"];

const theme = () => document.documentElement.dataset.theme;
const hex = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

// 256 colours along the stops, made once.
function ramp(stops) {
  const corners = stops.map(hex);
  return Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * (stops.length - 1);
    const i = Math.min(Math.floor(place), stops.length - 2);
    return corners[i].map((x, k) => Math.round(x + (corners[i + 1][k] - x) * (place - i)));
  });
}
const RAMPS = Object.fromEntries(
  Object.entries({ SEQUENTIAL, DIVERGING }).map(([name, { light, dark }]) => [name, { light: ramp(light), dark: ramp(dark) }]));
const along = (name) => {
  const table = RAMPS[name][theme()];
  return (t) => table[Math.round(Math.min(Math.max(t, 0), 1) * 255)];
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Everything drawn is drawn again when its width or the theme changes.
const watcher = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach((entry) => entry.target.redraw())));

function drawn(holder, draw) {
  let width = 0;
  holder.redraw = (force) => {
    if (!force && holder.clientWidth === width) return;
    width = holder.clientWidth;
    if (width > 0) draw(width);
  };
  watcher.observe(holder);
  return holder;
}
const redrawAll = (force = true) => document.querySelectorAll(".plot").forEach((holder) => holder.redraw && holder.redraw(force));

// Light or dark as the system says, until the reader says otherwise.
const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
const turn = (to) => ((document.documentElement.dataset.theme = to), redrawAll());
dark.addEventListener("change", () => turn(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => turn(theme() === "dark" ? "light" : "dark"));

// The one tooltip.
const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 14 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - box.width - 14 : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
}
const hideTip = () => (tip.hidden = true);
