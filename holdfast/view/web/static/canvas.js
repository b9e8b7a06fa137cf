// A canvas that is as sharp as the screen, and the gestures that pictures share.

export function fit(canvas, height) {
  const width = Math.max(1, Math.floor(canvas.parentElement.clientWidth));
  const scale = Math.min(devicePixelRatio || 1, 3);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function font(size, weight = 400) {
  return `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif`;
}

/** Where a pointer is on a canvas, in CSS pixels. */
export function place(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** Diagonal lines over an area: what is not known looks unfinished, in any colour vision. */
export function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

const STEPS_S = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
  3600, 7200, 10800, 21600, 43200, 86400, 172800, 259200, 432000, 604800,
];

/** Ticks of a time axis: [time, label], at round times of this machine's clock, with the date where it changes. */
export function ticks(from, to, width, apart = 96) {
  const least = (to - from) / Math.max(1, width / apart);
  const step = STEPS_S.find((each) => each >= least) ?? 604800;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  let last = "";
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) {
    const time = new Date(at * 1000);
    const date = time.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    found.push([at, label(time, at, step, found.length === 0), date !== last ? date : ""]);
    last = date;
  }
  return found;
}

function label(time, at, step, first) {
  const two = (value) => String(value).padStart(2, "0");
  if (step >= 86400) return "";
  const minutes = `${two(time.getHours())}:${two(time.getMinutes())}`;
  if (step >= 60) return minutes;
  if (step >= 1) return `${minutes}:${two(time.getSeconds())}`;
  const digits = step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  return `${first ? minutes : ""}:${two(time.getSeconds())}${(at % 1).toFixed(digits).slice(1)}`;
}
