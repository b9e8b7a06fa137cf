// Charts over time: stacked areas of causes, and lines. A cursor follows the pointer or the arrow keys and its
// readout says in words what the picture shows there.

import { fit, font, hatch, place, ticks } from "./canvas.js";
import { el, once, say } from "./dom.js";
import { causeColour, colour } from "./palette.js";

const LEFT = 46, BOTTOM = 22, TOP = 6;

/** Buckets [[begin, end, {cause: seconds}]] as shares of what was booked, stacked in the order of `causes`. */
export function areaChart(label, causes, told) {
  const chart = frame(label, 260, (context, area, data) => {
    const most = data.most ?? 1;
    axes(context, area, data, [0, 0.25, 0.5, 0.75, 1].map((share) => share * most), (share) => `${Number((share * 100).toPrecision(3))} %`, most);
    for (const [begin, end, seconds] of data.buckets) {
      const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
      if (!all) continue;
      const x = Math.round(area.x(begin, data)), wide = Math.max(1, Math.round(area.x(end, data)) - x);
      let y = TOP + area.tall;
      for (const cause of causes) {
        if (!seconds[cause] || data.without?.has(cause)) continue;
        const part = Math.min((seconds[cause] / all / most) * area.tall, y - TOP);
        context.fillStyle = causeColour(cause);
        context.fillRect(x, y - part, wide, part);
        if (cause === "unknown") hatch(context, x, y - part, wide, part, colour("line-strong"));
        y -= part;
      }
    }
  }, told);
  return chart;
}

function frame(label, height, paint, told) {
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${label} Left and right arrow keys read it out.` });
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const root = el("div", {}, el("div", { class: "picture" }, canvas), readout);
  let data = null, index = -1, area = null;

  const draw = once(() => {
    if (!canvas.isConnected || !data?.buckets.length) return;
    const { context, width } = fit(canvas, height);
    area = { left: LEFT, wide: width - LEFT, tall: height - BOTTOM - TOP, x: (time, given) => LEFT + ((time - given.from) / (given.to - given.from)) * (width - LEFT) };
    paint(context, area, data);
    if (index < 0) return;
    const [begin, end] = data.buckets[index], x = area.x((begin + end) / 2, data);
    context.strokeStyle = colour("text");
    context.lineWidth = 1;
    context.strokeRect(Math.round(x) + 0.5, TOP, 0.01, area.tall);
  });
  const choose = (next) => {
    index = data?.buckets.length ? Math.max(-1, Math.min(data.buckets.length - 1, next)) : -1;
    say(readout, index < 0 ? "" : told(data.buckets[index], data));
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!area || !data) return;
    const time = data.from + ((place(canvas, event)[0] - LEFT) / area.wide) * (data.to - data.from);
    choose(data.buckets.findIndex(([begin, end]) => time >= begin && time < end));
  });
  canvas.addEventListener("pointerleave", () => choose(-1));
  canvas.addEventListener("blur", () => choose(-1));
  canvas.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: Infinity }[event.key];
    if (to === undefined) return;
    choose(Math.max(0, to));
    event.preventDefault();
  });
  return { root, draw, update(next) { data = next; index = Math.min(index, next.buckets.length - 1); draw(); } };
}

function axes(context, area, data, levels, written, most) {
  context.font = font(11);
  context.lineWidth = 1;
  for (const level of levels) {
    const y = Math.round(TOP + area.tall * (1 - level / most)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(LEFT + area.wide, y);
    context.stroke();
    context.fillStyle = colour("muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(written(level), LEFT - 8, Math.max(8, y));
  }
  context.textAlign = "start";
  context.textBaseline = "alphabetic";
  let labelled = 0;
  for (const [time, label, date] of ticks(data.from, data.to, area.wide)) {
    const x = area.x(time, data), shown = date && label ? `${date}, ${label}` : label || date;
    const end = x + 2 + context.measureText(shown).width;
    if (end <= LEFT + area.wide && x >= labelled) {
      context.fillText(shown, x + 2, TOP + area.tall + 16);
      labelled = end + 8;
    }
    context.strokeStyle = colour("line-strong");
    context.beginPath();
    context.moveTo(x, TOP + area.tall);
    context.lineTo(x, TOP + area.tall + 4);
    context.stroke();
  }
}
