"""Runs that differ in one thing: each is trained, evaluated, and set beside the paper's number.

    python -m paper.experiments.sweep --list lambda     on synthetic images
    python -m paper.experiments.sweep --list r --data DIR --launcher "torchrun --nproc_per_node=8"

A list has MoCo-v3, SER and the runs below, with the paper's linear top-1 on ImageNet ("-": neither
its text nor its tables have it). Table 4 has scores of the last block for rot90, hflip and scale,
too: MoCo-v3 .804 .870 .945; L_equiv after block 3 .840 .881 .945, after block 9 .888 .886 .957,
after block 12 .924 .892 .957. Here heads are trained on one centre crop of each image, not on
random crops: compare runs with each other. Prints means ± std over seeds, and in brackets those of
the difference to SER within a seed. Flags of ser.py go to all runs. OUT/LIST.json has all results.
"""
import json
import shlex
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from statistics import mean, stdev

import ser

# Name of a run, the paper's number, program, flags. Choice: [CLS] enters after L_equiv's block;
# with "all layers" after block 3. After block 12 none is left: [CLS] enters at the input.
SHARED = "\n    MoCo-v3         68.44  ser  --ratio 0 --cls-layer 0\n    SER             69.28  ser"
LISTS = {"layers": """\
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
    half-r          69.08  ser  --ratio {half}
    double-r        68.30  ser  --ratio {double}""", "lambda": """\
    lambda-0        68.82  ser  --weight 0
    lambda-0.1      -      ser  --weight 0.1
    lambda-1        68.92  ser  --weight 1
    lambda-5        68.73  ser  --weight 5
    lambda-10       68.67  ser  --weight 10""", "decoupling": """\
    equimod-12      68.95  equimod  --layer 12 --ratio 0 --cls-layer 0
    equimod-3       69.51  equimod  --layer 3 --ratio 0 --cls-layer 0
    augself-12      67.55  augself  --layer 12 --ratio 0 --cls-layer 0
    augself-3       68.23  augself  --layer 3 --ratio 0 --cls-layer 0"""}

def call(words: list[str], args: Namespace) -> None:
    """Print a command line, and run it unless --print is given."""
    print(args.launcher, shlex.join(words), flush=True)
    if not args.print:
        subprocess.run([*shlex.split(args.launcher), *words], check=True)

def measure(lines: str, args: Namespace, evaluations: list[str]) -> list[dict]:
    """Train and evaluate each run. Returns the rows of all eval.json, with the keys "run" and
    "seed". "untrained" is the encoder with which a run began, in a table that of the last run."""
    rows = []
    data = ["--data", args.data, "--workers", str(args.workers)] if args.data else []
    for seed in args.seeds:
        for name, _, program, *own in map(str.split, lines.splitlines()):
            script = ["ser.py"] if program == "ser" else ["-m", f"paper.methods.{program}"]
            out = Path(args.out, f"{name}-{seed}")
            call([*script, *args.flags, *own, *data, "--seed", str(seed), "--out", str(out)], args)
            for more in map(str.split, evaluations):
                call(["eval_linear.py", "--checkpoint", f"{out}/last.pt", *more, *data], args)
            results = [] if args.print else json.loads((out / "eval.json").read_text())["rows"]
            for row in results:
                run = name if row["encoder"] == "trained" else "untrained"
                rows.append(row | {"run": run, "seed": seed})
    return rows

def spread(values: list[float], digits: int) -> str:
    """mean ± std over seeds."""
    std = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{std}" if values else "-"

def table(rows: list[dict], baseline: str, blocks: tuple[int, ...]) -> str:
    """A column for each run; a line for each accuracy on val, and for each measure of equivariance
    after `blocks`. Of several results of one kind the last counts, which is the newest."""
    found = {}     # title of a line -> run -> seed -> value
    for row in rows:
        shown = row["classes"] or row["block"] in blocks
        if row["set"] == "val" and shown and "chance" not in row["measure"]:
            title = f"{row['measure']}, block {row['block']}"
            found.setdefault(title, {}).setdefault(row["run"], {})[row["seed"]] = row["value"]
    runs = list(dict.fromkeys(row["run"] for row in rows))
    lines = [["", *runs], ["---"] * (1 + len(runs))]
    for title, columns in found.items():
        digits = 1 if "%" in title else 3
        base = columns.get(baseline, {})
        line = [title]
        for run in runs:
            own = columns.get(run, {})
            differences = [own[seed] - base[seed] for seed in own.keys() & base.keys()]
            line.append(f"{spread([*own.values()], digits)} ({spread(differences, digits)})")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

def arguments(program: str) -> ArgumentParser:
    """The flags of sweep.py and imagenette.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS, val/CLASS; none: synthetic images")
    add("--out", default=f"runs/{program}", help="folder of the runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all runs")
    add("--launcher", default=sys.executable, help="what runs a script: python, or torchrun")
    add("--workers", type=int, default=8, help="loader processes, with --data")
    add("--print", action="store_true", help="only print the command lines")
    return parser

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line. `flags` are those of ser.py, `lines` the runs."""
    parser = arguments("sweep")
    parser.add_argument("--list", default="layers", choices=list(LISTS), help="what is run")
    args, args.flags = parser.parse_known_args(argv)
    ratio = ser.parse([*args.flags, "--data", args.data]).ratio
    args.lines = LISTS[args.list].format(half=ratio / 2, double=ratio * 2) + SHARED
    return args

def main(args: Namespace) -> None:
    """Run a list; print it with the paper's numbers, and its table; write the rows."""
    rows = measure(args.lines, args, ["--cache --equivariance"])
    if rows:
        print(args.lines, table(rows, "SER", (3, 12)), sep="\n")
        Path(args.out, f"{args.list}.json").write_text(json.dumps({"rows": rows}, indent=1))

if __name__ == "__main__":
    main(settings())
