// Which lanes a timeline has: one a rank, or one a node. The server knows every rank by itself as long as it is
// asked for few at a time, so what is on the screen is asked for in pieces.

const RANKS_AT_ONCE = 256;

export class LaneList {
  /** `ranks` is the largest world that the job ever had; those that no node has any more share a last lane. */
  constructor(nodes, ranks, fold) {
    const placed = fold === "node" ? nodes.filter((node) => node[4] > 0).sort((a, b) => a[3] - b[3]) : [];
    const hosts = new Set(placed.map((node) => node[1]));
    const held = placed.reduce((sum, node) => sum + node[4], 0);
    this.fold = fold;
    this.nodes = placed.map(([node, host, , first, count]) => ({ name: hosts.size === placed.length ? host : node, first, count }));
    if (fold === "node" && held < ranks) this.nodes.push({ name: `ranks ${held} to ${ranks - 1}`, first: held, count: ranks - held });
    this.total = fold === "node" ? this.nodes.length : ranks;
  }

  at(index) {
    return this.fold === "node" ? this.nodes[index] : { name: `rank ${index}`, first: index, count: 1 };
  }

  /** Pieces [first lane, lanes] of a stretch of lanes, each with few enough ranks to be answered one by one. */
  pieces(first, amount) {
    const found = [];
    let ranks = Infinity;
    for (let index = first; index < Math.min(first + amount, this.total); index += 1) {
      ranks += this.at(index).count;
      if (ranks > RANKS_AT_ONCE) {
        found.push([index, 0]);
        ranks = this.at(index).count;
      }
      found.at(-1)[1] += 1;
    }
    return found;
  }
}
