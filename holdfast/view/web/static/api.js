// Speaks with the viewer: JSON by GET, actions by POST, and the stream of what changes.
//
// The stream is the only thing that is waited on. It tells of a lost coordinator itself; that the viewer or the
// network is gone shows in the stream breaking off or falling silent, and it is taken up again until it holds.
// Every request has a deadline: on a connection that ended without a word no answer ever comes.

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export function path(job, rest) {
  return `/api/jobs/${encodeURIComponent(job)}/${rest}`;
}

async function answer(response) {
  if (response.ok) return response.json();
  let text = `the viewer answered ${response.status}`;
  try {
    const body = await response.json();
    text = body.error ?? text;
  } catch { /* no JSON: the status says enough */ }
  throw new Refused(response.status, text);
}

const ANSWER_MS = 30000;

export async function get(url, signal, limit = ANSWER_MS) {
  const ends = AbortSignal.timeout(limit);
  return answer(await fetch(url, { signal: signal ? AbortSignal.any([signal, ends]) : ends, headers: { Accept: "application/json" }, credentials: "same-origin" }));
}

export async function act(job, action, body) {
  return answer(await fetch(path(job, `actions/${action}`), {
    method: "POST", credentials: "same-origin",
    headers: { "Content-Type": "application/json", "X-Holdfast": "1" },
    body: JSON.stringify({ ...body, confirm: job }),
  }));
}

const RETRY_MS = [500, 1000, 2000, 4000];
/** The stream says something every 4 s. */
const SILENCE_MS = 10000;
const REASON_MS = 4000;

/** Follow a job. `on` has now, incident, coordinator(there) and viewer(there, error), each called as it changes. An
    error that is not there is not known yet. */
export function follow(job, on) {
  let source = null, tries = 0, retry = 0, silence = 0;

  const alive = () => {
    clearTimeout(silence);
    silence = setTimeout(lost, SILENCE_MS);
  };
  const listen = (name, take) => source.addEventListener(name, (event) => {
    alive();
    take(event.data ? JSON.parse(event.data) : null);
  });
  const open = () => {
    clearTimeout(retry);
    source?.close();
    source = new EventSource(path(job, "stream"));
    source.onopen = () => { tries = 0; alive(); on.viewer(true); };
    source.onerror = () => lost();
    listen("now", on.now);
    listen("incident", on.incident);
    listen("gone", (said) => on.coordinator(false, said));
    listen("back", (said) => on.coordinator(true, said));
    listen("here", () => {});
    alive();
  };
  const lost = () => {
    source.close();
    clearTimeout(silence);
    on.viewer(false);
    probe();
  };
  /** Ask why, and again until there is an answer; then take the stream up. */
  const probe = async () => {
    clearTimeout(retry);
    const ended = source, error = await reason();
    if (source !== ended) return;
    if (error) on.viewer(false, error);
    clearTimeout(retry);
    retry = setTimeout(error ? probe : open, RETRY_MS[Math.min(tries++, RETRY_MS.length - 1)]);
  };
  const reason = () => get(path(job, "now"), undefined, REASON_MS).then(() => null, (error) => error);
  addEventListener("online", open);
  addEventListener("offline", lost);
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  open();
}
