"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16 --print
    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16
    python -m paper.experiments.imagenette --figures paper/experiments/imagenette.json

The first line prints the command lines and their hours, the third draws tables and pictures from
rows alone. Eight runs for each of three seeds train a ViT of 1.2 M parameters for 20 epochs at
64 px. Rate and crop were chosen by the accuracy of MoCo-v3 alone. 16 of 128 images are in b2. The
paper has 20: their number, not their share r, says how many images a token is contrasted with. The
control has lambda = 0. Flags of ser.py go to all runs; longer ones are `--epochs 100 --out
runs/long`. --bf16 is for a CPU that multiplies bfloat16: there attention is done by plain matrix
products, as PyTorch's own is slow in that type.

The paper, linear top-1 of ImageNet: MoCo-v3 68.44, control 68.82, SER 69.28. Its Table 4 moves
L_equiv from layer 3 to 9 and 12: 69.28, 68.72, 68.18, while the score of rot90 at the last layer
rises: .840, .888, .924. Here it moves from block 2 to 4 and 6. Tables have means ± std over seeds,
and in brackets those of the difference to the control, then to MoCo-v3, within a seed:

    linear, 20-NN        on features of one centre crop; the heads' rate is chosen on val, and the
                         value of a run is the mean of heads of three seeds
    cosine, retrieval    equivariance after blocks 2, 4 and 6: Table 4's score, and ours

Rows of finished runs are added to OUT/imagenette.json, so seeds can run side by side.
"""
import fcntl
import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any, Sequence

import torch
from PIL import Image, ImageOps
from torch.nn.attention import SDPBackend, sdpa_kernel

import eval_linear
import ser
from paper.experiments import sweep
from paper.experiments.sweep import Run

FLAGS = """--image-size 64 --patch-size 8 --dim 128 --depth 6 --heads 4 --cls-layer 2
           --equiv-layers 2 --ratio 0.125 --moco-hidden 1024 --crop-min 0.2 --batch-size 128
           --epochs 20 --warmup-epochs 1 --base-lr 2e-3 --log-every 10"""
RUNS = [
    Run("MoCo-v3", 68.44, sweep.PLAIN),
    Run("control", 68.82, "--weight 0"),
    Run("SER-0.02", None, "--weight 0.02"),
    Run("SER-0.1", None, "--weight 0.1"),
    Run("SER-0.25", None, "--weight 0.25"),
    Run("layer-4", 68.72, "--weight 0.5 --equiv-layers 4 --cls-layer 4"),
    Run("layer-6", 68.18, "--weight 0.5 --equiv-layers 6 --cls-layer 0"),
    Run("SER", 69.28, "--weight 0.5")]
NAMES = [run.name for run in RUNS]
# Heads of three seeds, as linear accuracy scatters with the seed of the head.
HEADS = ["--cache --equivariance", "--cache --seed 1", "--cache --seed 2"]
RATE = 95     # images/s of a training on one CPU core, with --bf16

# What pictures show: accuracy against equivariance.
TURNS = "rot90 retrieval"
BLOCKS = {"layer-4": 4, "layer-6": 6}     # that have L_equiv; 2 in all other runs
LABELS = {"SER-0.02": "SER, λ = .02", "SER-0.1": "SER, λ = .1", "SER-0.25": "SER, λ = .25",
          "SER": "SER, λ = .5", "layer-4": "λ = .5, block 4", "layer-6": "λ = .5, block 6"}
ALONG_LAMBDA = ("control", "SER-0.02", "SER-0.1", "SER-0.25", "SER")


# ==== Runs ================================================================================
def make_copies(data: str, folder: Path, side: int) -> None:
    """Write a copy of each image of data/train and data/val, its centre at side x side pixels. Of
    several processes, the first that is ready gives its copies to all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for source in Path(data).glob("*/*/*"):
        target = unfinished / source.relative_to(data).with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(source) as image:
            copy = ImageOps.fit(image.convert("RGB"), (side, side))
        copy.save(target, quality=95)
    try:
        unfinished.rename(folder)
    except OSError:     # another process was faster
        shutil.rmtree(unfinished)


def plain_attention(words: Sequence[str]) -> None:
    """Run ser.py or eval_linear.py with attention by plain matrix products."""
    script, *flags = words
    with sdpa_kernel(SDPBackend.MATH):
        if script == "ser.py":
            ser.train(ser.parse(flags))
        else:
            eval_linear.main(flags)


