// All jobs of this home: how each went, and any of them side by side.

import { get, path } from "./api.js";
import { card, el, fill, pill, table } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";
import { CAUSES, STATES, causeVar } from "./palette.js";

const MOST = 4;

export function historyView(page) {
  return jobList(page.job);
}

/** The list of jobs; with a job's name, that one is marked and compared first. */
export function jobList(current) {
  const list = el("div", { class: "flush" });
  const side = el("div", { class: "stack" });
  const root = el("div", { class: "stack" }, el("section", { class: "card", "aria-label": "Jobs" }, list), side);
  const chosen = new Set(current ? [current] : []);
  let jobs = [], order = ["opened_at", -1];

  async function load() {
    jobs = await get("/api/jobs");
    render();
    compare();
  }
  function render() {
    if (!jobs.length) return fill(list, el("p", { class: "empty" }, "No job yet. ", el("code", {}, "holdfast run train.py"), " starts one."));
    const [key, way] = order;
    const value = (job) => key === "job" || key === "state" ? job[key] : job[key] ?? -Infinity;
    const sorted = [...jobs].sort((a, b) => (value(a) < value(b) ? -way : value(a) > value(b) ? way : 0));
    const head = ([name, title, kind]) => el("th", { scope: "col", class: kind || null, "aria-sort": key === name ? (way < 0 ? "descending" : "ascending") : null },
      el("button", { type: "button", onclick: () => { order = [name, key === name ? -way : -1]; render(); list.querySelector(`th[aria-sort] button`)?.focus(); } }, title));
    fill(list, el("table", { class: "is-cards" }, el("caption", { class: "sr" }, "Jobs of this home"),
      el("thead", {}, el("tr", {}, COLUMNS.map(head), el("th", { scope: "col" }, "Compare"))),
      el("tbody", {}, sorted.map(row))));
  }
  function row(job) {
    return el("tr", { class: job.job === current ? "is-this" : null },
      el("th", { scope: "row" }, el("a", { href: `/job/${encodeURIComponent(job.job)}` }, job.job), job.reason && job.exit_code !== 0 && el("div", { class: "muted reason" }, job.reason)),
      el("td", { "data-name": "State" }, statePill(job)),
      el("td", { class: "nowrap wide", "data-name": "Started" }, job.opened_at === null ? "–" : new Date(job.opened_at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })),
      el("td", { class: "num", "data-name": "Took" }, duration(job.wall_s)), el("td", { class: "num", "data-name": "Ranks" }, count(job.world_size)), el("td", { class: "num", "data-name": "Steps" }, count(job.step)),
      el("td", { class: "num", "data-name": "Goodput" }, el("span", { class: "use" }, el("span", { class: "share wide", "aria-hidden": "true" }, el("i", { vars: { "--share": job.goodput ?? 0, "--c": "var(--accent)" } })), el("span", {}, percent(job.goodput)))),
      el("td", { class: "num", "data-name": "Incidents" }, count(job.incidents)), el("td", { class: "num", "data-name": "Restarts" }, count(job.restarts)),
      el("td", { "data-name": "Compare" }, el("input", { type: "checkbox", "aria-label": `Compare ${job.job}`, checked: chosen.has(job.job), onchange: (event) => choose(job.job, event.target) })));
  }
  function choose(name, box) {
    if (box.checked) chosen.add(name);
    else chosen.delete(name);
    if (chosen.size > MOST) { chosen.delete(name); box.checked = false; }
    compare();
  }
  async function compare() {
    if (chosen.size < 2) return fill(side, jobs.length > 1 && el("p", { class: "muted" }, `Tick up to ${MOST} jobs to see them side by side.`));
    const names = [...chosen].filter((name) => jobs.some((job) => job.job === name));
    const ledgers = await Promise.all(names.map((name) => get(path(name, "goodput?buckets=1")).catch(() => null)));
    if (names.join() === [...chosen].join()) fill(side, compared(names.map((name, index) => [jobs.find((job) => job.job === name), ledgers[index]])));
  }
  const ready = load().catch((error) => { fill(list, el("p", { class: "empty" }, error.message)); throw error; });
  ready.catch(() => {});
  return { root, ready, load };
}

const COLUMNS = [
  ["job", "Job", ""], ["state", "State", ""], ["opened_at", "Started", "wide"], ["wall_s", "Took", "num"], ["world_size", "Ranks", "num"],
  ["step", "Steps", "num"], ["goodput", "Goodput", "num"], ["incidents", "Incidents", "num"], ["restarts", "Restarts", "num"],
];

export function statePill(job) {
  if (job.state === "ended") return job.exit_code === 0 ? pill("finished") : pill(`exit code ${job.exit_code}`, "bad");
  const [word, tone] = STATES[job.state] ?? [job.state, ""];
  return pill(word, tone);
}

function compared(pairs) {
  const shares = ([, ledger]) => {
    const all = Object.values(ledger?.total ?? {}).reduce((sum, each) => sum + each, 0);
    return (cause) => (all ? (ledger.total[cause] ?? 0) / all : 0);
  };
  const used = Object.keys(CAUSES).filter((cause) => pairs.some((pair) => shares(pair)(cause) > 0.0001));
  const figure = (name, of) => [name, ...pairs.map(([job]) => of(job))];
  return card(`${plural(pairs.length, "job")} side by side`, [
    el("div", { class: "against" }, pairs.map((pair) => [
      el("b", {}, pair[0].job),
      el("span", { class: "meter is-tall", "aria-hidden": "true" }, used.map((cause) => el("i", { vars: { "--share": shares(pair)(cause), "--c": causeVar(cause) } }))),
      el("span", { class: "num" }, percent(pair[0].goodput)),
    ])),
    el("div", { class: "flush" }, table("Jobs side by side", [["Figure", ""], ...pairs.map(([job]) => [job.job, "num"])], [
      figure("Took", (job) => duration(job.wall_s)), figure("Steps", (job) => count(job.step)),
      figure("Steps a second", (job) => (job.wall_s ? (job.step / job.wall_s).toFixed(2) : "–")),
      figure("Incidents", (job) => count(job.incidents)), figure("Restarts", (job) => count(job.restarts)),
      ...used.map((cause) => [el("span", { class: "swatch-row" }, el("span", { class: "swatch", vars: { "--c": causeVar(cause) } }), cause), ...pairs.map((pair) => percent(shares(pair)(cause), 2))]),
    ])),
  ]);
}
