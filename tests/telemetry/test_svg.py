"""Numbers, ticks and coordinates of charts."""

import math
import xml.etree.ElementTree as ET

import pytest

from gyre.telemetry import svg


@pytest.mark.parametrize("value, text", [
    (0, "0"), (0.12345, "0.123"), (12, "12"), (1234, "1234"), (12_340, "12.3k"),
    (999_600, "1000k"), (4_560_000, "4.56M"), (-0.5, "-0.5"), (math.nan, "–"), (None, "–")])
def test_number(value, text):
    assert svg.number(value) == text


@pytest.mark.parametrize("seconds, text", [
    (4.21, "4.21 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (7200, "2 h")])
def test_duration(seconds, text):
    assert svg.duration(seconds) == text


@pytest.mark.parametrize("low, high, most, wanted", [
    (0, 1, 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 1, 5, [0, 0.5, 1.0]), (1, 16, 4, [5, 10, 15]),
    (3, 3, 5, [3]), (-1, 1, 3, [-1, 0, 1])])
def test_ticks(low, high, most, wanted):
    assert svg.ticks(low, high, most) == pytest.approx(wanted)


def test_time_ticks_are_round_times():
    assert svg.time_ticks(0, 100, 5) == [0, 30, 60, 90]
    assert svg.time_ticks(0, 7200, 5) == [0, 1800, 3600, 5400, 7200]


def test_coordinates():
    # Plot area: columns 50 to 186 (14 right), rows 12 to 76 (24 below).
    chart = svg.Chart(200, 100, (0, 10), (0, 2), "x", left=50)
    assert (chart.px(0), chart.px(10), chart.px(5)) == (50, 186, 118)
    assert (chart.py(0), chart.py(2), chart.py(1)) == (76, 12, 44)
    upside_down = svg.Chart(200, 100, (0, 10), (2, 0), "x")
    assert (upside_down.py(0), upside_down.py(2)) == (12, 76)


def test_a_nan_breaks_a_line():
    chart = svg.Chart(200, 100, (0, 4), (0, 1), "x")
    chart.line([(0, 0), (1, 1), (2, math.nan), (3, 1), (4, 0)], "c-good")
    assert chart.svg().count('class="line c-good"') == 2


def test_text_is_escaped_and_the_picture_is_well_formed():
    chart = svg.Chart(200, 100, (0, 1), (0, 1), 'a "label" & <more>', "x", "y")
    chart.box(0, 1, 0, 1, "c-bad", 'tip "<&>"')
    chart.dots([(0, 0)], "c-bad", ["<b>"])
    chart.steps([(0, 1), (0.5, 0)], 1, "c-bad", area=True)
    root = ET.fromstring(chart.svg())
    assert 'tip "<&>"' in [t.text for t in root.iter("title")]
