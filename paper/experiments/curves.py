"""The losses of runs as one picture: are they learning?

    python -m paper.experiments.curves runs/moco runs/main --out curves.png

Each run has a colour. "inv" is the base method's loss and "equiv" that of SER or another add-on. A
run prints at its start what both are at chance: a loss that stays there learns nothing.
"""
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path


def losses(run: str, key: str) -> dict[int, float]:
    """Step -> loss. A killed run has logged steps after its last checkpoint; the lines of the
    continued run replace them."""
    kept = {}
    for line in Path(run, "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if key in record:
            kept = {step: loss for step, loss in kept.items() if step < record["step"]}
            kept[record["step"]] = record[key]
    return kept


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser()
    parser.add_argument("runs", nargs="+", help="their folders")
    parser.add_argument("--out", default="curves.png", help="picture to write")
    return parser.parse_args(argv)


def main(args: Namespace) -> None:
    """Draw a panel for each loss."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("inv", "equiv")):
        for run in args.runs:
            log = losses(run, key)
            axes.plot(list(log), list(log.values()), label=run)
        axes.set(xlabel="step", title=key)

    figure.legend(handles=figure.axes[0].lines, loc="outside lower center")
    figure.savefig(args.out)


if __name__ == "__main__":
    main(settings())
