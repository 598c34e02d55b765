// Elements and words. What jobs bring along only ever becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element; properties that begin with "on" are listeners, children are elements or text. */
export function h(name, props = {}, ...children) {
  return dress(document.createElement(name), props, children);
}

/** Makes an element of a drawing. */
export function s(name, props = {}, ...children) {
  return dress(document.createElementNS(SVG, name), props, children);
}

function dress(element, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

/** A card with a title, things beside the title, and what it holds. */
export function card(title, beside, ...body) {
  const id = `card-${title.toLowerCase().replaceAll(" ", "-")}`;
  return h("section", { class: "card", "aria-labelledby": id }, h("div", { class: "cap" }, h("h2", { id }, title), ...beside), ...body);
}

/** A table with a head; columns that begin with "#" are numbers. */
export function table(columns, rows, label) {
  const head = columns.map(name => h("th", { scope: "col", class: name.startsWith("#") && "num" }, name.replace(/^#/, "")));
  return h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...head)), rows);
}

/** Sets the text of an element, if it is another one. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The name of a site, with its colour. */
export function siteTag(name, color) {
  const tag = h("span", { class: "site" }, name);
  if (color) tag.style.setProperty("--c", color);
  return tag;
}

const MARKS = { submitted: "○", running: "●", finished: "✓", failed: "✕", aborted: "■", interrupted: "‖", unknown: "?" };

/** The symbol of a status; the word is beside it, or is read out. */
export function mark(status) {
  return h("span", { class: "mark", "aria-hidden": "true" }, MARKS[status] ?? "?");
}

/** Whether nothing of a job runs; an interrupted one can be resumed. */
export const ended = status => !["submitted", "running"].includes(status);

/** Whether the status of a job can no longer change. */
export const final = status => ended(status) && status !== "interrupted";

export const frameText = frame => frame.join(".");

const whole = new Intl.NumberFormat("en");
export const count = number => whole.format(number);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function short(number) {
  if (!Number.isFinite(number)) return "–";
  return Math.abs(number) >= 1e6 || (number !== 0 && Math.abs(number) < 1e-3) ? number.toExponential(2) : String(+number.toPrecision(5));
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (number >= 999.5 && step < units.length - 1) [number, step] = [number / 1000, step + 1];
  return `${step === 0 || number >= 99.5 ? Math.round(number) : number.toFixed(1)} ${units[step]}`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
export function moment(seconds) {
  const then = new Date(seconds * 1000);
  return (Math.abs(Date.now() - then) < 20 * 3600e3 ? clock : day).format(then);
}

/** Draws at most once per frame of the screen, and not before the interval (ms) is over: requests are coalesced. */
export function painter(paint, pause = 0) {
  let due = false;
  let next = 0;
  const draw = () => {
    due = false;
    next = performance.now() + pause;
    paint();
  };
  return () => {
    if (due) return;
    due = true;
    const wait = next - performance.now();
    if (wait > 0) setTimeout(requestAnimationFrame, wait, draw);
    else requestAnimationFrame(draw);
  };
}

const SPOKEN = 10_000;

/** Has a screen reader read a message. Messages do not replace each other: each stays until it can have been read. */
export function announce(text) {
  const message = h("p", {}, text);
  document.getElementById("said").append(message);
  setTimeout(() => message.remove(), SPOKEN);
}
