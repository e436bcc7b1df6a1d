"""Runs that differ in one thing: each is trained, evaluated, and set beside the paper's number.

    python -m paper.experiments.sweep --list lambda --data /imagenet --print     command lines only
    python -m paper.experiments.sweep --list r --data DIR --launcher "torchrun --nproc_per_node=8"

A list has MoCo-v3, SER and the runs below, with the paper's linear top-1. Table 4 also has scores
of rot90 after the last block: MoCo-v3 .804; L_equiv after block 3 .840, after 9 .888, 12 .924.
Heads see one centre crop of each image here, so compare runs with each other. Flags of ser.py go to
all runs. On 8 GPUs, r-0.005, SER and r-0.02 have 8, 24 and 40 images in b2. With other batches or
ranks, two of them may have equally many. The lists layers and decoupling are for 12 blocks.

A stopped sweep goes on where it was. A finished sweep prints its table again. Both need the
last.pt of each run: a run without last.pt is trained anew.

Cells have mean ± std over seeds, then in brackets mean ± std of a seed's difference to SER.
"""
import importlib
import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import eval_linear
import ser


class Run(NamedTuple):
    """A training."""
    name: str
    flags: str                     # its own
    paper: float | None = None     # linear top-1 on ImageNet
    script: str = "ser.py"


# The flags of a run without b2. The other flags of b2 have no effect on such a run.
PLAIN = "--ratio 0 --cls-layer 0"
# In these methods, weight and temperature belong to other losses than L_equiv.
EQUIMOD = f"--weight 1 --temperature 0.2 {PLAIN}"
AUGSELF = f"--weight 0.5 {PLAIN}"
SHARED = [Run("MoCo-v3", PLAIN, 68.44), Run("SER", "", 69.28)]
# Choice: in layer-N, [CLS] enters after block N (layer-12: at the input; all-layers: block 3).
# Choice: the blocks without an accuracy, as the paper's text does not name those of Figure 3.
LISTS = {
    "layers": [
        Run("layer-1", "--equiv-layers 1 --cls-layer 1"),
        Run("layer-6", "--equiv-layers 6 --cls-layer 6"),
        Run("layer-9", "--equiv-layers 9 --cls-layer 9", 68.72),
        Run("layer-12", "--equiv-layers 12 --cls-layer 0", 68.18),
        *[Run(f"CLS-{block}", f"--cls-layer {block}") for block in (0, 1, 6, 9)],
        Run("all-layers", "--equiv-layers 1 2 3 4 5 6 7 8 9 10 11 12", 69.21)],
    "group": [
        Run("no-rot90", "--group hflip scale", 69.17),
        Run("no-rot90-hflip", "--group scale", 69.12),
        Run("no-rot90-scale", "--group hflip", 68.67)],
    "r": [Run("r-0.005", "--ratio 0.005", 69.08), Run("r-0.02", "--ratio 0.02", 68.30)],
    "lambda": [
        Run("lambda-0", "--weight 0", 68.82), Run("lambda-0.1", "--weight 0.1"),
        Run("lambda-1", "--weight 1", 68.92), Run("lambda-5", "--weight 5", 68.73),
        Run("lambda-10", "--weight 10", 68.67)],
    "decoupling": [
        Run("equimod-12", f"--layer 12 {EQUIMOD}", 68.95, "-m paper.methods.equimod"),
        Run("equimod-3", f"--layer 3 {EQUIMOD}", 69.51, "-m paper.methods.equimod"),
        Run("augself-12", f"--layer 12 {AUGSELF}", 67.55, "-m paper.methods.augself"),
        Run("augself-3", f"--layer 3 {AUGSELF}", 68.23, "-m paper.methods.augself")]}


