// The list of jobs: live, the newest first.

import { count, duration, ended, h, mark, moment, painter, plural, say } from "./dom.js";

const KEPT = 2000;
const SHOWN = 200;
const FILTERS = {
  All: () => true,
  Active: status => !ended(status),
  Finished: status => status === "finished",
  Failed: status => status === "failed",
  Stopped: status => status === "aborted" || status === "interrupted",
};

export class JobList {
  #jobs = new Map();
  #statuses = new Map(); // of more jobs than are kept: totals count them all
  #rows = new Map();
  #filter = "All";
  #current = null;

  constructor(root, { create }) {
    this.list = h("ul", { class: "list", onkeydown: event => this.#walk(event) });
    this.note = h("p", { class: "note" }, "No jobs yet.");
    this.tabs = Object.keys(FILTERS).map(name =>
      h("button", { type: "button", "aria-pressed": String(name === this.#filter), onclick: () => this.#choose(name) }, name));
    root.replaceChildren(
      h("div", { class: "top" },
        h("div", { class: "title" }, h("h2", {}, "Jobs"), create),
        h("div", { class: "tabs", role: "group", "aria-label": "Which jobs" }, ...this.tabs)),
      this.list, this.note);
    this.paint = painter(() => this.#paint());
  }

  /** Forgets all jobs: the stream begins with everything that there is. */
  clear() {
    this.#jobs.clear();
    this.#statuses.clear();
    this.paint();
  }

  /** Says that there is no list for this client. */
  refuse(message) {
    say(this.note, `The jobs cannot be listed: ${message}.`);
    this.note.hidden = false;
    return true;
  }

  take(info) {
    this.#jobs.set(info.job_id, info);
    this.#statuses.set(info.job_id, info.status);
    if (this.#jobs.size > KEPT) this.#jobs.delete(this.#oldest());
    this.paint();
  }

  get(id) {
    return this.#jobs.get(id);
  }

  get statuses() {
    return [...this.#statuses.values()];
  }

  /** Says which job the page shows. */
  point(id) {
    this.#current = id;
    this.paint();
  }

  #oldest() {
    let found = null;
    for (const info of this.#jobs.values()) if (found === null || info.created < found.created) found = info;
    return found.job_id;
  }

  #choose(name) {
    this.#filter = name;
    for (const tab of this.tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name));
    this.paint();
  }

  #paint() {
    const wanted = [...this.#jobs.values()].filter(info => FILTERS[this.#filter](info.status));
    wanted.sort((one, other) => other.created - one.created || (other.job_id < one.job_id ? -1 : 1));
    const shown = wanted.slice(0, SHOWN);
    const before = document.activeElement?.closest?.(".row")?.dataset.job;
    const rows = shown.map(info => this.#row(info));
    for (const id of this.#rows.keys()) if (!this.#jobs.has(id)) this.#rows.delete(id);
    // Rows stay where they are if they can: to move one takes the focus away from it.
    rows.forEach((row, index) => {
      if (this.list.children[index] !== row) this.list.insertBefore(row, this.list.children[index] ?? null);
    });
    while (this.list.children.length > rows.length) this.list.lastElementChild.remove();
    if (before && document.activeElement === document.body) this.#rows.get(before)?.firstElementChild.focus();
    const total = this.statuses.filter(FILTERS[this.#filter]).length;
    const more = total > shown.length ? `The newest ${shown.length} of ${count(total)}.` : "";
    say(this.note, shown.length ? more : this.#jobs.size ? "No such jobs." : "No jobs yet.");
    this.note.hidden = shown.length > 0 && !more;
  }

  #row(info) {
    const id = info.job_id;
    let row = this.#rows.get(id);
    if (!row) {
      row = h("li", {}, h("a", { class: "row", href: `?job=${encodeURIComponent(id)}`, "data-link": true, "data-job": id }));
      this.#rows.set(id, row);
    }
    const link = row.firstElementChild;
    if (row.info !== info) {
      row.info = info;
      link.className = `row s-${info.status}`;
      const sets = info.sets === null || info.sets === 0 ? "" : `${count(info.done ?? 0)}/${count(info.sets)}`;
      const waits = info.status === "submitted" && info.start_at !== null;
      const begun = Math.max(info.created, Math.min(info.start_at ?? 0, info.finished ?? 0));
      const time = info.finished ? duration(info.finished - begun) : waits ? `starts at ${moment(info.start_at)}` : info.status;
      link.replaceChildren(
        mark(info.status), h("span", { class: "name" }, info.pipeline ?? "pipeline"), h("span", { class: "when" }, moment(info.created)),
        h("span", { class: "id" }, id),
        h("span", { class: "sum" }, info.errors ? h("span", { class: "bad" }, plural(info.errors, "error")) : sets && ended(info.status) ? `${sets} · ${time}` : time),
        h("span", { class: "hidden" }, `, ${info.status}`));
    }
    if (id === this.#current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    return row;
  }

  #walk(event) {
    const links = [...this.list.querySelectorAll(".row")];
    const here = links.indexOf(document.activeElement);
    const next = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: links.length - 1 }[event.key];
    if (next === undefined || !links[next]) return;
    event.preventDefault();
    links[next].focus();
  }
}
