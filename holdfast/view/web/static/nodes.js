// Nodes: health, speed and use of each. Trouble comes first; a search finds any of thousands.

import { get, path } from "./api.js";
import { el, fill, pill } from "./dom.js";
import { bytes, count, moment, number, plural } from "./format.js";
import { spark } from "./spark.js";

const SHOWN = 50;
const REFRESH_MS = 4000;
const SORTS = { Trouble: (node) => -trouble(node), Node: (node) => node.host + node.node, "Score": (node) => last(node.score) ?? 2 };

export function nodesView(page) {
  const search = el("input", { type: "search", placeholder: "Search node or host", "aria-label": "Search nodes", oninput: () => { shown = SHOWN; render(); } });
  const sort = el("select", { "aria-label": "Order", onchange: () => render() }, Object.keys(SORTS).map((name) => el("option", { value: name }, `By ${name.toLowerCase()}`)));
  const summary = el("span", { class: "muted", role: "status" });
  const body = el("tbody");
  const more = el("button", { type: "button", onclick: () => { shown += SHOWN * 4; render(); } }, "Show more");
  const foot = el("p", { class: "empty" }, more);
  const root = el("section", { class: "card", "aria-label": "Nodes" },
    el("div", { class: "bar tools" }, search, sort, summary),
    el("div", { class: "flush" }, el("table", { class: "nodes is-cards" }, el("caption", { class: "sr" }, "Nodes of the job"),
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))), body)),
    foot);
  let nodes = [], past, asked = 0, shown = SHOWN;

  async function load() {
    asked = performance.now();
    ({ nodes, past } = await get(path(page.job, "nodes")));
    render();
  }
  function render() {
    const wanted = search.value.trim().toLowerCase(), key = SORTS[sort.value];
    const found = nodes.filter((node) => `${node.node} ${node.host}`.toLowerCase().includes(wanted))
      .map((node) => [key(node), node]).sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)).map(([, node]) => node);
    fill(body, found.slice(0, shown).map((node) => row(node, until(page), past)));
    const bad = nodes.filter((node) => trouble(node) > 0).length;
    fill(summary, `${plural(nodes.length, "node")}, ${bad ? `${count(bad)} with trouble` : "none with trouble"}${past ? ` since ${moment(past.since)}` : ""}`);
    foot.hidden = found.length <= shown;
  }
  const ready = load().catch((error) => fill(summary, error.message));
  return {
    root, ready, refresh: () => load().catch(() => {}),
    update() { if (!page.over() && performance.now() - asked > REFRESH_MS && !body.contains(document.activeElement)) load().catch(() => {}); },
  };
}

const COLUMNS = ["Node", "State", "Health", "Score", "CPU", "Memory", "GPU", "Network"];
const last = (series) => series?.at(-1)?.[1] ?? null;
const failed = (node) => (node.health ?? []).filter((check) => check.verdict === "fail");

function trouble(node) {
  const score = last(node.score);
  return (node.cordoned ? 100 : 0) + failed(node).length * 10 + (score !== null && score < 0.8 ? 5 : 0);
}

/** Up to when nodes are told of: now, or the job's end. */
const until = (page) => page.over() ? page.now.status.opened_at + page.now.status.wall_s : page.time();

function row(node, end, past) {
  const score = last(node.score);
  return el("tr", {},
    el("th", { scope: "row" }, node.host, el("div", { class: "muted" }, node.node)),
    el("td", { "data-name": "State" }, pill(node.state, node.state === "placed" ? "good" : ""), node.cordoned && el("div", {}, pill("cordoned", "bad"), ` ${node.cordoned}`)),
    el("td", { "data-name": "Health" }, health(node, past)),
    el("td", { "data-name": "Score" }, score === null ? none() : el("div", { class: "use" }, el("span", { class: score < 0.8 ? "warn" : "" }, number(score)),
      spark(node.score, { least: 0, most: 1, tone: score < 0.8 ? "var(--warn)" : undefined }))),
    [1, 2, 3, 4].map((column) => el("td", { "data-name": COLUMNS[column + 3] }, use(node, column, end))));
}

function health(node, past) {
  const checks = node.health ?? [];
  if (!checks.length) return el("span", { class: "muted" }, past ? "not known" : "nothing found");
  const found = checks.filter((check) => check.verdict !== "pass");
  if (!found.length) return pill(`✓ ${plural(checks.length, "check")}`, "good");
  return found.map(({ check, verdict, reason }) => el("div", {}, verdict === "fail" ? pill(`✗ ${check}`, "bad") : pill(`! ${check}`, "warn"), ` ${reason}`));
}

const none = () => el("span", { class: "muted none" }, "–");

/** A node tells its use when it has changed: between two samples it was as in the first. */
function held(series, end) {
  const steps = series.flatMap(([at, value], index) => index ? [[at, series[index - 1][1]], [at, value]] : [[at, value]]);
  return [...steps, [Math.max(end, series.at(-1)[0]), series.at(-1)[1]]];
}

function use(node, column, end) {
  const series = (node.usage ?? []).map((sample) => [sample[0], sample[column]]).filter(([, value]) => value !== null && value !== undefined);
  if (!series.length) return none();
  const value = series.at(-1)[1], network = column === 4;
  return el("div", { class: "use" }, el("span", { class: network ? "rate" : null }, network ? `${bytes(Math.round(value))}/s` : `${(value * 100).toFixed(0)} %`),
    spark(held(series, end), network ? { least: 0 } : { least: 0, most: 1 }));
}
