"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160
    python -m paper.experiments.imagenette --data DIR --seeds 0 --without corruptions

DIR holds train/CLASS/... and val/CLASS/... Three seeds, nine runs of 20 epochs at 64 pixels: hours
on a CPU; on a GPU ViT-S for 100 epochs (runs.py). The arms of a seed have the same budget, the same
images in the same order and the same flags of ser.py, and differ in ARMS alone (control: lambda 0).

It prints a table, mean ± std over seeds and paired differences, beside SER's encoder before
training:

    linear, MLP, 20-NN   on features of centre crops; the heads' rate chosen on held-out training
                         images
    corrupted            top-1 of the linear head on made corruptions of the first ten val images of
                         a class: made at 224 pixels, then reduced, so that noise is milder
    told from a pair     how well turns and flips can be told from frozen tokens
    retrieval, score     after SER's block and the last: eval_linear.py's, and that of Table 4

and below it SER's gradient norms, images, steps, minutes of all runs added up. All numbers go to
imagenette-SEEDS.json in --out; learning curves, 20-NN after about ten of the epochs (of 2,000 and
1,000 images), retrieval and corruptions to a PNG of that name. After SIGTERM or Ctrl-C the same
command continues. To train seeds side by side, call it with --seeds 0 and with --seeds 1 and the
same --out; a last call with both trains nothing.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import shlex
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Sequence

import eval_linear
import ser
from paper.evaluations import corruptions
from paper.experiments import measures
from paper.experiments.curves import empty_figure, records, series, write_png
from paper.experiments.runs import (ELEMENTS, PLAIN, Rows, base_settings, budget, complete,
                                    evaluate, flags, markdown, over_seeds, resumable,
                                    retrieval_chance, source_of, steps_of)
from ser import Config, require

PROGRAM = "paper.experiments.imagenette"
ARMS: dict[str, dict[str, Any]] = {
    "moco": PLAIN, "control": dict(weight=0.0), "ser": {}}
COLORS = {"untrained": "gray", "moco": "tab:blue", "control": "tab:orange", "ser": "tab:green"}
OPTIONAL = ("mlp", "curve", "moved", "corruptions")

# ==== Measurements ================================================================================
def measure(cfg: Config, without: Sequence[str], corrupted: Callable[[], Path],
            random_init: bool = False) -> dict[str, float]:
    """The rows of a finished run, by name, or of the encoder that it began with. corrupted: makes
    the corruptions, and returns their folder."""
    heads = ("linear",) if "mlp" in without else ("linear", "MLP")
    found = evaluate(cfg, random_init, heads)
    if "moved" not in without:
        found |= measures.moved(cfg, "untrained" if random_init else "trained")
    if "corruptions" not in without:
        found |= measures.corrupted(cfg, corrupted(), random_init)
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
    common = sorted(set.intersection(*map(set, curves)))     # resumed runs have further records
    means = [mean(curve[x] for curve in curves) for x in common]
    axes.plot(common, means, color=COLORS[column], label=column)

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
    for column in COLORS:
        if strengths:
            found = [rows[name][column]["values"] for name in strengths]     # [severity][seed]
            plot_seeds(below[3], column, [dict(enumerate(one, 1)) for one in zip(*found)])
    below[3].set(xlabel="severity", title="made corruptions, top-1 %")
    above[3].set_visible(bool(curves))
    below[3].set_visible(bool(strengths))
    for axes, key in zip(above, ("inv", "equiv", "patch_top1")):
        for arm, cfgs in runs.items():
            # moco has no b2, and the control's is read through a projector that nothing trained.
            if key == "inv" or arm == "ser":
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
    parser.add_argument("--figure", default="", help="the PNG; none: in --out")
    parser.add_argument("--without", nargs="+", default=[], choices=OPTIONAL,
                        help=f"measurements to leave out: {' '.join(OPTIONAL)}")
    options, rest = parser.parse_known_args(argv)
    given = {argument.partition("=")[0] for argument in rest}
    require("--seed" not in given, "--seed: say --seeds")
    require("--save-every" not in given, "--save-every: leave it out, encoders are kept by epochs")
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one is twice")
    folder = Path(options.figure).parent
    require(folder.is_dir(), f"--figure {options.figure}: there is no such folder")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands that it "
            "prints, and then this alone, --without curve")
    require("corruptions" in options.without or importlib.util.find_spec("imagecorruptions"),
            "made corruptions need imagecorruptions-imaug: pip install -r paper/requirements.txt, "
            "or --without corruptions")
    cfg = base_settings(options.data, rest, measures.Kept)
    require(cfg.epochs % 1 == 0 or "curve" in options.without,
            f"--epochs {cfg.epochs}: whole ones, or --without curve")
    require(cfg.weight > 0, f"--weight {cfg.weight}: lambda of SER, more than the control's 0")
    return options, cfg

def run(options: argparse.Namespace, cfg: Config) -> str:
    """Train and measure what is missing; returns what to print. Raises UserError and SystemExit."""
    figure = empty_figure(13, 5.6)     # now, not after hours
    paths = source_of(cfg)
    out = Path(options.out)
    total = steps_of(cfg, len(paths))
    runs: dict[str, list[Config]] = {}
    for arm, changes in ARMS.items():
        runs[arm] = [dataclasses.replace(cfg, seed=seed, out=str(out / f"{arm}-{seed}"), **changes)
                     for seed in options.seeds]

    @functools.cache
    def corrupted_images() -> Path:
        folder = out / "corrupted" / Path(cfg.data).resolve().name     # images that are there stay
        corruptions.make(str(folder), cfg.data, measures.CORRUPTED, 0, cfg.workers)
        return folder

    def measured(one: Config) -> dict[str, float]:
        if "curve" not in options.without:
            measures.neighbours(one)     # a missing encoder shows now, not after all runs
        return measure(one, options.without, corrupted_images)

    found = complete(runs, total, ser.digest(paths), measured)
    found["untrained"] = [measure(one, options.without, corrupted_images, random_init=True)
                          for one in runs["ser"]]
    curves: dict[str, list[dict[str, float]]] = {}
    if "curve" not in options.without:
        curves = {arm: [measures.neighbours(one) for one in cfgs] for arm, cfgs in runs.items()}
    terms = [measures.gradient_terms(one, paths) for one in runs["ser"]]

    rows = compare(found)
    spent, sentence = budget(runs, options.seeds, len(paths), total)
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
        text.append(f"SER {when}, norms of a batch's gradient in blocks 1 to {layer}: L_inv "
                    f"{inv:.3g}, lambda L_equiv {equiv:.3g} ({equiv / inv:.2g} of it), cosine "
                    f"between them {cosine:.2g}.")
    classes = len(eval_linear.collect(eval_linear.Settings(data=cfg.data, test=()), 0)[0])
    settings = shlex.join(flags(dataclasses.replace(cfg, data="")))
    text.append(f"{sentence}; chance: accuracy {100 / classes:.3g} %, retrieval "
                f"{retrieval_chance(cfg):.2g}; {settings}")
    stem = "-".join(map(str, ["imagenette", *options.seeds]))
    eval_linear.write_json(out / f"{stem}.json", {
        **spent, "arms": ARMS, "settings": settings, "rows": rows, "curves": curves,
        "gradients": terms, "text": text})
    draw(figure, runs, rows, curves)
    write_png(figure, Path(options.figure or out / f"{stem}.png"))
    return "\n".join(text)

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code: 0, 2 after one line, or 128 + a signal."""
    return ser.guard(PROGRAM, lambda: resumable(lambda: print(run(*parse(argv)))))

if __name__ == "__main__":
    ser.leave(main())
