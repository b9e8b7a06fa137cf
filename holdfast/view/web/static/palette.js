// Names, order and colours of the ledger's causes and of what ranks do. Colours live in base.css; canvases
// read them from there, so light and dark need no second list.

export const CAUSES = {
  productive: "steps finished for the first time",
  redo: "steps that a fault threw away, taken again",
  start: "from the launch until the script ran",
  init: "imports and process group, until the first step",
  checkpoint: "saving",
  evaluation: "evaluation that the script marks",
  detect: "from a fault until it was known",
  stop: "ending the other ranks",
  rendezvous: "agreeing on the next round",
  restore: "loading state",
  wait: "for nodes",
  idle: "finished before the others",
  other: "between steps, no training",
  finish: "from the last step to the script's end",
  unknown: "not known yet, or never known",
};

export const RANKS = {
  r: "running", w: "waiting for others", c: "saving", s: "slow", h: "hung", i: "starting",
  f: "finished", "-": "not there",
};

/** What a phase of a repair is booked as. */
export const PHASES = {
  teardown: ["detect", "the failed process's own teardown"], detect: ["detect", "until it was known"],
  stop: ["stop", "ending the other ranks"], rendezvous: ["rendezvous", "agreeing on the next round"],
  start: ["start", "until the script ran"], first_step: ["init", "until the first good step"],
};

export const STATES = {
  gathering: ["gathering", "warn"], running: ["running", "good"], stopping: ["stopping", "warn"],
  ending: ["ending", "warn"], ended: ["ended", ""], lost: ["lost", "bad"],
};

let known = {};

export function colour(name) {
  return (known[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888");
}

export const causeColour = (cause) => colour(`cause-${cause in CAUSES ? cause : "unknown"}`);
export const rankColour = (state) => colour(state === "-" ? "rank-none" : `rank-${state}`);
export const causeVar = (cause) => `var(--cause-${cause in CAUSES ? cause : "unknown"})`;

const THEME = "holdfast-theme";

/** Set the theme that was chosen, or the system's, and have pictures drawn anew when it changes. */
export function themed(button, redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light");
  const apply = () => {
    document.documentElement.dataset.theme = chosen();
    button.textContent = "◐";
    button.setAttribute("aria-label", chosen() === "dark" ? "Light theme" : "Dark theme");
    button.title = button.getAttribute("aria-label");
    known = {};
    redraw();
  };
  button.addEventListener("click", () => {
    localStorage.setItem(THEME, chosen() === "dark" ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
