"""The picture of predicted beside measured gains: on the line a prediction came true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

SIZE, MARGIN = 620, 64
WIDTH, LINE = 820, 15
"""Pixels: the picture with the names beside it, and from name to name."""
LEAST, MOST = -0.2, 1.0
"""Shares that the axes begin and end with."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}.axis{stroke:#999}.grid{stroke:#eee}.line{stroke:#999;stroke-dasharray:4 4}"
    ".bar{stroke:#2563eb;stroke-opacity:.35}.dot{fill:#2563eb}.name{font-size:11px}.lead{stroke:#ccc;stroke-width:.7}"
)


@dataclass(slots=True, frozen=True)
class Point:
    """One plant: low, likely and high share of the time that its fix saves."""

    name: str
    predicted: Sequence[float]
    measured: Sequence[float]


def calibration_svg(points: Sequence[Point]) -> str:
    """An SVG document: each point with both of its intervals, and the line on which prediction and measurement are equal. Names
    stand beside it, one below the other, with a line to each point."""
    inside = "\n".join([*_frame(), *_names(points), *(line for point in points for line in _drawn(point))])
    size = f'viewBox="0 0 {WIDTH} {SIZE}" width="{WIDTH}" height="{SIZE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Predicted and measured gains">'
    return f'{head}\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{inside}\n</svg>\n'


def _frame() -> Iterator[str]:
    for step in range(round(LEAST * 10), round(MOST * 10) + 1, 2):
        share = step / 10
        x, y, low, high = _x(share), _y(share), _x(LEAST), _x(MOST)
        kind = "axis" if share == 0 else "grid"
        yield f'<line class="{kind}" x1="{x}" y1="{_y(LEAST)}" x2="{x}" y2="{_y(MOST)}"/>'
        yield f'<line class="{kind}" x1="{low}" y1="{y}" x2="{high}" y2="{y}"/>'
        yield f'<text x="{x}" y="{_y(LEAST) + 18}" text-anchor="middle">{share:.0%}</text>'
        yield f'<text x="{low - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>'
    yield f'<line class="line" x1="{_x(LEAST)}" y1="{_y(LEAST)}" x2="{_x(MOST)}" y2="{_y(MOST)}"/>'
    yield f'<text x="{SIZE / 2}" y="{SIZE - 14}" text-anchor="middle">predicted part of the time that the fix saves</text>'
    yield f'<text x="18" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 18 {SIZE / 2})">measured</text>'


def _drawn(point: Point) -> Iterator[str]:
    (low, x, high), (least, y, most) = ([_held(share) for share in side] for side in (point.predicted, point.measured))
    yield f'<line class="bar" x1="{_x(low)}" y1="{_y(y)}" x2="{_x(high)}" y2="{_y(y)}"/>'
    yield f'<line class="bar" x1="{_x(x)}" y1="{_y(least)}" x2="{_x(x)}" y2="{_y(most)}"/>'
    yield f'<circle class="dot" cx="{_x(x)}" cy="{_y(y)}" r="3.5"/>'


def _names(points: Sequence[Point]) -> Iterator[str]:
    """The highest point's name first; none above the picture, or nearer to the next than a line."""
    spread = sorted(points, key=lambda point: _y(_held(point.measured[1])))
    heights = [_y(_held(point.measured[1])) for point in spread]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + LINE)
    beyond = max(0.0, heights[-1] - (SIZE - MARGIN)) if heights else 0.0
    for index in range(len(heights) - 1, -1, -1):  # those at the end give way upwards
        below = heights[index + 1] - LINE if index + 1 < len(heights) else heights[index] - beyond
        heights[index] = min(heights[index], below)
    for point, height in zip(spread, heights, strict=True):
        x, y, beside = _x(_held(point.predicted[1])), _y(_held(point.measured[1])), _x(MOST) + 14
        yield f'<line class="lead" x1="{x}" y1="{y}" x2="{beside - 3}" y2="{height}"/>'
        yield f'<text class="name" x="{beside}" y="{height + 4}">{escape(point.name.replace("_", " "))}</text>'


def _held(share: float) -> float:
    """A share, held within the axes."""
    return min(MOST, max(LEAST, share))


def _x(share: float) -> float:
    return round(MARGIN + (share - LEAST) / (MOST - LEAST) * (SIZE - 1.5 * MARGIN), 1)


def _y(share: float) -> float:
    return round(SIZE - MARGIN - (share - LEAST) / (MOST - LEAST) * (SIZE - 1.5 * MARGIN), 1)
