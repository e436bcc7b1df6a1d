"""Runs that differ in one thing: each is trained, evaluated, and set beside the paper's number.

    python -m paper.experiments.sweep --list lambda --data /imagenet --print     command lines only
    python -m paper.experiments.sweep --list r --data DIR --launcher "torchrun --nproc_per_node=8"

A list has MoCo-v3, SER and the runs below, with the paper's linear top-1 on ImageNet where it has
one. Table 4 also has scores of rot90 after the last block: MoCo-v3 .804; L_equiv after block 3
.840, after 9 .888, after 12 .924. Here heads are trained on one centre crop of each image, not on
random crops, so compare runs with each other. Flags of ser.py go to all runs.

The table has means ± std over seeds, and in brackets those of the difference to SER within a seed.
Only what the sweep's own evaluations wrote, for the weights that are there, enters it and
OUT/LIST.json.
"""
import importlib
import json
import shlex
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Iterator, NamedTuple, Sequence

import eval_linear
import ser


class Run(NamedTuple):
    """A training."""
    name: str
    flags: str                     # its own
    paper: float | None = None     # linear top-1 on ImageNet
    script: str = "ser.py"


# A run without b2, which the flags of b2 do not concern.
PLAIN = "--ratio 0 --cls-layer 0"
SHARED = [Run("MoCo-v3", PLAIN, 68.44), Run("SER", "", 69.28)]
# Choice: [CLS] enters after L_equiv's block; with all layers after block 3. After block 12 no block
# is left: there [CLS] enters at the input.
LISTS = {
    "layers": [
        Run("layer-1", "--equiv-layers 1 --cls-layer 1"),
        Run("layer-6", "--equiv-layers 6 --cls-layer 6"),
        Run("layer-9", "--equiv-layers 9 --cls-layer 9", 68.72),
        Run("layer-12", "--equiv-layers 12 --cls-layer 0", 68.18),
        Run("CLS-0", "--cls-layer 0"),
        Run("CLS-1", "--cls-layer 1"),
        Run("CLS-6", "--cls-layer 6"),
        Run("CLS-9", "--cls-layer 9"),
        Run("all-layers", "--equiv-layers 1 2 3 4 5 6 7 8 9 10 11 12", 69.21)],
    "group": [
        Run("no-rot90", "--group hflip scale", 69.17),
        Run("no-rot90-hflip", "--group scale", 69.12),
        Run("no-rot90-scale", "--group hflip", 68.67)],
    "r": [
        Run("half-r", "--ratio {half}", 69.08),
        Run("double-r", "--ratio {double}", 68.30)],
    "lambda": [
        Run("lambda-0", "--weight 0", 68.82),
        Run("lambda-0.1", "--weight 0.1"),
        Run("lambda-1", "--weight 1", 68.92),
        Run("lambda-5", "--weight 5", 68.73),
        Run("lambda-10", "--weight 10", 68.67)],
    "decoupling": [
        Run("equimod-12", f"--layer 12 {PLAIN}", 68.95, "-m paper.methods.equimod"),
        Run("equimod-3", f"--layer 3 {PLAIN}", 69.51, "-m paper.methods.equimod"),
        Run("augself-12", f"--layer 12 {PLAIN}", 67.55, "-m paper.methods.augself"),
        Run("augself-3", f"--layer 3 {PLAIN}", 68.23, "-m paper.methods.augself")]}


def check(args: Namespace, given: Sequence[str]) -> None:
    """Exit with one sentence, before the first training, if a run cannot have its settings, or if
    it sets one of the given flags, perhaps shortened, itself."""
    for run in args.runs:
        # A given --ratio is never lost: the list r has its half and its double.
        own = ["--seed", *run.flags.replace(PLAIN, "").replace("--ratio", "").split()]
        for flag in given:
            name = flag.split("=")[0]
            if name.startswith("--") and any(word.startswith(name) for word in own):
                sys.exit(f"{name}: the run {run.name} sets it itself")

        program = importlib.import_module(run.script.split()[-1].removesuffix(".py"))
        parse = getattr(program, "settings", ser.parse)
        settings = parse([*args.flags, *run.flags.split(), "--data", "given"])
        ser.check_settings(settings, images=settings.batch_size, ranks=1)


def call(words: Sequence[str], args: Namespace) -> None:
    """Print a command line, and run it unless --print is given."""
    print(args.launcher, shlex.join(words), flush=True)
    if not args.print:
        subprocess.run([*shlex.split(args.launcher), *words], check=True)


def rows_of(settings: Namespace) -> list[dict]:
    """The rows that an evaluation with these settings wrote for the weights that its checkpoint
    has."""
    encoder = ser.load_encoder(settings.checkpoint)
    made_by = {"weights": eval_linear.fingerprint(encoder), "settings": vars(settings)}
    made_by = json.loads(json.dumps(made_by))     # as it is in the file
    results = Path(settings.checkpoint).with_name("eval.json")
    rows = json.loads(results.read_text())["rows"]
    return [row for row in rows if made_by.items() <= row.items()]


