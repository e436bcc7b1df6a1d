"""Runs that differ in one thing: each is trained, evaluated, and set beside the paper's number.

    python -m paper.experiments.sweep --list lambda     drawn images; --print: its lines alone
    python -m paper.experiments.sweep --list r --data DIR --launcher "torchrun --nproc_per_node=8"

layers: Figure 3, whose numbers are in its picture alone, and Table 4, whose scores of the last
block are (rot90 hflip scale) MoCo-v3 .804 .870 .945, layer 3 .840 .881 .945, 9 .888 .886 .957, 12
.924 .892 .957. decoupling: EquiMod and AugSelf on the last layer, and on SER's. The paper's other
numbers are linear top-1 of ImageNet. Here: mean ± std over seeds, in brackets of the difference to
--baseline within a seed, on one centre crop. Existing runs continue, evaluations are done again.
Unknown flags, those of ser.py, go to all runs. Writes OUT/LIST.json.
"""
from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Sequence

import ser

# Name of a run, the paper's number, program, flags. [CLS] cannot enter after the last block.
# Choice: all layers with [CLS] after block 3; the paper does not say.
SER = "\n    SER             69.28  ser"
LISTS = {"layers": """\
    MoCo-v3         68.44  ser  --ratio 0 --cls-layer 0
    layer-1         -      ser  --equiv-layers 1 --cls-layer 1
    layer-6         -      ser  --equiv-layers 6 --cls-layer 6
    layer-9         68.72  ser  --equiv-layers 9 --cls-layer 9
    layer-12        68.18  ser  --equiv-layers 12 --cls-layer 0
    CLS-0           -      ser  --cls-layer 0
    CLS-1           -      ser  --cls-layer 1
    CLS-6           -      ser  --cls-layer 6
    CLS-9           -      ser  --cls-layer 9
    all-layers      69.21  ser  --equiv-layers 1 2 3 4 5 6 7 8 9 10 11 12""", "group": """\
    no-rot90        69.17  ser  --group hflip scale
    no-rot90-hflip  69.12  ser  --group scale
    no-rot90-scale  68.67  ser  --group hflip""", "r": """\
    MoCo-v3         68.44  ser  --ratio 0 --cls-layer 0
    half-r          69.08  ser  --ratio {half}
    double-r        68.30  ser  --ratio {double}""", "lambda": """\
    lambda-0        68.82  ser  --weight 0
    lambda-0.1      -      ser  --weight 0.1
    lambda-1        68.92  ser  --weight 1
    lambda-5        68.73  ser  --weight 5
    lambda-10       68.67  ser  --weight 10""", "decoupling": """\
    MoCo-v3         68.44  ser  --ratio 0 --cls-layer 0
    equimod-12      68.95  equimod  --layer 12 --ratio 0 --cls-layer 0
    equimod-3       69.51  equimod  --layer 3 --ratio 0 --cls-layer 0
    augself-12      67.55  augself  --layer 12 --ratio 0 --cls-layer 0
    augself-3       68.23  augself  --layer 3 --ratio 0 --cls-layer 0"""}
Found = dict[str, dict[str, dict[int, float]]]     # name of a run -> measure -> seed -> value

def call(words: Sequence[str], args: Namespace) -> None:
    """Print a command line, and run it unless that is all."""
    print(args.launcher, shlex.join(words), flush=True)
    if not args.print:
        subprocess.run([*shlex.split(args.launcher), *words], check=True)

def measure(lines: str, args: Namespace, flags: Sequence[str], evaluations: Sequence[str]) -> Found:
    """Train with `flags` and evaluate. "untrained" is the encoder with which the last run began."""
    found: Found = {}
    data = ["--data", args.data, "--workers", str(args.workers)] if args.data else []
    for seed in args.seeds:
        for name, _, program, *own in map(str.split, lines.splitlines()):
            script = ["ser.py"] if program == "ser" else ["-m", f"paper.methods.{program}"]
            out = Path(args.out, f"{name}-{seed}")
            call([*script, *flags, *own, *data, "--seed", str(seed), "--out", str(out)], args)
            for more in map(str.split, evaluations):
                call(["eval_linear.py", "--checkpoint", f"{out}/last.pt", *more, *data], args)
                result = {} if args.print else json.loads((out / "eval.json").read_text())
                for title, row in result.get("rows", {}).items():
                    title = re.sub(r" on \d \[CLS\]", "", title)     # fewer if late
                    for column, value in ((name, row["trained"]), ("untrained", row["untrained"])):
                        found.setdefault(column, {}).setdefault(title, {})[seed] = value
    return found

def spread(values: Sequence[float], digits: int) -> str:
    """mean ± std over seeds."""
    std = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{std}"

def table(found: Found, baseline: str, blocks: Sequence[int]) -> str:
    """A row for each measure, of equivariance after `blocks` alone, and a column for each run."""
    rows = [["", *found], ["---"] * (1 + len(found))]
    for title, own in found[baseline].items():
        if "top-1" in title or any(f"after block {block}:" in title for block in blocks):
            digits = 1 if "%" in title else 3
            row = [title]
            for columns in found.values():
                differences = [columns[title][seed] - own[seed] for seed in own]
                values = spread(columns[title].values(), digits)
                row.append(f"{values} ({spread(differences, digits)})")
            rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

def arguments(out: str) -> ArgumentParser:
    """Flags of sweep.py and imagenette.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS and val/CLASS; none: drawn images")
    add("--out", default=out, help="folder of the runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all runs")
    add("--launcher", default=sys.executable, help="what runs a script: python, or torchrun")
    add("--workers", type=int, default=8, help="loader processes, with --data")
    add("--print", action="store_true", help="only print the command lines")
    return parser

def main(argv: Sequence[str] | None = None) -> None:
    """Run a list, print it with the paper's numbers and its table, and write what was found."""
    parser = arguments("runs/sweep")
    parser.add_argument("--list", default="layers", choices=list(LISTS), help="what is run")
    parser.add_argument("--baseline", default="SER", help="run that others are compared with")
    args, flags = parser.parse_known_args(argv)
    if not args.data:     # what ser.py has for drawn images, with the paper's 12 blocks
        flags = ["--depth", "12", *flags]
    ratio = ser.parse([*flags, "--data", args.data]).ratio
    lines = (LISTS[args.list] + SER).format(half=ratio / 2, double=ratio * 2)
    found = measure(lines, args, flags, ["--cache --equivariance"])
    if found:
        Path(args.out, f"{args.list}.json").write_text(json.dumps(found, indent=1))
        print(lines, table(found, args.baseline, (3, 12)), sep="\n")

if __name__ == "__main__":
    main()
