// The schedules of the service: a table on the first page.

import { card, h, moment, painter, table } from "./dom.js";
import { get } from "./service.js";

const OF_SCHEDULE = "schedule "; // how the principals of their jobs begin

export class Schedules {
  constructor() {
    this.body = h("tbody");
    this.card = card("Schedules", [],
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Schedules and their ticks" },
        table(["Schedule", "Ticks", "Next", "Last job", "Missed ticks"], this.body, "Schedules and their ticks")));
    this.card.hidden = true;
    this.load = painter(() => this.#load().catch(() => {}), 1000); // what is shown stays if it cannot be read
  }

  /** Reads them again when a job of one of them is new. */
  take(info) {
    if (info.principal?.startsWith(OF_SCHEDULE)) this.load();
  }

  async #load() {
    const { schedules } = await get("schedules");
    this.card.hidden = schedules.length === 0;
    this.body.replaceChildren(...schedules.map(({ name, timetable, next_at: next, last_job: last, missed }) => h("tr", {},
      h("td", { class: "name", "data-more": missed }, h("b", {}, name)), h("td", { class: "name" }, timetable), h("td", {}, next === null ? "–" : moment(next)),
      h("td", { class: "name" }, last === null ? "–" : h("a", { href: `?job=${encodeURIComponent(last)}`, "data-link": true }, last)), h("td", {}, missed))));
  }
}
