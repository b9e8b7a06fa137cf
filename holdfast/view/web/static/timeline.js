// The timeline: what every rank did in every second of the job, coloured by the ledger's causes.
//
// The server reduces what it sends to what fits on the screen, so moving and zooming only draw what is there and
// ask for more in the background. Lanes scroll by the browser's own scroll bar; the canvas stays in place.

import { get, path } from "./api.js";
import { fit, place } from "./canvas.js";
import { el, fill, instead, once, say, table } from "./dom.js";
import { count, duration, moment, plural } from "./format.js";
import { gestures } from "./gestures.js";
import { LaneList } from "./lanelist.js";
import { AXIS, drawLanes, gutter, laneHeight, spanAt } from "./lanes.js";
import { CAUSES, causeVar } from "./palette.js";
import { TimeWindow } from "./window.js";

const FOLD_ABOVE = 64;
const SPANS_AT_ONCE = 12000;
const SPANS_AT_FIRST = 3500;
const REFRESH_MS = 2000;

export function timelineView(page) {
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline of all ranks. Up and down choose a lane, left and right go from span to span, plus and minus zoom, Shift with an arrow moves, N and P go to the next and the previous incident, Enter opens what is chosen.",
  });
  const tall = el("div", { class: "tall" });
  const box = el("div", { class: "lanes", onscroll: () => { draw(); load(); } }, canvas, tall);
  const readout = el("p", { class: "readout", "aria-live": "polite" }, HINT);
  const range = el("span", { class: "range" });
  const legend = el("ul", { class: "legend", "aria-label": "Causes" });
  const folds = el("select", { "aria-label": "A lane for each", onchange: () => { fold = folds.value; forget(); } },
    el("option", { value: "rank" }, "Lane: rank"), el("option", { value: "node" }, "Lane: node"));
  const scene = { window: null, lanes: [], total: 0, tall: 20, scroll: 0, incidents: [], rounds: [], cursor: null, focused: false };
  const alternative = instead("As a table", () => spanTable(scene, page));
  const incidents = new Map(), rounds = new Map();
  let list = null, surveyed = null, fold = null, drawn = null, asked = null, loadedAt = 0, waiting = 0, loaded = null;

  const root = el("section", { class: "card", "aria-label": "Timeline" },
    el("div", { class: "bar", role: "toolbar", "aria-label": "Zoom" },
      button("−", "Zoom out", () => zoom(0.5)), button("+", "Zoom in", () => zoom(2)),
      button("Whole job", null, () => show(scene.window.begin, scene.window.end)),
      button("Last 10 min", null, () => show(scene.window.end - 600, scene.window.end)),
      button("‹ Incident", "Previous incident", () => toIncident(-1)), button("Incident ›", "Next incident", () => toIncident(1)),
      folds, range),
    box, el("div", { class: "under-bar" }, readout, legend, alternative));

  // ---- the window ----

  function button(text, label, onclick) {
    return el("button", { type: "button", "aria-label": label, onclick }, text);
  }
  function begin() {
    const { status } = page.now;
    const begin = status.opened_at, end = page.over() ? begin + status.wall_s : Math.max(page.time(), begin + 0.01);
    const ranks = page.now.map.nodes.reduce((most, node) => Math.max(most, node[3] + node[4]), 0) || status.world_size;
    if (scene.window === null) {
      scene.window = new TimeWindow(begin, end);
      fold = ranks > FOLD_ABOVE ? "node" : "rank";
      folds.value = fold;
      scene.ranks = ranks;
      fromAddress();
      surveyed = survey();
    } else {
      scene.window.grow(begin, end);
    }
    scene.ranks = Math.max(scene.ranks ?? 0, ranks);
    list = new LaneList(page.now.map.nodes, scene.ranks, fold);
    scene.total = list.total;
  }
  function fromAddress() {
    const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    const [from, to] = [Number(query.get("from")), Number(query.get("to"))];
    if (from && to > from) scene.window.set(from, to);
  }
  function show(from, to) {
    scene.window?.set(from, to);
    moved();
  }
  function zoom(factor, x = null) {
    if (!scene.window) return;
    const around = x === null ? (scene.focused && scene.cursor && inside(scene.cursor.time) ? scene.cursor.time : undefined) : timeAt(x);
    scene.window.zoom(factor, around);
    moved();
  }
  const inside = (time) => time >= scene.window.from && time <= scene.window.to;
  const timeAt = (x) => scene.window.from + (x - drawn.left) / drawn.scale;
  const laneAt = (y) => y < AXIS ? -1 : Math.floor((y - AXIS + scene.scroll) / scene.tall);
  function moved() {
    draw();
    load();
    clearTimeout(moved.later);
    moved.later = setTimeout(() => {
      const { window } = scene;
      history.replaceState(null, "", window.whole ? "#timeline" : `#timeline?from=${window.from.toFixed(3)}&to=${window.to.toFixed(3)}`);
    }, 300);
  }
  function forget() {
    scene.lanes = [];
    scene.cursor = null;
    loaded = null;
    begin();
    moved();
  }

  // ---- what the server knows ----

  function visible() {
    const room = canvas.clientHeight - AXIS, first = Math.max(0, Math.floor(scene.scroll / scene.tall) - 4);
    return [first, Math.min(scene.total - first, Math.ceil(room / scene.tall) + 8)];
  }
  function load() {
    if (!scene.window || !canvas.isConnected) return;
    const wait = loaded && covers(loaded) ? REFRESH_MS : 40;
    clearTimeout(waiting);
    waiting = setTimeout(ask, wait);
  }
  function covers(have) {
    const { window } = scene, [first, amount] = visible();
    return have.fold === fold && have.from <= window.from && have.to >= window.to && have.span / window.span < 2.5
      && have.first <= first && have.first + have.count >= first + amount;
  }
  async function ask() {
    const { window } = scene, [first, amount] = visible();
    if (loaded && covers(loaded) && (page.over() || !window.follows)) return;
    const margin = window.whole ? 0 : window.span / 4;
    const from = Math.max(window.begin, window.from - margin), to = Math.min(window.end, window.to + margin);
    const pixels = Math.round((canvas.clientWidth - gutter(canvas.clientWidth)) / 2 * (to - from) / window.span);
    const width = Math.max(60, Math.min(pixels, Math.floor((window.whole && scene.ranks > FOLD_ABOVE ? SPANS_AT_FIRST : SPANS_AT_ONCE) / Math.max(1, amount))));
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked;
    const piece = ([lane, lanes]) => {
      const query = new URLSearchParams({ from: from.toFixed(4), to: to.toFixed(4), width, first: list.at(lane).first, count: lanes, fold });
      return get(path(page.job, `timeline?${query}`), signal).then((answer) => fitted(answer, lane, lanes));
    };
    try {
      const about = { from, to, span: window.span, first, count: amount, fold };
      take(await Promise.all(list.pieces(first, amount).map(piece)), about);
    } catch (error) {
      if (error.name !== "AbortError") say(readout, error.message);
    }
  }
  /** Give each lane of the screen what was answered for its first rank: the answer may join several. */
  function fitted(answer, first, lanes) {
    const found = [];
    for (let index = first; index < first + lanes; index += 1) {
      const { name, first: rank } = list.at(index);
      const lane = answer.lanes.find((each) => rank >= each.first_rank && rank < each.first_rank + each.ranks);
      if (lane) found.push([index, { ...lane, name, first_rank: rank }]);
    }
    return { ...answer, found };
  }
  function take(answers, about) {
    if (about.fold !== fold) return;
    for (const answer of answers) {
      for (const [index, lane] of answer.found) scene.lanes[index] = lane;
      scene.ranks = Math.max(scene.ranks, answer.ranks);
      remember(answer);
    }
    loaded = about;
    loadedAt = performance.now();
    begin();
    showLegend(answers.flatMap((answer) => answer.lanes));
    alternative.refresh();
    draw();
  }
  /** Incidents and rounds are kept by their numbers, whatever stretch they came with. */
  function remember(answer) {
    for (const incident of answer.incidents) incidents.set(incident[0], incident);
    for (const round of answer.rounds) rounds.set(round[1], round);
    scene.incidents = [...incidents.values()];
    scene.rounds = [...rounds.values()].sort((a, b) => a[0] - b[0]);
  }
  /** All incidents of the job, so that the next one is found wherever it is. */
  async function survey() {
    const { begin, end } = scene.window;
    try {
      remember(await get(path(page.job, `timeline?from=${begin.toFixed(4)}&to=${end.toFixed(4)}&width=1&first=0&count=1&fold=${fold}`)));
      draw();
    } catch { /* the banner says so */ }
  }
  function showLegend(lanes) {
    const seen = new Set(lanes.flatMap((lane) => lane.spans.flatMap(([, , cause]) => typeof cause === "string" ? [cause] : Object.keys(cause))));
    const items = Object.keys(CAUSES).filter((cause) => seen.has(cause));
    if (legend.dataset.said === items.join()) return;
    legend.dataset.said = items.join();
    fill(legend, items.map((cause) => el("li", { title: CAUSES[cause] }, el("span", { class: "swatch", vars: { "--c": causeVar(cause) } }), cause)));
  }

  // ---- the picture ----

  const draw = once(() => {
    if (!canvas.isConnected || !scene.window) return;
    const most = Math.max(220, Math.min(innerHeight * 0.62, 720));
    scene.tall = laneHeight(scene.total, most - AXIS);
    const all = AXIS + scene.total * scene.tall + 6, height = Math.min(most, Math.max(all, AXIS + 60));
    tall.style.height = `${Math.max(0, all - height)}px`;
    scene.scroll = box.scrollTop;
    const { context, width } = fit(canvas, height);
    drawn = drawLanes(context, width, height, scene);
    say(range, `${moment(scene.window.from)} – ${scene.window.follows && !page.over() ? "now" : moment(scene.window.to)} · ${duration(scene.window.span)}`);
  });
  function tell(lane, time) {
    const found = scene.lanes[lane], span = spanAt(found, time);
    if (!found) return say(readout, HINT);
    if (!span) return say(readout, `${found.name}, ${clock(time)}: nothing booked`);
    const [begin, end, cause] = span;
    const what = typeof cause === "string" ? `${cause} (${CAUSES[cause] ?? ""}) for ${duration(end - begin)}`
      : Object.entries(cause).sort((a, b) => b[1] - a[1]).map(([each, share]) => `${each} ${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`).join(", ") + ` of ${duration(end - begin)}`;
    say(readout, `${found.name}, from ${clock(begin)}: ${what}`);
  }
  const clock = (time) => scene.window.span < 30 ? `${moment(time)}${(time % 1).toFixed(3).slice(1)}` : moment(time);
  const markAt = (x, y) => y < AXIS ? drawn?.marks.find((mark) => Math.abs(mark.x - x) < 9) : null;

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(canvas, event), mark = markAt(x, y);
    canvas.classList.toggle("is-over", Boolean(mark));
    if (!drawn || event.buttons) return;
    if (mark) say(readout, mark.incidents.length > 1 ? `${plural(mark.incidents.length, "incident")}: click to zoom in` : `Incident ${mark.incidents[0][0]}: ${mark.incidents[0][3]}, ${moment(mark.incidents[0][1])}; click to open`);
    else if (x > drawn.left) tell(laneAt(y), timeAt(x));
    else if (scene.lanes[laneAt(y)]) say(readout, `${scene.lanes[laneAt(y)].name}${fold === "node" ? ": click to see its ranks" : ""}`);
  });
  gestures(canvas, {
    zoom, refuses: (factor) => factor < 1 && scene.window?.whole,
    pan: (dx, dy) => { scene.window?.pan(-dx / (drawn?.scale ?? 1)); box.scrollTop -= dy; moved(); },
    tap(x, y) {
      const mark = markAt(x, y);
      if (mark) openMark(mark);
      else if (x < (drawn?.left ?? 0)) openLane(laneAt(y));
      else choose(laneAt(y), timeAt(x));
    },
  });
  function openMark({ incidents }) {
    if (incidents.length === 1) page.go(`incidents/${incidents[0][0]}`);
    else show(incidents[0][1] - 1, incidents[incidents.length - 1][1] + 1);
  }
  function openLane(index) {
    const lane = scene.lanes[index];
    if (!lane || fold !== "node") return;
    fold = folds.value = "rank";
    forget();
    box.scrollTop = lane.first_rank * laneHeight(scene.total, 400);
  }

  // ---- by keyboard ----

  function choose(lane, time) {
    if (!scene.window || !scene.total) return;
    scene.cursor = { lane: Math.max(0, Math.min(scene.total - 1, lane)), time: Math.min(Math.max(time, scene.window.begin), scene.window.end - 1e-6) };
    const y = scene.cursor.lane * scene.tall;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y + scene.tall > box.scrollTop + canvas.clientHeight - AXIS) box.scrollTop = y + scene.tall - canvas.clientHeight + AXIS;
    if (!inside(scene.cursor.time)) { scene.window.pan(scene.cursor.time - (scene.window.from + scene.window.to) / 2); moved(); }
    tell(scene.cursor.lane, scene.cursor.time);
    draw();
  }
  function alongLane(way) {
    const { lane, time } = scene.cursor, span = spanAt(scene.lanes[lane], time);
    choose(lane, span ? (way > 0 ? span[1] + 1e-5 : span[0] - 1e-5) : time + way * scene.window.span / 20);
  }
  async function toIncident(way) {
    if (!scene.window) return;
    await surveyed;
    const middle = (scene.window.from + scene.window.to) / 2;
    const sorted = scene.incidents.map((each) => [each[0], each[1], each[2] ?? scene.window.end]).sort((a, b) => a[1] - b[1]);
    const inView = scene.window.whole ? (way > 0 ? -Infinity : Infinity) : middle;
    const centre = ([, from, to]) => (from + to) / 2;
    const next = way > 0 ? sorted.find((each) => centre(each) > inView + 1e-3) : sorted.findLast((each) => centre(each) < inView - 1e-3);
    if (!next) return say(readout, way > 0 ? "There is no later incident." : "There is no earlier incident.");
    const room = Math.max((next[2] - next[1]) * 1.5, 0.1);
    show(centre(next) - room, centre(next) + room);
    say(readout, `Incident ${next[0]}, ${moment(next[1])}: ${duration(next[2] - next[1])}`);
  }
  const KEYS = {
    ArrowUp: () => choose(scene.cursor.lane - 1, scene.cursor.time), ArrowDown: () => choose(scene.cursor.lane + 1, scene.cursor.time),
    ArrowLeft: () => alongLane(-1), ArrowRight: () => alongLane(1),
    PageUp: () => choose(scene.cursor.lane - 20, scene.cursor.time), PageDown: () => choose(scene.cursor.lane + 20, scene.cursor.time),
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: () => show(scene.window.begin, scene.window.end),
    Home: () => choose(scene.cursor.lane, scene.window.begin), End: () => choose(scene.cursor.lane, scene.window.end),
    n: () => toIncident(1), p: () => toIncident(-1), Enter: () => openLane(scene.cursor.lane),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !scene.window) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      scene.window.pan(scene.window.span / 8 * ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0));
      moved();
    } else if (event.key in KEYS) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("focus", () => {
    scene.focused = true;
    if (!scene.window) return;
    if (!scene.cursor) choose(Math.floor(scene.scroll / scene.tall), scene.window.from);
    draw();
  });
  canvas.addEventListener("blur", () => { scene.focused = false; draw(); });

  return {
    root, show: draw,
    argument() { if (scene.window) { fromAddress(); moved(); } },
    refresh() { loaded = null; load(); },
    incident() { loaded = null; load(); if (scene.window) surveyed = survey(); },
    update() {
      if (!page.now) return;
      begin();
      draw();
      if (!loaded || performance.now() - loadedAt > REFRESH_MS) load();
    },
    close() { clearTimeout(waiting); clearTimeout(moved.later); asked?.abort(); },
  };
}

const HINT = "Wheel, pinch or + and − zoom; drag or Shift with an arrow moves; N and P go to the next and the previous incident.";
const TABLE_MOST = 300;

function spanTable(scene, page) {
  const rows = [];
  for (const lane of scene.lanes) {
    for (const [begin, end, cause] of lane?.spans ?? []) {
      if (end < scene.window.from || begin > scene.window.to || rows.length >= TABLE_MOST) continue;
      const what = typeof cause === "string" ? cause : Object.entries(cause).map(([each, share]) => `${each} ${(share * 100).toFixed(0)} %`).join(", ");
      rows.push([lane.name, moment(begin, page.time()), duration(end - begin), what]);
    }
  }
  return [
    table("What is on the screen", [["Lane", ""], ["From", ""], ["For", "num"], ["Cause", ""]], rows),
    rows.length >= TABLE_MOST && el("p", { class: "empty" }, `The first ${count(TABLE_MOST)}; zoom in for the others.`),
  ];
}
