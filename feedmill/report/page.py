"""Render a report as one self-contained HTML page, without scripts, external fonts or images.

Text from posts, messages and workers is untrusted: it goes through `_text`, and the page's Content-Security-Policy
blocks scripts and all external content.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from feedmill.report.data import GAPS, NUM_BINS, OTHERS, REASONS, SUBREDDITS, Column, Report
from feedmill.shared.errors import printable, truncate
from feedmill.shared.results import HOUR_S

#: Approximate number of times to print below a chart.
AXIS_TIMES = 3
#: Characters of the label set to show.
SHOWN_LABELS = 300

#: Style sheet of the page.
STYLE = Path(__file__).with_name("page.css")


def page(report: Report) -> str:
    """Return the complete HTML page."""
    colours = {label: number for number, label in enumerate(report.shown_labels)}
    sections = (
        _figures(report),
        _over_time(report, colours),
        f'<div class="two">{_labels(report, colours)}{_scores(report)}</div>',
        *([_subreddits(report, colours)] if report.is_of_reddit else []),
        f'<div class="two">{_throughput(report)}{_waits(report)}</div>',
        f'<div class="two">{_dead(report)}{_gaps(report)}</div>' if report.is_of_reddit else _dead(report),
    )
    hours = "1 hour" if report.hours == 1 else f"{report.hours:,} hours"
    run = "" if report.run is None else f", run {escape(printable(report.run))}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Feedmill{run}: {hours}</title>\n<style>{STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>Feedmill{run}</h1>\n<p>{_span(report)}</p>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _text(words: object) -> str:
    """Escape untrusted text and isolate its writing direction."""
    return f"<bdi>{escape(printable(str(words)))}</bdi>"


def _span(report: Report) -> str:
    hours = "The last hour" if report.hours == 1 else f"The last {report.hours:,} hours"
    models = ", ".join(_text(model) for model, _ in report.models.most_common(3))
    by = f"; classified by {models}" if models else ""
    run = f"Run {_text(report.run)}. " if report.run is not None else ""
    labels = f" Labels: {_text(truncate(report.label_set, SHOWN_LABELS))}." if report.label_set else ""
    left_out = sum(report.others.values())
    others = f" {left_out:,} results of other label sets are left out." if left_out else ""
    return f"{run}{hours} until {_when(report.made_at)} UTC{by}.{labels}{others}"


def _section(name: str, title: str, caption: str, *content: str) -> str:
    return f'<section id="{name}">\n<h2>{title}</h2>\n<p>{caption}</p>\n' + "\n".join(content) + "\n</section>"


def _figures(report: Report) -> str:
    waits = Column(0, waits=[wait for column in report.columns for wait in column.waits])
    figures = [
        (f"{report.posts:,}", "posts classified"),
        (_rate(max((column.busiest for column in report.columns), default=0.0)), "posts/s in the busiest minute"),
        (_seconds(waits.wait(50)), "median time from sending to result"),
        (f"{report.reasons.total():,}", "dead letters" if report.reasons.total() != 1 else "dead letter"),
    ]
    if report.is_of_reddit:
        figures.append((f"{len(report.gaps):,}", "gaps" if len(report.gaps) != 1 else "gap"))
    cards = "".join(f"<div><b>{value}</b>{what}</div>" for value, what in figures)
    return f'<div class="figures" id="figures">{cards}</div>'


def _over_time(report: Report, colours: dict[str, int]) -> str:
    most = max((column.posts for column in report.columns), default=0)
    bars = []
    for number, column in enumerate(report.columns):
        base = 100.0
        for label, count in _parts(column.labels, colours):
            height = 100 * count / most
            base -= height
            bars.append(_bar(number, base, height, _colour(label, colours), f"{_hour(column)}: {label}, {count:,}"))
    rate = "per hour" if report.width == 1 else f"per {report.width} hours"
    chart = _chart(report, bars, f"{most:,} {rate}")
    return _section("time", "Posts over time", f"New results {rate}, by label.", *chart, _legend(report, colours))


def _labels(report: Report, colours: dict[str, int]) -> str:
    most = max(report.labels.values(), default=0)
    rows = [
        f'<div class="row"><span>{_text(label)}</span>{_stack([(label, count)], most, colours)}<span>{count:,}</span>'
        f"<small>{_text(report.examples.get(label, '–'))}</small></div>"
        for label, count in report.labels.most_common(2 * SUBREDDITS)
    ]
    return _section("labels", "Labels", "Posts per label, with the newest post's title.", *(rows or [_none()]))


def _scores(report: Report) -> str:
    rows = []
    for label, _ in report.labels.most_common(2 * SUBREDDITS):
        bars = report.scores.get(label)
        if bars:
            most = max(bars)
            heights = ((place, 100 * count / most, count) for place, count in enumerate(bars) if count)
            drawn = "".join(
                _bar(place, 100 - height, height, "var(--c0)", f"{count:,} from {place / NUM_BINS:.2f}")
                for place, height, count in heights
            )
            picture = f'<svg class="bins" {_box(NUM_BINS)}>{drawn}</svg>'
            rows.append(f'<div class="row"><span>{_text(label)}</span>{picture}<span>{_middle(bars):.2f}</span></div>')
    ends = '<span class="axis"><span>0</span><span>score</span><span>1</span></span>'
    axis = f'<div class="row"><span></span>{ends}<span class="dim">median</span></div>'
    caption = "Each label's scores over the posts where it is the best label."
    return _section("scores", "Scores", caption, *([*rows, axis] if rows else [_none()]))


def _middle(bars: Sequence[int]) -> float:
    """Return the approximate median score: the middle of the histogram bin that contains it."""
    half, seen = sum(bars) / 2, 0
    for place, count in enumerate(bars):
        seen += count
        if seen >= half:
            return (place + 0.5) / NUM_BINS
    return 0.0


def _subreddits(report: Report, colours: dict[str, int]) -> str:
    found = sorted(report.subreddits.items(), key=lambda each: -each[1].total())
    rows = [
        f'<div class="row"><span>{_text("r/" + name) if name else "no subreddit"}</span>'
        f"{_stack(_parts(counts, colours), counts.total(), colours)}<span>{counts.total():,}</span>"
        f"<small>{', '.join(f'{_text(label)} {count:,}' for label, count in counts.most_common(3))}</small></div>"
        for name, counts in found[:SUBREDDITS]
    ]
    more = f" The {SUBREDDITS} largest of {len(found):,} subreddits." if len(found) > SUBREDDITS else ""
    trimmed = (
        f" Only the newest {report.read:,} of {report.posts:,} posts: older ones were trimmed from the results stream."
        if report.read < report.posts
        else ""
    )
    caption = f"Labels of each subreddit's posts.{more}{trimmed}"
    return _section("subreddits", "Labels by subreddit", caption, *(rows or [_none()]), _legend(report, colours))


def _throughput(report: Report) -> str:
    return _lines(
        report, "throughput", "Throughput", "Results per second in the busiest minute.",
        lambda column: column.busiest, "var(--c2)", lambda value: f"{_rate(value or 0.0)}/s",
    )  # fmt: skip


def _waits(report: Report) -> str:
    return _lines(
        report, "waits", "Queue wait", "Time from sending to result, 95th percentile.",
        lambda column: column.wait(95), "var(--c1)", _seconds,
    )  # fmt: skip


def _lines(
    report: Report, name: str, title: str, caption: str,
    value_of: Callable[[Column], float | None], colour: str, formatted: Callable[[float | None], str],
) -> str:  # fmt: skip
    values = [value_of(column) for column in report.columns]
    most = max((value for value in values if value is not None), default=0.0)
    bars = [
        _bar(number, 100 - 100 * value / most, 100 * value / most, colour, f"{_hour(column)}: {formatted(value)}")
        for number, (column, value) in enumerate(zip(report.columns, values, strict=True))
        if value
    ]
    return _section(name, title, caption, *_chart(report, bars, formatted(most), "chart low"))


def _dead(report: Report) -> str:
    items = [
        f"<li>{_text(reason)}<small>{count:,} post{'s' if count != 1 else ''}</small></li>"
        for reason, count in report.reasons.most_common(REASONS)
    ]
    return _section("dead", "Dead letters", "Posts that could not be classified, by reason.", _list(items))


def _gaps(report: Report) -> str:
    items = [
        f"<li>{_text('r/' + gap.subreddit)}<small>{_when(gap.since)} to {_when(gap.until)}</small></li>"
        for gap in report.gaps[-GAPS:]
    ]
    return _section("gaps", "Gaps", "Periods whose Reddit posts could not be read.", _list(items))


def _list(items: Sequence[str]) -> str:
    return f'<ul class="list">{"".join(items)}</ul>' if items else _none()


def _parts(counts: Counter[str], colours: dict[str, int]) -> list[tuple[str, int]]:
    """Return (label, count) in the order of the colours, with all other labels summed up as OTHERS."""
    shown = [(label, counts[label]) for label in colours if counts[label]]
    others = counts.total() - sum(count for _, count in shown)
    return [*shown, (OTHERS, others)] if others else shown


def _colour(label: str, colours: dict[str, int]) -> str:
    return f"var(--c{colours[label]})" if label in colours else "var(--others)"


def _stack(parts: Iterable[tuple[str, int]], most: int, colours: dict[str, int]) -> str:
    pieces = "".join(
        f'<span style="width:{100 * count / most:.2f}%;background:{_colour(label, colours)}" '
        f'title="{escape(printable(label))}: {count:,}"></span>'
        for label, count in parts
    )
    return f'<span class="bar">{pieces}</span>'


def _chart(report: Report, bars: Sequence[str], top: str, kind: str = "chart") -> tuple[str, ...]:
    columns = report.columns
    if not bars:
        return (_none(),)
    every = max(-(-len(columns) // AXIS_TIMES), 1)
    hours = "".join(f"<span>{_hour(column)}</span>" for column in columns[::every])
    return (
        f'<div class="top">{top}</div>',
        f'<svg class="{kind}" {_box(len(columns))}>{"".join(bars)}</svg>',
        f'<div class="axis">{hours}<span>now</span></div>',
    )


def _box(width: int) -> str:
    return f'viewBox="0 0 {width} 100" preserveAspectRatio="none" role="img"'


def _bar(place: int, top: float, height: float, colour: str, caption: str) -> str:
    return (
        f'<rect x="{place + 0.08:.2f}" y="{top:.2f}" width="0.84" height="{height:.2f}" '
        f'style="fill:{colour}"><title>{escape(printable(caption))}</title></rect>'
    )


def _legend(report: Report, colours: dict[str, int]) -> str:
    names = [*colours, *([OTHERS] if len(report.labels) > len(colours) else [])]
    entries = "".join(
        f'<span><i style="background:{_colour(name, colours)}"></i>{_text(name)}</span>' for name in names
    )
    return f'<div class="legend">{entries}</div>'


def _none() -> str:
    return '<div class="dim">None.</div>'


def _hour(column: Column) -> str:
    return datetime.fromtimestamp(column.hour * HOUR_S, UTC).strftime("%d %b %H:%M")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.1f} s" if value < 120 else f"{value / 60:,.0f} min"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"
