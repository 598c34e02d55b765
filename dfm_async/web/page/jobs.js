// The list of jobs, the newest first: pages of the service that fit the filter, and their changes.

import { count, duration, ended, h, mark, moment, painter, plural, say } from "./dom.js";
import { get } from "./service.js";

const PAGE = 100;
const KEPT = 2000;
const PAUSE = 400; // between what is typed and the request
const STATUSES = ["All", "Active", "Finished", "Failed", "Aborted", "Interrupted"];

const newest = (one, other) => other.created - one.created || (other.job_id < one.job_id ? -1 : 1);
const MOST = 16; // words of a search, as in the service
const lower = text => text.replace(/[A-Z]+/g, letters => letters.toLowerCase());
const seconds = input => (input.value ? new Date(input.value).getTime() / 1000 : null);

export class JobList {
  #jobs = new Map();
  #rows = new Map();
  #wanted = {}; // what jobs must be: the query of requests
  #words = []; // what is searched
  #status = "All";
  #next = null; // where the next page begins
  #reach = Infinity; // jobs that were created before this time are not listed completely
  #fresh = null; // while a page is requested: the jobs that the stream has reported since
  #asked = 0;
  #timer = null;
  #current = null;
  #problem = "";
  #several = false; // whether the jobs have several submitters, which are shown then

