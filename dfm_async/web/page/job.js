// One job: everything that is known of it, live.

import { announce, count, duration, ended, final, h, mark, moment, painter, say } from "./dom.js";
import { askFork } from "./fork.js";
import { Graph } from "./graph.js";
import { EVENTS, JobModel } from "./model.js";
import { Faults, Nodes, Series } from "./parts.js";
import { Results } from "./results.js";
import { Feed, get, jobPath, post, url } from "./service.js";
import { Timeline } from "./timeline.js";
import { Waits } from "./waits.js";

const REPLAYED = 10_000;
const COLORS = 8;

export class JobView {
  #feed = null;
  #clock = null;
  #colors = new Map();
  #closed = false;
  #begin = -1;
  #status;

  /**
   * @param root where it is shown
   * @param info what is known of the job
   * @param confirm asks the user; gives whether they want it
   * @param tell gets the state of the connection
   * @param open shows another job, given what is known of it
   */
  constructor(root, info, { confirm, tell, open }) {
    const model = (this.model = new JobModel(info));
    this.#status = info.status;
    const color = site => this.#color(site);
    Object.assign(this, { root, confirm, tell, open });
    this.graph = new Graph(model, { drawn: sites => this.#know(sites) });
    this.nodes = new Nodes(model, color);
    this.time = new Timeline(model, color);
    this.results = new Results(model, color);
    this.faults = new Faults(model, color);
    this.series = new Series(model);
    this.waits = new Waits(model, { took: info => this.update(info) });
    this.parts = { waits: this.waits, graph: this.graph, nodes: this.nodes, time: this.time, results: this.results, faults: this.faults, series: this.series };
    this.parts.head = { paint: painter(() => this.#head()) };
    this.#build();
    this.#head();
    this.waits.paint();
    // The drawing first: it gives the sites their colours.
    this.graph.load().finally(() => {
      if (!this.#closed) this.#follow();
    });
  }

  #build() {
    const { job_id: id, pipeline } = this.model.info;
    this.badge = h("span");
    const button = (name, kind, press) => h("button", { type: "button", class: kind, onclick: press }, name);
    this.buttons = {
      finish: button("Finish inputs", "plain", () => this.#steer("finish")),
      resume: button("Resume", "primary", () => this.#steer("resume")),
      retry: button("Run failed sets again", "primary", () => this.#steer("retry", undefined, info => this.open(info))),
      fork: button("Fork job", "plain", () => askFork(id, this.graph.calls, info => this.open(info))),
      cancel: button("Cancel job", "danger", () => this.#cancel()),
    };
    this.title = h("h1", { tabindex: -1 }, h("span", {}, pipeline ?? "pipeline"), this.badge);
    this.facts = h("dl", { class: "facts" });
    this.bar = h("progress", { "aria-label": "Parameter sets that are done" });
    this.notice = h("p", { class: "notice", hidden: true });
    this.problem = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.root.replaceChildren(
      h("div", { class: "head" },
        h("div", { class: "who" }, h("a", { class: "back", href: "?", "data-link": true }, "← All jobs"), this.title, h("p", { class: "soft mono" }, id)),
        h("p", { class: "buttons" }, ...Object.values(this.buttons))),
      this.notice, this.problem, this.facts, this.bar,
      this.waits.card,
      this.faults.card,
      h("div", { class: "split" }, this.graph.card, h("div", { class: "stack" }, this.time.card, this.nodes.card, this.series.card)),
      this.results.card);
  }

  #color(site) {
    if (!this.#colors.has(site)) this.#colors.set(site, this.#colors.size % COLORS);
    return `var(--s${this.#colors.get(site)})`;
  }

  /** The drawing has given colours to the sites: everything else goes by it. */
  #know(sites) {
    for (const [site, index] of sites) this.#colors.set(site, index);
    this.parts.head.paint(); // the nodes are known
  }

  #follow() {
    const { job_id: id, first, events } = this.model.info;
    this.#begin = Math.max(first - 1, events - 1 - REPLAYED);
    this.#leaveOut(0, this.#begin, first);
    this.#feed = new Feed(last => `${jobPath(id, "/stream")}?activity=true&after=${Math.max(last ?? -1, this.#begin)}`, [...EVENTS, "end", "drain"], {
      take: (name, data) => this.#take(name, data),
      tell: state => this.tell(state === "over" ? "live" : state),
      over: last => this.#over(Math.max(last ?? -1, this.#begin)),
    });
  }

  /** The stream was refused: tells whether that is the end of it. */
  async #over(last) {
    const info = await get(jobPath(this.model.info.job_id)).catch(refused => (refused.status === 404 ? null : Promise.reject(refused)));
    if (info === null || info.events <= last) return this.#lost(); // it is gone, or another one has its name
    this.update(info);
    if (info.first - 1 > last) {
      this.#leaveOut(last + 1, info.first - 1, info.first);
      this.#begin = info.first - 1;
      return false;
    }
    return final(info.status) && info.events === last + 1;
  }

  /** Says which events cannot be seen here. */
  #leaveOut(from, to, first) {
    if (to < from) return;
    this.model.partial = true;
    const which = to === from ? `Event ${count(from)} is` : `The events ${count(from)} to ${count(to)} are`;
    this.notice.hidden = false;
    if (to < first) return say(this.notice, `${which} not shown: the service does not keep them any more.`);
    const older = h("a", { href: url(`${jobPath(this.model.info.job_id, "/events")}?after=${from - 1}`) }, "as JSON");
    return this.notice.replaceChildren(`${which} not shown, to save memory. The service has them all, `, older, ".");
  }

  #take(name, data) {
    if (name === "end") {
      this.#feed.close();
      get(jobPath(this.model.info.job_id)).then(info => this.update(info), () => {});
      return;
    }
    this.#tell(this.model.take(name, data));
    if (name === "interrupted") get(jobPath(this.model.info.job_id)).then(info => this.update(info), () => {});
  }

  #tell(parts) {
    for (const part of parts) this.parts[part].paint();
    const { status, pipeline } = this.model.info;
    if (status !== this.#status) announce(`The job ${pipeline ?? ""} is ${status}.`);
    this.#status = status;
  }

  #lost() {
    this.problem.hidden = false;
    say(this.problem, "The service does not know this job any more. This page keeps showing what it has received.");
    return true;
  }

