// The map: every rank of the round, in blocks by node. Colour and shape both say what a rank does, so either is
// enough. It is one canvas, drawn in a few milliseconds for ten thousand ranks; the table under it says the same.

import { fit, font, place } from "./canvas.js";
import { el, instead, once, say, table } from "./dom.js";
import { MARK, fold, foldedHint, groupSentence } from "./fold.js";
import { count, plural } from "./format.js";
import { RANKS, colour, rankColour } from "./palette.js";

const HEIGHT = 520;
/** A map that would be taller is folded. */
const TALL = 640;
const ACROSS = 8;
const LEAST = 5;

export function rankMap(open) {
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "map of ranks",
    "aria-label": "Map of all ranks by node. Arrow keys move from rank to rank, Enter shows a rank's stack.",
  });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, hint());
  const legend = el("ul", { class: "legend", "aria-label": "What ranks do" });
  const alternative = instead("As a table", () => nodeTable(map));
  const all = el("button", { type: "button", class: "unfolded", hidden: true, onclick: () => unfold(null) }, "‹ All nodes");
  const root = el("div", { class: "stack" }, legend, all, el("div", { class: "picture" }, canvas), readout, alternative);
  let map = { nodes: [], ranks: "" }, layout = null, at = -1, over = -1;
  let folded = null, chosen = null;

  const draw = once(() => {
    if (!canvas.isConnected) return;
    settle();
    if (over < 0 && document.activeElement !== canvas) tell(-1);
    const { context } = fit(canvas, layout.height);
    for (const block of layout.blocks) drawBlock(context, block, layout.pitch, layout.letters);
    if (layout.pitch < 13) enlarge(context, layout, layout.letters);
    for (const each of new Set([over, document.activeElement === canvas ? at : -1])) ring(context, layout, each);
  });

  /** Place all ranks; where they do not fit, marks for groups of nodes, or the ranks of the group that was chosen. */
  function settle() {
    const width = canvas.parentElement.clientWidth;
    layout = arrange(map.nodes, width);
    folded = layout.height > TALL ? fold(map, width, HEIGHT) : null;
    const group = folded?.groups.find((each) => each.some((node) => key(node) === chosen));
    if (folded) layout = group ? arrange(group, width) : locate([marks(folded)], MARK, Math.ceil(folded.groups.length / folded.across) * MARK + 2);
    if (group) folded = null;
    layout.letters = folded ? folded.letters : map.ranks;
    all.hidden = !group;
  }

  /** Show the ranks of a group of nodes; null shows all groups again. */
  function unfold(group) {
    const before = chosen;
    chosen = group && key(group[0]);
    settle();
    over = -1;
    at = group ? group[0][3] : folded?.groups.findIndex((each) => each.some((node) => key(node) === before)) ?? -1;
    canvas.focus({ preventScroll: true });
    tell(at);
    draw();
  }

  function tell(index) {
    const block = index >= 0 && layout?.of(index);
    if (folded) say(readout, block ? groupSentence(folded.groups[index], map.ranks) : foldedHint(folded));
    else say(readout, block ? sentence(map, block, index) : hint());
  }

  function move(to) {
    at = Math.max(layout?.first ?? 0, Math.min(layout?.last ?? 0, to));
    tell(at);
    draw();
  }

  const enter = (index) => {
    at = index;
    if (folded) unfold(folded.groups[index]);
    else open(index);
  };

  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const here = Math.max(at, layout?.first ?? 0);
    if (event.key in steps) move(here + steps[event.key]);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") move(layout.beside(here, event.key === "ArrowUp" ? -1 : 1));
    else if ((event.key === "Enter" || event.key === " ") && layout?.of(here)) enter(here);
    else if (event.key === "Escape" && chosen !== null) unfold(null);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("focus", () => move(at));
  canvas.addEventListener("blur", () => { tell(-1); draw(); });
  canvas.addEventListener("pointermove", (event) => {
    over = layout?.at(...place(canvas, event)) ?? -1;
    canvas.classList.toggle("is-over", over >= 0);
    tell(over);
    draw();
  });
  canvas.addEventListener("pointerleave", () => { over = -1; tell(-1); draw(); });
  canvas.addEventListener("click", (event) => {
    const index = layout?.at(...place(canvas, event)) ?? -1;
    if (index >= 0) enter(index);
  });

  return {
    root, draw,
    update(next) {
      map = { ...next, nodes: [...next.nodes, ...homeless(next)] };
      countStates(legend, map);
      draw();
      alternative.refresh();
    },
  };
}

