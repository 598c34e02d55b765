// A dialog that asks where a job is forked.

import { h } from "./dom.js";
import { jobPath, post } from "./service.js";
import { Field, problems } from "./submit.js";

const FRAME = /^\s*\d+(\s*,\s*\d+)*\s*$/;

/**
 * Asks for a node, and runs a job again from it on.
 *
 * @param id the job
 * @param nodes the labels of its calls
 * @param forked gets what is known of the new job
 */
export function askFork(id, nodes, forked) {
  const node = new Field("node", { enum: nodes, description: "the first that runs again" }, true);
  const frame = new Field("call", { type: "string", description: "its parameter set and iterations, such as 0,57; empty for all" }, false);
  const accept = new Field("accept changes", { type: "boolean", description: "use recorded values of operations whose code has changed" }, false);
  const problem = h("div", { role: "alert" });
  const send = async event => {
    event.preventDefault();
    problem.replaceChildren();
    try {
      if (!frame.omitted && !FRAME.test(frame.value)) throw new Error("call takes numbers, such as 0,57");
      const numbers = frame.omitted ? null : frame.value.split(",").map(Number);
      const info = await post(jobPath(id, "/fork"), { from_node: node.value, frame: numbers, accept_changes: accept.value });
      dialog.close();
      forked(info);
    } catch (error) {
      problem.replaceChildren(problems(error));
    }
  };
  const form = h("form", { class: "form", onsubmit: send }, node.label, frame.label, accept.label, problem,
    h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close"), h("button", { class: "primary" }, "Fork")));
  const dialog = h("dialog", { class: "ask wide", "aria-labelledby": "fork-job", onclose: () => dialog.remove() }, h("h2", { id: "fork-job" }, "Run again from a node on"), form);
  document.body.append(dialog);
  dialog.showModal();
}
