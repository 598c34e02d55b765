// A form for the registered pipelines, made from the schemas of their parameters; its fields serve other forms, too.

import { h } from "./dom.js";
import { get, post } from "./service.js";

const PLAIN = new Set(["string", "integer", "number", "boolean"]);

/** Follows references, and takes the only choice if there is one; null is none if it is the default. */
export function plainly(schema, definitions, depth = 0) {
  if (depth > 8 || typeof schema !== "object" || schema === null) return {};
  const own = {};
  for (const key of ["default", "description"]) if (schema[key] !== undefined) own[key] = schema[key];
  if (schema.$ref) return { ...plainly(definitions[schema.$ref.split("/").pop()], definitions, depth + 1), ...own };
  const empty = schema.default === null;
  const joined = (schema.allOf ?? schema.anyOf)?.filter(({ type }) => !(empty && type === "null"));
  if (joined?.length !== 1) return schema;
  const found = plainly(joined[0], definitions, depth + 1);
  return { ...found, ...(empty && found.enum ? { enum: [null, ...found.enum] } : {}), ...own };
}

/** An input for a value, by its JSON schema. */
export class Field {
  constructor(name, schema, required) {
    this.name = name;
    this.required = required;
    this.kind = schema.enum ? "enum" : PLAIN.has(schema.type) ? schema.type : "json";
    this.choices = schema.enum;
    this.input = this.#input(schema);
    const about = schema.description ?? (this.kind === "json" ? `${schema.type ?? "any value"}, as JSON` : this.kind);
    this.label = this.kind === "boolean"
      ? h("label", { class: "check" }, this.input, h("span", {}, name, " ", h("small", {}, schema.description ?? "")))
      : h("label", {}, h("span", {}, name, " ", h("small", {}, about)), this.input);
  }

  #input(schema) {
    const value = schema.default === undefined || (schema.default === null && this.kind !== "json") ? undefined : this.kind === "json" ? JSON.stringify(schema.default) : String(schema.default);
    switch (this.kind) {
      case "enum": return h("select", {}, ...this.choices.map((choice, index) => h("option", { value: index, selected: choice === schema.default }, String(choice))));
      case "boolean": return h("input", { type: "checkbox", checked: schema.default === true });
      case "integer": return h("input", { type: "number", step: 1, required: this.required, value });
      case "number": return h("input", { type: "number", step: "any", required: this.required, value });
      case "string": return h("input", { type: "text", value, autocomplete: "off" });
      default: return h("textarea", { rows: 3, required: this.required, spellcheck: "false" }, value ?? "");
    }
  }

  /** Whether it is left out, so that its default is used. A text is left out only if its default is not a text. */
  get omitted() {
    const blank = this.kind !== "boolean" && this.input.value === "";
    return !this.required && blank && !(this.kind === "string" && this.input.defaultValue !== "");
  }

  get value() {
    switch (this.kind) {
      case "enum": return this.choices[Number(this.input.value)];
      case "boolean": return this.input.checked;
      case "integer":
      case "number": return Number(this.input.value);
      case "string": return this.input.value;
      default: return parsed(this.input.value, this.name);
    }
  }
}

/** What is wrong with a request. */
export const problems = error =>
  h("div", { class: "notice bad" }, ...[error.message, ...(error.problems ?? [])].map(line => h("p", {}, line)));

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}

export class Submit {
  #pipelines = [];
  #definitions = {};
  #fields = [];

  constructor({ submitted }) {
    this.submitted = submitted;
    this.choice = h("select", { onchange: () => this.#choose() });
    this.about = h("p", { class: "about" });
    this.fields = h("div", { class: "form" });
    this.many = h("textarea", { rows: 5, spellcheck: "false", "aria-label": "Parameter sets, as a JSON list" });
    this.several = h("input", { type: "checkbox", onchange: () => this.#swap() });
    this.stays = h("input", { type: "checkbox" });
    this.problem = h("div", { role: "alert" });
    this.form = h("form", { class: "form", onsubmit: event => this.#send(event) },
      h("label", {}, "Pipeline", this.choice), this.about, this.fields, this.many,
      h("label", { class: "check" }, this.several, "several parameter sets, as JSON"),
      h("label", { class: "check" }, this.stays, "leave it open for more"),
      this.problem,
      h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => this.dialog.close() }, "Close"), h("button", { class: "primary" }, "Run")));
    this.dialog = h("dialog", { class: "ask wide", "aria-labelledby": "new-job" }, h("h2", { id: "new-job" }, "New job"), this.form);
    document.body.append(this.dialog);
  }

  open() {
    this.problem.replaceChildren();
    this.dialog.showModal();
    this.choice.focus();
  }

  async load() {
    const { pipelines, $defs } = await get("pipelines");
    this.#pipelines = pipelines;
    this.#definitions = $defs;
    this.choice.replaceChildren(...pipelines.map(({ name }) => h("option", { value: name }, name)));
    if (pipelines.length) this.#choose();
    return pipelines.map(({ name }) => name);
  }

  #choose() {
    const { params } = this.#pipelines.find(({ name }) => name === this.choice.value);
    this.about.textContent = params.description ?? "";
    this.about.hidden = !this.about.textContent;
    this.#fields = Object.entries(params.properties).map(([name, schema]) => new Field(name, plainly(schema, this.#definitions), params.required.includes(name)));
    this.fields.replaceChildren(...this.#fields.map(field => field.label));
    this.problem.replaceChildren();
    this.#swap();
  }

  #swap() {
    const several = this.several.checked;
    this.fields.hidden = several;
    for (const field of this.#fields) field.input.disabled = several;
    this.many.hidden = !several;
    if (several && !this.many.value) {
      const example = Object.fromEntries(this.#fields.map(({ name, kind }) => [name, kind === "string" ? "" : kind === "boolean" ? false : 0]));
      this.many.value = JSON.stringify([example], null, 2);
    }
  }

  async #send(event) {
    event.preventDefault();
    this.problem.replaceChildren();
    try {
      const params = this.several.checked ? parsed(this.many.value, "the list") : Object.fromEntries(this.#fields.filter(field => !field.omitted).map(field => [field.name, field.value]));
      const path = `pipelines/${encodeURIComponent(this.choice.value)}/jobs`;
      const info = await post(path, { params, open: this.stays.checked });
      this.dialog.close();
      this.submitted(info);
    } catch (error) {
      this.problem.replaceChildren(problems(error));
    }
  }
}
