// How the job is: a few figures, anything that needs attention, the map of all ranks, and what happened last.

import { get, path } from "./api.js";
import { card, el, fill, pill, say } from "./dom.js";
import { ago, cost, count, duration, lossText, number, percent, plural } from "./format.js";
import { rankMap } from "./map.js";
import { causeVar } from "./palette.js";
import { openRank } from "./rank.js";
import { spark } from "./spark.js";

const SHOWN = 6;
const SPEED_EVERY_MS = 5000;

export function nowView(page) {
  const figures = figureStrip();
  const attention = el("div", { class: "attention" });
  const map = rankMap((rank) => openRank(page, rank));
  const mapCard = card("Ranks", map.root);
  const latest = el("ol", { class: "brief" });
  const lost = el("div", { class: "stack" });
  const safe = el("div", { class: "stack" });
  const root = el("div", { class: "stack" }, figures.root, attention,
    el("div", { class: "columns" }, el("div", { class: "stack" }, mapCard, el("div", { class: "halves" }, card("Not productive so far", lost), card("Saved", safe))),
      card("Latest incidents", latest, el("span", { class: "grow" }), el("a", { href: "#incidents" }, "all"))));
  let incidents = [], said = {}, speedAt = -Infinity;

  async function loadSpeed() {
    speedAt = performance.now();
    try {
      const { points } = await get(path(page.job, "speed"));
      figures.draw("speed", points.map((point) => [point[0], point[2]]), { least: 0 });
      figures.draw("loss", lossBySteps((await get(path(page.job, "loss"))).points));
    } catch { /* the banner says so */ }
  }

  /** Build a part of the view anew only if what it shows has changed. */
  const part = (name, node, data, build) => {
    const text = JSON.stringify(data);
    if (said[name] === text) return;
    said[name] = text;
    fill(node, build());
  };

  async function loadIncidents() {
    try {
      incidents = (await get(path(page.job, `incidents?limit=${SHOWN}`))).incidents;
      showIncidents();
    } catch { /* the banner says so */ }
  }
  const showIncidents = () => part("incidents", latest, [incidents, Math.floor(page.time() / 10)],
    () => incidents.length ? incidents.slice(0, SHOWN).map((each) => brief(each, page.time())) : el("li", { class: "empty" }, "None so far."));

  return {
    root,
    ready: Promise.all([loadIncidents(), loadSpeed()]),
    refresh: loadIncidents,
    show: map.draw,
    incident(incident) {
      incidents = [incident, ...incidents.filter((each) => each.id !== incident.id)];
      showIncidents();
    },
    update() {
      const { now } = page;
      if (!now) return;
      figures.update(page);
      if (performance.now() - speedAt > (page.over() ? Infinity : SPEED_EVERY_MS)) loadSpeed();
      part("attention", attention, attentionOf(now), () => attentionOf(now).map(([tone, text]) => el("p", { class: `note is-${tone}` }, text)));
      map.update(now.map);
      showIncidents();
      part("lost", lost, [now.goodput.lost_s, now.status.world_size, page.price], () => losses(now.goodput.lost_s, now.status.world_size || 1, page.price));
      part("safe", safe, now.status.checkpoints, () => saved(now.status.checkpoints));
    },
  };
}

export function brief(incident, now) {
  return el("li", {},
    el("a", { href: `#incidents/${incident.id}` },
      el("span", { class: "row" },
        el("b", {}, `${incident.id}`), kindPill(incident), el("span", { class: "grow" }),
        el("time", { class: "muted nowrap", datetime: new Date(incident.at * 1000).toISOString() }, ago(incident.at, now))),
      el("span", { class: "line" }, incident.line)));
}

const MILD = new Set(["straggler", "overload", "storage", "leave", "resize", "requeue", "supply", "data"]);

export function kindPill(incident) {
  if (incident.open) return pill(`${incident.kind} · open`, "bad");
  return pill(incident.kind, MILD.has(incident.kind) ? "warn" : "");
}

// ---- figures ----

const onNodes = (nodes) => nodes ? `on ${plural(nodes, "node")}` : "their nodes have left";

function lostToday({ goodput, status }, price) {
  const lost = goodput.lost_today_s;
  if (lost === null) return ["–", "being read"];
  return [duration(lost / (status.world_size || 1)), price ? `a rank; all: ${cost(lost, price)}` : "a rank, not productive"];
}

