// The sites and their workers: a chip for each in the bar, a table on the first page.

import { bytes, card, count, duration, h, plural, table } from "./dom.js";

const unwell = site => site.workers.some(worker => worker.unresponsive);

const hanging = site => site.workers.reduce((sum, worker) => sum + worker.abandoned, 0);

/** Why its jobs compute on one core although they could use more. */
const bound = site => site.workers.flatMap(worker => worker.bound ?? []);

export class Sites {
  constructor(chips) {
    this.chips = chips;
    this.body = h("tbody");
    this.card = card("Sites", [],
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Sites and their workers" },
        table(["Site", "State", "#Running", "#Waiting", "#Jobs", "#Memory", "#Lag"], this.body, "Sites and their workers")));
    this.card.hidden = true;
  }

  take({ sites }) {
    const entries = Object.entries(sites).sort(([one], [other]) => (one < other ? -1 : 1));
    this.card.hidden = entries.length === 0;
    const chips = [...entries].sort(([, one], [, other]) => unwell(other) - unwell(one)); // those come first where not all fit
    this.chips.replaceChildren(...chips.map(([name, site]) => chip(name, site)));
    this.body.replaceChildren(...entries.flatMap(([name, site]) => rows(name, site)));
  }
}

// Such as "3 wait for gpus"; without workers, the site is in the process of the application.
function waits(site) {
  const waiting = new Map();
  for (const limit of site.limits) {
    if (limit.waiting) waiting.set(limit.limit, (waiting.get(limit.limit) ?? 0) + limit.waiting);
  }
  return [...waiting].map(([name, calls]) => `${count(calls)} ${calls === 1 ? "waits" : "wait"} for ${name}`).join(", ");
}

function state(site) {
  if (unwell(site)) return "does not respond";
  if (waits(site)) return waits(site);
  if (hanging(site)) return `${plural(hanging(site), "call")} not returning`;
  return bound(site).length ? "computes on one core" : "healthy";
}

function chip(name, site) {
  const title = `${plural(site.workers.length, "worker")}, ${state(site)}${site.restarts ? `, ${plural(site.restarts, "restart")}` : ""}`;
  return h("li", { class: `chip ${unwell(site) ? "sick" : site.workers.length ? "ok" : ""}`, title },
    h("span", { class: "dot", "aria-hidden": "true" }), h("b", {}, name), h("span", { class: "hidden" }, title),
    unwell(site) ? "does not respond" : site.restarts ? plural(site.restarts, "restart") : null);
}

/** A row for the site, and one for each of its workers; a single worker shares the row of its site. */
function rows(name, site) {
  const { workers } = site;
  const all = (key, join) => {
    const known = workers.map(worker => worker[key]).filter(value => value !== null);
    return known.length ? join(known) : null;
  };
  const sum = values => values.reduce((total, value) => total + value, 0);
  const restarts = site.restarts ? `, ${plural(site.restarts, "restart")}` : "";
  const number = (value, text = count) => h("td", { class: "num" }, value === null ? "–" : text(value));
  const more = ({ jobs, memory, lag }) => [jobs === null ? null : plural(jobs, "job"), memory === null ? null : bytes(memory), lag === null ? null : `lag ${duration(lag)}`];
  const line = (head, [said, wrong, title], { running, waiting, jobs, memory, lag }) => h("tr", {}, head, h("td", { class: wrong && "bad", title, "data-more": more({ jobs, memory, lag }).filter(Boolean).join(", ") }, said),
    number(running), number(waiting), number(jobs), number(memory, bytes), number(lag, duration));
  const limits = sum(site.limits.map(limit => limit.waiting));
  const total = {
    running: all("running", sum), waiting: workers.length ? all("waiting", sum) : limits || null, jobs: all("jobs", sum), memory: all("memory", sum),
    lag: all("lag", lags => Math.max(...lags)),
  };
  const pid = worker => (worker.pid === null ? "starting" : `process ${worker.pid}`);
  const single = workers.length === 1 ? h("span", { class: "soft mono" }, ` ${pid(workers[0])}`) : null;
  const first = line(h("td", { class: "name" }, h("b", {}, name), single), [state(site) + restarts, unwell(site), bound(site).join("\n") || null], total);
  if (single) return [first];
  // Without jobs of its own, a worker sends no heartbeats: how many calls it runs for others is not known.
  const known = worker => (worker.jobs ? worker : { ...worker, running: null, waiting: null });
  return [first, ...workers.map(worker => line(h("td", { class: "mono soft" }, pid(worker)), [condition(worker), worker.unresponsive], known(worker)))];
}

function condition({ unresponsive, abandoned, retired, bound: why }) {
  if (unresponsive) return "does not respond";
  if (abandoned) return `${plural(abandoned, "call")} not returning`;
  return why?.length ? "computes on one core" : retired ? "ending" : "healthy";
}
