// The map of a job that has too many ranks for the window: each mark stands for some nodes and shows the worst of
// their ranks. One that is chosen is unfolded into its ranks.

import { count, plural } from "./format.js";
import { RANKS } from "./palette.js";

/** Large enough for a finger. */
export const MARK = 24;
const WORST_FIRST = "h-siwcrf";

/** Join nodes that follow each other, so that a mark for each group fits. */
export function fold({ nodes, ranks }, width, height) {
  const held = nodes.filter((node) => node[4] > 0).sort((a, b) => a[3] - b[3]);
  const across = Math.max(1, Math.floor(width / MARK)), room = across * Math.floor(height / MARK);
  const each = Math.max(1, Math.ceil(held.length / room)), groups = [];
  for (let at = 0; at < held.length; at += each) groups.push(held.slice(at, at + each));
  return { groups, across, letters: groups.map((group) => worst(states(group, ranks))).join("") };
}

const states = (group, ranks) => group.map(([, , , first, held]) => ranks.slice(first, first + held)).join("");

function worst(letters) {
  for (const state of WORST_FIRST) if (letters.includes(state)) return state;
  return "-";
}

export function foldedHint({ groups }) {
  const each = groups[0]?.length ?? 1;
  return `Each mark is ${each === 1 ? "a node" : plural(each, "node")} and shows the worst of its ranks; tap it or press Enter to see them all.`;
}

export function groupSentence(group, ranks) {
  const letters = states(group, ranks), parts = [];
  for (const state of WORST_FIRST) {
    const amount = letters.split(state).length - 1;
    if (amount) parts.push(`${count(amount)} ${RANKS[state]}`);
  }
  const [first, last] = [group[0], group.at(-1)];
  return `${first[1] || first[0]}${last === first ? "" : ` to ${last[1] || last[0]}`}: ${parts.join(", ")}`;
}
