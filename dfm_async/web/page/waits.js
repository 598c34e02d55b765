// What a job waits for: its events, with a form to send each of them, and its times.

import { card, count, ended, frameText, h, moment, painter } from "./dom.js";
import { jobPath, post } from "./service.js";
import { Field, plainly } from "./submit.js";

const SHOWN = 20;

export class Waits {
  #model;
  #forms = new Map(); // by node and frame: they keep what was typed while the list changes

  /**
   * @param model what is known of the job
   * @param took gets what the service tells of the job when an event was sent
   */
  constructor(model, { took }) {
    this.#model = model;
    this.took = took;
    this.list = h("ul", { class: "waits" });
    this.more = h("p", { class: "soft", hidden: true });
    this.card = card("Waits for", [], h("div", { class: "body" }, this.list, this.more));
    this.card.hidden = true;
    this.paint = painter(() => this.#draw());
  }

  #draw() {
    const { info } = this.#model;
    const waits = ended(info.status) ? [] : info.waits ?? [];
    const forms = new Map();
    for (const wait of waits.slice(0, SHOWN)) {
      const key = `${wait.node}\n${frameText(wait.frame)}`;
      forms.set(key, this.#forms.get(key) ?? this.#item(wait, info));
    }
    const before = [...this.#forms.values()];
    const now = [...forms.values()];
    this.#forms = forms;
    this.card.hidden = waits.length === 0;
    this.more.hidden = waits.length <= SHOWN;
    this.more.textContent = `and ${count(waits.length - SHOWN)} more`;
    if (before.length === now.length && before.every((item, index) => item === now[index])) return; // keeps the focus
    this.list.replaceChildren(...now);
  }

  #item({ name, frame, node, until }, { job_id: id, sets, events_awaited: schemas }) {
    const where = `${node} of set ${frameText(frame)}`;
    const limit = until === null ? null : h("small", {}, ` until ${moment(until)}`);
    if (!name) return h("li", {}, h("span", {}, "a time", limit, " ", h("small", { class: "soft" }, where)));
    const schema = plainly(schemas?.[name] ?? {}, {});
    const problem = h("p", { role: "alert", class: "notice bad", hidden: true });
    const send = async (event, value) => {
      event.preventDefault();
      problem.hidden = true;
      try {
        this.took(await post(jobPath(id, `/events/${encodeURIComponent(name)}`), { value: value(), frame: sets === 1 ? null : frame[0] }));
      } catch (error) {
        problem.hidden = false;
        problem.textContent = [error.message, ...(error.problems ?? [])].join("; ");
      }
    };
    const title = h("span", {}, h("b", {}, name), limit, " ", h("small", { class: "soft" }, where));
    if (schema.type === "boolean") {
      const button = (text, kind, value) => h("button", { type: "button", class: kind, "aria-label": `${text}: ${name} of set ${frameText(frame)}`, onclick: event => send(event, () => value) }, text);
      return h("li", {}, title, h("p", { class: "buttons" }, button("Yes", "primary", true), button("No", "plain", false)), problem);
    }
    const field = new Field("value", schema, schema.type !== "string");
    const form = h("form", { class: "form", "aria-label": `${name} of set ${frameText(frame)}`, onsubmit: event => send(event, () => field.value) },
      field.label, h("p", {}, h("button", { class: "primary" }, "Send")));
    return h("li", {}, title, form, problem);
  }
}
