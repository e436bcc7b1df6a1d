"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160 --print      the command lines
    python -m paper.experiments.imagenette --data imagenette2-160 --bf16
    python -m paper.experiments.imagenette --data imagenette2-160 --corruptions

DIR holds train/CLASS/... and val/CLASS/... Four runs for each of three seeds, 20 epochs at 64 px
of a ViT with 1.2 M parameters (--bf16: for a CPU that multiplies bfloat16). Rate and crop were
chosen by the accuracy of MoCo-v3 alone. 4 of 128 images are in b2: r = .03; the paper's .01 is of
2048 images, where its lambda is .5. The control has lambda = 0.

The paper's row, linear top-1 of ImageNet: MoCo-v3 68.44, control 68.82, SER 69.28. Here, in tables
of mean ± std over seeds, with the difference to the control and to MoCo-v3 within a seed:

    linear, MLP, 20-NN   on features of one centre crop; the heads' rate is chosen on val
    equivariance         retrieval, and Table 4's score, after SER's block and the last
    corrupted            with --corruptions, the linear head on an ImageNet-C made of the first ten
                         val images of a class; needs imagecorruptions-imaug

"untrained" is SER's encoder before training. Writes found.json and retrieval.png in --out. To train
seeds side by side, call it with --seeds 0 and --seeds 1 and one --out, then with both. Learning
curves: python -m paper.experiments.curves runs/imagenette/SER-0 ...
"""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any, Sequence

from paper.evaluations import robustness
from paper.experiments import sweep

# Name of a run, the paper's number, program, flags; as in sweep.py.
RUNS = """\
    MoCo-v3  68.44  ser  --ratio 0 --cls-layer 0
    control  68.82  ser  --weight 0
    SER-0.1  -      ser  --weight 0.1
    SER      69.28  ser  --weight 0.5"""
FLAGS = """--image-size 64 --patch-size 8 --dim 128 --depth 6 --heads 4 --cls-layer 2
           --equiv-layers 2 --ratio 0.03125 --moco-hidden 1024 --crop-min 0.2 --batch-size 128
           --epochs 20 --warmup-epochs 1 --base-lr 2e-3 --log-every 10"""
EVALUATIONS = ("--cache --equivariance", "--cache --equivariance --mlp")
BLOCKS = (2, 6)     # SER's, and the last

def corrupted(args: Namespace) -> sweep.Found:
    """Top-1 of the linear heads on made corruptions, the mean over 15 of them and 5 severities."""
    folder = Path(args.out, "corrupted")
    if not folder.exists():
        robustness.make(str(folder), str(Path(args.data, "val")), per_class=10)
    found: sweep.Found = {}
    for name, *_ in map(str.split, RUNS.splitlines()):
        top1 = {}
        for seed in args.seeds:
            out = Path(args.out, f"{name}-{seed}")
            sweep.call(["-m", "paper.evaluations.robustness", "--checkpoint", f"{out}/last.pt",
                        "--c", str(folder)], args)
            sets = json.loads((out / "robustness-c.json").read_text())["found"]
            top1[seed] = mean(one["top-1"] for one in sets.values())
        found[name] = {"corrupted: linear, top-1 %": top1}
    return found

def draw(figure: Any, found: sweep.Found) -> None:
    """Retrieval after every block, a panel for each element; thin: a seed, thick: the mean."""
    for axes, element in zip(figure.subplots(1, 3), ("rot90", "hflip", "scale")):
        for number, (name, columns) in enumerate(found.items()):
            curves = [list(values.values()) for title, values in columns.items()
                      if title.startswith(f"{element} after") and "retrieval" in title]
            blocks = range(1, 1 + len(curves))
            axes.plot(blocks, curves, color=f"C{number}", linewidth=0.5)
            axes.plot(blocks, [mean(values) for values in curves], color=f"C{number}", label=name)
        axes.set(xlabel="after block (SER: 2)", title=f"{element}: retrieval")
    axes.legend()

def main(argv: Sequence[str] | None = None) -> None:
    """Train and measure all; print tables, write them and a picture."""
    parser = sweep.arguments("runs/imagenette")
    parser.add_argument("--corruptions", action="store_true", help="make and score corruptions")
    args, flags = parser.parse_known_args(argv)
    found = sweep.measure(RUNS, args, [*FLAGS.split(), *flags], EVALUATIONS)
    if found:
        tables = [found, corrupted(args)] if args.corruptions else [found]
        Path(args.out, "found.json").write_text(json.dumps(tables, indent=1))
        for baseline in ("control", "MoCo-v3"):
            print(f"\nin brackets: the difference to {baseline}")
            print(*[sweep.table(one, baseline, BLOCKS) for one in tables], sep="\n\n")
        from matplotlib.figure import Figure
        figure = Figure(figsize=(13, 4), layout="constrained")
        draw(figure, found)
        figure.savefig(Path(args.out, "retrieval.png"))

if __name__ == "__main__":
    main()
