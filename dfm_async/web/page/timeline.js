// What ran where, and when: a lane for each site, a line for each node, a bar for each call, lighter while it waited.

import { card, count, duration, h, painter, plural, say, siteTag, table } from "./dom.js";

const LINE = 20;
const THIN = 7;
const DEEP = 8; // so many calls of a node at the same time stand below each other; further ones lie over the last
const LANE = 24;
const FOOT = 22;
const LISTED = 100;
const LINES = 60;
const WAITS = 0.3; // how opaque the part of a bar is in which the call waited

export class Timeline {
  #bars = [];

  constructor(model, color) {
    this.model = model;
    this.color = color;
    this.canvas = h("canvas", { role: "img", "aria-label": "Timeline", onpointermove: event => this.#point(event), onpointerleave: () => (this.tip.hidden = true) });
    this.tip = h("div", { class: "tip", hidden: true });
    this.note = h("span", { class: "soft" });
    this.body = h("tbody");
    this.fold = h("details", { class: "fold", ontoggle: () => this.#list() }, h("summary", {}, "The same as a table"),
      h("div", { class: "scroll calls", tabindex: 0, role: "group", "aria-label": "Calls" },
        table(["Node", "#Attempt", "#Start", "#Waited", "#Took", "Outcome"], this.body, "Calls, the newest first")));
    this.card = card("Timeline", [this.note], h("div", { class: "time", tabindex: 0, role: "group", "aria-label": "Calls over time" }, this.canvas, this.tip), this.fold);
    this.card.hidden = true;
    this.paint = painter(() => this.#paint(), 400);
    this.resized = new ResizeObserver(() => this.paint());
    this.resized.observe(this.card);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", this.paint);
  }

  close() {
    this.resized.disconnect();
    this.dark.removeEventListener("change", this.paint);
  }

  /** The calls by site and node, in the order of their first ones. */
  #lanes() {
    const lanes = new Map();
    for (const call of this.model.calls.values()) {
      if (!lanes.has(call.site)) lanes.set(call.site, new Map());
      const lane = lanes.get(call.site);
      if (!lane.has(call.node)) lane.set(call.node, []);
      lane.get(call.node).push(call);
    }
    return lanes;
  }

  /** Calls at the same time stand below each other. Gives their rows, and how many there are. */
  #packed(calls) {
    const free = [];
    const rows = [...calls].sort((one, other) => queued(one) - queued(other)).map(call => {
      let row = free.findIndex(end => end <= queued(call));
      if (row < 0) row = Math.min(free.length, DEEP - 1);
      free[row] = Math.max(free[row] ?? 0, call.end);
      return [row, call];
    });
    rows.sort(([, one], [, other]) => one.failed - other.failed); // what failed lies on top
    return { rows, high: free.length === 1 ? LINE : free.length * THIN + 8, thick: free.length === 1 ? LINE - 8 : THIN - 1 };
  }

  #paint() {
    const { calls } = this.model;
    this.card.hidden = calls.size === 0;
    if (calls.size === 0) return;
    const lanes = this.#lanes();
    const width = this.canvas.parentElement.clientWidth - 32;
    const longest = Math.max(...[...lanes.values()].flatMap(lane => [...lane.keys()].map(node => node.length)));
    const gutter = Math.min(36 + longest * 8, Math.max(84, width * 0.38));
    let [from, to] = [Infinity, -Infinity];
    for (const call of calls.values()) [from, to] = [Math.min(from, queued(call)), Math.max(to, call.end)];
    const span = Math.max(to - from, 1e-4);
    const lines = [...lanes].flatMap(([site, lane]) => [...lane].map(([node, made]) => ({ site, node, ...this.#packed(made) }))).slice(0, LINES);
    const height = new Set(lines.map(({ site }) => site)).size * LANE + lines.reduce((sum, { high }) => sum + high, 0) + FOOT;
    const pen = this.#pen(width, height);
    const style = getComputedStyle(document.documentElement);
    const ink = name => style.getPropertyValue(name).trim();
    const at = time => gutter + ((time - from) / span) * (width - gutter - 4);

    this.#axis(pen, { gutter, width, height, span, ink });
    this.#bars = [];
    let [y, before] = [0, null];
    for (const { site, node, rows, high, thick } of lines) {
      const own = resolved(this.color(site), style);
      if (site !== before) {
        before = site;
        pen.fillStyle = ink("--sunk");
        pen.fillRect(0, y + 3, width, LANE - 5);
        pen.fillStyle = own;
        pen.fillRect(6, y + 10, 9, 9);
        pen.fillStyle = ink("--ink");
        pen.font = `600 12px ${ink("--text")}`;
        pen.fillText(site, 21, y + 15, width - 30);
        y += LANE;
      }
      pen.fillStyle = ink("--soft");
      pen.font = `12px ${ink("--text")}`;
      pen.fillText(fitted(pen, node, gutter - 27), 21, y + high / 2);
      pen.globalAlpha = WAITS;
      pen.fillStyle = own;
      for (const [row, call] of rows) {
        if (call.waited > 0) pen.fillRect(at(queued(call)), y + 4 + row * THIN, at(call.start) - at(queued(call)), thick);
      }
      pen.globalAlpha = 1;
      for (const [row, call] of rows) {
        const [x, top] = [at(call.start), y + 4 + row * THIN];
        const wide = Math.max(2, at(call.end) - x - 0.5);
        pen.fillStyle = call.failed ? ink("--bad") : own;
        pen.beginPath();
        pen.roundRect(x, top, wide, thick, Math.min(2.5, wide / 2));
        pen.fill();
        this.#bars.push({ x, top, wide, thick, call, from: at(queued(call)) });
      }
      y += high;
    }
    const total = [...this.model.nodes.values()].reduce((sum, { done, failed }) => sum + done + failed, 0);
    say(this.note, `${total > calls.size ? `${count(calls.size)} of ` : ""}${plural(Math.max(total, calls.size), "call")} in ${duration(span)}`);
    const label = [...lanes].map(([site, lane]) => `${site}: ${[...lane].map(([node, made]) => `${plural(made.length, "call")} of ${node}`).join(", ")}`);
    this.canvas.setAttribute("aria-label", `Timeline of ${duration(span)}. ${label.join(". ")}`.slice(0, 900));
    this.#list();
  }

  #pen(width, height) {
    const dots = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * dots);
    this.canvas.height = Math.round(height * dots);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(dots, dots);
    pen.textBaseline = "middle";
    return pen;
  }

  #axis(pen, { gutter, width, height, span, ink }) {
    const most = Math.max(2, Math.floor((width - gutter) / 80));
    const rough = span / most;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(factor => factor * unit).find(found => found >= rough);
    pen.font = `11px ${ink("--text")}`;
    pen.lineWidth = 1;
    for (let tick = 0; tick <= span; tick += step) {
      const x = Math.round(gutter + (tick / span) * (width - gutter - 4)) + 0.5;
      pen.strokeStyle = ink("--line");
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height - FOOT + 4);
      pen.stroke();
      pen.fillStyle = ink("--soft");
      const label = tick === 0 ? "0" : span < 0.1 ? `${+(tick * 1000).toPrecision(4)} ms` : `${+tick.toPrecision(4)} s`;
      if (x + pen.measureText(label).width < width) pen.fillText(label, x, height - FOOT / 2 + 3);
    }
  }

  #point(event) {
    const { offsetX: x, offsetY: y } = event;
    const hit = this.#bars.findLast(bar => y >= bar.top - 1 && y <= bar.top + bar.thick + 1 && x >= bar.x - 2 && x <= bar.x + bar.wide + 2)
      ?? this.#bars.findLast(bar => y >= bar.top - 1 && y <= bar.top + bar.thick + 1 && x >= bar.from && x <= bar.x);
    this.tip.hidden = !hit;
    if (!hit) return;
    const { node, frame, attempt, start, end, failed, waited } = hit.call;
    const tries = attempt > 1 ? `, attempt ${attempt}` : "";
    say(this.tip, `${node}, frame ${frame}${tries}: ${duration(end - start)}${waited > 0 ? ` after waiting for ${duration(waited)}` : ""}${failed ? ", failed" : ""}`);
    this.tip.style.left = `${Math.max(8, Math.min(x + 24, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  #list() {
    if (!this.fold.open) return;
    const calls = [...this.model.calls.values()];
    const from = calls.reduce((first, call) => Math.min(first, queued(call)), Infinity);
    calls.sort((one, other) => other.start - one.start);
    this.body.replaceChildren(...calls.slice(0, LISTED).map(call => h("tr", {},
      h("td", { class: "how", "data-more": `+${duration(call.start - from)}${call.attempt > 1 ? `, attempt ${call.attempt}` : ""}` }, call.node, h("small", { class: "soft" }, siteTag(call.site, this.color(call.site)), ` frame ${call.frame}`)),
      h("td", { class: "num" }, String(call.attempt)), h("td", { class: "num" }, `+${duration(call.start - from)}`),
      h("td", { class: "num" }, call.waited > 0 ? duration(call.waited) : "–"), h("td", { class: "num" }, duration(call.end - call.start)), h("td", { class: call.failed ? "bad" : "" }, call.failed ? "failed" : "done"))));
  }
}

function queued(call) {
  return call.start - (call.waited ?? 0);
}

function resolved(color, style) {
  const name = /^var\((--[\w-]+)\)$/.exec(color ?? "");
  return name ? style.getPropertyValue(name[1]).trim() : color || style.getPropertyValue("--accent").trim();
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
