// One incident, told from the sentence to the evidence: who, why, what was done, what it cost, and how it went.

import { card, el, fill, instead, pill, table } from "./dom.js";
import { bytes, count, duration, moment, plural } from "./format.js";
import { kindPill } from "./now.js";
import { PHASES, causeVar } from "./palette.js";
import { stackOf } from "./rank.js";

export function incidentReport(page, { incident, open, story, left_out: leftOut, stacks, log, verdict, seen_before: before, seen_elsewhere: elsewhere }, known) {
  return [
    el("a", { class: "back", href: "#incidents" }, "‹ All incidents"),
    head(page, { ...incident, open }, before.map((id) => known.find((each) => each.id === id) ?? { id }), elsewhere),
    guilt(incident, verdict),
    phases(incident),
    stackCards(stacks, verdict),
    storyCard(story, leftOut),
    logCard(log),
    incident.also.length > 0 && card("What followed from it", el("ul", {}, incident.also.map((each) => el("li", {}, each)))),
  ];
}

function head(page, incident, before, elsewhere) {
  const around = Math.max(incident.lost_s ?? 5, 0.2);
  return el("section", { class: "card", "aria-label": "What happened" }, el("div", { class: "body stack" },
    el("div", { class: "row" },
      el("h2", {}, `Incident ${incident.id}`), kindPill(incident),
      incident.injected && pill(`injected: ${incident.injected}`, "accent"),
      el("span", { class: "grow" }),
      el("a", { href: `#timeline?from=${(incident.at - around * 0.4).toFixed(3)}&to=${(incident.at + around * 1.4).toFixed(3)}` }, "Show in the timeline")),
    el("p", { class: "headline" }, incident.line),
    facts([
      ["When", moment(incident.at, page.time())],
      ["Lost", incident.lost_s === null ? "still open" : duration(incident.lost_s)],
      ["Steps again", count(incident.lost_steps)],
      ["Where", incident.rank === null ? `node ${incident.node}` : `rank ${incident.rank}, node ${incident.node}`],
      ["Round, step", `${incident.round}, ${count(incident.step)}`],
    ]),
    before.length > 0 && el("p", {}, "Seen before: ", before.slice(0, 8).map((each, index) => [index ? ", " : "", earlier(each, page)]),
      before.length > 8 && ` and ${plural(before.length - 8, "more time")}`),
    tellElsewhere(el("p", { class: "elsewhere" }), elsewhere, page)));
}

function earlier({ id, at }, page) {
  return el("a", { href: `#incidents/${id}` }, at ? `incident ${id} at ${moment(at, page.time())}` : `incident ${id}`);
}

/** Where other jobs had the same; null while the viewer still reads their journals. */
export function tellElsewhere(place, elsewhere, page) {
  place.hidden = !elsewhere?.length;
  return fill(place, "Seen in other jobs: ", (elsewhere ?? []).map((each, index) => [index ? ", " : "", ofAnother(each, page)]));
}

function ofAnother({ job, id, at }, page) {
  return el("a", { href: `/job/${encodeURIComponent(job)}#incidents/${id}` }, `${job}, incident ${id} at ${moment(at, page.time())}`);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function guilt(incident, verdict) {
  const who = verdict?.guilty?.length ? `Rank ${verdict.guilty.join(", ")}` : incident.rank === null ? `Node ${incident.node}` : `Rank ${incident.rank} on node ${incident.node}`;
  const why = verdict?.sentence || incident.signature;
  return card("Who and why", el("div", { class: "stack" },
    el("p", {}, !why.toLowerCase().startsWith(who.toLowerCase().split(" on ")[0]) && [el("b", {}, who), ": "], why),
    el("p", {}, el("span", { class: "muted" }, "What was done: "), incident.action || "nothing yet",
      incident.rung && el("span", { class: "muted" }, ` (${incident.rung})`)),
    incident.detail && incident.detail !== why && el("pre", { class: "code is-tail", tabindex: "0", "aria-label": "Details" }, incident.detail)));
}

function phases(incident) {
  const entries = Object.entries(incident.phases ?? {});
  const all = entries.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!(all > 0)) return null;
  let from = 0;
  const rows = entries.map(([name, seconds]) => {
    const [cause, about] = PHASES[name] ?? ["unknown", ""];
    const row = [
      el("span", { title: about }, name.replace("_", " ")),
      el("span", { class: "track", "aria-hidden": "true" }, el("i", { vars: { "--from": all ? from / all : 0, "--share": all ? seconds / all : 0, "--c": causeVar(cause) } })),
      el("span", { class: "num" }, duration(seconds)),
    ];
    from += seconds;
    return row;
  });
  return card("From the fault to the first good step", el("div", { class: "phases" }, rows),
    el("span", { class: "muted" }, `${duration(all)} in ${plural(entries.length, "phase")}`));
}

function stackCards(stacks, verdict) {
  const texts = Object.entries(stacks ?? {});
  const groups = verdict?.groups ?? [];
  if (!texts.length && !groups.length) return null;
  const each = texts.map(([rank, text]) => el("section", { class: "stack-of" }, el("h3", {}, `Rank ${rank}`),
    el("pre", { class: "code", tabindex: "0", "aria-label": `Stack of rank ${rank}` }, text)));
  if (!groups.length) return card("Stacks at that time", el("div", { class: "stacks" }, each));
  return card("Stacks at that time", [
    el("div", { class: "stacks" }, groups.map((group) => stackOf(group, true))),
    each.length > 0 && el("details", {}, el("summary", {}, "All threads of each rank"), el("div", { class: "stacks" }, each)),
  ]);
}

const STORY_SHOWN = 40;

function storyCard(story, leftOut) {
  if (!story.length) return null;
  const line = (step) => el("li", { class: `is-${step.kind}` },
    el("span", { class: "when" }, `${step.after_s < 0 ? "−" : "+"}${duration(Math.abs(step.after_s))}`), el("span", { class: "mark" }),
    el("span", {}, el("b", {}, step.what), step.node && el("span", { class: "muted" }, ` ${step.kind === "action" ? "to" : "from"} ${step.node}`), " ", step.text));
  return card("The chain of causes", [
    el("ol", { class: "story" }, story.slice(0, STORY_SHOWN).map(line)),
    story.length > STORY_SHOWN && el("details", {}, el("summary", {}, `${story.length - STORY_SHOWN} more`), el("ol", { class: "story" }, story.slice(STORY_SHOWN).map(line))),
    Object.keys(leftOut).length > 0 && el("p", { class: "muted" }, `Not shown: ${Object.entries(leftOut).map(([what, amount]) => `${count(amount)} ${what}`).join(", ")}.`),
    instead("With what each follows from", () => table("Events and actions", [["Number", ""], ["Follows from", ""], ["After", "num"], ["What", ""], ["Text", ""]],
      story.map((step) => [step.id, step.cause || "–", duration(step.after_s), step.what, step.text]))),
  ], el("span", { class: "muted" }, "● event  ◇ action"));
}

function logCard(log) {
  const logs = Object.entries(log ?? {}).filter(([, lines]) => lines.length);
  if (!logs.length) return null;
  return card("Log lines around it", el("div", { class: "stacks" }, logs.map(([rank, lines]) =>
    el("section", { class: "stack-of" }, el("h3", {}, `Rank ${rank}`, el("span", { class: "muted" }, ` ${plural(lines.length, "line")}, ${bytes(lines.join("\n").length)}`)),
      el("pre", { class: "code is-tail", tabindex: "0", "aria-label": `Log of rank ${rank}` }, lines.join("\n"))))));
}
