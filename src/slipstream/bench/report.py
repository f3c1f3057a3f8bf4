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
    """Speedup of every method at every setting, as bars."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'slipstream[plot]'") from None
    labels = [f"{row.method}\nb{row.batch_size} T{row.temperature:g}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(max(6, 0.9 * len(rows)), 4))
    axes.bar(labels, [row.speedup for row in rows], color="#4c78a8")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speedup against plain decoding")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
