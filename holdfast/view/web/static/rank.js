// Where one rank is in its code, asked of the running job when it is opened: `holdfast why` for a rank.

import { get, path } from "./api.js";
import { el, fill, pill } from "./dom.js";
import { ranges } from "./format.js";
import { RANKS } from "./palette.js";

const LOG_LINES = 100;
const TONES = { r: "good", h: "bad", s: "warn" };

export function openRank(page, rank) {
  const state = page.now?.map.ranks[rank];
  const body = el("div", { class: "body", "aria-live": "polite" });
  const log = el("div", { class: "body" });
  const again = el("button", { type: "button", onclick: () => ask() }, "Ask again");
  const dialog = el("dialog", { "aria-labelledby": "rank-title", onclose: () => dialog.remove() },
    el("header", {},
      el("h2", { id: "rank-title" }, `Rank ${rank}`), state && pill(RANKS[state] ?? state, TONES[state]),
      el("span", { class: "grow" }), again,
      el("button", { type: "button", onclick: () => dialog.close() }, "Close")),
    body, log);
  document.body.append(dialog);
  dialog.showModal();

  async function ask() {
    again.disabled = true;
    fill(body, el("p", { class: "muted" }, whereabouts(page, rank)), el("p", { class: "muted" }, "Asking the rank where it is… training is not stopped."));
    try {
      fill(body, el("p", { class: "muted" }, whereabouts(page, rank)), told(await get(path(page.job, `why?rank=${rank}`)), rank));
    } catch (error) {
      fill(body, el("p", { class: "muted" }, whereabouts(page, rank)), el("p", { class: "note is-warn" }, error.message));
    }
    again.disabled = false;
  }
  async function readLog() {
    const { text } = await get(path(page.job, `logs?rank=${rank}`));
    const lines = text.trimEnd().split("\n").slice(-LOG_LINES);
    if (text) fill(log, el("h3", {}, "Its log"), el("pre", { class: "code is-low", tabindex: "0", "aria-label": `Log of rank ${rank}` }, lines.join("\n")));
    log.querySelector("pre")?.scrollTo(0, 1e9);
  }
  ask();
  readLog().catch(() => {});
}

function whereabouts(page, rank) {
  const node = page.now?.map.nodes.find(([, , , first, ranks]) => rank >= first && rank < first + ranks);
  return node ? `On ${node[1]} (${node[0]}), round ${page.now.status.round}.` : "";
}

function told(why, rank) {
  const groups = [...(why.verdict?.groups ?? [])];
  const mine = groups.filter((group) => group.ranks.includes(rank));
  const rest = groups.filter((group) => !group.ranks.includes(rank));
  return [
    why.suspicion && el("p", { class: "note is-warn" }, why.suspicion.line),
    el("p", {}, why.verdict?.sentence ?? ""),
    !why.ranks[rank] && mine.map((group) => stackOf(group, true)),
    why.ranks[rank] && el("pre", { class: "code", tabindex: "0", "aria-label": `Stacks of rank ${rank}` }, why.ranks[rank]),
    rest.length > 0 && el("details", {}, el("summary", {}, "Where the other ranks are"), el("div", { class: "stack" }, rest.map((group) => stackOf(group, false)))),
  ];
}

export function stackOf(group, open) {
  return el("section", { class: "stack-of" },
    el("h3", {}, group.headline || `Ranks ${ranges(group.ranks)}`),
    el("pre", { class: open ? "code" : "code is-low", tabindex: "0", "aria-label": `Stack of ranks ${ranges(group.ranks)}` }, group.frames.map(frameText).join("\n")));
}

function frameText(frame) {
  const place = frame.line ? `${frame.file}:${frame.line}` : frame.file;
  return `${frame.function}  ${place}`;
}