def run_all(args: Namespace) -> None:
    """Train and measure, and add the rows of each run as soon as it is ready."""
    images = len(ser.list_images(args.data)[0]) * len(args.runs) * len(args.seeds)
    hours = images * args.training.epochs / RATE / 3600
    print(f"the trainings take about {hours:.1f} hours of one CPU core at {RATE} images/s")

    if args.side:
        copies = Path(args.out, f"images-{args.side}")
        if not copies.exists() and not args.print:
            make_copies(args.data, copies, args.side)
        args.data = str(copies)

    before = []
    if args.training.bf16 and not torch.cuda.is_available():
        before = ["-m", "paper.experiments.imagenette", "--plain"]
    for found in sweep.measure(args.runs, args, HEADS, before):
        if not args.print:
            add(Path(args.rows), means(found, args.training))


# ==== Rows ================================================================================
def means(found: Sequence[dict], training: Namespace) -> list[dict]:
    """A row for each measure: the mean over the heads of several seeds, with their values beside
    it. The rows are keyed by the epochs, and by the images of b2 of those runs that have b2."""
    arm = {"epochs": training.epochs, "b2": ser.b2_per_rank(training, 1)}
    names = ("run", "seed", "weights", "set", "classes", "block", "measure")
    rows: dict = {}
    for row in found:
        if row["classes"] or row["block"] in (2, 4, 6):
            place = {name: row[name] for name in names}
            kept = rows.setdefault(tuple(place.values()), place | arm | {"values": []})
            kept["values"].append(row["value"])
    return [row | {"value": mean(row["values"])} for row in rows.values()]


def add(path: Path, rows: Sequence[dict]) -> None:
    """Add rows to a file. They take the place of the same run's: of those that are of the same
    measure, and of those that are of other weights."""
    def of_run(row: dict) -> tuple:
        return row["run"], row["seed"], row["epochs"], row["b2"]

    def of_measure(row: dict) -> tuple:
        return *of_run(row), row["set"], row["block"], row["measure"]

    weights = {of_run(row): row["weights"] for row in rows}
    measures = {of_measure(row) for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)     # seeds may run side by side
        file.seek(0)
        kept = []
        for row in json.loads(file.read() or "[]"):
            same_weights = weights.get(of_run(row), row["weights"]) == row["weights"]
            if same_weights and of_measure(row) not in measures:
                kept.append(row)
        lines = [json.dumps(row) for row in [*kept, *rows]]
        file.truncate(0)
        file.write("[\n" + ",\n".join(lines) + "\n]\n")


def read(path: str | Path, epochs: float = 20, b2: int = 16) -> list[dict]:
    """The rows of a file, of runs with so many epochs and images of b2, in the order of RUNS. A row
    whose seed is None has the mean and the std of seeds whose own rows are lost. It counts in place
    of them, until as many are there again."""
    order = ["untrained", *NAMES]
    groups: dict = {}
    for row in json.loads(Path(path).read_text()):
        if (row["epochs"], row["b2"]) == (epochs, b2) and row["run"] in order:
            place = (row["run"], row["measure"], row["block"])
            groups.setdefault(place, []).append(row)

    rows = []
    for group in groups.values():
        lost = [row for row in group if row["seed"] is None]
        known = [row for row in group if row["seed"] is not None]
        rows += lost if lost and len(known) < lost[0]["seeds"] else known
    return sorted(rows, key=lambda row: order.index(row["run"]))


def select(rows: Sequence[dict], run: str, measure: str, block: int = 6) -> dict:
    """seed -> row."""
    return {row["seed"]: row for row in rows
            if (row["run"], row["measure"], row["block"]) == (run, measure, block)}


def table_of(rows: Sequence[dict], run: str, measure: str, block: int = 6) -> tuple:
    """Mean and std over seeds, of rows that `read` returned; the std of one seed is None."""
    return sweep.mean_and_std(select(rows, run, measure, block).values())