def check(args: Namespace, given: list[str]) -> None:
    """Exit with one sentence, before the first training, if a run's settings do not fit the
    ranks of --nproc_per_node, or if a run itself sets a given flag, perhaps shortened."""
    ranks = max(map(int, re.findall(r"per[-_]node[= ](\d+)", args.launcher)), default=1)
    for run in args.runs:
        set_by_run = ["--seed", *run.flags.replace(PLAIN, "").split()]
        for flag in given:
            name = flag.split("=")[0]
            if name.startswith("--") and any(word.startswith(name) for word in set_by_run):
                sys.exit(f"{name}: the run {run.name} sets it itself")

        program = importlib.import_module(run.script.split()[-1].removesuffix(".py"))
        parse = getattr(program, "settings", ser.parse)
        settings = parse([*args.flags, *run.flags.split(), "--data", "given"])
        ser.check_settings(settings, n_images=settings.batch_size, ranks=ranks)
        if settings.ratio == 0 and PLAIN not in run.flags:
            sys.exit(f"--ratio 0: the run {run.name} has b2")


def call(words: list[str], args: Namespace) -> None:
    """Print a command line, and run it unless --print is given."""
    print(args.launcher, shlex.join(words), flush=True)
    if not args.print:
        subprocess.run([*shlex.split(args.launcher), *words], check=True)


def own_rows(words: list[str], out: str, images: str) -> list[dict]:
    """The rows of OUT/eval.json that an evaluation with these words wrote for these images, and
    for the weights of OUT/last.pt and those its run began with."""
    args = eval_linear.parse(words)
    checkpoint = eval_linear.read_checkpoint(args)
    weights = [checkpoint.fingerprint, eval_linear.untrained(checkpoint).fingerprint]

    rows = eval_linear.read_results(Path(out, "eval.json"))["rows"]
    own = [row for row in rows if row["settings"] == vars(args) and row["images"] == images
           and row["weights"] in weights]
    if not any(row["weights"] == checkpoint.fingerprint for row in own):
        return []     # the run went on after the evaluation, or was made anew
    return own


def means(found: list[dict], run: str, seed: int, blocks: tuple[int, ...]) -> list[dict]:
    """A row for each accuracy, and for each measure of equivariance after `blocks`: the mean over
    evaluations, with their values beside it. "untrained" is the encoder that SER began with."""
    rows: dict = {}
    for row in found:
        wanted = row["encoder"] == "trained" or run == "SER"
        if wanted and (row["classes"] or row["block"] in blocks):
            name = run if row["encoder"] == "trained" else "untrained"
            place = {"run": name, "seed": seed, "images": row["images"]}
            place |= {key: row[key] for key in ("weights", "set", "classes", "block", "measure")}
            kept = rows.setdefault(tuple(place.values()), place | {"values": []})
            kept["values"].append(row["value"])
    return [row | {"value": mean(row["values"])} for row in rows.values()]


def measure(args: Namespace, evaluations: list[str], blocks: tuple[int, ...]) -> list[dict]:
    """Train and evaluate each run; write its rows to its folder, and return those of all runs."""
    data = ["--data", args.data, "--workers", str(args.workers)]
    if not args.print:
        sets = eval_linear.load_sets(eval_linear.parse(data), size=1)     # of any size
        images = eval_linear.describe_sets({"train": sets.train_centre, **sets.tests})

    # Begun runs go first, as ser.py refuses to continue them with other flags.
    runs = [(run, seed, f"{args.out}/{run.name}-{seed}")
            for seed, run in product(args.seeds, args.runs)]
    begun = [one for one in runs if Path(one[2], "last.pt").exists()]
    rows = []
    for run, seed, out in begun + [one for one in runs if one not in begun]:
        flags = [*args.flags, *run.flags.split(), *data, "--seed", str(seed), "--out", out]
        call([*run.script.split(), *flags], args)

        found = []
        for evaluation in evaluations:
            words = ["--checkpoint", f"{out}/last.pt", *evaluation.split(), *data]
            done = [] if args.print else own_rows(words, out, images)
            if not done:
                call(["eval_linear.py", *words], args)
            if not args.print:
                found.append(done or own_rows(words, out, images))
                if not found[-1]:
                    sys.exit(f"{out}: images changed since the sweep began, or weights just now")

        of_run = means(sum(found, []), run.name, seed, blocks)
        if of_run:
            trained = Namespace(**ser.load_checkpoint(f"{out}/last.pt")["settings"])
            made_by = {
                "flags": shlex.join(args.flags), "own": f"{run.script} {run.flags}",
                "ranks": trained.ranks, "bf16": trained.bf16, "b2": trained.b2, "heads": len(found),
                "read by heads": len(eval_linear.feature_blocks(trained)), "data": args.data}
            of_run = [row | made_by for row in of_run]
            Path(out, "rows.json").write_text(json.dumps(of_run, indent=1))
        rows += of_run
    return rows


