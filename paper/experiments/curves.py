"""The losses of runs as one picture: are they learning?

    python -m paper.experiments.curves runs/main
    python -m paper.experiments.curves runs/moco runs/main --out curves.png

Each run has a colour. "inv" is the base method's loss and "equiv" that of SER or another add-on. A
run prints at its start what both are at chance: a loss that stays there learns nothing.
"""
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Sequence


def losses(run: str, key: str) -> dict[int, float]:
    """Step -> loss. A killed run has logged steps after its last checkpoint; the lines of the
    continued run replace them."""
    kept: dict[int, float] = {}
    for line in Path(run, "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if key in record:
            step = record["step"]
            kept = {past: loss for past, loss in kept.items() if past < step}
            kept[step] = record[key]
    return kept


def plot(figure: Any, runs: Sequence[str]) -> None:
    """A panel for each loss, on a figure of matplotlib's."""
    for axes, key in zip(figure.subplots(1, 2), ("inv", "equiv")):
        for number, run in enumerate(runs):
            log = losses(run, key)
            axes.plot(list(log), list(log.values()), color=f"C{number}", label=run)
        axes.set(xlabel="step", title=key)
    figure.legend(handles=figure.axes[0].lines, loc="outside lower center")


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser("python -m paper.experiments.curves", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="their folders")
    parser.add_argument("--out", default="curves.png", help="picture to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    from matplotlib.figure import Figure
    args = settings()
    figure = Figure(figsize=(10, 4), layout="constrained")
    plot(figure, args.runs)
    figure.savefig(args.out)
