// A line the size of a word: how something went. The figure stands beside it as text.

import { svg } from "./dom.js";

export function spark(points, { least = null, most = null, tone = "var(--accent)" } = {}) {
  const kept = points.filter(([, value]) => value !== null && value !== undefined);
  const picture = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.style.setProperty("--c", tone);
  if (kept.length < 2) return picture;
  const values = kept.map(([, value]) => value);
  const low = least ?? Math.min(...values), high = Math.max(most ?? Math.max(...values), low + 1e-9);
  const [from, to] = [kept[0][0], kept.at(-1)[0]];
  const line = kept.map(([at, value], index) =>
    `${index ? "L" : "M"}${(((at - from) / (to - from || 1)) * 100).toFixed(1)} ${(23 - ((value - low) / (high - low)) * 22).toFixed(1)}`).join("");
  picture.append(svg("path", { class: "under", d: `${line}L100 24L0 24Z` }), svg("path", { d: line }));
  return picture;
}