  /** Takes what the service tells of its jobs. */
  update(info) {
    this.#tell(this.model.update(info));
  }

  #head() {
    const { info, errors } = this.model;
    const over = ended(info.status);
    if (over || this.#closed) {
      clearInterval(this.#clock);
      this.#clock = null;
    } else {
      this.#clock ??= setInterval(() => this.parts.head.paint(), 1000);
    }
    this.badge.className = `badge s-${info.status}`;
    this.badge.replaceChildren(mark(info.status), info.status);
    this.buttons.cancel.hidden = over && info.status !== "interrupted";
    this.buttons.finish.hidden = over || !info.accepts;
    this.buttons.resume.hidden = info.status !== "interrupted";
    this.buttons.retry.hidden = !["failed", "aborted"].includes(info.status) || info.sets === 0;
    this.buttons.fork.hidden = !over || !info.stored || this.graph.calls.length === 0;
    const later = info.start_at > info.created ? info.start_at : null;
    const took = (info.finished ?? Date.now() / 1000) - (later ?? info.created);
    // When an interrupted job ended is not known, nor how long one that starts later will take.
    const untimed = info.status === "interrupted" ? info.finished === null : later !== null && info.status === "submitted";
    const sets = info.sets === null ? null : `${info.done === null ? "" : `${count(info.done)} of `}${count(info.sets)}${info.accepts ? " or more" : ""}`;
    this.facts.replaceChildren(...[
      ["Parameter sets", sets],
      [over ? "Took" : info.status === "submitted" ? "Waiting" : "Running for", untimed ? null : duration(Math.max(0, took))],
      [info.status === "submitted" ? "Starts at" : "Started at", later && moment(later)],
      ["Errors", count(errors), errors > 0],
      ["Submitted", moment(info.created)],
      ["Submitted by", info.principal],
      ["Retry of", info.retry_of && h("a", { href: `?job=${encodeURIComponent(info.retry_of)}`, "data-link": true }, info.retry_of)],
      ["Fork of", info.fork_of && h("a", { href: `?job=${encodeURIComponent(info.fork_of)}`, "data-link": true }, info.fork_of)],
      ["Waits for", info.waits_for],
      ["Reason", info.reason],
    ].filter(([, value]) => value).map(([name, value, wrong]) =>
      h("div", { class: wrong && "wrong" }, h("dt", {}, name), h("dd", { class: ["Reason", "Waits for"].includes(name) && "small" }, value))));
    this.bar.hidden = over || !info.sets;
    if (info.sets) [this.bar.max, this.bar.value] = [info.sets, info.done ?? 0];
    document.title = `${info.status === "running" && info.sets ? `${info.done ?? 0}/${info.sets} ` : `${info.status} · `}${info.pipeline ?? info.job_id} · dfm_async`;
  }

  async #cancel() {
    const name = this.model.info.pipeline ?? "this job";
    if (!(await this.confirm("Cancel the job?", `What runs of “${name}” is stopped. The results so far stay.`, "Cancel job"))) return;
    await this.#steer("cancel", { reason: "cancelled on the live page" });
  }

  async #steer(action, body, took = info => this.update(info)) {
    const button = this.buttons[action];
    const focused = document.activeElement === button;
    button.disabled = true; // takes the focus away
    this.problem.hidden = true;
    try {
      took(await post(jobPath(this.model.info.job_id, `/${action}`), body));
    } catch (refused) {
      this.problem.hidden = false;
      say(this.problem, `The request failed: ${refused.message}.`);
    } finally {
      button.disabled = false;
      this.#head();
      if (focused) (button.hidden ? this.title : button).focus();
    }
  }

  close() {
    this.#closed = true;
    this.#feed?.close();
    clearInterval(this.#clock);
    this.time.close();
    this.graph.close();
  }
}
