// All incidents, newest first, and beside them the one that was chosen. A thousand of them are loaded page by page
// as one scrolls; a search loads the rest.

import { get, path } from "./api.js";
import { el, fill } from "./dom.js";
import { plural } from "./format.js";
import { incidentReport, tellElsewhere } from "./incident.js";
import { brief } from "./now.js";

const PAGE = 50;
/** Until what other jobs had is asked for again. */
const OTHERS_MS = 1000;

export function incidentsView(page, argument) {
  const list = el("ol", { class: "brief", "aria-label": "Incidents, newest first" });
  const search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search incidents", oninput: () => find() });
  const more = el("div", { class: "more muted" });
  const box = el("section", { class: "card list", "aria-label": "All incidents", tabindex: "-1" }, el("div", { class: "filter" }, search), list, more);
  const detail = el("section", { class: "stack", "aria-label": "The chosen incident", "aria-live": "off" });
  const root = el("div", { class: "desk" }, box, detail);
  let known = [], total = null, chosen = null, asking = null, following = argument === "";

  async function load(before) {
    const answer = await get(path(page.job, `incidents?limit=${PAGE}${before ? `&before=${before}` : ""}`));
    total = answer.total;
    const ids = new Set(answer.incidents.map((each) => each.id));
    known = [...known.filter((each) => !ids.has(each.id)), ...answer.incidents].sort((a, b) => b.id - a.id);
    render();
  }
  const older = () => (asking ??= load(known.at(-1)?.id).catch(() => {}).finally(() => { asking = null; }));
  const sentinel = new IntersectionObserver((seen) => {
    if (seen.some((each) => each.isIntersecting) && known.length && known.length < total) older();
  }, { root: null, rootMargin: "400px" });
  sentinel.observe(more);

  async function find() {
    while (search.value && known.length < total) {
      const before = known.length;
      await older();
      if (known.length === before) break;
    }
    render();
  }

  function render() {
    const wanted = search.value.trim().toLowerCase();
    const shown = wanted ? known.filter((each) => `${each.id} ${each.kind} ${each.node} ${each.line}`.toLowerCase().includes(wanted)) : known;
    fill(list, shown.map((each) => brief(each, page.time())));
    fill(more, shown.length === 0 ? (wanted ? "No incident matches." : total === 0 ? "No incident so far: nothing has failed." : "") :
      wanted ? plural(shown.length, "match", "matches") : known.length < total ? `${known.length} of ${total}; scroll for more` : `all ${plural(total, "incident")}`);
    mark();
    if (chosen === null && following && known.length && matchMedia("(min-width: 901px)").matches) open(known[0].id);
    if (total === 0) fill(detail, el("p", { class: "card empty" }, "When a rank dies or hangs, its story stands here: what failed, why, what was done, and what it cost."));
  }

  function mark() {
    for (const link of list.querySelectorAll("a")) {
      if (link.getAttribute("href") === `#incidents/${chosen}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  async function open(id) {
    const again = chosen === id;
    chosen = id;
    root.classList.toggle("is-open", !following);
    mark();
    if (!again) fill(detail, el("p", { class: "card empty" }, "Reading…"));
    try {
      const answer = await get(path(page.job, `incidents/${id}`));
      if (chosen !== id) return;
      fill(detail, incidentReport(page, answer, known));
      if (answer.seen_elsewhere === null) setTimeout(askElsewhere, OTHERS_MS, id);
      for (const log of detail.querySelectorAll(".is-tail")) log.scrollTop = log.scrollHeight;
    } catch (error) {
      if (chosen === id) fill(detail, el("p", { class: "note is-bad" }, error.message));
    }
  }

  async function askElsewhere(id) {
    if (chosen !== id || !root.isConnected) return;
    const { seen_elsewhere: elsewhere } = await get(path(page.job, `incidents/${id}`)).catch(() => ({ seen_elsewhere: null }));
    const place = detail.querySelector(".elsewhere");
    if (chosen !== id || !place) return;
    tellElsewhere(place, elsewhere, page);
    if (elsewhere === null) setTimeout(askElsewhere, OTHERS_MS, id);
  }

  const show = (text) => {
    const id = Number.parseInt(text, 10);
    following = Number.isNaN(id);
    if (following) { root.classList.remove("is-open"); chosen = null; render(); }
    else open(id);
  };
  const ready = load().catch((error) => fill(more, error.message));
  if (argument) show(argument);

  return {
    root, ready,
    argument: show,
    refresh: () => load().catch(() => {}),
    incident(incident) {
      const was = known.find((each) => each.id === incident.id);
      known = [incident, ...known.filter((each) => each.id !== incident.id)].sort((a, b) => b.id - a.id);
      if (!was) total += 1;
      if (following && !was) chosen = null;
      render();
      if (chosen === incident.id) open(incident.id);
    },
    close: () => sentinel.disconnect(),
  };
}
