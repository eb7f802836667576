"""The HTML around the script. It holds no data but, in a report, one JSON document."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("page.js", "chart.js", "parts.js", "run.js", "list.js", "trace.js", "start.js")
"""In the order in which they build upon each other."""


@functools.cache
def script() -> str:
    """All of ours, in one scope that nothing else sees."""
    parts = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@functools.cache
def style() -> str:
    return (ASSETS / "style.css").read_text(encoding="utf-8")


def live_page(source: str | None) -> str:
    """A page of the dashboard: of the run whose data is at `source`, or the list of runs."""
    where = f' data-run="{html.escape(source, quote=True)}"' if source else ""
    home = '<a class="brand" href="/">redline</a>'
    head = '<link rel="stylesheet" href="/assets/style.css">\n<script src="/assets/script.js" defer></script>'
    return _page("redline", head, f'<body{where}>\n<main>{home}<div id="page"><p class="loading">reading …</p></div></main>')


def report_page(name: str, document: dict[str, Any]) -> str:
    """One file that needs nothing else: the policy allows its own script and style, by their hashes, and no request at all."""
    sources = f"script-src '{_hash(script())}'; style-src '{_hash(style())}'; img-src data:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style()}</style>'
    body = (
        '<body>\n<main><span class="brand">redline</span><div id="page"><p class="loading">reading …</p></div>'
        "<noscript>This report is drawn by the script inside it.</noscript></main>\n"
        f'<script id="document" type="application/json">{_enclosed(document)}</script>\n<script>{script()}</script>'
    )
    return _page(f"{name} · redline", head, body)


def _page(title: str, head: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
{head}
</head>
{body}
</body>
</html>
"""


def _enclosed(document: dict[str, Any]) -> str:
    """JSON that no `</script>` or `<!--` in it can end."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def page_bytes(text: str) -> bytes:
    """As a browser gets it. Names of files and what programs say may hold halves of letters, which UTF-8 has not."""
    return text.encode(errors="replace")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
