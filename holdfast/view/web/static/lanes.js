// Draws a timeline: an axis, a lane for each rank or node, the incidents as marks. Only what is on the screen is
// drawn, so the number of ranks does not matter.

import { font, hatch, ticks } from "./canvas.js";
import { CAUSES, causeColour, colour } from "./palette.js";

export const AXIS = 44;
const MARK = 9;
const DENSE = 60;
const ORDER = Object.keys(CAUSES);

export function laneHeight(lanes, room) {
  return Math.max(12, Math.min(26, Math.floor(room / Math.max(1, lanes))));
}

export function gutter(width) {
  return width < 600 ? 62 : 124;
}

/** Draw a frame. `scene` has window, lanes (sparse, by index), first lane on the screen, incidents, cursor. */
export function drawLanes(context, width, height, scene) {
  const left = gutter(width), scale = (width - left) / scene.window.span;
  const at = (time) => left + (time - scene.window.from) * scale;
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, width, height);
  const drawn = { at, left, scale, width, height };
  grid(context, drawn, scene);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  const lead = Math.max(0, Math.floor(scene.scroll / scene.tall));
  const shown = Math.ceil((height - AXIS) / scene.tall) + 1;
  for (let index = lead; index < Math.min(scene.total, lead + shown); index += 1) {
    lane(context, drawn, scene, index, AXIS + index * scene.tall - scene.scroll);
  }
  shades(context, drawn, scene);
  cursor(context, drawn, scene);
  context.restore();
  const marks = incidentMarks(drawn, scene);
  drawMarks(context, drawn, marks);
  return { ...drawn, marks };
}

function grid(context, { at, left, width, height }, { window, rounds, incidents }) {
  context.font = font(11);
  context.textBaseline = "alphabetic";
  context.lineWidth = 1;
  let labelled = 0;
  for (const [time, label, date] of ticks(window.from, window.to, width - left)) {
    const x = Math.round(at(time)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(x, 22);
    context.lineTo(x, height);
    context.stroke();
    context.fillStyle = colour("muted");
    const shown = date && label ? `${date}, ${label}` : label || date;
    const end = x + 4 + context.measureText(shown).width;
    if (end > width || x < labelled) continue;
    context.fillText(shown, x + 4, 18);
    labelled = end + 8;
  }
  let free = left;
  context.font = font(10);
  const near = rounds.filter(([time]) => time >= window.from && time <= window.to);
  for (const [time, number] of near.length > 40 ? [] : near) {
    const x = at(time);
    if (x < free) continue;
    context.strokeStyle = colour("line-strong");
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, 24);
    context.lineTo(Math.round(x) + 0.5, AXIS);
    context.stroke();
    if (incidents.some(([, fault]) => at(fault) > x + 2 && at(fault) < x + 60)) continue;  // Its mark covers the name.
    context.fillStyle = colour("muted");
    context.fillText(`round ${number}`, x + 8, 40);
    free = x + 72;
  }
}

function lane(context, drawn, scene, index, y) {
  const found = scene.lanes[index], { left, width } = drawn, tall = scene.tall;
  if (scene.cursor?.lane === index && scene.focused) {
    context.fillStyle = colour("accent-soft");
    context.fillRect(0, y, left, tall);
  }
  context.font = font(11);
  context.textBaseline = "middle";
  context.fillStyle = colour(scene.cursor?.lane === index && scene.focused ? "text" : "muted");
  context.save();
  context.beginPath();
  context.rect(0, y, left - 6, tall);
  context.clip();
  context.fillText(ending(context, found?.name ?? "…", left - 18), 12, y + tall / 2 + 0.5);
  context.restore();
  if (!found) return;
  context.save();
  context.beginPath();
  context.rect(left, y, width - left, tall);
  context.clip();
  const gap = tall > 14 ? 3 : 1;
  for (const [begin, end, cause] of found.spans) {
    if (end < scene.window.from || begin > scene.window.to) continue;
    const x = Math.max(left, drawn.at(begin)), wide = Math.max(0.75, drawn.at(end) - x);
    if (typeof cause === "string") plain(context, cause, x, y + gap / 2, Math.min(wide, width - x), tall - gap);
    else mixed(context, cause, x, y + gap / 2, wide, tall - gap);
  }
  context.restore();
}

/** A name that is too long loses its beginning: hosts differ at the end. */
function ending(context, name, width) {
  let kept = name;
  while (kept.length > 2 && context.measureText(kept).width > width) kept = kept.slice(kept[0] === "…" ? 2 : 1).replace(/^/, "…");
  return kept;
}