def measure(args: Namespace, evaluations: Sequence[str]) -> Iterator[tuple[str, list[dict]]]:
    """Train and evaluate each run. Yields its folder and the rows of its evaluations, with the keys
    "run" and "seed"; "untrained" is the encoder that SER began with. With --print, no rows."""
    data = ["--data", args.data, "--workers", str(args.workers)]
    for seed, run in product(args.seeds, args.runs):
        out = f"{args.out}/{run.name}-{seed}"
        flags = [*args.flags, *run.flags.split(), *data, "--seed", str(seed), "--out", out]
        call([*run.script.split(), *flags], args)

        names = {"trained": run.name}
        if run.name == "SER":
            names["untrained"] = "untrained"
        rows = []
        for evaluation in evaluations:
            words = ["--checkpoint", f"{out}/last.pt", *evaluation.split(), *data]
            call(["eval_linear.py", *words], args)
            if not args.print:
                rows += rows_of(eval_linear.parse(words))
        yield out, [row | {"run": names[row["encoder"]], "seed": seed}
                    for row in rows if row["encoder"] in names]


def select(rows: Sequence[dict], run: str, measure: str, block: int) -> dict:
    """seed -> row. A row whose seed is None has the mean and the std of seeds whose own rows are
    lost, and counts alone. Of several rows of a seed, the first is among all classes."""
    found: dict = {}
    for row in rows:
        if (row["run"], row["measure"], row["block"]) == (run, measure, block):
            found.setdefault(row["seed"], row)
    return {None: found[None]} if None in found else found


def mean_and_std(found: dict) -> tuple[float, float | None]:
    """Over the seeds of `select`. The std of one seed is None, that of lost seeds in their row."""
    rows = list(found.values())
    values = [row["value"] for row in rows]
    std = stdev(values) if len(values) > 1 else rows[0].get("std")
    return mean(values), std


def differences(found: dict, base: dict, baseline: str) -> dict:
    """Those of two runs within a seed, as from `select`. The row of lost seeds may bring them."""
    lost = found.get(None, {}).get(f"minus {baseline}")
    if lost:
        return {None: lost}
    return {seed: {"value": found[seed]["value"] - base[seed]["value"]}
            for seed in found if seed in base}


def spread(found: dict, digits: int) -> str:
    """mean ± std over seeds."""
    if not found:
        return "-"
    average, std = mean_and_std(found)
    text = f"{average:.{digits}f}"
    return text if std is None else f"{text} ± {std:.{digits}f}"


def table(rows: Sequence[dict], baseline: str, blocks: Sequence[int]) -> str:
    """A column for each run; a line for each accuracy on val, and for each measure of equivariance
    after `blocks`. Where val lacks classes, accuracies are those among all classes."""
    runs = sorted({row["run"]: 0 for row in rows}, key=lambda run: run != "untrained")
    lines = [["", *runs], ["---"] * (1 + len(runs))]
    measures = dict.fromkeys((row["measure"], row["block"]) for row in rows)
    for measure, block in measures:
        if "%" not in measure and block not in blocks:
            continue
        digits = 1 if "%" in measure else 3
        base = select(rows, baseline, measure, block)
        line = [f"{measure}, block {block}"]
        for run in runs:
            found = select(rows, run, measure, block)
            gains = differences(found, base, baseline)
            line.append(f"{spread(found, digits)} ({spread(gains, digits)})")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(program: str) -> ArgumentParser:
    """The flags of sweep.py and imagenette.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", default=f"runs/{program}", help="folder of the runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all runs")
    add("--launcher", default=sys.executable, help="what runs a script: python, or torchrun")
    add("--workers", type=int, default=8, help="loader processes")
    add("--print", action="store_true", help="only print the command lines")
    return parser


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line. `flags` are those of ser.py, `runs` the trainings."""
    parser = arguments("sweep")
    parser.add_argument("--data", required=True, help="folder with train/CLASS, val/CLASS")
    parser.add_argument("--list", default="layers", choices=list(LISTS), help="what is run")
    args, args.flags = parser.parse_known_args(argv)

    ratio = ser.parse([*args.flags, "--data", args.data]).ratio
    args.runs = []
    for run in [*LISTS[args.list], *SHARED]:
        flags = run.flags.format(half=ratio / 2, double=ratio * 2)
        args.runs.append(run._replace(flags=flags))
    check(args, args.flags)
    return args


def main(args: Namespace) -> None:
    """Run a list; write the rows, and print its table under the paper's numbers."""
    rows = []
    for _, found in measure(args, ["--cache --equivariance"]):
        rows += found
    if args.print:
        return

    path = Path(args.out, f"{args.list}.json")
    path.write_text(json.dumps({"rows": rows}, indent=1))
    for run in args.runs:
        print(f"{run.name:16}{run.paper or '-':>8}  {run.script} {run.flags}")
    print(table(rows, "SER", (3, 12)))
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings())