def check_alike(rows: list[dict]) -> None:
    """Exit with one sentence if rows should not share a table."""
    for name in ("flags", "images", "ranks", "bf16", "heads"):
        found = {str(row.get(name)) for row in rows}     # older rows do not tell, so None is one
        if len(found) > 1:
            sys.exit(f"the rows are of runs with other {name}: {'; '.join(sorted(found))}")

    for run in {row["run"] for row in rows}:
        found = {row["own"] for row in rows if row["run"] == run}     # script and flags
        if len(found) > 1:
            sys.exit(f"{run} has rows of other flags: {'; '.join(sorted(found))}")


def select(rows: list[dict], run: str, measure: str, block: int) -> dict[int, float]:
    """seed -> value. Of several rows of a seed, the first is among all classes."""
    found: dict = {}
    for row in rows:
        if (row["run"], row["measure"], row["block"]) == (run, measure, block):
            found.setdefault(row["seed"], row["value"])
    return found


def spread(values: list[float], measure: str) -> str:
    """mean ± std over seeds."""
    if not values:
        return "-"
    _, unit, digits = eval_linear.table_format(measure)
    numbers = [mean(values)] if len(values) == 1 else [mean(values), stdev(values)]
    return " ± ".join(f"{unit * number:.{digits}f}" for number in numbers)


def table(rows: list[dict], baseline: str) -> str:
    """A column for each run, and a line for each measure on val, among all classes."""
    runs = dict.fromkeys(row["run"] for row in rows)
    own = {run: [row for row in rows if row["run"] == run] for run in runs}
    seeds = [" ".join(sorted({str(row["seed"]) for row in own[run]})) for run in runs]
    read = [str(own[run][0].get("read by heads", "-")) for run in runs]     # older rows lack it
    lines = [["", *runs], ["---"] * (1 + len(runs)), ["seeds", *seeds]]
    if len(set(read)) > 1:     # one number for all would not help to compare
        lines.append(["blocks read by heads", *read])

    for measure, block in dict.fromkeys((row["measure"], row["block"]) for row in rows):
        base = select(rows, baseline, measure, block)
        line = [f"{eval_linear.table_format(measure)[0]}, block {block}"]
        for run in runs:
            found = select(rows, run, measure, block)
            gains = [found[seed] - base[seed] for seed in found if seed in base]
            line.append(f"{spread([*found.values()], measure)} ({spread(gains, measure)})")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(program: str) -> ArgumentParser:
    """The flags of sweep.py and imagenette.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", default=f"runs/{program}", help="folder of the runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all runs")
    add("--launcher", default=shlex.quote(sys.executable), help="python, or torchrun")
    add("--workers", type=int, default=8, help="loader processes")
    add("--print", action="store_true", help="only print the command lines")
    return parser


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line. `flags` are those of ser.py, `runs` the trainings."""
    parser = arguments("sweep")
    parser.add_argument("--data", required=True, help="folder with train/CLASS, val/CLASS")
    parser.add_argument("--list", default="layers", choices=list(LISTS), help="what is run")
    args, args.flags = parser.parse_known_args(argv)
    args.runs = [*LISTS[args.list], *SHARED]
    check(args, args.flags)
    training = ser.parse([*args.flags, "--data", "given"])
    args.blocks = (max(training.equiv_layers), training.depth)
    return args


def main(args: Namespace) -> None:
    """Run a list, and print its table under the paper's numbers."""
    rows = measure(args, ["--cache --equivariance"], args.blocks)
    check_alike(rows)
    if rows:
        for run in args.runs:
            b2 = next(row["b2"] for row in rows if row["run"] == run.name)
            print(f"{run.name:16}{run.paper or '-':>8}{b2:>5} in b2  {run.script} {run.flags}")
        print(table(rows, "SER"))


if __name__ == "__main__":
    main(settings())
