// What the page knows of one job, bounded: a job may have more events than a browser has memory.

import { ended } from "./dom.js";
import { isImage, title } from "./values.js";

const RESULTS = 5000;
const TEXT = 16_000_000;
const ONE = 100_000;
const GROUPS = 100;
const EXAMPLES = 20;
const NOTICES = 50;
const CALLS = 4000;
const NODES = 2000;
const SERIES = 48;
const POINTS = 400;
const WAITS = 100;

/** Keeps the newest entries of a map that would grow without end. */
function trim(map, most) {
  for (const key of map.keys()) {
    if (map.size <= most) return;
    map.delete(key);
  }
}

const indented = value => {
  const text = JSON.stringify(value, null, 2) ?? "null";
  const cut = text.length > ONE;
  const image = isImage(value);
  return { text: cut ? text.slice(0, ONE) : text, cut, image, said: cut || image ? title(value) : null };
};

export class JobModel {
  constructor(info) {
    this.info = info;
    this.results = []; // the newest last
    this.dropped = 0;
    this.size = 0;
    this.faults = new Map(); // by node and type: how many there are, and the newest of them
    this.faultCount = 0;
    this.missing = 0;
    this.partial = false; // whether events are left out here: then some counts are those of the newest ones
    this.notices = [];
    this.nodes = new Map();
    this.calls = new Map();
    this.series = new Map();
    this.places = new Set(info.places ?? []);
    this.sites = new Set();
  }

  /** Takes an event of the stream; gives which parts of the page it concerns. */
  take(name, data) {
    if (data.site) this.sites.add(data.site);
    return this[`on_${name}`]?.(data) ?? [];
  }

  node(label, site) {
    const key = `${label}\n${site}`;
    let found = this.nodes.get(key);
    if (!found) {
      found = { label, site, started: 0, done: 0, failed: 0, progress: null };
      this.nodes.set(key, found);
      this.sites.add(site);
      trim(this.nodes, NODES);
    }
    return found;
  }

  on_result({ offset, place, value, frame, site, node }) {
    const kept = { offset, place, frame: frame.join("."), site, node, ...indented(value) };
    this.places.add(place);
    this.results.push(kept);
    this.size += kept.text.length;
    while (this.results.length > RESULTS || (this.size > TEXT && this.results.length > 1)) {
      this.size -= this.results.shift().text.length;
      this.dropped += 1;
    }
    return ["results"];
  }

  on_failure(data) {
    if (data.place !== null) {
      this.missing += 1;
      return ["faults"];
    }
    const { node, site, error } = data;
    const key = `${node}\n${site}\n${error.type}`;
    const group = this.faults.get(key) ?? { key, node, site, type: error.type, count: 0, newest: [] };
    this.faults.delete(key); // the newest group stands last
    this.faults.set(key, group);
    group.count += 1;
    group.newest.unshift(data);
    group.newest.length = Math.min(group.newest.length, EXAMPLES);
    trim(this.faults, GROUPS);
    this.faultCount += 1;
    return ["faults", "head"];
  }

  on_progress({ frame, site, node, done, total, note }) {
    this.node(node, site).progress = { frame: frame.join("."), done, total, note };
    return ["nodes"];
  }

  on_metrics({ site, node, values }) {
    for (const [name, value] of Object.entries(values)) {
      if (typeof value !== "number") continue;
      const key = `${site}\n${node}\n${name}`;
      let found = this.series.get(key);
      if (!found) this.series.set(key, (found = { site, node, name, points: [], every: 1, seen: 0 }));
      // A long series keeps its shape: every second point goes, and from then on every second one comes.
      if (found.seen++ % found.every === 0) found.points.push(value);
      if (found.points.length > POINTS) {
        found.points = found.points.filter((_, index) => index % 2 === 0);
        found.every *= 2;
      }
      found.last = value;
    }
    trim(this.series, SERIES);
    return ["series"];
  }

  /** The errors of the job: those that the service counts, or that were seen here, if these are more. */
  get errors() {
    return Math.max(this.info.errors, this.faultCount);
  }

  on_status({ status, reason, offset }) {
    if (offset < this.info.events) return []; // what is known of the job is newer
    return this.#enter({ ...this.info, status, reason });
  }

  /** The log has no event for an application that was killed: the service tells what it found. */
  on_interrupted({ status }) {
    return this.#enter({ ...this.info, status });
  }

  #enter(info) {
    this.info = info;
    if (ended(info.status)) for (const node of this.nodes.values()) node.started = node.done + node.failed;
    return ["head", "graph", "nodes", "faults", "results", "waits"];
  }

  on_wait_began({ offset, name, frame, node, until }) {
    return this.#wait(offset, node, frame, [{ name, frame, node, until }]);
  }

  on_wait_ended({ offset, node, frame }) {
    return this.#wait(offset, node, frame, []);
  }

  /** Replaces what waits at a node, unless what is known of the job is newer. */
  #wait(offset, node, frame, now) {
    if (offset < this.info.events) return [];
    const others = (this.info.waits ?? []).filter(wait => wait.node !== node || wait.frame.join(".") !== frame.join("."));
    this.info = { ...this.info, waits: [...others, ...now].slice(0, WAITS) };
    return ["waits"];
  }

  /** Takes the job from the service. The number of sets done is not known for every ended job. */
  update(info) {
    return this.#enter({ ...info, done: info.done ?? this.info.done });
  }

  on_worker(data) {
    this.notices.push(data);
    if (this.notices.length > NOTICES) this.notices.shift();
    return ["faults"];
  }

  /** A failure that the pipeline goes on without: not an error of the job. */
  on_handled({ site, node, type_name, message }) {
    return this.on_worker({ site, kind: "handled", detail: `${node}: ${type_name}: ${message}` });
  }

  /** Totals, not differences: a stream may send everything again when it reconnects. */
  on_activity({ nodes, calls }) {
    for (const { node, site, started, done, failed } of nodes) Object.assign(this.node(node, site), { started, done, failed });
    for (const call of calls) {
      const key = `${call.node} ${call.site} ${call.frame.join(".")} ${call.attempt} ${call.start}`;
      if (!this.calls.has(key)) this.calls.set(key, { ...call, frame: call.frame.join(".") });
    }
    trim(this.calls, CALLS);
    return ["nodes", "graph", ...(calls.length ? ["time"] : [])];
  }
}

/** The names of the events that a model takes. */
export const EVENTS = Object.getOwnPropertyNames(JobModel.prototype).filter(name => name.startsWith("on_")).map(name => name.slice(3));
