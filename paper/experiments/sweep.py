"""Runs that differ in one thing: each is trained, evaluated, and set beside the paper's number.

    python -m paper.experiments.sweep --list lambda --data /imagenet --print     command lines only
    python -m paper.experiments.sweep --list r --data DIR --launcher "torchrun --nproc_per_node=8"

A list has MoCo-v3, SER and the runs below, with the paper's linear top-1 on ImageNet (None: neither
its text nor its tables have it). Table 4 also has scores of the last block, of rot90: MoCo-v3 .804;
L_equiv after block 3 .840, after 9 .888, after 12 .924. Here heads are trained on one centre crop
of each image, not on random crops: compare runs with each other.

Flags of ser.py go to all runs. The table has means ± std over seeds, and in brackets those of the
difference to SER within a seed. Only what the sweep's own evaluations wrote, for the weights that
are there, enters it. OUT/LIST.json has all of these results.
"""
import importlib
import json
import shlex
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Collection, Iterator, NamedTuple, Sequence

import eval_linear
import ser


class Run(NamedTuple):
    """A training."""
    name: str
    paper: float | None      # linear top-1 on ImageNet
    flags: str               # its own
    program: str = "ser"     # or a module of paper.methods


# A run without b2, which the flags of b2 do not concern.
PLAIN = "--ratio 0 --cls-layer 0"
SHARED = [Run("MoCo-v3", 68.44, PLAIN), Run("SER", 69.28, "")]
# Choice: [CLS] enters after L_equiv's block; with all layers after block 3. After block 12 no block
# is left: there [CLS] enters at the input.
LISTS = {
    "layers": [
        Run("layer-1", None, "--equiv-layers 1 --cls-layer 1"),
        Run("layer-6", None, "--equiv-layers 6 --cls-layer 6"),
        Run("layer-9", 68.72, "--equiv-layers 9 --cls-layer 9"),
        Run("layer-12", 68.18, "--equiv-layers 12 --cls-layer 0"),
        Run("CLS-0", None, "--cls-layer 0"),
        Run("CLS-1", None, "--cls-layer 1"),
        Run("CLS-6", None, "--cls-layer 6"),
        Run("CLS-9", None, "--cls-layer 9"),
        Run("all-layers", 69.21, "--equiv-layers 1 2 3 4 5 6 7 8 9 10 11 12")],
    "group": [
        Run("no-rot90", 69.17, "--group hflip scale"),
        Run("no-rot90-hflip", 69.12, "--group scale"),
        Run("no-rot90-scale", 68.67, "--group hflip")],
    "r": [
        Run("half-r", 69.08, "--ratio {half}"),
        Run("double-r", 68.30, "--ratio {double}")],
    "lambda": [
        Run("lambda-0", 68.82, "--weight 0"),
        Run("lambda-0.1", None, "--weight 0.1"),
        Run("lambda-1", 68.92, "--weight 1"),
        Run("lambda-5", 68.73, "--weight 5"),
        Run("lambda-10", 68.67, "--weight 10")],
    "decoupling": [
        Run("equimod-12", 68.95, f"--layer 12 {PLAIN}", "equimod"),
        Run("equimod-3", 69.51, f"--layer 3 {PLAIN}", "equimod"),
        Run("augself-12", 67.55, f"--layer 12 {PLAIN}", "augself"),
        Run("augself-3", 68.23, f"--layer 3 {PLAIN}", "augself")]}


def flags_of(run: Run, args: Namespace) -> list[str]:
    """The flags of a run, but for its seed and its folder."""
    return [*args.flags, *run.flags.split(), *data_of(args)]


def data_of(args: Namespace) -> list[str]:
    """The flags of the images."""
    return ["--data", args.data, "--workers", str(args.workers)] if args.data else []


def given_names(flags: Sequence[str]) -> set[str]:
    """The names of the settings that flags of ser.py set."""
    parser = ser.arguments()
    unset = dict.fromkeys(vars(parser.parse_args([])))
    args = parser.parse_args(flags, Namespace(**unset))
    return {name for name, value in vars(args).items() if value is not None}


def check(runs: Sequence[Run], given: Sequence[str], args: Namespace) -> None:
    """Exit with one sentence, before the first training, if a run cannot have its settings, or if
    it sets one of the `given` flags itself."""
    for run in runs:
        # A given --ratio is never lost: the list r has its half and its double.
        words = run.flags.replace(PLAIN, "").replace("-", "_").split()
        own = {"__seed", *words} - {"__ratio"}
        for name in given_names(given):
            if f"__{name}" in own:
                sys.exit(f"--{name.replace('_', '-')}: the run {run.name} sets it itself")

        program = ser
        parse = ser.parse
        if run.program != "ser":
            program = importlib.import_module(f"paper.methods.{run.program}")
            parse = program.settings
        settings = parse(flags_of(run, args))
        ser.check_settings(settings, images=settings.batch_size, ranks=1)


def call(words: Sequence[str], args: Namespace) -> None:
    """Print a command line, and run it unless --print is given."""
    print(args.launcher, shlex.join(words), flush=True)
    if not args.print:
        subprocess.run([*shlex.split(args.launcher), *words], check=True)


