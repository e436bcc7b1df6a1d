"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160
    python -m paper.experiments.imagenette --data DIR --seeds 0 --without corruptions

DIR holds train/CLASS/... and val/CLASS/... Three seeds, nine runs of ten epochs: hours on a CPU.
Flags of ser.py go to every arm alike. The arms of a seed have the same budget and the same images
in the same order and differ in ARMS alone (control: lambda = 0).

It prints a table, a row per measure, mean ± std over seeds and paired differences: linear and MLP
heads (their rate chosen on held-out training images) and 20-NN, on features of centre crops; how
well turns and flips can be told from frozen tokens; top-1 on made corruptions of ten val images a
class; after blocks, retrieval and the score of Table 3; below it SER's gradient norms, images,
steps, minutes. All numbers go to imagenette.json in --out, learning curves, 20-NN after every epoch
(of 2,000 and 1,000 images), retrieval and corruptions to one PNG. After SIGTERM or Ctrl-C the same
command continues. To train seeds side by side, call it with --seeds 0 and with --seeds 1 and the
same --out; a last call with both trains nothing.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from pathlib import Path
from statistics import mean
from typing import Any, Sequence

import torch

import eval_linear
import ser
from paper.evaluations import corruptions
from paper.experiments import measures
from paper.experiments.curves import empty_figure, records, series, write_png
from paper.experiments.runs import (CPU, ELEMENTS, GPU, Rows, evaluate, finished, flags, markdown,
                                    minutes, over_seeds, resumable, shared, steps_of, train)
from ser import Config, require

PROGRAM = "paper.experiments.imagenette"
ARMS: dict[str, dict[str, Any]] = {
    "moco": dict(ratio=0.0, cls_layer=0), "control": dict(weight=0.0), "ser": {}}
COLORS = {"untrained": "gray", "moco": "tab:blue", "control": "tab:orange", "ser": "tab:green"}
OPTIONAL = ("mlp", "curve", "moved", "corruptions")

# ==== Measurements ================================================================================
def measure(cfg: Config, without: Sequence[str], corrupted: Path,
            random_init: bool = False) -> dict[str, float]:
    """All that is measured on a finished run, by name, or on the encoder that it began with."""
    heads = ("linear",) if "mlp" in without else ("linear", "MLP")
    found = evaluate(cfg, random_init, heads)
    if "moved" not in without:
        found |= measures.moved(cfg, "untrained" if random_init else "trained")
    if "corruptions" not in without:
        found |= measures.corrupted(cfg, corrupted, random_init)
    return found

# ==== Report ======================================================================================
def compare(found: dict[str, list[dict[str, float]]]) -> Rows:
    """found[column]: for each seed, what was measured, by name. Returns `over_seeds` for each name
    and column; the last two columns are differences within a seed."""
    rows: Rows = {}
    for name in found["ser"][0]:
        columns = {}
        for column in COLORS:
            columns[column] = [one[name] for one in found[column]]
        for other in ("control", "moco"):
            pairs = zip(columns["ser"], columns[other])
            columns[f"ser - {other}"] = [a - b for a, b in pairs]
        rows[name] = {column: over_seeds(values) for column, values in columns.items()}
    return rows

def plot_seeds(axes: Any, column: str, curves: list[dict[int, float]]) -> None:
    """A thin line for each seed, and a thick one for their mean."""
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), color=COLORS[column], linewidth=0.5, alpha=0.5)
    shared = sorted(set.intersection(*map(set, curves)))     # a stopped run has records of its own
    means = [mean(curve[x] for curve in curves) for x in shared]
    axes.plot(shared, means, color=COLORS[column], label=column)

def draw(figure: Any, runs: dict[str, list[Config]], rows: Rows,
         curves: dict[str, list[dict[str, float]]]) -> None:
    """Above, learning curves, and 20-NN by epoch; below, retrieval after every block, and made
    corruptions. The cosine is not shown: it rises, too, where all tokens grow alike."""
    cfg = runs["ser"][0]
    above, below = figure.subplots(2, 4)
    for arm, of_seeds in curves.items():
        plot_seeds(above[3], arm, [{int(epoch): value for epoch, value in one.items()}
                                   for one in of_seeds])
    above[3].set(xlabel="epoch", title="20-NN, top-1 % (a part of val)")
    strengths = [name for name in rows if name.startswith("corrupted, severity")]
    for column in COLORS if strengths else ():
        found = [rows[name][column]["values"] for name in strengths]
        plot_seeds(below[3], column, [dict(enumerate(one, 1)) for one in zip(*found)])
    below[3].set(xlabel="severity", title="made corruptions, top-1 %")
    for axes, key in zip(above, ("inv", "equiv", "patch_top1")):
        for arm, cfgs in runs.items():
            if key == "inv" or arm != "moco":     # moco has no b2
                plot_seeds(axes, arm, [series(records(one.out), key) for one in cfgs])
        if key != "patch_top1":
            chance = series(records(cfg.out), f"{key}_chance")
            axes.plot(list(chance), list(chance.values()), color="black", linestyle=":")
        axes.set(xlabel="step", title=f"training: {key}")
    for axes, element in zip(below, ELEMENTS):
        for column in COLORS:
            by_block = [rows[f"{element}: retrieval, block {block}"][column]["values"]
                        for block in range(1, cfg.depth + 1)]
            plot_seeds(axes, column, [dict(enumerate(one, 1)) for one in zip(*by_block)])
        axes.axvline(max(cfg.equiv_layers), color="black", linestyle=":", linewidth=0.8)
        axes.set(xlabel="after block (dotted: SER's)", title=f"{element}: patch retrieval")
    above[0].legend(fontsize="small")
    below[0].legend(fontsize="small")

