// The pipeline as a graph, which lights up where something happens.

import { card, count, h, painter, plural, s, say } from "./dom.js";
import { jobPath, text } from "./service.js";

const ALLOWED = new Set(("svg g path rect circle ellipse line polyline polygon text tspan title desc defs marker "
  + "linearGradient radialGradient stop clipPath").split(" "));
const ZOOM = 1.4; // of one step
const LARGEST = 3; // times the natural size
const COLUMN = 520; // a wider drawing gets the whole width of the page
// Drawings live in a shadow tree, so that their style and the page's do not meet.
const LIVE = `
  :host { display: block; }
  svg { display: block; margin: 0 auto; height: auto; }
  .dfm-graph {
    --dfm-card: var(--surface); --dfm-text: var(--ink); --dfm-dim: var(--soft); --dfm-failed: var(--bad);
    ${[0, 1, 2, 3, 4, 5, 6, 7].map(index => `--dfm-site-${index}: var(--s${index});`).join(" ")}
  }
  .dfm-graph .count { font: 600 11px var(--text); fill: var(--accent-ink); text-anchor: middle; }
  .plate { fill: var(--accent); stroke: var(--surface); stroke-width: 1.5; }
  .failed .plate { fill: var(--bad); }
  .dfm-graph .failed .count { fill: var(--surface); }
  .dfm-graph .active > .shape { stroke: var(--accent); stroke-width: 3; }
  .dfm-graph .failed > .shape { stroke: var(--bad); stroke-width: 3; }
  @media (prefers-reduced-motion: no-preference) {
    .active > .shape { stroke-dasharray: 7 4; animation: march .7s linear infinite; }
    .pulse > .shape { animation: glow .7s ease-out; }
    .edge.pulse { animation: flow .7s ease-out; }
  }
  @keyframes march { to { stroke-dashoffset: -11; } }
  @keyframes glow { from { stroke: var(--accent); stroke-width: 7; } }
  @keyframes flow { from { stroke: var(--accent); stroke-width: 4; } }
`;

const parsed = text => new DOMParser().parseFromString(text, "text/xml").documentElement;

