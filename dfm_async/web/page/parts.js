// Parts of a job that are lists: its nodes and their progress, what went wrong, metrics.

import { card, count, frameText, h, painter, plural, s, say, short, siteTag, table } from "./dom.js";

const LISTED = 300;
const BRIEF = 160;
const FEW = 3; // of more groups, the rest is folded, so that the graph stays on the screen
const NOTICE = { bound: " computes on one core", handled: " goes on without a failed value" };

/** The calls of a node that run or wait. */
const open = node => Math.max(0, node.started - node.done - node.failed);

/** How far each node is, by site. */
export class Nodes {
  #rows = new Map();

  constructor(model, color) {
    this.model = model;
    this.color = color;
    this.note = h("span", { class: "soft" });
    this.body = h("tbody");
    this.card = card("Progress", [this.note],
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Progress by node" },
        table(["Node", "Site", "#In flight", "#Done", "#Failed"], this.body, "Progress by node")));
    this.card.hidden = true;
    this.paint = painter(() => this.#paint(), 150);
  }

  #paint() {
    const nodes = [...this.model.nodes.values()];
    this.card.hidden = nodes.length === 0;
    for (const node of nodes.slice(0, LISTED)) this.#update(node);
    const total = number => count(nodes.reduce((sum, node) => sum + number(node), 0));
    say(this.note, `${total(open)} in flight, ${total(node => node.done)} done`);
  }

  #update(node) {
    let row = this.#rows.get(node);
    if (!row) {
      const number = () => h("td", { class: "num" });
      const bar = h("progress", { max: 1, hidden: true, "aria-label": `Progress of ${node.label} at ${node.site}` });
      row = { open: number(), done: number(), failed: number(), bar, said: h("small", { class: "soft" }) };
      this.#rows.set(node, row);
      this.body.append(h("tr", {}, h("td", { class: "how", "data-more": node.site }, node.label, row.bar, row.said), h("td", {}, siteTag(node.site, this.color(node.site))),
        row.open, row.done, row.failed));
    }
    say(row.open, count(open(node)));
    say(row.done, count(node.done));
    say(row.failed, count(node.failed));
    row.failed.classList.toggle("bad", node.failed > 0);
    const progress = open(node) > 0 ? node.progress : null; // of a call that has ended, it says nothing any more
    row.bar.hidden = !progress?.total;
    row.said.hidden = !progress;
    if (!progress) return;
    if (progress.total) row.bar.value = Math.min(1, progress.done / progress.total);
    const much = progress.total ? `${short(progress.done)} of ${short(progress.total)}` : short(progress.done);
    say(row.said, [progress.note, much, `frame ${progress.frame}`].filter(Boolean).join(" · "));
  }
}

/** What went wrong: failures by node and type, with the tracebacks of the newest, and what happened to workers. */
export class Faults {
  #rows = new Map();
  #noticed = 0;