def rows_of(results: Path, settings: Namespace) -> list[dict]:
    """The rows of a file that an evaluation with these settings wrote for the weights that its
    checkpoint has."""
    encoder = ser.load_encoder(settings.checkpoint)
    made_by = {"weights": eval_linear.fingerprint(encoder), "settings": vars(settings)}
    made_by = json.loads(json.dumps(made_by))     # as it is in the file
    rows = json.loads(results.read_text())["rows"]
    return [row for row in rows if made_by.items() <= row.items()]


def measure(runs: Sequence[Run], args: Namespace, evaluations: Sequence[str],
            before: Sequence[str] = ()) -> Iterator[list[dict]]:
    """Train and evaluate each run. Yields the rows of a run's evaluations, with the keys "run" and
    "seed"; "untrained" is the encoder with which SER began. before: words before a script."""
    trainings = len(runs) * len(args.seeds)
    print(f"{len(runs)} runs with {len(args.seeds)} seeds: {trainings} trainings", flush=True)
    for seed in args.seeds:
        for run in runs:
            script = ["ser.py"] if run.program == "ser" else ["-m", f"paper.methods.{run.program}"]
            out = Path(args.out, f"{run.name}-{seed}")
            own = ["--seed", str(seed), "--out", str(out)]
            call([*before, *script, *flags_of(run, args), *own], args)

            rows = []
            for evaluation in evaluations:
                words = ["--checkpoint", f"{out}/last.pt", *evaluation.split(), *data_of(args)]
                call([*before, "eval_linear.py", *words], args)
                if not args.print:
                    rows += rows_of(out / "eval.json", eval_linear.parse(words))

            names = {"trained": run.name}
            if run.name == "SER":
                names["untrained"] = "untrained"
            yield [row | {"run": names[row["encoder"]], "seed": seed}
                   for row in rows if row["encoder"] in names]


def mean_and_std(rows: Collection[dict]) -> tuple[float, float | None]:
    """Over the seeds of a run. A single row may bring the std of seeds that are lost."""
    values = [row["value"] for row in rows]
    if len(rows) > 1:
        return mean(values), stdev(values)
    return values[0], next(iter(rows)).get("std")


def differences(rows: dict, base: dict, baseline: str) -> list[dict]:
    """Those of two runs within a seed; both are seed -> row. A single row may bring the difference
    to the baseline of seeds that are lost."""
    lost = rows.get(None, {}).get(f"minus {baseline}")
    if lost:
        return [lost]
    return [{"value": rows[seed]["value"] - base[seed]["value"]} for seed in rows if seed in base]


def spread(rows: Collection[dict], digits: int) -> str:
    """mean ± std over seeds."""
    if not rows:
        return "-"
    average, std = mean_and_std(rows)
    text = f"{average:.{digits}f}"
    return text if std is None else f"{text} ± {std:.{digits}f}"


def table(rows: Sequence[dict], baseline: str, blocks: Sequence[int]) -> str:
    """A column for each run; a line for each accuracy on val, and for each measure of equivariance
    after `blocks`. Where val lacks classes, accuracies are those among all classes."""
    found: dict = {}     # title of a line -> run -> seed -> row
    for row in rows:
        if "%" in row["measure"] or row["block"] in blocks:
            title = f"{row['measure']}, block {row['block']}"
            of_run = found.setdefault(title, {}).setdefault(row["run"], {})
            of_run.setdefault(row["seed"], row)     # the first is among all classes

    runs = sorted({row["run"]: None for row in rows}, key=lambda run: run != "untrained")
    lines = [["", *runs], ["---"] * (1 + len(runs))]
    for title, columns in found.items():
        digits = 1 if "%" in title else 3
        base = columns.get(baseline, {})
        line = [title]
        for run in runs:
            own = columns.get(run, {})
            gains = differences(own, base, baseline)
            line.append(f"{spread(own.values(), digits)} ({spread(gains, digits)})")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(program: str) -> ArgumentParser:
    """The flags of sweep.py and imagenette.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS, val/CLASS")
    add("--out", default=f"runs/{program}", help="folder of the runs")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all runs")
    add("--launcher", default=sys.executable, help="what runs a script: python, or torchrun")
    add("--workers", type=int, default=8, help="loader processes, with --data")
    add("--print", action="store_true", help="only print the command lines")
    return parser


def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line. `flags` are those of ser.py, `runs` the trainings."""
    parser = arguments("sweep")
    parser.add_argument("--list", default="layers", choices=list(LISTS), help="what is run")
    args, args.flags = parser.parse_known_args(argv)
    ratio = ser.parse([*args.flags, *data_of(args)]).ratio
    args.runs = []
    for run in [*LISTS[args.list], *SHARED]:
        flags = run.flags.format(half=ratio / 2, double=ratio * 2)
        args.runs.append(run._replace(flags=flags))
    check(args.runs, args.flags, args)
    return args


def main(args: Namespace) -> None:
    """Run a list; write the rows, and print its table under the paper's numbers."""
    rows = []
    for found in measure(args.runs, args, ["--cache --equivariance"]):
        rows += found
    if args.print:
        return
    path = Path(args.out, f"{args.list}.json")
    path.write_text(json.dumps({"rows": rows}, indent=1))
    for run in args.runs:
        print(f"{run.name:16}{run.paper or '-':>8}  {run.program} {run.flags}")
    print(table(rows, "SER", (3, 12)))
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings())
