// What the service does: jobs now, jobs that have ended lately, and the newest errors.

import { card, count, duration, ended, h, mark, moment, painter, plural, s, say, short } from "./dom.js";
import { get, jobPath } from "./service.js";

const PAGE = 200;
const KEPT = 1000;
const NEWEST = 5; // jobs with errors
const TAILS = [16, 500]; // events at the end of a job, among which its newest error is looked for
const BARS = 48;
const SPANS = [60, 300, 900, 3600, 6 * 3600, 24 * 3600];
const MINUTE = 60;
const TICK = 5000;
const BRIEF = 160;

const span = seconds => `last ${seconds < 3600 ? `${seconds / 60} min` : `${seconds / 3600} h`}`;

export class Overview {
  #jobs = new Map(); // the newest of all
  #from = 0; // jobs that were created before this time are not all known
  #since = Infinity; // jobs that were created after this time are new
  #steps = []; // when how many parameter sets were completed, and errors occurred
  #failed = new Map(); // the newest jobs with errors
  #errors = new Map(); // what their newest errors are
  #clock = null;

  constructor(sites, schedules) {
    this.totals = h("dl", { class: "facts" });
    this.note = h("span", { class: "soft" });
    this.bars = s("g");
    this.drawing = s("svg", { viewBox: `0 0 ${BARS * 10} 100`, preserveAspectRatio: "none", role: "img" }, this.bars);
    this.rate = h("p", { class: "soft" });
    this.chart = card("Jobs ended", [this.note], h("div", { class: "body ended" }, this.drawing, this.rate));
    this.list = h("ul");
    this.newest = card("Newest errors", [], this.list);
    this.sites = sites;
    this.schedules = schedules;
    this.paint = painter(() => this.#paint(), 250);
  }

  show(root) {
    root.replaceChildren(
      h("div", { class: "title" }, h("h1", {}, "Overview"), h("a", { class: "back", href: "#jobs" }, "Jobs ↓")),
      this.totals, h("div", { class: "pair" }, this.newest, this.chart), this.schedules.card, this.sites.card);
    this.#clock ??= setInterval(this.paint, TICK);
    this.paint();
  }

  hide() {
    clearInterval(this.#clock);
    this.#clock = null;
  }

  /** The stream has begun: it reports the active jobs, and all changes from now on. */
  async begin() {
    this.schedules.load();
    this.#jobs.clear();
    this.#since = Infinity;
    const [{ jobs, next }, failed] = await Promise.all([get(`jobs?limit=${PAGE}`), get(`jobs?limit=${NEWEST}&status=failed`)]);
    this.#from = next === null ? 0 : jobs.at(-1).created;
    this.#since = jobs[0]?.created ?? 0;
    for (const info of [...jobs, ...failed.jobs]) if (!this.#jobs.has(info.job_id)) this.#keep(info, jobs.includes(info));
    if (!this.#steps.length) {
      // What is certain of the minute before: all that the jobs have done that were submitted in it.
      const now = Date.now() / 1000;
      this.#steps = jobs.map(info => this.#jobs.get(info.job_id)).filter(info => info.created > now - MINUTE)
        .map(({ finished, done, errors }) => ({ at: performance.now() - (now - (finished ?? now)) * 1000, sets: done ?? 0, errors }))
        .sort((one, other) => one.at - other.at);
    }
    this.paint();
  }

  take(info) {
    const before = this.#jobs.get(info.job_id);
    if (!before) this.schedules.take(info);
    if (before || info.created > this.#since) {
      const step = { at: performance.now(), sets: (info.done ?? 0) - (before?.done ?? 0), errors: info.errors - (before?.errors ?? 0) };
      if (step.sets > 0 || step.errors > 0) this.#steps.push(step);
    }
    this.#keep(info, true);
    this.paint();
  }

  #keep(info, newest) {
    if (newest) this.#jobs.set(info.job_id, info);
    if (info.errors > 0 || info.status === "failed") this.#failed.set(info.job_id, info);
    trim(this.#failed, NEWEST);
    if (this.#jobs.size <= KEPT) return;
    for (const last of trim(this.#jobs, KEPT - PAGE)) if (ended(last.status)) this.#from = Math.max(this.#from, last.created);
  }

  #paint() {
    if (this.#clock === null) return;
    const now = Date.now() / 1000;
    const over = [...this.#jobs.values()].filter(info => info.finished !== null);
    const age = now - over.reduce((first, info) => Math.min(first, info.finished), now);
    const wanted = SPANS.find(found => found >= age) ?? SPANS.at(-1);
    // Of more jobs than are known here, the newest are counted.
    const [seconds, since] = now - wanted >= this.#from ? [wanted, span(wanted)] : [now - this.#from, `since ${moment(this.#from)}`];
    const recent = over.filter(info => info.finished > now - seconds);
    this.#tell(recent, since);
    this.#draw(recent, now, seconds, since);
    this.#list();
  }

  #tell(recent, when) {
    const number = (...statuses) => [...this.#jobs.values()].filter(info => statuses.includes(info.status)).length;
    const failed = recent.filter(info => info.status === "failed").length;
    const finished = recent.filter(info => info.status === "finished").length;
    const since = performance.now() - MINUTE * 1000;
    while (this.#steps.length && this.#steps[0].at < since) this.#steps.shift();
    const sum = name => this.#steps.reduce((all, step) => all + Math.max(0, step[name]), 0);
    const share = failed ? ` (${short(Math.round((100 * failed) / recent.length))} %)` : "";
    this.totals.replaceChildren(...[
      ["Jobs running", count(number("running"))],
      ["Jobs waiting", count(number("submitted"))],
      [`Finished, ${when}`, count(finished)],
      [`Failed, ${when}`, count(failed) + share, failed > 0],
      ["Sets per minute", count(sum("sets"))],
      ["Errors per minute", count(sum("errors")), sum("errors") > 0],
    ].map(([name, value, wrong]) => h("div", { class: wrong && "wrong" }, h("dt", {}, name), h("dd", {}, value))));
    say(this.note, when);
    const took = recent.filter(info => info.status === "finished").map(info => info.finished - info.created).sort((one, other) => one - other);
    say(this.rate, took.length ? `${plural(recent.length, "job")}; half of the finished ones took ${duration(took[Math.floor((took.length - 1) / 2)])} or less, the longest ${duration(took.at(-1))}`
      : recent.length ? plural(recent.length, "job") : "No job has ended.");
  }

  #draw(recent, now, seconds, when) {
    const stacks = Array.from({ length: BARS }, () => ({ finished: 0, failed: 0, stopped: 0 }));
    for (const { finished, status } of recent) {
      const stack = stacks[Math.min(BARS - 1, Math.max(0, Math.floor(((finished - now + seconds) / seconds) * BARS)))];
      stack[status in stack ? status : "stopped"] += 1;
    }
    const high = Math.max(1, ...stacks.map(({ finished, failed, stopped }) => finished + failed + stopped));
    this.bars.replaceChildren(...stacks.flatMap((stack, index) => {
      let y = 100;
      return ["finished", "stopped", "failed"].filter(name => stack[name]).map(name => {
        const height = (stack[name] / high) * 100;
        y -= height;
        return s("rect", { class: name, x: index * 10 + 1, y, width: 8, height });
      });
    }));
    const total = name => stacks.reduce((sum, stack) => sum + stack[name], 0);
    this.drawing.setAttribute("aria-label", `Jobs that ended, ${when}: ${total("finished")} finished, ${total("failed")} failed, ${total("stopped")} stopped`);
  }

  #list() {
    const jobs = [...this.#failed.values()].sort((one, other) => other.created - one.created);
    const lines = jobs.map(info => {
      const { job_id: id, pipeline, status, errors, finished, created, reason } = info;
      this.#look(info);
      const text = this.#errors.get(id)?.text ?? reason ?? "";
      return h("li", {}, h("a", { class: `row s-${status}`, href: `?job=${encodeURIComponent(id)}`, "data-link": true },
        mark(status), h("span", { class: "name" }, pipeline ?? "pipeline"), h("span", { class: "when" }, moment(finished ?? created)),
        h("span", { class: "what" }, text), h("span", { class: "sum bad" }, errors ? plural(errors, "error") : status)));
    });
    // Not while the keyboard is in it, unless there is something new: the focus would be lost.
    const key = lines.map(line => line.textContent + line.firstElementChild.href).join();
    if (key === this.shown) return;
    this.shown = key;
    this.list.replaceChildren(...(lines.length ? lines : [h("li", { class: "note" }, "None.")]));
  }

  /** Looks up the newest error of a job, if there is a newer one. */
  async #look({ job_id: id, errors, events, first }) {
    const known = this.#errors.get(id);
    if (known?.errors === errors || known?.busy) return;
    const entry = { errors, busy: true, text: known?.text };
    this.#errors.set(id, entry);
    try {
      for (const tail of TAILS) {
        const page = await get(`${jobPath(id, "/events")}?limit=${tail}&after=${Math.max(first, events - tail) - 1}`);
        const found = page.events.findLast(event => event.event === "failure" && event.place === null);
        if (!found) continue;
        const text = `${found.error.type} in ${found.node}: ${found.error.message}`;
        entry.text = text.length > BRIEF ? `${text.slice(0, BRIEF)} …` : text;
        break;
      }
    } catch {
      // the job is gone, or may not be read: its number of errors is shown all the same
    }
    entry.busy = false;
    for (const old of [...this.#errors.keys()].slice(0, -2 * NEWEST)) this.#errors.delete(old);
    this.paint();
  }
}

/** Drops the oldest jobs from a map, and returns them. */
function trim(jobs, most) {
  const all = [...jobs.values()];
  if (all.length <= most) return [];
  const dropped = all.sort((one, other) => other.created - one.created).slice(most);
  for (const { job_id: id } of dropped) jobs.delete(id);
  return dropped;
}
