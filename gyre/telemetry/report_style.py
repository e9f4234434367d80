"""Style sheet and frame of report.html: light and dark, nothing loaded from elsewhere."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6675;--rule:#e3e7ed;
--rollout:#2f7fd6;--train:#e0812b;--transfer:#a9b3c1;--good:#22976a;--warn:#d9a21b;--bad:#c8453c;
--violet:#7c5cc4;--teal:#1f9aa8;--grey:#8f9bab;--shadow:0 1px 2px #1b233014,0 4px 16px #1b23300a}
@media(prefers-color-scheme:dark){:root{--bg:#10151c;--card:#18202a;--ink:#e6ebf2;--soft:#93a0b1;
--rule:#2a3441;--rollout:#5aa2ee;--train:#f0a050;--transfer:#5b687a;--good:#45bd8d;--warn:#e6bd4a;
--bad:#e8736a;--violet:#a78bec;--teal:#4fc0cd;--grey:#758396;--shadow:none}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.02em}
h2{font-size:16px;margin:0;letter-spacing:-.01em}
header p{margin:6px 0 0;color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:12px;
margin:22px 0 16px}
.tile,.card{background:var(--card);border-radius:12px;box-shadow:var(--shadow);
border:1px solid var(--rule)}
.tile{padding:12px 16px}
.tile b{display:block;font-size:22px;line-height:1.3;letter-spacing:-.02em;white-space:nowrap;
font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.tile .arrow{color:var(--soft);font-weight:400;padding:0 .1em}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.card{padding:16px 18px 12px;min-width:0}
.wide{grid-column:1/-1}
@media(max-width:800px){.cards{grid-template-columns:minmax(0,1fr)}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}}
.card>p{margin:2px 0 0;color:var(--soft);font-size:13px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:8px 0 2px;font-size:12.5px;
color:var(--soft)}
.key{display:inline-flex;align-items:center;gap:6px}
svg.chart{display:block;width:100%;height:auto;overflow:visible}
.tick,.name,.mark{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.mark{fill:var(--ink)}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--grey);fill:none;opacity:.7}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.thin{stroke-width:1}.dash{stroke-dasharray:4 4}
.area{fill:var(--c);opacity:.16}.fill{fill:var(--c)}
.outline{fill:var(--c);fill-opacity:.18;stroke:var(--c)}
.ring{stroke:var(--card);stroke-width:1.5}.touch{fill:transparent}
.touch:hover{fill:var(--c);fill-opacity:.2}rect.fill:hover{opacity:.8}
.c-rollout{--c:var(--rollout)}.c-train{--c:var(--train)}.c-transfer{--c:var(--transfer)}
.c-good{--c:var(--good)}.c-warn{--c:var(--warn)}.c-bad{--c:var(--bad)}.c-violet{--c:var(--violet)}
.c-teal{--c:var(--teal)}.c-grey{--c:var(--grey)}.c-ink{--c:var(--ink)}
.facts{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 4px;font-size:13px;color:var(--soft)}
.facts b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.tree ul{list-style:none;margin:0;padding:0 0 0 16px;border-left:1px solid var(--rule)}
.tree>ul{padding:0;border:0}
.tree details,.tree .leaf{margin:4px 0}
.tree summary{cursor:pointer}
.seg{font-size:13px;color:var(--soft)}
.seg i{display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:7px;
background:var(--c)}
.seg i.text{background:none;box-shadow:inset 0 0 0 1.5px var(--c)}
.seg b{color:var(--ink);font-weight:600}
pre{margin:4px 0 6px;padding:8px 12px;max-height:320px;overflow:auto;background:var(--bg);
border-radius:8px;border-left:3px solid var(--c);white-space:pre-wrap;overflow-wrap:anywhere;
font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.none{padding:18px 0 14px;color:var(--soft);font-size:13px}
footer{margin-top:22px;color:var(--soft);font-size:12.5px}
"""


def page(title: str, body: str) -> str:
    """A whole document. `title` is escaped text, `body` is HTML."""
    return ("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
            f"<title>{title}</title><style>{CSS}</style></head>\n"
            f"<body><main>{body}</main></body></html>\n")


def card(title: str, caption: str, content: str, wide: bool = False) -> str:
    """One section of the page."""
    return (f'<section class="card{" wide" if wide else ""}"><h2>{title}</h2><p>{caption}</p>'
            f"{content}</section>\n")