/** Takes a drawing as parsed XML, with nothing in it that could act or fetch; its style comes apart. */
export function harmless(source) {
  let style = "";
  // Before it is parsed: the policy of the page forbids style elements, also in documents that are never shown.
  const bare = source.replace(/<style>([^]*?)<\/style>/g, (_, css) => {
    style += parsed(`<x>${css}</x>`).textContent;
    return "";
  });
  const root = parsed(bare);
  if (root.localName !== "svg") throw new Error("the drawing cannot be read");
  for (const element of [root, ...root.querySelectorAll("*")]) {
    if (!ALLOWED.has(element.localName)) element.remove();
    for (const { name, value } of [...element.attributes]) {
      const refers = /(^|:)href$/.test(name) || (/url\(/.test(value) && !/^url\(#[\w-]+\)$/.test(value));
      if (name.startsWith("on") || name === "style" || refers) element.removeAttribute(name);
    }
  }
  return { root: document.importNode(root, true), style };
}

const sheet = style => {
  const made = new CSSStyleSheet();
  made.replaceSync(style.replace(/@import[^;]*;?/g, ""));
  return made;
};

export class Graph {
  #marks = [];
  #edges = new Map();
  #zoom = 1; // times the size at which it fits
  calls = []; // the labels of the nodes that call operations

  constructor(model, { drawn = () => {} } = {}) {
    this.model = model;
    this.drawn = drawn;
    this.note = h("span", { class: "soft" });
    this.host = h("div");
    const button = (name, text, press) => h("button", { type: "button", "aria-label": name, title: name, onclick: press }, text);
    this.smaller = button("Zoom out", "−", () => this.#scale(this.#zoom / ZOOM));
    this.fit = button("Fit to the width", "Fit", () => this.#scale(1));
    this.larger = button("Zoom in", "+", () => this.#scale(this.#zoom * ZOOM));
    this.tools = h("span", { class: "tools", role: "group", "aria-label": "Size of the drawing", hidden: true }, this.smaller, this.fit, this.larger);
    this.frame = h("div", { class: "graph", tabindex: 0, role: "group", "aria-label": "Drawing of the pipeline", onkeydown: event => this.#press(event), onwheel: event => this.#turn(event) }, this.host);
    this.card = card("Graph", [this.note, this.tools], this.frame);
    this.resized = new ResizeObserver(() => this.#scale(this.#zoom));
    this.shadow = this.host.attachShadow({ mode: "open" });
    this.paint = painter(() => this.#paint(), 150);
  }

  async load() {
    let source;
    try {
      source = await text(jobPath(this.model.info.job_id, "/graph"));
    } catch (refused) {
      say(this.note, `The drawing is not available: ${refused.message}.`);
      return;
    }
    const { root, style } = harmless(source);
    this.shadow.adoptedStyleSheets = [sheet(style), sheet(LIVE)];
    this.shadow.replaceChildren(root);
    this.root = root;
    this.natural = Number.parseFloat(root.getAttribute("width")) || 300;
    this.card.parentElement?.classList.toggle("wide", this.natural > COLUMN);
    this.tools.hidden = false;
    this.resized.observe(this.frame);
    for (const edge of root.querySelectorAll(".edge")) {
      const from = edge.dataset.from;
      this.#edges.set(from, [...(this.#edges.get(from) ?? []), edge]);
    }
    const labels = new Map();
    const nodes = [...root.querySelectorAll(".node[data-node]")];
    for (const node of nodes) labels.set(node.dataset.node, (labels.get(node.dataset.node) ?? 0) + 1);
    this.#marks = nodes.map(node => this.#marked(node, labels.get(node.dataset.node) > 1));
    this.calls = [...new Set(nodes.filter(node => node.classList.contains("call")).map(node => node.dataset.node))];
    this.drawn(nodes.flatMap(node => [...node.classList].filter(name => /^s\d$/.test(name)).map(name => [node.dataset.site, name.slice(1)])));
    this.paint();
  }

  /** Draws it at a multiple of the size at which it fits the width; what was in the middle stays there, or at a point. */
  #scale(zoom, x = this.frame.clientWidth / 2, y = this.frame.clientHeight / 2) {
    const room = this.frame.clientWidth - 32;
    if (!this.root || room <= 0) return;
    const base = Math.min(this.natural, room);
    this.#zoom = Math.max(1, Math.min(zoom, (LARGEST * this.natural) / base));
    const before = this.root.getBoundingClientRect().width;
    const { scrollLeft, scrollTop } = this.frame;
    this.root.style.width = `${Math.round(base * this.#zoom)}px`;
    this.smaller.disabled = this.fit.disabled = this.#zoom === 1;
    this.larger.disabled = base * this.#zoom >= LARGEST * this.natural - 1;
    const grown = this.root.getBoundingClientRect().width / (before || 1);
    this.frame.scrollLeft = (scrollLeft + x) * grown - x;
    this.frame.scrollTop = (scrollTop + y) * grown - y;
  }

  #press(event) {
    const zoom = { "+": this.#zoom * ZOOM, "=": this.#zoom * ZOOM, "-": this.#zoom / ZOOM, 0: 1 }[event.key];
    if (zoom === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.#scale(zoom);
  }

  #turn(event) {
    if (!event.ctrlKey) return; // also what browsers make of two fingers
    event.preventDefault();
    const box = this.frame.getBoundingClientRect();
    this.#scale(this.#zoom * 1.002 ** -event.deltaY, event.clientX - box.left, event.clientY - box.top);
  }

  close() {
    this.resized.disconnect();
  }

  #marked(node, several) {
    const box = (node.querySelector(":scope > .shape") ?? node).getBBox();
    const label = s("text", { class: "count", x: box.x + box.width - 4, y: box.y + 4, dy: ".02em" });
    const plate = s("rect", { class: "plate", rx: 8, height: 16, y: box.y - 8 });
    const badge = s("g", { "aria-hidden": "true" }, plate, label);
    badge.style.display = "none";
    node.append(badge);
    for (const element of [node, ...(this.#edges.get(node.dataset.node) ?? [])]) {
      element.addEventListener("animationend", () => element.classList.remove("pulse"));
    }
    return { node, badge, plate, label, several, done: null, counts: "", right: box.x + box.width + 6 };
  }

  #totals({ node, several }) {
    const found = { started: 0, done: 0, failed: 0 };
    for (const entry of this.model.nodes.values()) {
      if (entry.label !== node.dataset.node || (several && entry.site !== node.dataset.site)) continue;
      for (const name of Object.keys(found)) found[name] += entry[name];
    }
    return found;
  }

  #paint() {
    let [active, failed] = [0, 0];
    for (const mark of this.#marks) {
      const total = this.#totals(mark);
      const pending = total.started - total.done - total.failed;
      active += pending > 0;
      failed += total.failed > 0;
      mark.node.classList.toggle("active", pending > 0);
      mark.node.classList.toggle("failed", total.failed > 0);
      if (mark.done !== null && total.done > mark.done) {
        for (const element of [mark.node, ...(this.#edges.get(mark.node.dataset.node) ?? [])]) element.classList.add("pulse");
      }
      mark.done = total.done;
      this.#tell(mark, total);
    }
    const parts = [plural(this.#marks.length, "node")];
    if (active) parts.push(`${active} active`);
    if (failed) parts.push(`${failed} with errors`);
    if (this.#marks.length) say(this.note, parts.join(", "));
  }

  #tell(mark, { started, done, failed }) {
    const counts = failed ? `${count(done)} · ${count(failed)} ✕` : started ? count(done) : "";
    if (counts === mark.counts) return;
    mark.counts = counts;
    mark.badge.style.display = counts ? "" : "none";
    mark.label.textContent = counts;
    const width = Math.max(18, counts.length * 7 + 9);
    mark.plate.setAttribute("width", width);
    mark.plate.setAttribute("x", mark.right - width);
    mark.label.setAttribute("x", mark.right - width / 2);
  }
}
