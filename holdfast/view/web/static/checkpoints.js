// Checkpoints: what a fault would cost now, and what is held where: in memory, at a peer, on storage.

import { get, path } from "./api.js";
import { card, el, fill, pill, table } from "./dom.js";
import { ago, bytes, count, duration, moment } from "./format.js";
import { fit, font } from "./canvas.js";
import { colour } from "./palette.js";

const TIERS = [["memory", "Memory", "cause-checkpoint"], ["peer", "Peer's memory", "cause-evaluation"], ["storage", "Storage", "cause-init"]];
const REFRESH_MS = 2000;
const SHOWN = 60;
const SHOWN_ON_A_PHONE = 15;

export function checkpointsView(page) {
  const restore = el("div", { class: "stack" });
  const savers = el("div", { class: "flush" });
  const steps = el("div", { class: "flush" });
  const canvas = el("canvas", { role: "img", "aria-label": "When each tier was saved; the table has the same." });
  const picture = el("div", { class: "picture" }, canvas);
  const root = el("div", { class: "stack" },
    el("div", { class: "halves" }, card("If it failed now", restore),
      el("section", { class: "card", "aria-label": "Checkpointers" }, el("header", {}, el("h2", {}, "Checkpointers")), savers)),
    card("When", el("div", { class: "stack" }, picture, el("p", { class: "muted" }, "Tall: verified, that is, all ranks have loaded it and every digest was compared. Low: not verified."))),
    el("section", { class: "card", "aria-label": "By step" }, el("header", {}, el("h2", {}, "By step")), steps));
  let data = null, asked = 0;

  async function load() {
    asked = performance.now();
    data = await get(path(page.job, "checkpoints"));
    fill(restore, restored(data.would_restore));
    fill(savers, saverTable(data.checkpointers));
    fill(steps, stepTable(data, page));
    draw();
  }
  const draw = () => { if (data && canvas.isConnected) drawTiers(canvas, data.steps, page); };
  const ready = load().catch((error) => fill(restore, el("p", { class: "note is-bad" }, error.message)));
  return {
    root, ready, show: draw, refresh: () => load().catch(() => {}),
    update() { if (data && !page.over() && performance.now() - asked > REFRESH_MS) load().catch(() => {}); },
  };
}

function restored(would) {
  if (!would || would.step === null || would.step === undefined) {
    return [el("p", { class: "hero" }, "Training would begin anew"), el("p", { class: "muted" }, would?.why ?? "Nothing has been saved.")];
  }
  return [el("p", { class: "hero" }, `Step ${count(would.step)}, from ${would.from}`), el("p", { class: "muted" }, would.why ?? "")];
}

function saverTable(savers) {
  if (!savers?.length) return el("p", { class: "empty" }, "The script has no checkpointer: `holdfast.Checkpointer` makes one.");
  const step = (value) => value === null || value === undefined ? "–" : count(value);
  return table("Checkpointers", [["Name", ""], ["Memory", "num"], ["Storage", "num"], ["Writing", "num wide"], ["Skipped", "num wide"], ["Failed", "num"]],
    savers.map((each) => [el("span", { class: "mono" }, each.checkpointer), step(each.in_memory), step(each.on_storage), step(each.writing), count(each.skipped),
      each.failed || each.failures ? el("span", { class: "bad" }, count(each.failed + each.failures)) : "0"]));
}

function newest(steps) {
  return [...steps].sort((a, b) => b.step - a.step || b.at - a.at);
}

function stepTable({ steps, past }, page) {
  if (!steps.length) return el("p", { class: "empty" }, past ? `No checkpoint since ${moment(past.since)}; earlier ones are not known.` : "No checkpoint so far.");
  const most = matchMedia("(max-width: 700px)").matches ? SHOWN_ON_A_PHONE : SHOWN;
  return [
    table("Checkpoints by step", [["Step", "num"], ["When", ""], ...TIERS.map(([tier, name]) => [name, steps.some((each) => each.tiers[tier]) ? "" : "wide"])],
      newest(steps).slice(0, most).map((each) => [
        count(each.step), el("span", { class: "nowrap", title: ago(each.at, page.time()) }, moment(each.at, page.time())),
        ...TIERS.map(([tier, , tone]) => tierCell(each.tiers[tier], tone))]), null, "is-cards"),
    steps.length > most && el("p", { class: "empty" }, `The newest ${most} of ${count(steps.length)}.`),
  ];
}

function tierCell(tier, tone) {
  if (!tier) return el("span", { class: "muted none" }, "–");
  const parts = [tier.size_bytes !== null && bytes(tier.size_bytes), tier.seconds > 0 && duration(tier.seconds)].filter(Boolean);
  return el("span", { class: "tier" }, el("span", { class: "swatch", vars: { "--c": `var(--${tone})` } }), parts.join(" in ") || "held",
    tier.error ? pill(`✗ ${tier.error}`, "bad") : tier.verified ? pill("✓ verified", "good") : el("span", { class: "muted" }, "unverified"));
}

function drawTiers(canvas, steps, page) {
  const { context, width } = fit(canvas, 92);
  const left = width < 600 ? 62 : 110, begin = page.now?.status.opened_at ?? Math.min(...steps.map((each) => each.at));
  const end = page.over() ? begin + page.now.status.wall_s : page.time();
  const x = (at) => left + ((at - begin) / (end - begin || 1)) * (width - left - 8);
  TIERS.forEach(([tier, name, tone], row) => {
    const y = 8 + row * 32;
    context.font = font(11);
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    context.fillText(width < 600 ? name.split("'")[0] : name, 0, y + 10);
    context.fillStyle = colour("sunken");
    context.fillRect(left, y, width - left, 20);
    for (const each of steps) {
      const held = each.tiers[tier];
      if (!held) continue;
      const to = x(held.at ?? each.at), from = Math.min(to - 3, x((held.at ?? each.at) - (held.seconds ?? 0)));
      context.fillStyle = colour(held.error ? "bad" : tone);
      context.fillRect(Math.max(left, from), y + (held.verified ? 2 : 8), Math.max(3, to - from), held.verified ? 16 : 4);
    }
  });
}
