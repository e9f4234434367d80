"""Charts as inline SVG text: axes with round ticks, series, legends, tooltips. Pure functions.

Colours are CSS classes that the page defines for light and dark (report_style.py); a class names
what a thing is (`c-rollout`), not what it looks like. Coordinates are rounded to 0.1 pixel.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

Point = tuple[float, float]
Format = Callable[[float], str]


def number(value: float) -> str:
    """A value for people: three significant digits, thousands as 12.3k, millions as 4.5M."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 999.5 else f"{scaled:.0f}{unit}"
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time span for people: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * value:.3g}%" if value is not None and math.isfinite(value) else "–"


def ticks(low: float, high: float, most: int, steps: Sequence[float] = (1, 2, 5)) -> list[float]:
    """Round numbers in [low, high], at most `most`; `steps` are the allowed first digits."""
    if not high > low:
        return [low]
    scale = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (s * scale * 10**k for k in range(3) for s in steps):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    return [low, high]


def time_ticks(low: float, high: float, most: int) -> list[float]:
    """Round times in seconds."""
    for step in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800,
                 86400):
        if (high - low) / step <= most:
            return [i * float(step) for i in range(math.ceil(low / step), int(high // step) + 1)]
    return ticks(low, high, most)


def esc(text: object) -> str:
    """Text for HTML and SVG, attributes included."""
    return html.escape(str(text), quote=True)


def title(text: str) -> str:
    """A tooltip as the child of a shape."""
    return f"<title>{esc(text)}</title>" if text else ""


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """HTML legend. Entries are (kind, class, label); kind is line, dash, box, dot or diamond."""
    items = "".join(
        f'<span class="key"><svg class="{cls}" width="18" height="10" viewBox="0 0 18 10" '
        f'aria-hidden="true">{_SWATCHES[kind]}</svg>{esc(label)}</span>'
        for kind, cls, label in entries)
    return f'<div class="legend">{items}</div>'


_SWATCHES = {
    "line": '<path class="line" d="M0 5H18"/>',
    "dash": '<path class="line dash" d="M0 5H18"/>',
    "box": '<rect class="fill" x="3" width="12" height="10" rx="2"/>',
    "outline": '<rect class="outline" x="3.5" y=".5" width="11" height="9" rx="2"/>',
    "dot": '<circle class="fill" cx="9" cy="5" r="4"/>',
    "diamond": '<path class="fill" d="M9 0l5 5-5 5-5-5z"/>',
}


@dataclasses.dataclass
class Chart:
    """One chart under construction; shapes are added in data coordinates, `svg` gives the text.

    Attributes:
      width, height: of the picture in pixels at scale 1.
      x, y: (low, high) of the axes.
      label: what the chart shows, for screen readers.
      x_label, y_label: axis titles, with units.
      x_ticks, y_ticks: where ticks stand; None chooses round numbers.
      x_format, y_format: texts of ticks.
      left: pixels left of the plot.
    """

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    label: str
    x_label: str = ""
    y_label: str = ""
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    x_format: Format = number
    y_format: Format = number
    left: int = 52

    def __post_init__(self):
        self._shapes: list[str] = []
        self._right, self._top, self._bottom = 14, 12, 40 if self.x_label else 24

    # ------------------------------------------------------------------ coordinates

    def px(self, x: float) -> float:
        """Pixel column of a value."""
        low, high = self.x
        inner = self.width - self.left - self._right
        return round(self.left + (x - low) / ((high - low) or 1) * inner, 1)

    def py(self, y: float) -> float:
        """Pixel row of a value."""
        low, high = self.y
        inner = self.height - self._top - self._bottom
        return round(self._top + (1 - (y - low) / ((high - low) or 1)) * inner, 1)

    # ------------------------------------------------------------------ shapes

    def add(self, shape: str) -> None:
        """Adds SVG text in pixel coordinates."""
        self._shapes.append(shape)

    def line(self, points: Sequence[Point], cls: str, dash: bool = False) -> None:
        """A line through the points; a NaN breaks it."""
        for run in _runs(points):
            d = "M" + "L".join(f"{self.px(x):g} {self.py(y):g}" for x, y in run)
            self.add(f'<path class="line {cls}{" dash" if dash else ""}" d="{d}"/>')

    def steps(self, points: Sequence[Point], end: float, cls: str, area: bool = False) -> None:
        """A step function: each value holds until the next point, the last one until `end`."""
        if not points:
            return
        d = f"M{self.px(points[0][0]):g} {self.py(points[0][1]):g}"
        for x, y in points[1:]:
            d += f"H{self.px(x):g}V{self.py(y):g}"
        d += f"H{self.px(end):g}"
        if area:
            base = f"V{self.py(self.y[0]):g}H{self.px(points[0][0]):g}Z"
            self.add(f'<path class="area {cls}" d="{d}{base}"/>')
        self.add(f'<path class="line {cls}" d="{d}"/>')

    def band(self, lows: Sequence[Point], highs: Sequence[Point], cls: str) -> None:
        """The area between two lines that have the same x values."""
        keep = [i for i in range(len(lows)) if _finite(lows[i]) and _finite(highs[i])]
        if len(keep) > 1:
            there = "L".join(f"{self.px(highs[i][0]):g} {self.py(highs[i][1]):g}" for i in keep)
            back = "L".join(f"{self.px(lows[i][0]):g} {self.py(lows[i][1]):g}" for i in keep[::-1])
            self.add(f'<path class="area {cls}" d="M{there}L{back}Z"/>')

    def dots(self, points: Sequence[Point], cls: str, tips: Sequence[str],
             radius: float = 3) -> None:
        """A dot with a tooltip per point; the touchable area is larger than the dot. Radius 0 draws
        the touchable area only."""
        for (x, y), tip in zip(points, tips, strict=True):
            if _finite((x, y)):
                at = f'cx="{self.px(x):g}" cy="{self.py(y):g}"'
                if radius:
                    self.add(f'<circle class="fill {cls}" {at} r="{radius:g}"/>')
                self.add(f'<circle class="touch {cls}" {at} r="{radius + 5:g}">'
                         f"{title(tip)}</circle>")

    def diamonds(self, points: Sequence[Point], cls: str, tips: Sequence[str],
                 size: float = 6) -> None:
        """A diamond with a tooltip per point."""
        for (x, y), tip in zip(points, tips, strict=True):
            if _finite((x, y)):
                self.add(f'<path class="fill ring {cls}" d="M{self.px(x):g} {self.py(y) - size:g}'
                         f'l{size:g} {size:g}-{size:g} {size:g}-{size:g}-{size:g}z">'
                         f"{title(tip)}</path>")

    def box(self, x0: float, x1: float, y0: float, y1: float, cls: str, tip: str = "",
            gap: float = 0.0, rounded: float = 0.0) -> None:
        """A filled box in data coordinates. `gap` pixels are left free on its right."""
        left, right = self.px(x0), self.px(x1)
        top, bottom = sorted((self.py(y0), self.py(y1)))
        width = max(right - left - gap, 0.6)
        rx = f' rx="{min(rounded, width / 2):.1f}"' if rounded else ""
        self.add(f'<rect class="fill {cls}" x="{left:g}" y="{top:g}" width="{round(width, 1):g}" '
                 f'height="{round(bottom - top, 1):g}"{rx}>{title(tip)}</rect>')

    def vertical(self, x: float, cls: str, tip: str) -> None:
        """A vertical rule over the whole height."""
        self.add(f'<path class="line thin dash {cls}" d="M{self.px(x):g} {self._top}'
                 f'V{self.height - self._bottom}">{title(tip)}</path>')

    # ------------------------------------------------------------------ text

    def svg(self) -> str:
        """The picture."""
        plot = self.width - self.left - self._right
        xs = self.x_ticks if self.x_ticks is not None else ticks(*self.x, max(2, plot // 80))
        ys = self.y_ticks if self.y_ticks is not None else ticks(*self.y, 6)
        parts = [f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
                 f'aria-label="{esc(self.label)}">']
        right, floor = self.width - self._right, self.height - self._bottom
        for y in ys:
            at = self.py(y)
            parts.append(f'<path class="grid" d="M{self.left} {at:g}H{right}"/>'
                         f'<text class="tick" x="{self.left - 8}" y="{at + 3.5:g}" '
                         f'text-anchor="end">{esc(self.y_format(y))}</text>')
        for x in xs:
            at = self.px(x)
            parts.append(f'<path class="axis" d="M{at:g} {floor}v4"/><text class="tick" x="{at:g}" '
                         f'y="{floor + 16}" text-anchor="middle">{esc(self.x_format(x))}</text>')
        parts += self._shapes
        parts.append(f'<path class="axis" d="M{self.left} {floor}H{right}"/>')
        if self.x_label:
            parts.append(f'<text class="name" x="{self.left + plot / 2:g}" y="{self.height - 6}" '
                         f'text-anchor="middle">{esc(self.x_label)}</text>')
        if self.y_label:
            middle = (self._top + floor) / 2
            parts.append(f'<text class="name" transform="translate(12 {middle:g}) rotate(-90)" '
                         f'text-anchor="middle">{esc(self.y_label)}</text>')
        return "".join([*parts, "</svg>"])


def _finite(point: Point) -> bool:
    return all(v is not None and math.isfinite(v) for v in point)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if _finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
