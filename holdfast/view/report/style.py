"""Holds the style sheet of a report: in the light, in the dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.messages.records import Cause

LIGHT: Mapping[Cause, str] = {
    "productive": "#79c0ab",
    "redo": "#e58a33",
    "start": "#b7a2de",
    "init": "#8167bd",
    "checkpoint": "#3f7fd4",
    "evaluation": "#71bce8",
    "detect": "#cd3a34",
    "stop": "#e67f86",
    "rendezvous": "#bb4a97",
    "restore": "#dcb630",
    "wait": "#8c99a3",
    "idle": "#c7cfd4",
    "other": "#b79d7e",
    "finish": "#67788a",
    "unknown": "#dde0e0",
}
"""Colours of the causes."""
DARK: Mapping[Cause, str] = {
    "productive": "#2a7562",
    "redo": "#d67c28",
    "start": "#9a83c9",
    "init": "#7559b3",
    "checkpoint": "#3c78c8",
    "evaluation": "#519dca",
    "detect": "#d8463f",
    "stop": "#c9626b",
    "rendezvous": "#b2498f",
    "restore": "#c39f25",
    "wait": "#6b7881",
    "idle": "#444f55",
    "other": "#8f785c",
    "finish": "#56687a",
    "unknown": "#363e41",
}
PHASES = ("#e2a09b", "#cd3a34", "#e58a33", "#bb4a97", "#8167bd", "#79c0ab")

_PLAIN = """
--paper:#fbfbf9;--card:#fff;--ink:#1d2426;--soft:#5c676b;--line:#e3e5e2;--good:#1f7a5c;
--bad:#b3261e;--live:#2563a8;--curve:#2563a8;--mark:#b3261e;color-scheme:light;"""
_DARK = """
--paper:#14181a;--card:#1c2224;--ink:#e6eaea;--soft:#98a4a8;--line:#2f383b;--good:#57c39d;
--bad:#ff8a80;--live:#7db4ee;--curve:#7db4ee;--mark:#ff8a80;color-scheme:dark;"""

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 10px}
p{margin:6px 0}
header{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;margin-bottom:4px}
.badge{font-size:13px;font-weight:600;border-radius:999px;padding:2px 12px;
border:1.5px solid currentColor}
.good{color:var(--good)}.bad{color:var(--bad)}.live{color:var(--live)}
.soft,.legend,footer{color:var(--soft)}
.reason{border-left:3px solid var(--bad);padding-left:10px;overflow-wrap:anywhere}
.lead{font-size:17px;max-width:70ch}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:16px 18px;margin-top:16px;break-inside:avoid-page}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;
margin-top:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 14px}
.card b{display:block;font-size:25px;line-height:1.2;font-weight:650;letter-spacing:-.01em;
font-variant-numeric:tabular-nums;white-space:nowrap}
.card span{color:var(--soft);font-size:13px}
.plot{overflow-x:auto}
.plot svg{display:block;width:100%;min-width:600px;height:auto}
.bar svg{display:block;width:100%;height:34px;border-radius:6px}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;margin-top:8px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:13px}
td,th{padding:5px 10px 5px 0;border-top:1px solid var(--line);vertical-align:top}
tr:first-child th{border-top:0}
.cause{white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
.scroll{overflow-x:auto}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.incident-row{border-top:1px solid var(--line);padding:10px 0;break-inside:avoid}
.incident-row:first-of-type{border-top:0}
.incident-row h3{font-size:14.5px;margin:0 0 2px;font-weight:600;overflow-wrap:anywhere}
.incident-row .num{color:var(--mark);margin-right:6px;font-variant-numeric:tabular-nums}
.incident-row svg{display:block;width:100%;height:10px;border-radius:3px;margin:6px 0 2px}
details{margin-top:4px}summary{cursor:pointer;color:var(--soft);font-size:13px}
pre{margin:6px 0 0;padding:10px;border:1px solid var(--line);border-radius:8px;
font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-x:auto;
white-space:pre-wrap;overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:0 24px}
svg text{font-family:inherit;fill:var(--soft)}
path[class^=c-],path[class^=p]{shape-rendering:crispEdges}
.tick,.lane{font-size:11px}.mark{font-size:12px;font-weight:700;text-anchor:middle}
svg .mark{fill:var(--mark)}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.incident{stroke:var(--mark);stroke-width:1;opacity:.55;fill:none}
.note{stroke:var(--soft);stroke-width:.7;stroke-dasharray:2 3;opacity:.5;fill:none}
.curve{fill:none;stroke:var(--curve);stroke-width:1.6;stroke-linejoin:round}
.spark{width:120px;height:22px;vertical-align:middle}
.failed{stroke:var(--bad);stroke-width:1.8;fill:none}.loaded{fill:var(--good)}
footer{font-size:13px;margin-top:18px}
@media (max-width:600px){main{padding:18px 12px}section{padding:13px 12px}
.card b{font-size:21px}.lead{font-size:16px}.what{display:none}}
@media print{body{background:#fff;font-size:11.5px}main{max-width:none;padding:0}
section,.card{border-color:#ccc}.plot svg{min-width:0}
.plot,.scroll{overflow:visible}details>pre{max-height:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def style_sheet() -> str:
    """Return the whole style sheet."""
    tiers = {"memory": "checkpoint", "peer": "evaluation", "storage": "finish"}
    classes = [f".c-{cause}{{fill:var(--{cause});background:var(--{cause})}}" for cause in LIGHT]
    classes += [f".save-{tier}{{fill:var(--{cause})}}" for tier, cause in tiers.items()]
    classes += [f".p{i}{{fill:{colour};background:{colour}}}" for i, colour in enumerate(PHASES)]
    light = _PLAIN + _variables(LIGHT)
    dark = _DARK + _variables(DARK)
    return (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{{light}}}}}{_RULES}{''.join(classes)}"
    ).replace("\n", "")


def _variables(colours: Mapping[Cause, str]) -> str:
    return "".join(f"--{cause}:{colour};" for cause, colour in colours.items())