# ==== Command line ================================================================================
def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The flags of this script, and the settings that all arms share. Raises UserError."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    parser.add_argument("--data", required=True, help="with train/CLASS/... and val/CLASS/...")
    parser.add_argument("--out", default="runs/imagenette", help="of the runs [runs/imagenette]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    parser.add_argument("--figure", default="", help="the PNG; none: imagenette.png in --out")
    parser.add_argument("--without", nargs="+", default=[], choices=OPTIONAL,
                        help=f"measurements to leave out: {' '.join(OPTIONAL)}")
    options, rest = parser.parse_known_args(argv)
    given = {argument.partition("=")[0] for argument in rest}
    taken = {"--seed", "--weight"} & given
    require(not taken, f"{' '.join(taken)}: the arms or their seeds differ in it, leave it out")
    require("--save-every" not in given, "--save-every: the encoder is kept at every epoch")
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one is twice")
    require(options.data != "", "--data is empty: an unset shell variable?")
    folder = Path(options.figure).parent
    require(folder.is_dir(), f"--figure {options.figure}: there is no such folder")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands that it prints")
    size = GPU if torch.cuda.is_available() else CPU
    cfg = shared(options.data, size, rest, measures.Kept)
    require(cfg.ratio > 0, "--ratio 0 leaves SER no images: moco alone has it")
    return options, cfg

def run(options: argparse.Namespace, cfg: Config) -> str:
    """Train and measure what is missing; returns what to print. Raises UserError and SystemExit."""
    figure = empty_figure(13, 5.6)     # now, not after hours
    settings = eval_linear.Settings(data=cfg.data, test=())
    classes = eval_linear.collect(settings, cfg.image_size)[0]
    paths = ser.list_images(cfg.data)
    out = Path(options.out)
    total = steps_of(cfg, len(paths))
    runs: dict[str, list[Config]] = {}
    for arm, changes in ARMS.items():
        runs[arm] = [dataclasses.replace(cfg, seed=seed, out=str(out / f"{arm}-{seed}"), **changes)
                     for seed in options.seeds]
        for one in runs[arm]:     # a mistake shows now, too
            finished(one, total)
    corrupted = out / "corrupted"
    if "corruptions" not in options.without:     # what is there already stays
        corruptions.make(str(corrupted), cfg.data, measures.CORRUPTED, 0, cfg.workers)
    found: dict[str, list[dict[str, float]]] = {column: [] for column in COLORS}
    curves: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    terms = []
    for place in range(len(options.seeds)):     # all arms of a seed, so that a part is paired
        for arm in ARMS:
            one = runs[arm][place]
            if not finished(one, total):
                train(one)
            found[arm].append(measure(one, options.without, corrupted))
            if "curve" not in options.without:
                curves[arm].append(measures.neighbours(one))
        found["untrained"].append(measure(one, options.without, corrupted, random_init=True))
        terms.append(measures.gradient_terms(one, paths))

    rows = compare(found)
    spent = 0.0
    for cfgs in runs.values():
        spent += sum(map(minutes, cfgs))
    layer = max(cfg.equiv_layers)
    names = [name for name in rows if "%" in name and "severity" not in name]
    for element in ELEMENTS:
        names += [f"{element}: retrieval, block {layer}",
                  f"{element}: retrieval, block {cfg.depth}",
                  f"{element}: score, block {cfg.depth}"]
    text = [markdown({name: rows[name] for name in names}), ""]
    for when in ("untrained", "trained"):
        inv, equiv, cosine = (mean(one[when][key] for one in terms)
                              for key in ("inv", "equiv", "cosine"))
        text.append(f"SER {when}, gradient norms in blocks 1 to {layer}: L_inv {inv:.3g}, lambda "
                    f"L_equiv {equiv:.3g} ({equiv / inv:.2g} of it), cosine between them "
                    f"{cosine:.2g}.")
    chance = (cfg.patch_size / cfg.image_size) ** 2 / 32
    settings = shlex.join(flags(dataclasses.replace(cfg, data="")))
    text.append(f"Seeds {' '.join(map(str, options.seeds))}; {len(paths)} images, {total} steps of "
                f"{cfg.batch_size}, {spent:.0f} minutes of training in all; chance: accuracy "
                f"{100 / len(classes):.3g} %, retrieval {chance:.2g}; {settings}")
    eval_linear.write_json(out / "imagenette.json", {
        "seeds": options.seeds, "images": len(paths), "steps": total, "minutes": spent,
        "arms": ARMS, "settings": vars(cfg), "rows": rows, "curves": curves, "gradients": terms,
        "text": text})
    draw(figure, runs, rows, {} if "curve" in options.without else curves)
    write_png(figure, Path(options.figure or out / "imagenette.png"))
    return "\n".join(text)

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code: 0, 2 after one line, or 128 + a signal."""
    return ser.guard(PROGRAM, lambda: resumable(lambda: print(run(*parse(argv)))))

if __name__ == "__main__":
    ser.leave(main())
