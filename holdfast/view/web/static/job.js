// The page of one job: reads which view the address asks for, keeps it up to date, and says when it cannot.

import { offerActions } from "./actions.js";
import { follow, get, path } from "./api.js";
import { checkpointsView } from "./checkpoints.js";
import { el, fill, say } from "./dom.js";
import { count, moment, percent } from "./format.js";
import { goodputView } from "./goodput.js";
import { historyView } from "./history.js";
import { incidentsView } from "./incidents.js";
import { nodesView } from "./nodes.js";
import { nowView } from "./now.js";
import { STATES, themed } from "./palette.js";
import { timelineView } from "./timeline.js";

const VIEWS = {
  now: nowView, timeline: timelineView, incidents: incidentsView, goodput: goodputView,
  checkpoints: checkpointsView, nodes: nodesView, history: historyView,
};

const main = document.getElementById("main");

/** What all views share. A view gets it when it is shown, and again with each change. */
const page = {
  job: decodeURIComponent(location.pathname.split("/").pop()), actions: [], price: null, incidents: 0, now: null, viewer: true, error: null, coordinator: true, skew: 0,
  /** The job's clock: that of the machine that serves the page. */
  time: () => Date.now() / 1000 + page.skew,
  over: () => page.now !== null && ["ended", "lost"].includes(page.now.status.state),
  go: (hash) => { location.hash = hash; },
};

let shown = null;

function route() {
  const [name, ...rest] = location.hash.slice(1).split("?")[0].split("/");
  const known = name in VIEWS ? name : "now";
  for (const link of document.querySelectorAll(".tabs a")) {
    const current = link.getAttribute("href") === `#${known}`;
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  revealTab();
  if (shown?.name === known && shown.view.argument) {
    shown.view.argument(rest.join("/"));
    return;
  }
  const first = shown === null;
  shown?.view.close?.();
  main.setAttribute("aria-busy", "true");
  const view = VIEWS[known](page, rest.join("/"));
  shown = { name: known, view };
  fill(main, el("h2", { class: "sr", id: "view-title" }, `${document.querySelector(`.tabs a[href="#${known}"]`).firstChild.textContent.trim()}`), view.root);
  main.setAttribute("aria-labelledby", "view-title");
  document.title = `${page.job} · ${known} · Holdfast`;
  if (!first) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  Promise.resolve(view.ready).finally(() => main.setAttribute("aria-busy", "false"));
  view.show?.();
  view.update?.();
}

function revealTab() {
  document.querySelector(".tabs a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// ---- what the stream says ----

function takeNow(now) {
  now.map = { nodes: [], ranks: "", ...page.now?.map, ...now.map };
  page.skew = now.now - Date.now() / 1000;
  page.coordinator = now.alive !== false;
  const read = ["loading", "past"].some((part) => page.now?.[part] !== undefined && now[part] === undefined);
  page.now = now;
  header();
  shown?.view.update?.();
  if (read) catchUp();
}

/** The journal is read to its end: what was asked for before knew only a part of it. */
function catchUp() {
  get(path(page.job, "incidents?limit=1")).then(({ total }) => countIncidents(total), () => {});
  shown?.view.refresh?.();
}

const announcer = document.getElementById("announcer");

function takeIncident(incident) {
  const said = el("p", {}, `Incident ${incident.id}: ${incident.line}`);
  announcer.append(said);
  while (announcer.children.length > 5) announcer.firstChild.remove();
  countIncidents(incident.id);
  shown?.view.incident?.(incident);
}

function countIncidents(incidents) {
  page.incidents = Math.max(page.incidents, incidents);
  const counter = document.getElementById("incident-count");
  counter.hidden = !page.incidents;
  const wide = counter.offsetWidth;
  say(counter, count(page.incidents));
  if (counter.offsetWidth !== wide) revealTab();
}

function header() {
  const { status } = page.now;
  const [word, tone] = STATES[status.state] ?? [status.state, ""];
  const badge = document.getElementById("job-state");
  const ended = status.state === "ended";
  const text = ended ? (status.exit_code === 0 ? "finished" : `ended, exit code ${status.exit_code}`) : word;
  badge.className = `pill is-${ended && status.exit_code !== 0 ? "bad" : tone || "none"}`;
  say(badge, text);
  offerActions(document.getElementById("actions"), page);
  connection();
}

// ---- when something is gone ----

const banner = document.getElementById("banner");

function connection() {
  const trouble = problem();
  banner.hidden = trouble === null;
  banner.classList.toggle("is-bad", trouble?.bad ?? false);
  say(banner, trouble?.text ?? "");
  const fresh = trouble === null || trouble.fresh;
  const live = fresh && page.now !== null && !page.over();
  fill(document.getElementById("link"), live ? [el("span", { class: "dot good pulse" }), el("span", { class: "wide" }, " live")] : []);
  document.body.classList.toggle("is-stale", !fresh);
}

function problem() {
  if (!navigator.onLine) return { bad: true, text: "This machine has no network. What you see is old; the page catches up by itself." };
  if (!page.viewer && [401, 403].includes(page.error?.status)) {
    return { bad: true, text: "The viewer does not know this browser. Open the address that `holdfast web` printed; it holds the token." };
  }
  if (!page.viewer && page.error?.status === 404) return { bad: true, text: `This viewer knows no job named ${page.job}.` };
  if (!page.viewer) {
    return { bad: true, text: "The viewer does not answer: `holdfast web` has ended, or the way to it is cut. The job is not affected. Trying again…" };
  }
  if (!page.coordinator && !page.over()) {
    return { bad: false, text: "The coordinator is gone. Training goes on without it while nothing else fails; the page goes on when it is back." };
  }
  if (page.now?.trouble) return { bad: true, text: page.now.trouble };
  if (page.now?.loading !== undefined) return { bad: false, text: `The journal is being read: ${percent(page.now.loading, 0)}.` };
  const past = page.now?.past;
  if (past) return { bad: false, fresh: true, text: `${pastText(past)} Charts, checkpoints, checks of nodes and the chains of causes begin there; all else is whole.` };
  return null;
}

function pastText({ since, read, trouble }) {
  const before = `What was before ${moment(since)}`;
  return trouble ? `${before} cannot be read: ${trouble}.` : `${before} is being read: ${percent(read, 0)}.`;
}

/** What this visitor may do, and which job a page without a name in its address is of. */
async function meet() {
  const session = await get("/api/session");
  page.job = page.job || session.job;
  page.actions = session.actions;
  page.price = session.price ?? null;
  if (page.now) header();
  shown?.view.show?.();
  shown?.view.update?.();
}

async function start() {
  if (page.job) meet().catch(() => {});
  else await meet();
  say(document.getElementById("job-name"), page.job);
  themed(document.getElementById("theme"), () => shown?.view.show?.());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  addEventListener("hashchange", route);
  addEventListener("resize", () => shown?.view.show?.());
  route();
  get(path(page.job, "now")).then(takeNow, lost);
  catchUp();
  follow(page.job, {
    now: takeNow,
    incident: takeIncident,
    coordinator: (there) => { page.coordinator = there; connection(); },
    viewer: (there, error) => {
      const back = there && !page.viewer;
      page.viewer = there;
      page.error = there ? null : error ?? page.error;
      connection();
      if (back) get(path(page.job, "now")).then((now) => { takeNow(now); shown?.view.refresh?.(); }, () => {});
    },
  });
}

function lost(error) {
  page.viewer = false;
  page.error = error;
  connection();
}

start().catch(lost);
