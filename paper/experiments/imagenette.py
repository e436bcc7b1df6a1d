"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16 --print
    python -m paper.experiments.imagenette --data imagenette2-160 --side 128 --bf16
    python -m paper.experiments.imagenette --figures paper/experiments/imagenette.json

The first line prints the command lines, the third draws tables and pictures from rows alone. Eight
runs for each of three seeds train a ViT of 1.2 M parameters for 20 epochs at 64 px, 13 hours of one
CPU core. Rate and crop were chosen by the accuracy of MoCo-v3 alone. 16 of 128 images are in b2.
The paper has 20: their number, not their share r, says how many images a token is contrasted with.
Flags of ser.py go to all runs; longer ones are `--epochs 100 --out runs/long`.

The paper, linear top-1 of ImageNet: MoCo-v3 68.44, control (lambda = 0) 68.82, SER 69.28. Its Table
4 moves L_equiv from layer 3 to 9 and 12: 69.28, 68.72, 68.18. Here it moves from block 2 to 4 and
6. Tables are those of sweep.py, with differences to the control, then to MoCo-v3. Linear heads and
20-NN read one centre crop, and a run's linear accuracy is the mean over heads of three seeds. Each
run has a folder in OUT with its rows.json, so several processes can share the seeds, once the
copies are there.
"""
import json
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any, Iterable, Sequence

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

# What pictures show: accuracy against retrieval of turns.
TURNS = "rot90 retrieval"
SHOWN = {     # in the pictures
    "MoCo-v3": "MoCo-v3", "control": "control", "SER-0.1": "SER, λ = .1", "SER": "SER, λ = .5"}


def make_copies(data: str, folder: Path, side: int) -> None:
    """Write a copy of each image of data/train and data/val, its centre at side x side pixels. A
    folder that has its name is whole."""
    unfinished = folder.with_suffix(".unfinished")
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


def read(paths: Iterable, epochs: float, b2: int) -> list[dict]:
    """The rows of files, of runs with so many epochs and images of b2, in the order of RUNS."""
    order = ["untrained", *NAMES]
    rows = []
    for path in paths:
        rows += json.loads(Path(path).read_text())
    kept = [row for row in rows if (row["epochs"], row["b2"]) == (epochs, b2)]
    return sorted(kept, key=lambda row: order.index(row["run"]))


def tradeoff(figure: Any, rows: Sequence[dict]) -> None:
    """Linear accuracy against retrieval of turns after block 2, a dot for each seed."""
    axes = figure.subplots()
    for run, label in SHOWN.items():
        x = sweep.select(rows, run, TURNS, 2)
        y = sweep.select(rows, run, "linear top-1 %", 6)
        both = [seed for seed in x if seed in y]
        x_of_seeds = [x[seed]["value"] for seed in both]
        y_of_seeds = [y[seed]["value"] for seed in both]
        axes.scatter(x_of_seeds, y_of_seeds, label=label)

    axes.margins(y=1.5)     # so that the noise of seeds does not fill the picture
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set(xlabel="retrieval of turns", ylabel="linear top-1 %")
    axes.legend()


def retrieval(figure: Any, rows: Sequence[dict]) -> None:
    """Retrieval of turns after block 2, a bar for the mean and a dot for each seed."""
    axes = figure.subplots()
    for run, label in {"untrained": "untrained", **SHOWN}.items():
        found = sweep.select(rows, run, TURNS, 2)
        if found:
            average, _ = sweep.mean_and_std(found)
            axes.bar(label, average, color="lightgray")
            dots = [row["value"] for seed, row in found.items() if seed is not None]
            axes.scatter([label] * len(dots), dots, color="C0", zorder=2)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(title="share of tokens that find their place in the turned image")


def draw(args: Namespace) -> None:
    """Print the tables of files of rows, and write the pictures."""
    from matplotlib.figure import Figure
    paths = args.figures or Path(args.out).glob("*/rows.json")
    rows = read(paths, args.training.epochs, ser.b2_per_rank(args.training, 1))
    for baseline in ("control", "MoCo-v3"):
        print(f"\nin brackets: the difference to {baseline}\n")
        print(sweep.table(rows, baseline, (2, 4, 6)))

    Path(args.out).mkdir(parents=True, exist_ok=True)
    for plot in (tradeoff, retrieval):
        figure = Figure(figsize=(11, 4), layout="constrained")
        plot(figure, rows)
        figure.savefig(Path(args.out, f"{plot.__name__}.png"))
    print(f"results are in {args.out}")


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py, `training` what they mean."""
    parser = sweep.arguments("imagenette")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="folder with train/CLASS, val/CLASS")
    source.add_argument("--figures", nargs="+", metavar="ROWS", help="only show rows of files")
    parser.add_argument("--side", type=ser.count, help="copy the images, at this side, to OUT")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES, help="runs to make")
    args, given = parser.parse_known_args(argv)

    args.flags = [*FLAGS.split(), *given]
    args.training = ser.parse([*args.flags, "--data", "given"])
    args.runs = [run for run in RUNS if run.name in args.names]
    sweep.check(args, given)
    if args.training.bf16 and not torch.cuda.is_available():
        args.launcher += " -m paper.experiments.imagenette --plain"
    return args


def run_all(args: Namespace) -> None:
    """Train and measure; write the rows of each run as soon as it is ready."""
    if args.side:
        copies = Path(args.out, f"images-{args.side}")
        if not copies.exists() and not args.print:
            make_copies(args.data, copies, args.side)
        args.data = str(copies)

    for out, found in sweep.measure(args, HEADS):
        if not args.print:
            rows = means(found, args.training)
            Path(out, "rows.json").write_text(json.dumps(rows, indent=1))


def main(args: Namespace) -> None:
    """Train and measure all, then show the results."""
    if args.data:
        run_all(args)
    if not args.print:
        draw(args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain_attention(sys.argv[2:])
    else:
        main(settings())
