"""Measurements as a table and as a picture."""

from slipstream.bench.measure import Row
from slipstream.core.errors import ConfigError


def table(rows: list[Row]) -> str:
    """One line a row."""
    lines = [
        f"{'batch':>5} {'temp':>5}  {'method':<12} {'tokens/s':>9} {'spread':>15} {'speedup':>8} "
        f"{'tokens/pass':>11} {'draft':>6} {'extra MB':>8}  same as plain"
    ]
    for row in rows:
        spread = f"{row.spread[0]:.1f} to {row.spread[1]:.1f}"
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        lines.append(
            f"{row.batch_size:>5} {row.temperature:>5g}  {row.method:<12} "
            f"{row.tokens_per_sec:>9.1f} {spread:>15} {row.speedup:>7.2f}x {length:>11} "
            f"{100 * row.draft_share:>5.1f}% {row.draft_bytes / 1e6:>8.1f}  "
            f"{row.identical_outputs} of {row.num_outputs}"
        )
    return "\n".join(lines)


def draw(rows: list[Row], path: str) -> None:
    """Speedup of every method, as bars side by side for each setting."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'slipstream[plot]'") from None
    speedup = {(row.method, row.batch_size, row.temperature): row.speedup for row in rows}
    settings = list(dict.fromkeys((row.batch_size, row.temperature) for row in rows))
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method != "plain"]
    width = 0.8 / max(len(methods), 1)
    figure, axes = pyplot.subplots(figsize=(max(6, 0.25 * len(rows)), 4))
    for i, method in enumerate(methods):
        places = [x + (i - (len(methods) - 1) / 2) * width for x in range(len(settings))]
        axes.bar(places, [speedup[method, *setting] for setting in settings], width, label=method)
    labels = [f"batch {batch_size}\nT {temperature:g}" for batch_size, temperature in settings]
    axes.set_xticks(range(len(settings)), labels)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speedup against plain decoding")
    if methods:
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(methods), frameon=False
        )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
