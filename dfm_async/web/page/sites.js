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
        table(["Site", "State", "Processes", "#Jobs", "#Memory", "#Lag", "#Restarts"], this.body, "Sites and their workers")));
    this.card.classList.add("wider");
    this.card.hidden = true;
  }

  take({ sites }) {
    const entries = Object.entries(sites).sort(([one], [other]) => (one < other ? -1 : 1));
    this.card.hidden = entries.length === 0;
    this.chips.replaceChildren(...entries.map(([name, site]) => chip(name, site)));
    this.body.replaceChildren(...entries.map(([name, site]) => row(name, site)));
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

function row(name, site) {
  const memory = site.workers.reduce((sum, worker) => sum + (worker.memory ?? 0), 0);
  const lags = site.workers.map(worker => worker.lag).filter(lag => lag !== null);
  const jobs = site.workers.reduce((sum, worker) => sum + worker.jobs, 0);
  const number = text => h("td", { class: "num" }, text);
  return h("tr", {}, h("td", {}, name), h("td", { class: unwell(site) ? "bad" : "", title: bound(site).join("\n") || null }, state(site)),
    h("td", { class: "mono" }, site.workers.map(worker => worker.pid ?? "starts").join(", ") || "–"),
    number(count(jobs)), number(memory ? bytes(memory) : "–"), number(lags.length ? duration(Math.max(...lags)) : "–"),
    number(count(site.restarts)));
}
