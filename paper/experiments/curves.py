"""The logs of runs as one picture: is it learning, and how fast?

    python -m paper.experiments.curves runs/ser
    python -m paper.experiments.curves runs/moco runs/ser --out curves.png

A RUN is the folder of a run, or its log.jsonl. One colour a run; chance is dotted. Losses have to
fall below their chance and retrieval has to rise above 1 / tokens of b2 (this one is not drawn);
`spread` must not fall to 0, where all images have one embedding. `waiting` is the share of the time
in which training waits for images. The picture is written to --out, whose path is printed.
"""
from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any, Sequence

from PIL import Image

import ser
from ser import UserError, require

# Title, the log's key of a value, and that of its chance.
PANELS = (("L_inv", "inv", "inv_chance"), ("L_equiv", "equiv", "equiv_chance"),
          ("patch retrieval, share", "patch_top1", ""), ("spread of [CLS]", "feature_std", ""),
          ("learning rate", "lr", ""), ("gradient norm, encoder", "grad_encoder", ""),
          ("images/s", "images_per_s", ""), ("waiting for images, share", "waiting", ""))

def records(run: str | Path) -> dict[int, dict[str, Any]]:
    """Step -> record of a run's log, in order. A run that was killed or begun anew goes on from the
    `start` of its next settings, so that what was logged of later steps before does not count;
    lines left half-written are skipped. Raises UserError for a log that is missing or without
    records."""
    path = Path(run)
    if path.is_dir():
        path = path / "log.jsonl"
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}): name the folder of a run"
        raise UserError(reason) from None
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        if type(record.get("start")) is int:     # settings; others are of a step
            found = {step: old for step, old in found.items() if step <= record["start"]}
        elif type(record.get("step")) is int:
            found[record["step"]] = record
    require(len(found) > 0, f"{path} holds no record of a step: is it the log of ser.py?")
    return dict(sorted(found.items()))

def series(log: dict[int, dict[str, Any]], key: str) -> dict[int, float]:
    """Step -> value, where it was logged."""
    return {step: record[key] for step, record in log.items()
            if isinstance(record.get(key), (int, float))}

def empty_figure(width: float, height: float) -> Any:
    """A figure of matplotlib's, in inches, that needs no screen. Raises UserError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib is missing: pip install -r paper/requirements.txt") from None
    return Figure(figsize=(width, height), layout="constrained")

def write_png(figure: Any, path: Path) -> None:
    """Write the figure, reduced to 64 colours, a third of the size. Raises UserError."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    try:
        Image.open(drawn).convert("RGB").quantize(64).save(path, "PNG")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None

def draw(figure: Any, logs: dict[str, dict[int, dict[str, Any]]]) -> None:
    """A panel for each value of PANELS that one of the logs has."""
    logged = set()
    for log in logs.values():
        logged |= {key for _, key, _ in PANELS if series(log, key)}
    shown = [panel for panel in PANELS if panel[1] in logged]
    require(len(shown) > 0, "these logs hold none of the values that ser.py logs")
    axes = figure.subplots(2, (len(shown) + 1) // 2, squeeze=False).flatten()
    for place, (title, key, chance) in zip(axes, shown):
        for number, (name, log) in enumerate(logs.items()):
            values = series(log, key)
            color = f"C{number}"
            place.plot(list(values), list(values.values()), color=color, label=name)
            expected = series(log, chance)
            place.plot(list(expected), list(expected.values()), color=color, linestyle=":")
        place.set(xlabel="step", title=title)
    for place in axes[len(shown):]:
        place.set_axis_off()
    axes[0].legend(fontsize="small")

def plot(argv: Sequence[str] | None) -> str:
    """Draw what the command line names; returns the path of the picture. Raises UserError."""
    parser = argparse.ArgumentParser("paper.experiments.curves", description=__doc__,
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="curves.png", help="the PNG to write [curves.png]")
    options = parser.parse_args(argv)
    figure = empty_figure(14, 6)
    draw(figure, {run: records(run) for run in options.runs})
    write_png(figure, Path(options.out))
    return options.out

def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and print the path; returns the exit code."""
    return ser.guard("paper.experiments.curves", lambda: print(plot(argv)))

if __name__ == "__main__":
    sys.exit(main())