  constructor(root, { create }) {
    const field = (name, type, more) => {
      const input = h("input", { type, autocomplete: "off", oninput: () => this.#typed(), ...more });
      return [input, h("label", {}, name, input)];
    };
    const [pipeline, pipelines] = field("Pipeline", "search", { list: "pipelines" });
    const [principal, principals] = field("Submitted by", "search", { list: "principals" });
    const [since, from] = field("From", "datetime-local");
    const [until, to] = field("Until", "datetime-local");
    const search = h("input", { type: "search", autocomplete: "off", placeholder: "Search id, pipeline, submitter", "aria-label": "Search jobs by parts of their id, pipeline or submitter", oninput: () => this.#typed() });
    this.fields = { search, pipeline, principal, since, until };
    this.names = h("datalist", { id: "pipelines" });
    this.people = h("datalist", { id: "principals" });
    this.list = h("ul", { class: "list", onkeydown: event => this.#walk(event) });
    this.note = h("p", { class: "note" }, "Loading …");
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#load() }, "Show older jobs");
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.#reset() }, "Clear filter");
    this.filter = h("summary", {}, "Filter");
    this.tabs = STATUSES.map(name =>
      h("button", { type: "button", "aria-pressed": String(name === this.#status), onclick: () => this.#choose(name) }, name));
    root.replaceChildren(
      h("div", { class: "top" },
        h("div", { class: "title" }, h("h2", {}, "Jobs"), create),
        search,
        h("div", { class: "tabs", role: "group", "aria-label": "Jobs by status" }, ...this.tabs),
        h("details", { class: "filter" }, this.filter, h("div", { class: "fields" }, pipelines, principals, from, to, this.reset), this.names, this.people)),
      h("div", { class: "rows" }, this.list, this.note, this.more));
    this.paint = painter(() => this.#paint(), 100);
  }

  /** The stream has begun: it reports the active jobs and all changes from now on. What was known before may be older. */
  begin() {
    this.#jobs.clear();
    this.#begin();
  }

  /** Says that there is no list for this client. */
  refuse(message) {
    this.#problem = `The jobs cannot be listed: ${message}.`;
    this.paint();
    return true;
  }

  /** Offers the names of pipelines. */
  offer(names) {
    this.names.replaceChildren(...names.map(value => h("option", { value })));
  }

  take(info) {
    this.#fresh?.add(info.job_id);
    this.#jobs.set(info.job_id, info);
    this.#trim();
    this.paint();
  }

  get(id) {
    return this.#jobs.get(id);
  }

  get known() {
    return [...this.#jobs.values()];
  }

  /** Says which job the page shows. */
  point(id) {
    this.#current = id;
    this.paint();
  }

  #choose(name) {
    this.#status = name;
    for (const tab of this.tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name));
    this.#begin();
  }

  #typed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#begin(), PAUSE);
  }

  #reset() {
    for (const input of Object.values(this.fields)) input.value = "";
    this.filter.focus();
    this.#begin();
  }

  #begin() {
    clearTimeout(this.#timer);
    const { search, pipeline, principal, since, until } = this.fields;
    const given = { pipeline: pipeline.value.trim(), principal: principal.value.trim(), since: seconds(since), until: seconds(until) };
    const set = Object.entries(given).filter(([, value]) => value);
    say(this.filter, set.length ? `Filter (${set.length})` : "Filter");
    this.#words = lower(search.value).split(/\s+/).filter(Boolean).slice(0, MOST);
    if (this.#words.length) set.push(["search", this.#words.join(" ")]);
    this.reset.hidden = !set.length;
    this.#wanted = Object.fromEntries(set);
    this.#next = null;
    this.#reach = this.#status === "Active" ? -Infinity : Infinity; // the stream has reported all that are active
    this.#problem = "";
    this.#asked += 1;
    this.#fresh = null;
    if (this.#status === "Active") this.paint();
    else this.#load();
  }

  async #load() {
    const asked = ++this.#asked;
    const fresh = (this.#fresh = new Set());
    const status = this.#status === "All" ? {} : { status: this.#status.toLowerCase() };
    const after = this.#next === null ? {} : { after: this.#next };
    this.more.disabled = true;
    try {
      const { jobs, next } = await get(`jobs?${new URLSearchParams({ limit: PAGE, ...this.#wanted, ...status, ...after })}`);
      if (asked !== this.#asked) return;
      for (const info of jobs) if (!fresh.has(info.job_id)) this.#jobs.set(info.job_id, info);
      this.#next = next;
      this.#reach = next === null ? -Infinity : jobs.at(-1).created;
      this.people.replaceChildren(...[...new Set(this.known.map(info => info.principal).filter(Boolean))].map(value => h("option", { value })));
    } catch (refused) {
      if (asked !== this.#asked) return;
      this.#problem = `The jobs cannot be listed: ${refused.message}.`;
    }
    this.#fresh = null;
    this.more.disabled = false;
    this.paint();
  }

  /** Drops jobs that have ended: those that do not fit the filter, then the oldest, which are requested again. */
  #trim() {
    if (this.#jobs.size <= KEPT + PAGE) return;
    const known = this.known.filter(info => ended(info.status)).sort((one, other) => this.#fits(other) - this.#fits(one) || newest(one, other));
    for (const info of known.splice(-(this.#jobs.size - KEPT))) this.#jobs.delete(info.job_id);
    const last = known.at(-1);
    if (last && this.#fits(last) && this.#reach <= last.created) [this.#reach, this.#next] = [last.created, `${last.created}~${last.job_id}`];
  }

  #fits({ job_id: id, status, pipeline, principal, created }) {
    const wanted = this.#wanted;
    return (this.#status === "All" || (this.#status === "Active" ? !ended(status) : status === this.#status.toLowerCase()))
      && (!wanted.pipeline || pipeline === wanted.pipeline) && (!wanted.principal || principal === wanted.principal)
      && (!wanted.since || created >= wanted.since) && (!wanted.until || created < wanted.until)
      && this.#words.every(word => lower(`${id} ${pipeline ?? ""} ${principal ?? ""}`).includes(word));
  }

  #paint() {
    if (this.#reach === Infinity && !this.#problem) return; // what is there stays until the page has come
    const shown = this.known.filter(info => info.created >= this.#reach && this.#fits(info)).sort(newest);
    for (const id of this.#rows.keys()) if (!this.#jobs.has(id)) this.#rows.delete(id);
    this.#several = new Set(this.known.map(info => info.principal)).size > 1;
    const before = document.activeElement?.closest?.(".row")?.dataset.job;
    const rows = shown.map(info => this.#row(info));
    // Rows stay where they are if they can: to move one takes the focus away from it.
    rows.forEach((row, index) => {
      if (this.list.children[index] !== row) this.list.insertBefore(row, this.list.children[index] ?? null);
    });
    while (this.list.children.length > rows.length) this.list.lastElementChild.remove();
    if (before && document.activeElement === document.body) this.#rows.get(before)?.firstElementChild.focus();
    const full = shown.length >= KEPT;
    this.more.hidden = this.#next === null || full;
    const { pipeline, principal } = this.#wanted;
    const whole = pipeline || principal ? " Pipeline and submitter must be whole names; the search finds parts of them." : "";
    const none = this.#status !== "All" || Object.keys(this.#wanted).length ? `No such jobs.${whole}` : "No jobs yet.";
    const some = this.#next === null ? "" : `The newest ${count(shown.length)}.${full ? " Filter by time to see older ones." : ""}`;
    say(this.note, this.#problem || (shown.length ? some : none));
    this.note.hidden = !this.note.textContent;
  }

  #row(info) {
    const id = info.job_id;
    let row = this.#rows.get(id);
    if (!row) {
      row = h("li", {}, h("a", { class: "row", href: `?job=${encodeURIComponent(id)}`, "data-link": true, "data-job": id }));
      this.#rows.set(id, row);
    }
    const link = row.firstElementChild;
    if (row.info !== info || row.several !== this.#several) {
      Object.assign(row, { info, several: this.#several });
      link.className = `row s-${info.status}`;
      const sets = info.sets === null || info.sets === 0 ? "" : `${count(info.done ?? 0)}/${count(info.sets)}`;
      const waits = info.status === "submitted" && info.start_at !== null;
      const begun = Math.max(info.created, Math.min(info.start_at ?? 0, info.finished ?? 0));
      const waiting = info.status === "submitted" ? "waiting" : info.status;
      const time = info.finished ? duration(info.finished - begun) : waits ? `starts at ${moment(info.start_at)}` : waiting;
      link.replaceChildren(
        mark(info.status), h("span", { class: "name" }, info.pipeline ?? "pipeline"), h("span", { class: "when" }, moment(info.created)),
        h("span", { class: "id" }, this.#several && info.principal ? `${id} · ${info.principal}` : id),
        h("span", { class: "sum" }, info.errors ? h("span", { class: "bad" }, plural(info.errors, "error")) : sets ? `${sets} · ${time}` : time),
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
