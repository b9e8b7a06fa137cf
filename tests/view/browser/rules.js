// What a page must keep so that everybody can use it, as rules that a test evaluates in the browser.

globalThis.rules = {
  /** Controls, pictures and tables without a name; landmarks and headings out of order. */
  names() {
    const named = (node) => (node.getAttribute("aria-label") ?? "").trim()
      || (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent).join("").trim()
      || node.labels?.[0]?.textContent.trim() || node.textContent.trim() || node.getAttribute("title");
    const shown = (node) => node.getClientRects().length > 0;
    const found = [];
    for (const node of document.querySelectorAll("a[href], button, input, select, summary, canvas[tabindex], [role=application], dialog")) {
      if (shown(node) && !named(node)) found.push(`no name: ${node.outerHTML.slice(0, 90)}`);
    }
    for (const node of document.querySelectorAll("canvas, svg, img")) {
      const silent = node.closest("[aria-hidden=true]") || node.getAttribute("alt") === "" || node.hasAttribute("aria-label");
      if (!silent) found.push(`picture without a name: ${node.outerHTML.slice(0, 90)}`);
    }
    for (const table of document.querySelectorAll("table")) {
      if (!table.caption?.textContent) found.push("table without a caption");
      if (!table.querySelector("th[scope=col]")) found.push("table without headings");
    }
    for (const node of document.querySelectorAll("[style]")) {
      if (/style=/.test(node.outerHTML.split(">")[0]) && !node.style.length) found.push("style attribute");
    }
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    for (const id of new Set(ids)) if (ids.filter((each) => each === id).length > 1) found.push(`id ${id} twice`);
    const count = (query) => document.querySelectorAll(query).length;
    if (count("main") !== 1) found.push("not one main");
    if (count("h1") !== 1) found.push("not one h1");
    if (count("nav[aria-label]") !== 1) found.push("no named nav");
    if (count("[aria-live=assertive]") !== 1) found.push("no live region for incidents");
    if (!document.documentElement.lang) found.push("no language");
    let level = 1;
    for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
      const next = Number(heading.tagName[1]);
      if (next > level + 1) found.push(`heading ${heading.textContent} skips a level`);
      level = next;
    }
    return found;
  },

  /** Texts with less contrast than AA asks for. */
  contrast() {
    const parse = (text) => {
      const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
      return { rgb: [r, g, b], a };
    };
    const light = (rgb) => {
      const [r, g, b] = rgb.map((each) => each / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const under = (node) => {
      for (let each = node; each; each = each.parentElement) {
        const { rgb, a } = parse(getComputedStyle(each).backgroundColor);
        if (a === 1) return rgb;
      }
      return [255, 255, 255];
    };
    const found = new Set();
    for (const node of document.querySelectorAll("body *")) {
      const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      if (!text || !node.getClientRects().length || node.closest(".sr, .skip, [aria-hidden=true], [disabled], script, noscript")) continue;
      const style = getComputedStyle(node), [a, b] = [light(parse(style.color).rgb), light(under(node))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`);
    }
    return [...found];
  },

  /** Where the focus is, and whether one can see it. */
  focused() {
    const node = document.activeElement, style = getComputedStyle(node);
    const shown = style.outlineStyle !== "none" || node.matches(".skip");
    return { tag: node.tagName, href: node.getAttribute("href"), shown, inside: node.matches("main *") };
  },
};
