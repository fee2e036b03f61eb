"""A report as one HTML file: it has no script, needs no server and fetches nothing.

The plot has a bar for each kind of call. The bar's width is its share of the time, and its height
is its share of the limit. The empty area between a bar and the line at 0.9 is the time that could
be saved.
"""

from __future__ import annotations

from html import escape

from opgraft.profiling.profile_report import (
    HEADINGS,
    REACHABLE,
    Line,
    ProfileReport,
    cells,
    head,
    is_native,
    tail,
)

_WIDTH, _HEIGHT = 1000.0, 320.0
_LEFT, _TOP, _BOTTOM = 44.0, 12.0, 40.0
#: Narrower bars have no label; the mouse shows their name.
_NAMED = 16.0
#: The kinds of call after this share of the time are drawn as one bar.
_SHOWN = 0.99

_STYLE = """
.opgraft-profile { font: 14px/1.45 system-ui, sans-serif; color: #1c2430; background: #fff; }
.opgraft-profile svg { width: 100%; max-width: 1100px; height: auto; display: block; }
.opgraft-profile table { border-collapse: collapse; font-size: 13px; }
.opgraft-profile th, .opgraft-profile td { padding: 3px 10px 3px 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #dfe3e8; }
.opgraft-profile td.number, .opgraft-profile th.number { text-align: right; white-space: nowrap; }
.opgraft-profile pre { font-size: 13px; white-space: pre-wrap; }
.opgraft-profile .key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 16px; }
.opgraft-profile text { font: 11px system-ui, sans-serif; fill: #1c2430; }
.opgraft-profile .native { fill: #e08a3c; background: #e08a3c; }
.opgraft-profile .override { fill: #2f8f83; background: #2f8f83; }
.opgraft-profile .unknown { fill: #d5dae1; background: #d5dae1; }
.opgraft-profile .lost { fill: #fbe9dc; background: #fbe9dc; }
.opgraft-profile .axis { stroke: #8a93a0; stroke-width: 1; }
.opgraft-profile .reach { stroke: #b3261e; stroke-width: 1; stroke-dasharray: 5 4; }
"""
_KEYS = (
    ("override", "an override took it"),
    ("native", "the native kernel"),
    ("lost", f"to be gained up to {REACHABLE} of the limit"),
    ("unknown", "what it moves is not known, or nothing"),
)


def document(report: ProfileReport) -> str:
    """The page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>opgraft profile</title>\n</head>\n<body>\n{fragment(report)}\n</body>\n</html>\n"
    )


def fragment(report: ProfileReport) -> str:
    """The report as a part of another page, such as a notebook's."""
    title, *more = head(report)
    keys = "".join(f'<span class="key {name}"></span>{escape(text)}' for name, text in _KEYS)
    return "\n".join(
        [
            f'<div class="opgraft-profile">\n<style>{_STYLE}</style>',
            f"<p><b>{escape(title)}</b></p>",
            *(f"<p>{escape(line)}</p>" for line in more),
            plot(report),
            f"<p>{keys}</p>",
            f"<pre>{escape(chr(10).join(tail(report)))}</pre>",
            _table(report),
            "</div>",
        ]
    )


def plot(report: ProfileReport) -> str:
    """Time against share of the limit."""
    bars = []
    at = 0.0
    shown = 0
    for line in report.lines:
        if at > _SHOWN:
            break
        bars.append(_bar(line, at, report))
        at += line.share
        shown += 1
    rest = report.lines[shown:]
    if rest:
        bars.append(_rectangle(at, 1 - at, 1.0, "unknown", f"{len(rest)} more kinds of call"))
    ticks = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        f'<path class="axis" d="M{_LEFT - 3} {_y(value):.1f}h3"/>'
        for value in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    across = "".join(
        f'<text x="{_x(value):.1f}" y="{_y(0) + 16:.1f}" text-anchor="middle">{value:.0%}</text>'
        for value in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    reach = _y(REACHABLE)
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{escape(report.time)} time by op, against the share of the limit">'
        f"{''.join(bars)}{ticks}{across}"
        f'<line class="axis" x1="{_LEFT}" x2="{_x(1):.1f}" y1="{_y(0):.1f}" y2="{_y(0):.1f}"/>'
        f'<line class="reach" x1="{_LEFT}" x2="{_x(1):.1f}" y1="{reach:.1f}" y2="{reach:.1f}"/>'
        f'<text x="{_x(0.5):.1f}" y="{_HEIGHT - 6:g}" text-anchor="middle">'
        f"share of {escape(report.time)} time (width), share of the device's limit (height)</text>"
        "</svg>"
    )


def _bar(line: Line, at: float, report: ProfileReport) -> str:
    row = dict(zip(HEADINGS, cells(line, report.steps), strict=True))
    hint = "\n".join(f"{name}: {value}" for name, value in row.items() if value)
    share_of_limit = line.share_of_limit
    if share_of_limit is None:
        return _rectangle(at, line.share, 1.0, "unknown", hint) + _name(line, at)
    kind = "native" if is_native(line) else "override"
    lost = _rectangle(at, line.share, REACHABLE, "lost", hint) if share_of_limit < REACHABLE else ""
    return lost + _rectangle(at, line.share, min(share_of_limit, 1.0), kind, hint) + _name(line, at)


def _rectangle(at: float, share: float, height: float, kind: str, hint: str) -> str:
    width = max((_WIDTH - _LEFT - 8) * share - 0.6, 0.2)
    return (
        f'<rect class="{kind}" x="{_x(at):.2f}" y="{_y(height):.2f}" width="{width:.2f}" '
        f'height="{_y(0) - _y(height):.2f}"><title>{escape(hint)}</title></rect>'
    )


def _name(line: Line, at: float) -> str:
    """The op's name along its bar, if the bar is wide enough."""
    if (_WIDTH - _LEFT - 8) * line.share < _NAMED:
        return ""
    x = _x(at + line.share / 2) + 4
    return (
        f'<text transform="translate({x:.1f} {_y(0) - 6:.1f}) rotate(-90)">{escape(line.op)}</text>'
    )


def _x(share: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 8) * share


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _table(report: ProfileReport) -> str:
    numbers = {"calls", "time", "share", "bytes", "flops", "of limit"}
    style = [' class="number"' if name in numbers else "" for name in HEADINGS]
    heading = "".join(f"<th{s}>{escape(n)}</th>" for s, n in zip(style, HEADINGS, strict=True))
    rows = []
    for line in report.lines:
        row = zip(style, cells(line, report.steps), strict=True)
        rows.append("<tr>" + "".join(f"<td{s}>{escape(cell)}</td>" for s, cell in row) + "</tr>")
    return f"<table>\n<tr>{heading}</tr>\n" + "\n".join(rows) + "\n</table>"
