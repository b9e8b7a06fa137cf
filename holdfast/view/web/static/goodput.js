// Goodput: where every second of every rank went, over time and in total, and what plain restarts would have cost.

import { get, path } from "./api.js";
import { areaChart } from "./chart.js";
import { card, el, fill, instead, table } from "./dom.js";
import { cost, count, duration, moment, number, percent, plural } from "./format.js";
import { CAUSES, causeVar } from "./palette.js";

const BUCKETS = 200;
const REFRESH_MS = 3000;
const ORDER = Object.keys(CAUSES);

export function goodputView(page) {
  const chart = areaChart("Shares of all rank-seconds over time, by cause.", ORDER, told);
  const legend = el("ul", { class: "legend", "aria-label": "Causes" });
  const totals = el("div", { class: "flush" });
  const against = el("div", { class: "stack" });
  const only = el("button", { type: "button", "aria-pressed": "false", onclick: () => { only.setAttribute("aria-pressed", String(!pressed())); show(); } }, "Without productive");
  const pressed = () => only.getAttribute("aria-pressed") === "true";
  const alternative = instead("As a table", () => data ? bucketTable(data, page) : "");
  const root = el("div", { class: "stack" },
    card("Over time", el("div", { class: "stack" }, legend, chart.root, alternative), el("span", { class: "grow" }), only),
    el("div", { class: "columns even" },
      el("section", { class: "card", "aria-label": "In total" }, el("header", {}, el("h2", {}, "In total")), totals),
      card("Against restarting everything", against)));
  let data = null, asked = 0;

  async function load() {
    asked = performance.now();
    const answer = await get(path(page.job, `goodput?buckets=${BUCKETS}`));
    data = { ...answer, from: answer.buckets[0]?.[0] ?? 0, to: answer.buckets.at(-1)?.[1] ?? 1 };
    show();
  }
  function show() {
    chart.update(pressed() ? { ...data, without: new Set(["productive"]), most: mostLost(data.buckets) } : data);
    const used = ORDER.filter((cause) => data.total[cause] > 0);
    fill(legend, used.map((cause) => el("li", { title: CAUSES[cause] }, el("span", { class: "swatch", vars: { "--c": causeVar(cause) } }), cause)));
    fill(totals, totalTable(data, used, page.price));
    fill(against, compared(data));
    alternative.refresh();
  }
  const ready = load().catch((error) => fill(totals, el("p", { class: "empty" }, error.message)));
  return {
    root, ready, show: () => (data ? show() : chart.draw()), refresh: () => load().catch(() => {}),
    update() { if (data && !page.over() && performance.now() - asked > REFRESH_MS) load().catch(() => {}); },
  };
}

/** The largest share that was not productive, rounded up to a readable level. */
function mostLost(buckets) {
  const shares = buckets.map(([, , seconds]) => {
    const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
    return all ? 1 - (seconds.productive ?? 0) / all : 0;
  });
  const most = Math.max(0.001, ...shares);
  return [0.002, 0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 0.6, 0.8].find((level) => level >= most) ?? 1;
}

function told([begin, end, seconds]) {
  const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  const parts = Object.entries(seconds).filter(([, each]) => each > 0).sort((a, b) => b[1] - a[1])
    .map(([cause, each]) => `${cause} ${percent(each / all)}`);
  return `${moment(begin)}, ${duration(end - begin)}: ${parts.join(", ") || "nothing booked"}`;
}

function totalTable({ total, wall_s: wall, ranks, goodput }, used, price) {
  const all = used.reduce((sum, cause) => sum + total[cause], 0);
  const rows = [...used].sort((a, b) => total[b] - total[a]).map((cause) => [
    el("span", { class: "swatch-row" }, el("span", { class: "swatch", vars: { "--c": causeVar(cause) } }), cause),
    el("span", { class: "muted" }, CAUSES[cause]),
    el("span", { class: "share", "aria-hidden": "true" }, el("i", { vars: { "--share": total[cause] / all, "--c": causeVar(cause) } })),
    percent(total[cause] / all, 2), duration(total[cause] / ranks), duration(total[cause]), ...(price ? [cost(total[cause], price)] : []),
  ]);
  return [
    table("Seconds by cause", [["Cause", ""], ["What it covers", "wide"], [el("span", { class: "sr" }, "As a bar"), "wide"], ["Share", "num"], ["A rank", "num"], ["All ranks", price ? "num wide" : "num"], ...(price ? [["Cost", "num"]] : [])], rows,
      ["Together", el("span", { class: "muted" }, `${duration(wall)} × ${Number.isInteger(ranks) ? count(ranks) : number(ranks)} ranks`), "", "100 %", duration(all / ranks), duration(all), ...(price ? [cost(all, price)] : [])]),
    Math.abs(all - wall * ranks) > Math.max(1, wall * ranks * 1e-3) && el("p", { class: "note is-warn" }, `These are ${duration(Math.abs(all - wall * ranks))} off the wall clock.`),
    el("p", { class: "sr" }, `Goodput ${percent(goodput)}.`),
  ];
}

function compared({ goodput, torchrun }) {
  const bar = (name, share, tone) => [
    el("b", {}, name),
    el("span", { class: "meter is-tall", "aria-hidden": "true" }, el("i", { vars: { "--share": share, "--c": tone } })),
    el("span", { class: "num" }, percent(share)),
  ];
  if (!torchrun) return el("p", { class: "muted" }, "Nothing to compare yet.");
  const { faults, ours_s: ours, lost_s: theirs } = torchrun, ratio = ours > 0 ? theirs / ours : null;
  return [
    el("div", { class: "against" }, bar("Holdfast", goodput, "var(--accent)"), bar("torchrun", torchrun.goodput, "var(--cause-wait)")),
    el("p", {}, faults === 0 ? "No fault yet, so both would have done the same." : `${plural(faults, "fault")} cost ${duration(ours)}; torchrun would have lost ${duration(theirs)}`, faults > 0 && (ratio > 1.05 ? `, ${number(ratio)} times as much.` : ".")),
    faults > 0 && el("p", { class: "muted" }, torchrun.assumption),
  ];
}

function bucketTable(data, page) {
  const used = ORDER.filter((cause) => data.total[cause] > 0);
  const step = Math.max(1, Math.ceil(data.buckets.length / 50)), rows = [];
  for (let index = 0; index < data.buckets.length; index += step) {
    const some = data.buckets.slice(index, index + step), sums = {};
    for (const [, , seconds] of some) for (const [cause, each] of Object.entries(seconds)) sums[cause] = (sums[cause] ?? 0) + each;
    const all = Object.values(sums).reduce((sum, each) => sum + each, 0);
    rows.push([moment(some[0][0], page.time()), ...used.map((cause) => all ? percent((sums[cause] ?? 0) / all) : "–"), count(all)]);
  }
  return table("Shares by cause over time", [["From", ""], ...used.map((cause) => [cause, "num"]), ["Rank-seconds", "num"]], rows);
}
