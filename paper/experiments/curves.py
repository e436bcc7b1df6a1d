"""The losses of runs as one picture: is it learning?

    python -m paper.experiments.curves runs/ser
    python -m paper.experiments.curves runs/moco runs/ser --out curves.png

One colour a run, whose log.jsonl is read; dotted, the loss at chance, where nothing is learned.
"inv" is the base method's loss, "equiv" that of SER or of another add-on.
"""
from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Sequence

def records(run: str) -> dict[int, dict]:
    """Step -> what was logged of it, but for what a killed run logged after its checkpoint."""
    found: dict[int, dict] = {}
    for line in Path(run, "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "step" in record:     # not the settings
            while found and next(reversed(found)) >= record["step"]:     # done again
                found.popitem()
            found[record["step"]] = record
    return found

def draw(figure: Any, runs: Sequence[str]) -> None:
    """A panel for each loss, on a figure of matplotlib's."""
    for axes, key in zip(figure.subplots(1, 2), ("inv", "equiv")):
        for number, run in enumerate(runs):
            log = {step: record for step, record in records(run).items() if key in record}
            for name, style in ((key, "-"), (f"{key}_chance", ":")):
                values = [record[name] for record in log.values()]
                axes.plot(list(log), values, style, color=f"C{number}", label=run)
        axes.set(xlabel="step", title=key)
    figure.legend(handles=axes.lines[::2], loc="outside lower center")

def main(argv: Sequence[str] | None = None) -> None:
    """Draw the runs of the command line."""
    from matplotlib.figure import Figure
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="their folders")
    parser.add_argument("--out", default="curves.png", help="picture to write")
    args = parser.parse_args(argv)
    figure = Figure(figsize=(10, 4), layout="constrained")
    draw(figure, args.runs)
    figure.savefig(args.out)

if __name__ == "__main__":
    main()
