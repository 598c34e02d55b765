// The results of a job: a table with filters, the newest first.

import { card, count, ended, h, painter, say, siteTag, table } from "./dom.js";
import { get, jobPath, url } from "./service.js";
import { image, picture, title } from "./values.js";

const SHOWN = 200;
const LINE = 160;

export class Results {
  #rows = new Map();

  constructor(model, color) {
    this.model = model;
    this.color = color;
    this.place = this.#choice("Place");
    this.site = this.#choice("Site");
    this.frame = h("input", { type: "search", size: 7, placeholder: "frame", "aria-label": "Frame, such as 0 or 0.3", oninput: () => this.paint() });
    this.note = h("span", { class: "soft", role: "note" });
    this.body = h("tbody");
    this.card = card("Results", [this.note, this.place, this.site, this.frame],
      h("div", { class: "scroll results", tabindex: 0, role: "group", "aria-label": "Results" },
        table(["#Offset", "Place", "Frame", "Site", "Value"], this.body, "Results, the newest first")));
    this.paint = painter(() => this.#paint(), 150);
    this.paint();
  }

  #choice(name) {
    return h("select", { "aria-label": name, onchange: () => this.paint() }, h("option", { value: "" }, `Every ${name.toLowerCase()}`));
  }

  #offer(select, values) {
    const there = new Set([...select.options].map(option => option.value));
    for (const value of values) if (!there.has(value)) select.append(h("option", { value }, value));
    select.hidden = values.size < 2;
  }

  #paint() {
    const { results, dropped, places, sites } = this.model;
    this.#offer(this.place, places);
    this.#offer(this.site, sites);
    const [place, site, frame] = [this.place.value, this.site.value, this.frame.value.trim()];
    const fits = ({ place: at, site: by, frame: of }) =>
      (!place || at === place) && (!site || by === site) && (!frame || of === frame || of.startsWith(`${frame}.`));
    const shown = [];
    let found = 0;
    for (let index = results.length - 1; index >= 0; index--) {
      if (fits(results[index]) && ++found <= SHOWN) shown.push(results[index]);
    }
    const rows = new Map(shown.map(result => [result.offset, this.#rows.get(result.offset) ?? this.#row(result)]));
    this.#rows = rows;
    const wanted = [...rows.values()];
    for (const row of [...this.body.children]) if (!rows.has(row.offset)) row.remove();
    wanted.forEach((row, index) => {
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
    });
    if (!wanted.length) {
      this.body.append(h("tr", {}, h("td", { colspan: 5, class: "soft" }, results.length ? "No such results." : ended(this.model.info.status) ? "No results." : "No results yet.")));
    }
    const gone = dropped ? ` (${count(dropped)} older ones are not kept here)` : "";
    say(this.note, found > SHOWN ? `the newest ${SHOWN} of ${count(found)}${gone}` : `${count(found)}${gone}`);
  }

  #row(result) {
    const row = h("tr", {},
      h("td", { class: "num soft" }, String(result.offset)), h("td", { class: "name", "data-more": `${result.site} · ${result.offset}` }, result.place), h("td", { class: "mono" }, result.frame),
      h("td", {}, siteTag(result.site, this.color(result.site))), h("td", { class: "wide" }, this.#value(result)));
    row.offset = result.offset;
    return row;
  }

  #value({ offset, text, cut, image: pictured, said }) {
    const value = !cut && /^[[{]/.test(text) ? JSON.parse(text) : null;
    const known = said ?? title(value);
    const line = known ?? text.slice(0, 4 * LINE).replace(/\s*\n\s*/g, " ");
    if (!cut && !pictured && value === null && line.length <= LINE) return h("span", { class: "one" }, line);
    const details = h("details", {}, h("summary", { class: known === null && "one" }, line.length > LINE ? `${line.slice(0, LINE)} …` : line));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      const json = h("pre", {}, text);
      const show = drawn => details.append(...(drawn ? [h("div", { class: "preview" }, drawn), h("details", {}, h("summary", { class: "soft" }, "JSON"), json)] : [json]));
      const { job_id: id } = this.model.info;
      const path = `${jobPath(id, "/events")}?after=${offset - 1}&limit=1`;
      if (cut) details.append(h("p", {}, "Shortened: ", h("a", { href: url(path) }, "the whole value"), "."));
      if (pictured) return show(image(url(jobPath(id, `/results/${offset}/image`)), known));
      if (!cut) return show(picture(value));
      return get(path).then(({ events }) => show(picture(events[0].value)), () => show(null));
    });
    return details;
  }
}
