// The live page: which job is shown, and the stream of the whole service.

import { announce, h, say } from "./dom.js";
import { JobView } from "./job.js";
import { JobList } from "./jobs.js";
import { Overview } from "./overview.js";
import { Schedules } from "./schedules.js";
import { Feed, get, jobPath } from "./service.js";
import { Sites } from "./sites.js";
import { Submit } from "./submit.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
const dialog = document.getElementById("ask");

const open = info => { jobs.take(info); overview.take(info); go(`?job=${encodeURIComponent(info.job_id)}`); };
const submit = new Submit({ submitted: open });
const sites = new Sites(document.getElementById("health"));
const overview = new Overview(sites, new Schedules());
const create = h("button", { type: "button", hidden: true, onclick: () => submit.open() }, "New job");
const jobs = new JobList(document.getElementById("jobs"), { create });
let view = null;

const connections = { service: "waiting", job: "live" };
const WORDS = { live: "live", waiting: "connecting …", over: "not connected" };

function tell(which, state) {
  connections[which] = state;
  const worst = connections.service !== "live" ? connections.service : connections.job;
  if (link.dataset.state === worst) return;
  if (link.dataset.state === "live") announce("The connection is lost. The page is reconnecting.");
  else if (worst === "live") announce("Connected.");
  link.dataset.state = worst;
  say(link.querySelector(".word"), WORDS[worst]);
}

let answer = () => {};

function confirm(title, text, yes) {
  say(document.getElementById("ask-title"), title);
  say(document.getElementById("ask-text"), text);
  say(document.getElementById("ask-yes"), yes);
  answer(false);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => { answer = resolve; });
}

// The event comes after the dialog has closed, perhaps when it is already open for another question.
dialog.addEventListener("close", () => { if (!dialog.open) answer(dialog.returnValue === "yes"); });

function go(address) {
  history.pushState(null, "", address);
  route({ moved: true });
}

async function route({ moved = false } = {}) {
  const id = new URLSearchParams(location.search).get("job");
  view?.close();
  view = null;
  tell("job", "live");
  jobs.point(id);
  document.body.classList.toggle("on-job", Boolean(id));
  overview.hide();
  if (!id) {
    document.title = "dfm_async";
    return overview.show(main);
  }
  let info = jobs.get(id);
  try {
    info = await get(jobPath(id)); // what the list knows may be older
  } catch (refused) {
    if (!info) return missing(id, refused);
  }
  if (new URLSearchParams(location.search).get("job") !== id) return;
  view = new JobView(main, info, { confirm, tell: state => tell("job", state), open });
  if (!moved) return undefined;
  view.title.focus({ preventScroll: true });
  scrollTo(0, 0);
  return undefined;
}

function missing(id, refused) {
  document.title = "dfm_async";
  const message = refused.status === 404 ? `There is no job ${id}, or you may not see it.` : `The job cannot be shown: ${refused.message}.`;
  main.replaceChildren(h("p", {}, h("a", { href: "?", "data-link": true }, "← All jobs")), h("p", { class: "notice bad", role: "alert" }, message));
}

document.addEventListener("click", event => {
  const anchor = event.target.closest?.("a[data-link]");
  if (!anchor || event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  go(anchor.getAttribute("href"));
});
addEventListener("popstate", () => route());

new Feed(() => "stream?active=true", ["job", "sites", "drain"], {
  opened: () => {
    jobs.begin();
    overview.begin().catch(() => {});
  },
  tell: state => tell("service", state),
  // A client that may not list jobs does not wait for them; other errors are temporary.
  over: () => get("jobs?limit=1").then(() => false, refused => [401, 403].includes(refused.status) && jobs.refuse(refused.message)),
  take: (name, data) => {
    if (name === "sites") return sites.take(data);
    if (name !== "job") return undefined;
    jobs.take(data);
    overview.take(data);
    if (view?.model.info.job_id === data.job_id) view.update(data);
    return undefined;
  },
});

route();
submit.load().then(names => {
  create.hidden = !names.length;
  jobs.offer(names);
}, () => {});
