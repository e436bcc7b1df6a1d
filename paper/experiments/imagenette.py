"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16 --print
    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16
    python -m paper.experiments.imagenette --figures paper/experiments/imagenette.json

The first line prints the command lines, the third draws tables and pictures from rows alone. Eight
runs for each of three seeds train a ViT of 1.2 M parameters for 20 epochs at 64 px. Rate and crop
were chosen by the accuracy of MoCo-v3 alone. 16 of 128 images are in b2. The paper has 20: their
number, not their share r, says how many images a token is contrasted with. Flags of ser.py go to
all runs; longer ones are `--epochs 100 --out runs/long`.

The paper, linear top-1 of ImageNet: MoCo-v3 68.44, control (lambda = 0) 68.82, SER 69.28. Its Table
4 moves L_equiv from layer 3 to 9 and 12: 69.28, 68.72, 68.18. Here it moves from block 2 to 4 and
6. Tables are those of sweep.py, with differences to the control, then to MoCo-v3. Linear heads and
20-NN read one centre crop, and a run's linear accuracy is the mean over heads of three seeds. Rows
of finished runs are added to OUT/imagenette.json, so seeds can run side by side.
"""
import fcntl
import json
import sys
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
    Run("MoCo-v3", sweep.PLAIN),
    Run("control", "--weight 0"),
    Run("SER-0.02", "--weight 0.02"),
    Run("SER-0.1", "--weight 0.1"),
    Run("SER-0.25", "--weight 0.25"),
    Run("layer-4", "--weight 0.5 --equiv-layers 4 --cls-layer 4"),
    Run("layer-6", "--weight 0.5 --equiv-layers 6 --cls-layer 0"),
    Run("SER", "--weight 0.5")]
NAMES = [run.name for run in RUNS]
# Heads of three seeds, as linear accuracy scatters with the seed of the head.
HEADS = ["--cache --equivariance", "--cache --seed 1", "--cache --seed 2"]
BLOCKS = (2, 4, 6)
# The runs in pictures, by lambda.
LABELS = {"untrained": "untrained", "MoCo-v3": "MoCo-v3", "control": "control",
          "SER-0.02": "SER, λ = .02", "SER-0.1": "SER, λ = .1", "SER-0.25": "SER, λ = .25",
          "SER": "SER, λ = .5"}


def make_copies(data: str, folder: Path, side: int) -> None:
    """Write a copy of each image of data/train and data/val, its centre at side x side pixels."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for source in Path(data).glob("*/*/*"):
        target = unfinished / source.relative_to(data).with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(source) as image:
            copy = ImageOps.fit(image.convert("RGB"), (side, side))
        copy.save(target, quality=95)
    unfinished.rename(folder)


def plain_attention(words: Sequence[str]) -> None:
    """Run ser.py or eval_linear.py with attention by plain matrix products, as PyTorch's own is
    slow in bfloat16 on CPUs."""
    script, *flags = words
    with sdpa_kernel(SDPBackend.MATH):
        if script == "ser.py":
            ser.train(ser.parse(flags))
        else:
            eval_linear.main(flags)


# ==== Rows ================================================================================
def means(found: Sequence[dict], training: Namespace) -> list[dict]:
    """A row for each measure: the mean over the heads of several seeds, with their values beside
    it. The rows are keyed by the epochs, and by the images of b2 of those runs that have b2."""
    arm = {"epochs": training.epochs, "b2": ser.b2_per_rank(training, 1)}
    names = ("run", "seed", "weights", "set", "classes", "block", "measure")
    rows: dict = {}
    for row in found:
        if row["classes"] or row["block"] in BLOCKS:
            place = {name: row[name] for name in names}
            kept = rows.setdefault(tuple(place.values()), place | arm | {"values": []})
            kept["values"].append(row["value"])
    return [row | {"value": mean(row["values"])} for row in rows.values()]


def add(path: Path, rows: Sequence[dict]) -> None:
    """Add the rows of a run to a file, in place of those that it has of this run."""
    def of_run(row: dict) -> tuple:
        return row["run"], row["seed"], row["epochs"], row["b2"]

    renewed = {of_run(row) for row in rows}
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)     # seeds may run side by side
        file.seek(0)
        kept = [row for row in json.loads(file.read() or "[]") if of_run(row) not in renewed]
        lines = [json.dumps(row) for row in [*kept, *rows]]
        file.truncate(0)
        file.write("[\n" + ",\n".join(lines) + "\n]\n")


def read(path: str | Path, epochs: float = 20, b2: int = 16) -> list[dict]:
    """The rows of a file, of runs with so many epochs and images of b2, in the order of RUNS."""
    order = ["untrained", *NAMES]
    rows = [row for row in json.loads(Path(path).read_text())
            if (row["epochs"], row["b2"]) == (epochs, b2) and row["run"] in order]
    return sorted(rows, key=lambda row: order.index(row["run"]))


# ==== Pictures ============================================================================
def tradeoff(figure: Any, rows: Sequence[dict]) -> None:
    """Accuracies against retrieval of turns after block 2: mean and std of each run."""
    for axes, measure in zip(figure.subplots(1, 2), ("linear top-1 %", "20-NN top-1 %")):
        for run in list(LABELS)[1:]:     # the untrained encoder is far below
            found = sweep.select(rows, run, "rot90 retrieval", 2)
            accuracy = sweep.select(rows, run, measure, 6)
            if found and accuracy:
                x, x_std = sweep.mean_and_std(found)
                y, y_std = sweep.mean_and_std(accuracy)
                axes.errorbar(x, y, y_std, x_std, fmt="o", label=LABELS[run])
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.set(xlabel="retrieval of turns after block 2", ylabel=measure)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right")


def retrieval(figure: Any, rows: Sequence[dict]) -> None:
    """Retrieval of turns after block 2: a bar for the mean of each run, a line for its std."""
    axes = figure.subplots()
    for run, label in LABELS.items():
        found = sweep.select(rows, run, "rot90 retrieval", 2)
        if found:
            average, std = sweep.mean_and_std(found)
            axes.bar(label, average, color="lightgray", yerr=std)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(title="share of tokens that find their place in the turned image")


def draw(args: Namespace) -> None:
    """Print the tables of a file of rows, and write the pictures."""
    from matplotlib.figure import Figure
    rows = read(args.rows, args.training.epochs, ser.b2_per_rank(args.training, 1))
    for baseline in ("control", "MoCo-v3"):
        print(f"\nin brackets: the difference to {baseline}\n")
        print(sweep.table(rows, baseline, BLOCKS))

    Path(args.out).mkdir(parents=True, exist_ok=True)
    for plot in (tradeoff, retrieval):
        figure = Figure(figsize=(11, 4), layout="constrained")
        plot(figure, rows)
        figure.savefig(Path(args.out, f"{plot.__name__}.png"))
    print(f"rows are in {args.rows}, pictures in {args.out}")


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py, `training` what they mean."""
    parser = sweep.arguments("imagenette")
    parser.add_argument("--side", type=ser.count, help="copy the images, at this side, to OUT")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES, help="runs to make")
    parser.add_argument("--figures", metavar="ROWS", help="only show the rows of this file")
    args, flags = parser.parse_known_args(argv)
    if not args.data and not args.figures:
        parser.error("--data must name a folder")
    args.rows = args.figures or f"{args.out}/imagenette.json"
    args.runs = [run for run in RUNS if run.name in args.names]
    sweep.refuse_own_flags(args.runs, flags)
    args.flags = [*FLAGS.split(), *flags]
    args.training = ser.parse([*args.flags, "--data", "given"])
    if args.training.bf16 and not torch.cuda.is_available():
        args.launcher += " -m paper.experiments.imagenette --plain"
    return args


def run_all(args: Namespace) -> None:
    """Train and measure, and add the rows of each run as soon as it is ready."""
    if args.side:
        copies = Path(args.out, f"images-{args.side}")
        if not copies.exists() and not args.print:
            make_copies(args.data, copies, args.side)
        args.data = str(copies)

    for found in sweep.measure(args, HEADS):
        if not args.print:
            add(Path(args.rows), means(found, args.training))


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