  constructor(model, color) {
    this.model = model;
    this.color = color;
    this.note = h("span", { class: "soft" });
    this.list = h("div");
    this.notices = h("ul");
    this.more = h("button", { type: "button", "aria-expanded": "false", onclick: () => this.#unfold() });
    this.scroll = h("div", { class: "scroll faults", tabindex: 0, role: "group", "aria-label": "Errors by node and type" }, this.list, this.notices);
    this.card = card("Errors", [this.note, this.more], this.scroll);
    this.card.hidden = true;
    this.paint = painter(() => this.#paint(), 150);
  }

  #unfold() {
    const open = this.more.getAttribute("aria-expanded") !== "true";
    this.more.setAttribute("aria-expanded", String(open));
    this.#paint();
    this.scroll.scrollTop = 0;
  }

  #paint() {
    const { errors, faults, missing, partial, notices } = this.model;
    this.card.hidden = errors + missing + notices.length === 0;
    this.card.classList.toggle("alert", errors > 0);
    const groups = [...faults.values()].reverse().sort((one, other) => other.count - one.count);
    const folded = this.more.getAttribute("aria-expanded") !== "true";
    this.more.hidden = groups.length <= FEW;
    say(this.more, folded ? `Show all ${count(groups.length)} kinds` : "Show fewer");
    this.scroll.classList.toggle("all", !folded);
    for (const [key, row] of this.#rows) {
      if (faults.get(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
    groups.forEach((group, index) => {
      const { element } = this.#row(group);
      if (this.list.children[index] !== element) this.list.insertBefore(element, this.list.children[index] ?? null);
      element.hidden = folded && index >= FEW;
    });
    const listed = groups.reduce((sum, group) => sum + group.count, 0);
    const parts = [plural(errors, "error")];
    if (listed < errors) parts.push(`the newest ${count(listed)} are listed`);
    if (missing && !partial) parts.push(`${plural(missing, "result")} missing`);
    say(this.note, parts.join(", "));
    if (notices.length !== this.#noticed) {
      this.#noticed = notices.length;
      this.notices.replaceChildren(...notices.map(({ site, kind, detail }) =>
        h("li", { class: "fault" }, siteTag(site, this.color(site)), NOTICE[kind] ?? ` worker ${kind}`, h("p", { class: "where" }, detail))));
    }
  }

  /** The failures of one node and type, folded; what is inside is made when it is opened. */
  #row(group) {
    let row = this.#rows.get(group.key);
    if (!row) {
      const [number, last, body] = [h("span", { class: "times" }), h("span", { class: "soft" }), h("div")];
      const details = h("details", {},
        h("summary", {}, h("strong", { class: "bad" }, group.type), number, " in ", h("span", { class: "mono" }, group.node), ": ", last), body);
      const element = h("div", { class: "fault" }, details);
      row = { element, number, last, body, details, shown: 0 };
      details.addEventListener("toggle", () => this.paint());
      this.#rows.set(group.key, row);
    }
    if (row.shown === group.count) return row;
    say(row.number, group.count > 1 ? ` × ${count(group.count)}` : "");
    const { message } = group.newest[0].error;
    say(row.last, message.length > BRIEF ? `${message.slice(0, BRIEF)} …` : message);
    if (!row.details.open) return row;
    row.shown = group.count;
    const more = group.count > group.newest.length ? h("p", { class: "where" }, `The newest ${group.newest.length} of ${count(group.count)}:`) : null;
    row.body.replaceChildren(...[more, ...group.newest.map(fault => this.#fault(fault))].filter(Boolean));
    return row;
  }

  #fault({ error, frame, site, node, offset }) {
    const tries = error.attempt > 1 ? `, attempt ${error.attempt}` : "";
    const where = h("p", { class: "where" }, siteTag(site, this.color(site)), ` ${node}, frame ${frameText(frame)}${tries}, offset ${offset}`);
    return h("div", { class: "one" }, h("p", {}, error.message), where, error.traceback ? h("pre", {}, error.traceback) : null);
  }
}

/** Metrics as small curves. */
export class Series {
  #plots = new Map();

  constructor(model) {
    this.model = model;
    this.list = h("div", { class: "series" });
    this.card = card("Metrics", [], h("div", { class: "body" }, this.list));
    this.card.hidden = true;
    this.paint = painter(() => this.#paint(), 150);
  }

  #paint() {
    this.card.hidden = this.model.series.size === 0;
    for (const [key, series] of this.model.series) {
      let plot = this.#plots.get(key);
      if (!plot) {
        const line = s("path");
        const drawing = s("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" }, line);
        plot = { line, drawing, last: h("span", { class: "last" }) };
        this.#plots.set(key, plot);
        this.list.append(h("figure", {}, plot.last, h("figcaption", {}, series.name, h("span", { class: "soft" }, ` ${series.node} · ${series.site}`)), drawing));
      }
      const [low, high] = draw(plot.line, series.points);
      say(plot.last, short(series.last));
      plot.drawing.setAttribute("aria-label", `${series.name}: ${plural(series.seen, "value")} from ${short(low)} to ${short(high)}, now ${short(series.last)}`);
    }
  }
}

function draw(line, points) {
  const [low, high] = [Math.min(...points), Math.max(...points)];
  const x = index => ((index / (points.length - 1)) * 100).toFixed(2);
  const y = value => (28 - ((value - low) / (high - low || 1)) * 26).toFixed(2);
  const path = points.length === 1 ? `M0 ${y(low)}H100` : `M${points.map((value, index) => `${x(index)} ${y(value)}`).join("L")}`;
  line.setAttribute("d", path);
  return [low, high];
}
