// What can be done to the job from here: shown only if the server allows it, and done only after a dialog in which
// the job's name is typed. The server asks for the same name, so no stray request acts.

import { act } from "./api.js";
import { el, fill } from "./dom.js";

const nodes = (page) => page.now.map.nodes.map(([node]) => node);

const ACTIONS = {
  save: { title: "Save now", tone: "", about: "The newest snapshots in memory are written to storage now. Training goes on meanwhile.", fields: [] },
  exclude: { title: "Exclude a node", tone: "danger", about: "Its host takes no further part. If it is in the round, the round ends and the job goes on without it, or with a spare.", fields: [["node", "Node", nodes, ""], ["reason", "Reason", "text", "excluded on the page"]] },
  fault: { title: "Inject a fault", tone: "danger", about: "Strikes a rank on purpose, to see that the job recovers. Steps since the last snapshot are taken again.", fields: [["fault", "Fault", () => ["kill", "term", "stop", "hang", "exception", "segfault", "slow"], ""], ["rank", "Rank", "number", "0"]] },
  scale: { title: "Scale", tone: "", about: "Changes how many nodes the job wants. The round ends and a larger or smaller one follows.", fields: [["min_nodes", "Nodes at least", "number", "1"], ["max_nodes", "Nodes at most", "number", "1"]] },
  stop: { title: "Stop the job", tone: "danger", about: "Ends every rank of the job. Steps since the last checkpoint are lost.", fields: [["reason", "Reason", "text", "stopped on the page"]] },
};

export function offerActions(place, page) {
  const allowed = page.over() ? [] : Object.keys(ACTIONS).filter((name) => page.actions.includes(name));
  if (place.dataset.allowed === allowed.join()) return;
  place.dataset.allowed = allowed.join();
  if (!allowed.length) return fill(place);
  const choice = el("select", { "aria-label": "Act on the job", onchange: () => { const name = choice.value; choice.value = ""; if (name) confirm(page, name); } },
    el("option", { value: "" }, "Act…"), allowed.map((name) => el("option", { value: name }, ACTIONS[name].title)));
  fill(place, choice);
}

function confirm(page, name) {
  const { title, tone, about, fields } = ACTIONS[name];
  const inputs = fields.map(([key, label, type, value]) => [key, type, typeof type === "function"
    ? el("select", { "aria-label": label }, type(page).map((each) => el("option", { value: each }, each)))
    : el("input", { type, value, required: true, "aria-label": label }), label]);
  const typed = el("input", { type: "text", autocomplete: "off", spellcheck: "false", "aria-label": `Type ${page.job} to confirm`, oninput: () => { go.disabled = typed.value !== page.job; } });
  const go = el("button", { type: "submit", class: tone || "primary", disabled: true }, title);
  const answer = el("p", { role: "status" });
  const form = el("form", { class: "body", method: "dialog", onsubmit: (event) => { event.preventDefault(); send(); } },
    el("p", {}, about),
    inputs.map(([, , input, label]) => el("label", { class: "field" }, el("span", {}, label), input)),
    el("label", { class: "field" }, el("span", {}, "Type ", el("code", {}, page.job), " to confirm"), typed),
    answer,
    el("footer", {}, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go));
  const dialog = el("dialog", { "aria-labelledby": "act-title", onclose: () => dialog.remove() }, el("header", {}, el("h2", { id: "act-title" }, `${title}: ${page.job}`)), form);
  document.body.append(dialog);
  dialog.showModal();

  async function send() {
    go.disabled = true;
    const body = Object.fromEntries(inputs.map(([key, type, input]) => [key, type === "number" ? Number(input.value) : input.value]));
    try {
      const said = await act(page.job, name, body);
      answer.className = "note is-good";
      fill(answer, said?.line ?? "Done.");
      typed.disabled = true;
    } catch (error) {
      answer.className = "note is-bad";
      fill(answer, error.message);
      go.disabled = false;
    }
  }
}