const FIGURES = [
  ["step", "Step", ({ status }) => [count(status.step), status.no_step_s ? `none for ${duration(status.no_step_s)}` : `round ${status.round}`]],
  ["speed", "Speed", ({ status }) => [status.steps_per_s ? `${number(status.steps_per_s)}/s` : "–", status.samples_per_s ? `${number(status.samples_per_s)} samples/s` : "steps a second"]],
  ["loss", "Loss", ({ status }) => [lossText(status.loss), (status.loss ?? null) === null ? "not told by the script" : `at step ${count(status.loss_step)}`]],
  ["goodput", "Goodput", ({ goodput }) => [percent(goodput.goodput), "of all rank-seconds"]],
  ["lost", "Lost today", lostToday],
  ["ranks", "Ranks", ({ status, map }) => [count(status.world_size), onNodes(map.nodes.filter((node) => node[4] > 0).length)]],
  ["restarts", "Restarts", ({ status }) => [count(status.restarts), "rounds a fault cost"]],
  ["wall", "Since start", ({ status }) => [duration(status.wall_s), new Date(status.opened_at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })]],
];

function figureStrip() {
  const cells = FIGURES.map(([key, name, of]) => {
    const value = el("dd", { class: "value", "data-figure": key }, "–"), under = el("dd", { class: "under" }, " ");
    const trend = el("span", { class: "trend" });
    return { key, of, value, under, trend, root: el("div", {}, el("dt", {}, name, trend), value, under) };
  });
  return {
    root: el("dl", { class: "figures card", "aria-label": "Key figures" }, cells.map((each) => each.root)),
    draw(key, points, bounds = {}) {
      fill(cells.find((each) => each.key === key).trend, points.length > 2 ? spark(points, bounds) : null);
    },
    update(page) {
      for (const { of, value, under } of cells) {
        const [text, note] = of(page.now, page.price);
        say(value, text);
        say(under, note || " ");
      }
    },
  };
}

/** Losses [[at, step, loss]] as [step, loss]: without those that are no number, and those of steps that were taken again. */
function lossBySteps(points) {
  const kept = [];
  for (const [, step, loss] of points) {
    while (kept.length && kept.at(-1)[0] >= step) kept.pop();
    if (typeof loss === "number") kept.push([step, loss]);
  }
  return kept;
}

function attentionOf({ status }) {
  const found = [];
  if (status.state === "lost") found.push(["bad", "No process runs this job, and it has not ended: its launcher was killed or its machine went down. Start it again with the same name to go on."]);
  if (status.reason && status.exit_code !== 0) found.push(["bad", status.reason]);
  if (status.suspicion) found.push(["warn", status.suspicion.line]);
  if (typeof status.loss === "string") found.push(["warn", `The loss is ${status.loss} at step ${count(status.loss_step)}.`]);
  for (const each of status.checkpoints ?? []) {
    if (each.failures) found.push(["bad", `Checkpoints in ${each.checkpointer} fail: ${each.failures} writes in a row.`]);
  }
  for (const [host, why] of Object.entries(status.excluded ?? {})) found.push(["warn", `Host ${host} is excluded: ${why}`]);
  for (const [node, why] of Object.entries(status.suspects ?? {})) found.push(["warn", `Node ${node} is suspect: ${why}`]);
  if (status.supply?.refusal) found.push(["warn", `The platform takes no requests: ${status.supply.refusal}`]);
  return found.slice(0, 6);
}

function losses(seconds, ranks, price) {
  const causes = Object.entries(seconds).filter(([, each]) => each > 0).sort((a, b) => b[1] - a[1]);
  const all = causes.reduce((sum, [, each]) => sum + each, 0);
  if (!all) return el("p", { class: "muted" }, "Nothing was lost.");
  return [
    el("div", { class: "meter", "aria-hidden": "true" }, causes.map(([cause, each]) => el("i", { vars: { "--share": each / all, "--c": causeVar(cause) } }))),
    el("ul", { class: "legend" }, causes.slice(0, 8).map(([cause, each]) =>
      el("li", {}, el("span", { class: "swatch", vars: { "--c": causeVar(cause) } }), cause, el("b", {}, duration(each / ranks))))),
    el("p", { class: "muted" }, `${duration(all / ranks)} a rank; `, price && `${cost(all, price)} in all; `, el("a", { href: "#goodput" }, "all of it")),
  ];
}

function saved(checkpointers) {
  if (!checkpointers?.length) return el("p", { class: "muted" }, "The script saves nothing through Holdfast.");
  return checkpointers.slice(0, 4).map((each) => el("dl", { class: "pairs" },
    el("dt", {}, "in memory"), el("dd", {}, each.in_memory === null ? "–" : `step ${count(each.in_memory)}`),
    el("dt", {}, "on storage"), el("dd", {}, each.on_storage === null ? "–" : `step ${count(each.on_storage)}`,
      each.writing !== null && each.writing !== undefined && el("span", { class: "muted" }, ` writing ${count(each.writing)}`)),
    el("dt", {}, "name"), el("dd", { class: "clip", title: each.checkpointer }, each.checkpointer)));
}