function plain(context, cause, x, y, wide, tall) {
  context.fillStyle = causeColour(cause);
  context.fillRect(x, y, wide, tall);
  if (cause === "unknown" && wide > 3) hatch(context, x, y, wide, tall, colour("line-strong"));
  if (wide < 56 || tall < 11) return;
  context.font = font(11, 500);
  context.textBaseline = "middle";
  const label = context.measureText(cause).width + 10;
  if (label > wide) return;
  context.fillStyle = LIGHT.has(cause) ? "#1b2124" : "#fff";
  if (document.documentElement.dataset.theme === "dark") context.fillStyle = LIGHT_DARK.has(cause) ? "#101415" : "#fff";
  context.fillText(cause, x + 5, y + tall / 2 + 0.5);
}

const LIGHT = new Set(["productive", "redo", "start", "evaluation", "stop", "restore", "wait", "idle", "other", "unknown"]);
const LIGHT_DARK = new Set(["redo", "start", "evaluation", "restore", "stop"]);

/** A stretch too short to be told apart: its causes by share, one above the other. */
function mixed(context, shares, x, y, wide, tall) {
  let bottom = y + tall;
  for (const cause of ORDER) {
    if (!shares[cause]) continue;
    const part = shares[cause] * tall;
    context.fillStyle = causeColour(cause);
    context.fillRect(x, bottom - part, wide + 0.5, part);
    bottom -= part;
  }
}

function shades(context, { at, left, width, height }, { incidents, window }) {
  if (incidents.length > DENSE) return;
  context.fillStyle = colour("bad");
  for (const [, begin, end] of incidents) {
    const until = end ?? window.end;
    if (until < window.from || begin > window.to) continue;
    const x = Math.max(left, at(begin)), wide = Math.min(width, at(until)) - x;
    context.globalAlpha = 0.9;
    if (at(begin) >= left) context.fillRect(Math.round(x), AXIS, 1, height);
    context.globalAlpha = 0.08;
    if (wide > 2) context.fillRect(x, AXIS, wide, height);
    context.globalAlpha = 1;
  }
}

/** Incidents that would cover each other become one mark with their number. */
function incidentMarks({ at, left, width }, { incidents, window }) {
  const marks = [], dense = incidents.length > DENSE, apart = dense ? MARK - 3 : MARK * 2;
  for (const incident of [...incidents].sort((a, b) => a[1] - b[1])) {
    if (incident[1] < window.from || incident[1] > window.to) continue;
    const x = at(incident[1]), last = marks[marks.length - 1];
    if (x < left || x > width) continue;
    if (last && x - last.x < apart) last.incidents.push(incident);
    else marks.push({ x, incidents: [incident] });
  }
  return Object.assign(marks, { dense });
}

function drawMarks(context, drawn, marks) {
  if (marks.dense) return drawDensity(context, marks);
  for (const { x, incidents } of marks) {
    context.fillStyle = colour("bad");
    context.beginPath();
    context.moveTo(x - 5, AXIS - 11);
    context.lineTo(x + 5, AXIS - 11);
    context.lineTo(x, AXIS - 1);
    context.fill();
    if (incidents.length < 2) continue;
    context.font = font(10, 600);
    context.textBaseline = "alphabetic";
    context.fillStyle = colour("bad");
    context.fillText(String(incidents.length), x + 6, AXIS - 3);
  }
}

/** More marks than can be told apart become bars, as high as there were incidents. */
function drawDensity(context, marks) {
  const most = Math.max(...marks.map(({ incidents }) => incidents.length));
  context.fillStyle = colour("bad");
  for (const { x, incidents } of marks) {
    const tall = 3 + 13 * (incidents.length / most);
    context.fillRect(x, AXIS - 2 - tall, MARK - 4, tall);
  }
}

function cursor(context, { at, left, width }, scene) {
  if (!scene.cursor || !scene.focused) return;
  const y = AXIS + scene.cursor.lane * scene.tall - scene.scroll, x = at(scene.cursor.time);
  context.strokeStyle = colour("text");
  context.lineWidth = 2;
  if (x >= left && x <= width) context.strokeRect(x - 1, y, 2, scene.tall);
}

/** The span of a lane at a time, or null. */
export function spanAt(lane, time) {
  return lane?.spans.find(([begin, end]) => time >= begin && time < end) ?? null;
}