const hint = () => "Point at a rank, or use the arrow keys; click or Enter shows where it is in its code.";

/** A node, and also one that has left. */
const key = ([node, , , first]) => `${node} ${first}`;

/** One block of marks, as wide as the picture. */
function marks({ groups, across }) {
  return { node: "", host: "", state: "", first: 0, ranks: groups.length, columns: across, x: 1, y: 1, top: 1, label: false, wide: across * MARK, tall: Math.ceil(groups.length / across) * MARK };
}

/** Ranks whose node has left, as further blocks: those of a finished job, or of a node that was lost. */
function homeless({ nodes, ranks }) {
  const found = [];
  let at = 0;
  for (const [, , , first, held] of nodes.filter((node) => node[4] > 0).sort((a, b) => a[3] - b[3])) {
    gap(found, at, first);
    at = first + held;
  }
  gap(found, at, ranks.length);
  return found;
}

function gap(found, from, to) {
  for (let at = from; at < to; at += ACROSS) found.push(["no node", "node has left", "left", at, Math.min(ACROSS, to - at), null, false]);
}

function sentence(map, block, rank) {
  return `Rank ${rank}${block.state === "left" ? "" : ` on ${block.host} (${block.node})`}: ${RANKS[map.ranks[rank]] ?? "not there"}`;
}

function countStates(legend, map) {
  const counts = {};
  for (const state of map.ranks) counts[state] = (counts[state] ?? 0) + 1;
  const spares = map.nodes.filter(([, , state, , ranks]) => state === "waiting" && !ranks).length;
  const warm = map.nodes.filter((node) => node[6]).length;
  const items = Object.keys(RANKS).filter((state) => counts[state])
    .map((state) => el("li", {}, sample(state), el("b", {}, count(counts[state])), RANKS[state]));
  if (warm) items.push(el("li", { title: "A rank given to such a node starts at once" }, sample("standby"), el("b", {}, count(warm)), warm === 1 ? "node with a standby" : "nodes with a standby"));
  if (spares) items.push(el("li", {}, sample("spare"), el("b", {}, count(spares)), spares === 1 ? "spare node" : "spare nodes"));
  const said = items.map((item) => item.textContent).join();
  if (legend.dataset.said !== said + document.documentElement.dataset.theme) {
    legend.dataset.said = said + document.documentElement.dataset.theme;
    legend.replaceChildren(...items);
    for (const each of legend.querySelectorAll("canvas")) paintSample(each);
  }
}

function sample(state) {
  return el("canvas", { width: "32", height: "32", class: "key", "data-state": state, "aria-hidden": "true" });
}

function paintSample(canvas) {
  const context = canvas.getContext("2d");
  context.setTransform(2, 0, 0, 2, 0, 0);
  context.clearRect(0, 0, 16, 16);
  const { state } = canvas.dataset;
  if (state === "spare") outline(context, 1, 1, 14, 14);
  else if (state === "standby") circle(context, 8, 8, 5.5);
  else cell(context, state, 1, 1, 14);
}

// ---- where things are ----

/** Choose the largest cells with which all blocks fit, and place the blocks. */
function arrange(nodes, width) {
  for (let pitch = 40; pitch > LEAST; pitch -= pitch > 16 ? 2 : 0.5) {
    const layout = flow(nodes, width, pitch);
    if (layout.height <= (pitch > 30 ? HEIGHT / 2 : HEIGHT)) return layout;
  }
  return flow(nodes, width, LEAST);
}

