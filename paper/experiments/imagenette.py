"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160 --print      the command lines
    python -m paper.experiments.imagenette --data imagenette2-160 --bf16
    python -m paper.experiments.imagenette --data imagenette2-160 --bf16 --corruptions

The folder has train/CLASS/ and val/CLASS/. Eight runs for each of three seeds train a ViT of 1.2 M
parameters for 20 epochs at 64 px (--bf16: for a CPU that multiplies bfloat16). Rate and crop were
chosen by the accuracy of MoCo-v3 alone. 16 of 128 images are in b2. The paper has 20: their number,
not their share r, says how many images a token is contrasted with. The control has lambda = 0.

The paper, linear top-1 of ImageNet: MoCo-v3 68.44, control 68.82, SER 69.28. Its Table 4 moves
L_equiv from layer 3 to 9 and 12: 69.28, 68.72, 68.18, while the score of rot90 at the last layer
rises: .840, .888, .924. Here it moves from block 2 to 4 and 6. Prints means ± std over seeds, and
in brackets those of the difference to the control, then to MoCo-v3, within a seed:

    linear, MLP, 20-NN   on features of one centre crop; the heads' rate is chosen on val
    cosine, retrieval    equivariance after blocks 2, 4 and 6: Table 4's score, and ours
    corrupted            with --corruptions, the linear head on an ImageNet-C made of the first ten
                         val images of each class; needs imagecorruptions-imaug

Seeds can run side by side, by --seeds; a call with all then only evaluates and writes tradeoff.png.
"""
import json
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any

import ser
from paper.evaluations import robustness
from paper.experiments import sweep

# Name of a run, the paper's number, program, flags; as in sweep.py.
RUNS = """\
    MoCo-v3   68.44  ser  --ratio 0 --cls-layer 0
    control   68.82  ser  --weight 0
    SER-0.02  -      ser  --weight 0.02
    SER-0.1   -      ser  --weight 0.1
    SER-0.25  -      ser  --weight 0.25
    layer-4   68.72  ser  --weight 0.5 --equiv-layers 4 --cls-layer 4
    layer-6   68.18  ser  --weight 0.5 --equiv-layers 6 --cls-layer 0
    SER       69.28  ser  --weight 0.5"""
FLAGS = """--image-size 64 --patch-size 8 --dim 128 --depth 6 --heads 4 --cls-layer 2
           --equiv-layers 2 --ratio 0.125 --moco-hidden 1024 --crop-min 0.2 --batch-size 128
           --epochs 20 --warmup-epochs 1 --base-lr 2e-3 --log-every 10"""
EVALUATIONS = ("--cache --equivariance", "--cache --equivariance --mlp")
NAMES = [line.split()[0] for line in RUNS.splitlines()]
BLOCKS = {"layer-4": 4, "layer-6": 6}     # that have L_equiv; 2 in all other runs
LABELS = {"SER-0.02": "SER, lambda .02", "SER-0.1": "SER, lambda .1", "SER-0.25": "SER, lambda .25",
          "SER": "SER, lambda .5", "layer-4": "SER .5, block 4", "layer-6": "SER .5, block 6"}
CHAINS = {"along lambda": ("control", "SER-0.02", "SER-0.1", "SER-0.25", "SER"),
          "along the block of L_equiv": ("SER", "layer-4", "layer-6")}

def corrupted(args: Namespace) -> list[dict]:
    """Rows of the linear heads: means over 15 made corruptions at 5 severities."""
    folder = Path(args.out, "corrupted")
    if not folder.exists() and not args.print:
        robustness.make(str(folder), str(Path(args.data, "val")), per_class=10)
    rows = []
    for seed in args.seeds:
        for run in NAMES:
            out = Path(args.out, f"{run}-{seed}")
            sweep.call(["-m", "paper.evaluations.robustness", "--checkpoint", f"{out}/last.pt",
                        "--head", f"{out}/head-cache.pt", "--imagenet-c", str(folder),
                        "--workers", str(args.workers)], args)
            if args.print:
                continue
            sets = json.loads((out / "robustness.json").read_text())["rows"]
            top1 = {row["set"]: row["value"] for row in sets if row["measure"] == "linear top-1 %"}
            rows.append({"run": run, "seed": seed, "set": "val", "classes": 10, "block": 6,
                         "measure": "corrupted linear top-1 %", "value": mean(top1.values())})
    return rows

def plot(figure: Any, rows: list[dict]) -> None:
    """The trade-off: accuracy against retrieval of turns, a dot for each run, and lines that join
    the means along lambda and along the block of L_equiv. Left, linear, and retrieval after the
    block that has L_equiv (2 for MoCo-v3 and control); right, 20-NN, and after the last block."""
    results = {}     # (run, measure, block) -> seed -> value
    for row in rows:
        key = (row["run"], row["measure"], row["block"])
        if row["set"] == "val":
            results.setdefault(key, {})[row["seed"]] = row["value"]
    places = {"linear top-1 %": "the block of L_equiv", "20-NN top-1 %": "block 6, the last"}
    for axes, (measure, place) in zip(figure.subplots(1, 2), places.items()):
        means = {}
        for run in NAMES:
            block = BLOCKS.get(run, 2) if measure == "linear top-1 %" else 6
            turns = results[run, "rot90 retrieval", block]
            top1 = results[run, measure, 6]
            x = [turns[seed] for seed in top1]
            y = list(top1.values())
            marker = {"MoCo-v3": "*", "control": "s"}.get(run, "o")
            axes.scatter(x, y, marker=marker, label=LABELS.get(run, run))
            means[run] = (mean(x), mean(y))
        for (label, chain), style in zip(CHAINS.items(), ("-", ":")):
            x, y = zip(*[means[run] for run in chain])
            axes.plot(x, y, style, color="gray", zorder=0, label=label)
        axes.set(xlabel=f"retrieval of turns after {place}", ylabel=measure)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right")

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py."""
    parser = sweep.arguments("imagenette")
    parser.add_argument("--corruptions", action="store_true", help="make and score corruptions")
    args, flags = parser.parse_known_args(argv)
    if not args.data:
        parser.error("--data must name a folder")
    args.flags = [*FLAGS.split(), *flags]
    ser.parse(args.flags)     # exits where ser.py has no such flag
    return args

def main(args: Namespace) -> None:
    """Train and measure all; print tables, write the rows and a picture."""
    rows = sweep.measure(RUNS, args, EVALUATIONS)
    if args.corruptions:
        rows += corrupted(args)
    if args.print:
        return
    for baseline in ("control", "MoCo-v3"):
        print(f"\nin brackets: the difference to {baseline}\n")
        print(sweep.table(rows, baseline, (2, 4, 6)))
    Path(args.out, "imagenette.json").write_text(json.dumps({"rows": rows}, indent=1))
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout="constrained")
    plot(figure, rows)
    figure.savefig(Path(args.out, "tradeoff.png"))

if __name__ == "__main__":
    main(settings())
