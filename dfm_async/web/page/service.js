// The service behind the page: requests, and streams that reconnect by themselves.

const base = new URL(".", document.baseURI);
const IDLE = 30_000; // A hidden page closes its connections after this time: browsers allow only six per host.

export const url = path => new URL(path, base);
export const jobPath = (id, rest = "") => `jobs/${encodeURIComponent(id)}${rest}`;

/** An error response of the service; `status` is 0 if it was not reached. */
export class Refused extends Error {
  constructor(status, message, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(url(path), options);
  } catch {
    throw new Refused(0, "the service cannot be reached");
  }
  if (response.ok) return response;
  const error = await response.json().catch(() => ({}));
  throw new Refused(response.status, error.message ?? `the service answered ${response.status}`, error.problems);
}

export const get = async path => (await ask(path)).json();
export const text = async path => (await ask(path)).text();
export const post = async (path, body = {}) =>
  (await ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) })).json();

/**
 * A stream of server-sent events. Browsers reconnect by themselves after a lost connection, but not after an error
 * response; this class does, with growing pauses, until `over` returns true.
 */
export class Feed {
  #source = null;
  #timer = null;
  #pause = 1000;
  #last = null;

  /**
   * @param path returns the path; gets the id of the last event, or null
   * @param names the names of the events
   * @param take gets each event: its name and its data
   * @param tell gets the state of the connection: "live", "waiting", "over"
   * @param over returns, after an error response, whether the stream has ended; gets the id of the last event
   */
  constructor(path, names, { take, tell = () => {}, opened = () => {}, over = async () => false }) {
    Object.assign(this, { path, names, take, tell, opened, over });
    this.onVisible = () => this.#seen();
    document.addEventListener("visibilitychange", this.onVisible);
    this.#open();
  }

  #open() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const source = (this.#source = new EventSource(url(this.path(this.#last))));
    source.onopen = () => {
      this.#pause = 1000;
      this.tell("live");
      this.opened();
    };
    source.onerror = () => this.#broken(source);
    for (const name of this.names) {
      source.addEventListener(name, event => {
        if (event.lastEventId !== "") this.#last = Number(event.lastEventId);
        this.take(name, JSON.parse(event.data));
      });
    }
  }

  async #broken(source) {
    if (source !== this.#source) return;
    if (source.readyState === EventSource.CONNECTING) return this.tell("waiting");
    this.tell("waiting");
    const over = await this.over(this.#last).catch(() => false);
    if (source !== this.#source) return;
    if (over) return this.close();
    this.#timer = setTimeout(() => this.#open(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, 15_000);
  }

  #seen() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (document.hidden) {
      this.#timer = setTimeout(() => this.#rest(), IDLE);
    } else if (this.#source === null || this.#source.readyState === EventSource.CLOSED) {
      this.#open();
    }
  }

  #rest() {
    this.#source?.close();
    this.#source = null;
    this.tell("waiting");
  }

  /** Ends it for good. */
  close() {
    document.removeEventListener("visibilitychange", this.onVisible);
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
    this.tell("over");
  }
}