function flow(nodes, width, pitch) {
  const label = pitch >= 16 ? 18 : 0, gap = Math.max(4, Math.round(pitch * 0.55));
  const blocks = [], inset = pitch < 13 ? 6 : 1;
  let x = inset, y = inset, tallest = 0;
  for (const [node, host, state, first, ranks] of nodes) {
    const columns = Math.max(1, Math.min(ranks || 4, ACROSS)), rows = Math.max(1, Math.ceil(ranks / columns));
    const wide = Math.max(columns * pitch, label ? Math.min(width, 92) : 0), tall = rows * pitch + label;
    if (x > inset && x + wide > width - inset) { x = inset; y += tallest + gap; tallest = 0; }
    blocks.push({ node, host, state, first, ranks, columns, x, y, top: y + label, label: label > 0, wide, tall });
    x += wide + gap;
    tallest = Math.max(tallest, tall);
  }
  return locate(blocks, pitch, Math.max(40, y + tallest + inset + 1));
}

function locate(blocks, pitch, height) {
  const ranked = blocks.filter((block) => block.ranks > 0).sort((a, b) => a.first - b.first);
  const of = (rank) => {
    let low = 0, high = ranked.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1, block = ranked[middle];
      if (rank < block.first) high = middle - 1;
      else if (rank >= block.first + block.ranks) low = middle + 1;
      else return block;
    }
    return null;
  };
  const box = (rank) => {
    const block = of(rank), index = rank - block.first;
    return [block.x + (index % block.columns) * pitch, block.top + Math.floor(index / block.columns) * pitch];
  };
  const at = (x, y) => {
    for (const block of ranked) {
      if (y < block.top || y >= block.y + block.tall || x < block.x || x >= block.x + block.columns * pitch) continue;
      const index = Math.floor((y - block.top) / pitch) * block.columns + Math.floor((x - block.x) / pitch);
      return index < block.ranks ? block.first + index : -1;
    }
    return -1;
  };
  const beside = (rank, way) => {
    if (!of(rank)) return rank;
    const [x, y] = box(rank);
    for (let step = 1; step < 30; step += 1) {
      const found = at(x + pitch / 2, y + pitch / 2 + (way * step * pitch) / 2);
      if (found >= 0 && found !== rank) return found;
    }
    return rank;
  };
  const last = ranked.at(-1);
  return { blocks, pitch, height, of, box, at, beside, first: ranked[0]?.first ?? 0, last: last ? last.first + last.ranks - 1 : 0 };
}

// ---- how things look ----

