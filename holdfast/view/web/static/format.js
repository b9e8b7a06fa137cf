// Numbers, times and names as people read them. One way for each, so that no two views differ.

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

/** A quantity with three significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return count(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/** A loss with four significant digits, or what it is instead of a number. */
export function lossText(value) {
  if (value === null || value === undefined) return NONE;
  return typeof value === "string" ? value : String(Number(value.toPrecision(4)));
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? NONE : `${(share * 100).toFixed(digits)} %`;
}

/** A duration: two units at most, milliseconds where they matter. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const size = Math.abs(seconds);
  if (size < 0.0005) return "0 s";
  if (size < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (size < 60) return `${seconds.toFixed(size < 10 ? 2 : 1)} s`;
  if (size < 3600) return `${Math.floor(seconds / 60)} m ${pad(seconds % 60)} s`;
  if (size < 86400) return `${Math.floor(seconds / 3600)} h ${pad((seconds % 3600) / 60)} m`;
  return `${Math.floor(seconds / 86400)} d ${pad((seconds % 86400) / 3600)} h`;
}

/** What this much time of ranks costs; empty if no price is known. */
export function cost(rankSeconds, price) {
  if (!price) return "";
  const digits = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
  return `${((rankSeconds / 3600) * price.amount).toLocaleString("en-US", digits)} ${price.unit}`.trim();
}

function pad(value) {
  return String(Math.floor(value)).padStart(2, "0");
}

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  while (size >= 1024 && step < units.length - 1) { size /= 1024; step += 1; }
  return `${step ? number(size) : size} ${units[step]}`;
}

/** A moment on this machine's clock: with its date, unless that is today. */
export function moment(at, now = Date.now() / 1000) {
  const time = new Date(at * 1000);
  const clock = `${pad(time.getHours())}:${pad(time.getMinutes())}:${pad(time.getSeconds())}`;
  return time.toDateString() === new Date(now * 1000).toDateString() ? clock : `${day(time)} ${clock}`;
}

export function day(time) {
  return time.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

export function ago(at, now) {
  const seconds = Math.max(0, now - at);
  return seconds < 2 ? "just now" : `${duration(seconds).replace(/\.\d+ s$/, " s")} ago`;
}

export function plural(amount, one, many = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}

/** [0,1,2,3,7] as "0–3, 7". */
export function ranges(ranks, most = 12) {
  const parts = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = parts[parts.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  const shown = parts.slice(0, most).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
  return parts.length > most ? `${shown}, …` : shown;
}
