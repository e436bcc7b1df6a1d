"""The paper's central comparison at a size that anyone can run: MoCo-v3, control, SER.

    python -m paper.experiments.imagenette --data imagenette-128 --bf16
    python -m paper.experiments.imagenette --show paper/experiments/imagenette-100.json

The first line makes all runs, on the copies that paper/README.md makes, or with --print only
prints command lines. The second prints tables of saved rows, which --figure draws. Rate and crop
were chosen by the accuracy of MoCo-v3 alone. b2 has 16 of 128 images, where the paper has some
20 of 2,048. So negatives are of about as many images in both. Flags of ser.py go to all runs.

The paper, linear top-1 of ImageNet: MoCo-v3 68.44, control (lambda = 0) 68.82, SER 69.28.
"""
import json
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any

import ser
from paper.experiments import sweep
from paper.experiments.sweep import Run

FLAGS = """--image-size 64 --patch-size 8 --dim 128 --depth 6 --heads 4 --cls-layer 2
           --equiv-layers 2 --ratio 0.125 --moco-hidden 1024 --crop-min 0.2 --batch-size 128
           --epochs 10 --warmup-epochs 1 --base-lr 2e-3 --log-every 10"""
RUNS = [
    Run("MoCo-v3", sweep.PLAIN), Run("turned", sweep.PLAIN, script="-m paper.methods.turned"),
    Run("turned-control", "--weight 0", script="-m paper.methods.turned"),
    Run("turned-SER", "--weight 0.5", script="-m paper.methods.turned"),
    Run("control", "--weight 0"),
    Run("SER-0.1", "--weight 0.1"), Run("SER", "--weight 0.5")]
NAMES = [run.name for run in RUNS]
TITLES = {
    "turned": "MoCo-v3 + rotation", "turned-control": "control + rotation",
    "turned-SER": "SER + rotation", "SER-0.1": "SER, λ = 0.1", "SER": "SER, λ = 0.5"}
# Heads of three seeds, as linear accuracy scatters with the seed of the head.
HEADS = ["--cache --equivariance", "--cache --seed 1", "--cache --seed 2"]


def draw(rows: list[dict]) -> Any:
    """Bars for each run: patches matched after L_equiv's block and the last, and accuracies."""
    from matplotlib.figure import Figure     # of paper/requirements.txt

    blocks = sorted({row["block"] for row in rows})
    two = [(0.2, 1, blocks[0]), (-0.2, 0.5, blocks[-1])]     # shift and opacity of a block's bar
    one = [(0, 1, blocks[-1])]
    panels = [(f"{element} retrieval with jitter", 100, two, f"matched, {moved}, %")
              for element, moved in zip(ser.ELEMENTS, ("rotated", "flipped", "scaled"))]
    panels += [("linear top-1 %", 1, one, "accuracy, upright, %"),
               ("turned linear top-1 %", 1, one, "accuracy, rotated, %")]

    runs = sorted({row["run"] for row in rows} & set(NAMES),
                  key=lambda run: ("turned" in run, NAMES.index(run)))
    # Rows of rotated images were put in by hand: means of robustness.py over three angles.
    panels = [p for p in panels if all(sweep.select(rows, run, p[0], blocks[-1]) for run in runs)]

    heights = [-number - 0.5 * ("turned" in run) for number, run in enumerate(runs)]     # downwards
    colors = ["tab:red" if "SER" in run else "gray" for run in runs]

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True)
    for axes, (measure, factor, bars, title) in zip(columns, panels):
        for shift, opacity, block in bars:
            of_runs = [sweep.select(rows, run, measure, block) for run in runs]
            if any(seeds.keys() != of_runs[0].keys() for seeds in of_runs):
                sys.exit(f"--figure: runs have {title} of other seeds: choose some by --seeds")
            values = [factor * mean(seeds.values()) for seeds in of_runs]
            y = [height + shift for height in heights]
            drawn = axes.barh(y, values, 0.4, color=colors, alpha=opacity)
            axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize="small")
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set(xlim=(0, 110), xticks=[], frame_on=False)     # with room for numbers

    axes.set_yticks(heights, [TITLES.get(run, run) for run in runs])     # shared by all panels
    return figure


def show(args: Namespace) -> None:
    """Print the tables of files of rows, and draw them."""
    paths = args.show or Path(args.out).glob("*/rows.json")
    every = [row for path in paths for row in json.loads(Path(path).read_text())]
    rows = [row for row in every
            if row["run"] in ["untrained", *args.names] and row["seed"] in args.seeds]
    folders = ", ".join(sorted({row.get("data", "an unnamed folder") for row in rows}))
    print(f"{len(rows)} of {len(every)} rows, by --names and --seeds, of images in {folders}")
    places = [(row["run"], row["seed"], row["classes"], row["block"], row["measure"])
              for row in rows]
    if len(set(places)) < len(places):
        sys.exit("several rows are of one run and seed: show their files one after another")
    sweep.check_alike(rows)
    rows.sort(key=lambda row: ["untrained", *NAMES].index(row["run"]))
    baselines = [name for name in ("control", "MoCo-v3") if name in args.names]
    for baseline in baselines or ["control"]:
        print(f"\nin brackets the difference to {baseline}\n\n{sweep.table(rows, baseline)}")
    if args.figure:
        draw(rows).savefig(args.figure, dpi=150)


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py."""
    parser = sweep.arguments("imagenette")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="folder with train/CLASS, val/CLASS")
    source.add_argument("--show", nargs="+", metavar="ROWS", help="only show rows of files")
    parser.add_argument("--figure", metavar="FILE", help="draw what is shown")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES, help="runs to make")
    args, given = parser.parse_known_args(argv)

    args.flags = [*FLAGS.split(), *given]
    args.runs = [run for run in RUNS if run.name in args.names]
    sweep.check(args, given)
    training = ser.parse([*args.flags, "--data", "given"])
    first = max(training.equiv_layers)
    args.blocks = (first, 2 * first, training.depth)     # 2, 4 and 6
    return args


def main(args: Namespace) -> None:
    """Train and measure, then show the results."""
    if not args.show:
        sweep.measure(args, HEADS, args.blocks)
    if not args.print:
        show(args)


if __name__ == "__main__":
    main(settings())