function drawBlock(context, block, pitch, ranks) {
  if (block.label) {
    context.fillStyle = colour("muted");
    context.font = font(11);
    context.textBaseline = "alphabetic";
    context.fillText(shortened(context, block.host || block.node, block.wide), block.x, block.top - 5);
  }
  if (!block.ranks) {
    outline(context, block.x, block.top, block.columns * pitch - 2, pitch - 2);
    return;
  }
  for (let index = 0; index < block.ranks; index += 1) {
    const x = block.x + (index % block.columns) * pitch, y = block.top + Math.floor(index / block.columns) * pitch;
    cell(context, ranks[block.first + index] ?? "-", x, y, pitch - (pitch > 8 ? 2 : 1));
    if (pitch >= 26) number(context, block.first + index, ranks[block.first + index], x, y, pitch - 2);
  }
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text.length;
  while (kept > 1 && context.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return `${text.slice(0, kept)}…`;
}

function number(context, rank, state, x, y, size) {
  if (!"rcw".includes(state)) return;
  context.fillStyle = state === "w" ? colour("text") : "#fff";
  context.font = font(rank > 999 ? 9 : size > 30 ? 13 : 11, 600);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(String(rank), x + size / 2, y + size / 2 + 0.5);
  context.textAlign = "start";
}

/** One rank: full square running, frame waiting, notched saving, triangle slow, cross hung, dot starting,
    low bar finished, thin dash not there. */
function cell(context, state, x, y, size) {
  context.fillStyle = context.strokeStyle = rankColour(state);
  const middle = size / 2;
  if (state === "r") {
    context.fillRect(x, y, size, size);
  } else if (state === "w") {
    const line = Math.max(1, size * 0.14);
    context.lineWidth = line;
    context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
  } else if (state === "c") {
    shape(context, [[x, y], [x + size, y], [x + size, y + middle], [x + middle, y + size], [x, y + middle]]);
  } else if (state === "s") {
    shape(context, [[x + middle, y], [x + size, y + size], [x, y + size]]);
  } else if (state === "h") {
    const arm = Math.max(1.5, size * 0.26);
    context.lineWidth = arm;
    context.beginPath();
    context.moveTo(x + arm / 2, y + arm / 2); context.lineTo(x + size - arm / 2, y + size - arm / 2);
    context.moveTo(x + size - arm / 2, y + arm / 2); context.lineTo(x + arm / 2, y + size - arm / 2);
    context.stroke();
  } else if (state === "i") {
    context.beginPath();
    context.arc(x + middle, y + middle, size * 0.32, 0, 2 * Math.PI);
    context.fill();
  } else if (state === "f") {
    context.fillRect(x, y + size * 0.55, size, size * 0.45);
  } else {
    context.fillRect(x + size * 0.2, y + middle - 0.5, size * 0.6, Math.max(1, size * 0.1));
  }
}

function shape(context, points) {
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.fill();
}

/** Few ranks are in trouble and they must be seen: among small cells theirs are drawn larger, over the others. */
function enlarge(context, layout, ranks) {
  const size = 13;
  for (let rank = 0; rank < ranks.length; rank += 1) {
    if (!"hs".includes(ranks[rank]) || !layout.of(rank)) continue;
    const [x, y] = layout.box(rank), shift = (layout.pitch - size) / 2;
    context.fillStyle = colour("surface");
    context.fillRect(x + shift - 2, y + shift - 2, size + 4, size + 4);
    cell(context, ranks[rank], x + shift, y + shift, size);
  }
}

function circle(context, x, y, radius) {
  context.strokeStyle = colour("rank-w");
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.stroke();
}

function outline(context, x, y, width, height) {
  context.strokeStyle = colour("rank-w");
  context.lineWidth = 1.5;
  context.setLineDash([3, 3]);
  context.strokeRect(x + 0.75, y + 0.75, width - 1.5, height - 1.5);
  context.setLineDash([]);
}

function ring(context, layout, rank) {
  if (rank < 0 || !layout.of(rank)) return;
  const [x, y] = layout.box(rank), size = layout.pitch - (layout.pitch > 8 ? 2 : 1);
  context.strokeStyle = colour("text");
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, size + 2, size + 2);
}

const TABLE_MOST = 200;

function nodeTable(map) {
  const rows = map.nodes.map(([node, host, state, first, ranks]) => {
    const counts = {};
    for (const each of map.ranks.slice(first, first + ranks)) counts[each] = (counts[each] ?? 0) + 1;
    const trouble = (counts.h ?? 0) * 1000 + (counts.s ?? 0) * 10 + (counts["-"] ?? 0);
    const words = Object.entries(counts).map(([each, amount]) => `${amount} ${RANKS[each]}`).join(", ");
    return { trouble, cells: [`${host} (${node})`, state, ranks ? `${first}–${first + ranks - 1}` : "none", words || "–"] };
  });
  rows.sort((a, b) => b.trouble - a.trouble);
  const shown = rows.slice(0, TABLE_MOST).map((row) => row.cells);
  return [
    table("Ranks by node", [["Node", ""], ["State", ""], ["Ranks", ""], ["What they do", ""]], shown),
    rows.length > TABLE_MOST && el("p", { class: "empty" }, `${plural(rows.length - TABLE_MOST, "further node")}, all without trouble, in the view Nodes.`),
  ];
}