# ==== Pictures ============================================================================
def panel(axes: Any, rows: Sequence[dict], measure: str, blocks: dict) -> None:
    """An accuracy against retrieval of turns: a dot for each seed, or mean and std where seeds are
    lost. A line joins the means along lambda. blocks: run -> that of its retrieval."""
    means = []
    for run, block in blocks.items():
        x = select(rows, run, TURNS, block)
        y = select(rows, run, measure)
        if not x or not y:
            continue
        x_mean, x_std = table_of(rows, run, TURNS, block)
        y_mean, y_std = table_of(rows, run, measure)
        if run in ALONG_LAMBDA:
            means.append((x_mean, y_mean))

        seeds = [seed for seed in x if seed in y and seed is not None]
        dots = [(x[seed]["value"], y[seed]["value"]) for seed in seeds]
        colour = f"C{NAMES.index(run)}"
        if not dots:
            dots = [(x_mean, y_mean)]
            axes.errorbar(x_mean, y_mean, y_std, x_std, color=colour)
        marker = {"MoCo-v3": "*", "control": "s"}.get(run, "o")
        axes.scatter(*zip(*dots), marker=marker, color=colour, label=LABELS.get(run, run))
    axes.plot(*zip(*means), color="gray", zorder=0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set(ylabel=measure)


def tradeoff(figure: Any, rows: Sequence[dict]) -> None:
    """Left, linear accuracy, and retrieval after the block that has L_equiv (2 for MoCo-v3 and the
    control); right, 20-NN, and retrieval after the last block. The heads of block 4 read two
    blocks, not four, so the left panel leaves them out."""
    left, right = figure.subplots(1, 2)
    own = {run: BLOCKS.get(run, 2) for run in NAMES if run != "layer-4"}
    panel(left, rows, "linear top-1 %", own)
    panel(right, rows, "20-NN top-1 %", dict.fromkeys(NAMES, 6))
    left.set(xlabel="retrieval of turns after the block of L_equiv")
    right.set(xlabel="retrieval of turns after block 6, the last")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right")


def retrieval(figure: Any, rows: Sequence[dict]) -> None:
    """Retrieval of turns after block 2 by method: a bar for the mean, a dot for each seed, or the
    std where seeds are lost."""
    axes = figure.subplots()
    for run in ("untrained", "MoCo-v3", *ALONG_LAMBDA):
        found = select(rows, run, TURNS, 2)
        if not found:
            continue
        label = LABELS.get(run, run)
        average, std = table_of(rows, run, TURNS, 2)
        axes.bar(label, average, color="lightgray", yerr=std if None in found else None)
        dots = [row["value"] for seed, row in found.items() if seed is not None]
        axes.scatter([label] * len(dots), dots, color="C0", zorder=2)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(title="share of tokens that find their place in the turned image")


def draw(args: Namespace) -> None:
    """Print the tables of a file of rows, and write the pictures."""
    from matplotlib.figure import Figure
    rows = read(args.rows, args.training.epochs, ser.b2_per_rank(args.training, 1))
    for baseline in ("control", "MoCo-v3"):
        print(f"\nin brackets: the difference to {baseline}\n")
        print(sweep.table(rows, baseline, (2, 4, 6)))

    os.makedirs(args.out, exist_ok=True)
    for plot in (tradeoff, retrieval):
        figure = Figure(figsize=(11, 4), layout="constrained")
        plot(figure, rows)
        figure.savefig(Path(args.out, f"{plot.__name__}.png"))
    print(f"rows are in {args.rows}, pictures in {args.out}")


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py, `training` what they mean."""
    parser = sweep.arguments("imagenette")
    add = parser.add_argument
    add("--side", type=ser.count, help="copy images of --data to OUT/images-SIDE, of this side")
    add("--names", nargs="+", default=NAMES, choices=NAMES, help="runs that are made")
    add("--figures", metavar="ROWS", help="only show the rows of this file")
    args, flags = parser.parse_known_args(argv)
    if not args.data and not args.figures:
        parser.error("--data must name a folder")
    args.rows = args.figures or f"{args.out}/imagenette.json"
    args.flags = [*FLAGS.split(), *flags]
    args.training = ser.parse([*args.flags, "--data", "given"])
    args.runs = [run for run in RUNS if run.name in args.names]
    sweep.check(args.runs, flags, args)
    return args


def main(args: Namespace) -> None:
    """Train and measure all, then show the results."""
    if not args.figures:
        run_all(args)
    if not args.print:
        draw(args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain_attention(sys.argv[2:])
    else:
        main(settings())
