"""The paper's ablations: where L_equiv acts and [CLS] enters, all layers, the group, r and lambda.

    python -m paper.experiments.layers                           drawn images, 21 runs
    python -m paper.experiments.layers --panels layer cls        the figure alone, 9 runs
    python -m paper.experiments.layers --data imagenette2-160 --seeds 0 1

The paper, ViT-S, 100 epochs of ImageNet, top-1 (Table 4, and the tables of its appendix):
    layer       3 / 9 / 12: 69.28 / 68.72 / 68.18, score of rot90 .840 / .888 / .924
    all layers  69.21
    group       full 69.28, without rot90 69.17, without rot90 and hflip 69.12, without rot90 and
                scale 68.67
    r           0 / .005 / .01 / .02: 68.44 / 69.08 / 69.28 / 68.30
    lambda      0 / .5 / 1 / 5 / 10: 68.82 / 69.28 / 68.92 / 68.73 / 68.67
The figure's values are in its picture alone (left top-1, right top-5). In the release one setting
is the layer and the place of [CLS] in one, and the last layer crashes.

Flags of ser.py go to all runs alike. It prints a table, a row for each point of a panel (the base
run is one of each): linear heads and 20-NN on features of centre crops, also less the base run's of
the same seed; the scores of Table 4, and retrieval, after the last block. The table goes to
layers-PANELS-SEEDS.json in --out, the two panels of the paper's figure to a PNG of that name. Runs
that are there are skipped, and after SIGTERM or Ctrl-C the same command continues.

A linear head reads [CLS] after the last four blocks that have one, after fewer where it enters
late, and after four again where [CLS] is there from the start, as in the last point of panel
`layer`: part of a fall, or rise, of accuracy is the head's. 20-NN reads the last [CLS] in all runs.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, Sequence

import eval_linear
import ser
from paper.experiments.curves import empty_figure, write_png
from paper.experiments.runs import (ELEMENTS, PLAIN, Rows, base_settings, budget, complete,
                                    evaluate, markdown, over_seeds, resumable, source_of, steps_of)
from ser import Config, require

PROGRAM = "paper.experiments.layers"

# ==== The grid ====================================================================================
Grid = dict[str, dict[str, dict[str, Any]]]     # panel -> point -> settings

def grid(base: Config) -> Grid:
    """What every panel varies of `base`, whose run is a point of each panel."""
    depth = base.depth
    own = base.equiv_layers
    scaled = {max(1, round(place * depth / 12)) for place in (1, 3, 6, 9, 12)}     # the paper's
    places = sorted(scaled | {max(own)})
    return {
        # [CLS] enters after the layer of L_equiv. After the last block it could not: there it is a
        # plain ViT's.
        "layer": {str(l): dict(equiv_layers=(l,), cls_layer=0 if l == depth else l)
                  for l in places},
        "cls": {str(c): dict(equiv_layers=own, cls_layer=c) for c in (0, *places) if c < depth},
        # Choice: [CLS] enters where the base run has it; the paper does not say.
        "all": {"one layer": {}, "all layers": dict(equiv_layers=tuple(range(1, depth + 1)))},
        "group": {"full": {},
                  "- rot90": dict(group=("hflip", "scale")),
                  "- rot90 - hflip": dict(group=("scale",)),
                  "- rot90 - scale": dict(group=("hflip",))},
        "r": {"0 (MoCo-v3)": PLAIN,
              f"{base.ratio / 2:g}": dict(ratio=base.ratio / 2),
              f"{base.ratio:g}": {},
              f"{base.ratio * 2:g}": dict(ratio=base.ratio * 2)},
        "lambda": {f"{weight:g}": dict(weight=weight)
                   for weight in (0.0, 0.1, 0.5, 1.0, 5.0, 10.0)}}     # the paper's, and 0.1

def run_name(base: Config, settings: dict[str, Any]) -> str:
    """The folder of a run, by what differs from `base`: equal runs of two panels are one."""
    words = []
    for name, value in sorted(settings.items()):
        if value != getattr(base, name):
            values = value if isinstance(value, tuple) else (value,)
            words += [name, *map(str, values)]
    return "-".join(words) or "base"

def runs(base: Config, points: Grid, out: Path, seeds: Sequence[int]) -> dict[str, list[Config]]:
    """Name -> the settings of the run with each seed."""
    found = {}
    for panel in points.values():
        for settings in panel.values():
            name = run_name(base, settings)
            found[name] = [dataclasses.replace(base, **settings, seed=seed,
                                               out=str(out / f"{name}-{seed}")) for seed in seeds]
    return found

# ==== Report ======================================================================================
def summary(measured: list[dict[str, float]], of_base: list[dict[str, float]],
            depth: int) -> dict[str, dict[str, Any]]:
    """The row of a run. measured, of_base: what `evaluate` found of it and of the base run, for
    each seed."""
    found = {}
    for head in ("linear", "20-NN"):
        name = f"{head}, top-1 %"
        pairs = zip(measured, of_base)
        found[name] = over_seeds([one[name] for one in measured])
        found[f"{head} - base %"] = over_seeds([one[name] - base[name] for one, base in pairs])
    for measure in ("score", "retrieval"):
        for element in ELEMENTS:
            name = f"{element}: {measure}, block {depth}"
            found[f"{element} {measure}"] = over_seeds([one[name] for one in measured])
    return found

def draw(figure: Any, points: Grid, rows: Rows, base: Config) -> None:
    """Left, by the layer of L_equiv; right, by the layer after which [CLS] enters. Thin lines are
    seeds; on the axis to the right, dotted, the score of Table 4 after the last block."""
    colors = {"linear, top-1 %": "tab:green", "20-NN, top-1 %": "tab:blue"}
    panels = [panel for panel in ("layer", "cls") if panel in points]
    titles = {"layer": "L_equiv and [CLS] at layer (at the last: [CLS] at 0)",
              "cls": "[CLS] enters after block"}
    for axes, panel in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels):
        places = [int(point) for point in points[panel]]
        found = [rows[run_name(base, settings)] for settings in points[panel].values()]
        for name, color in colors.items():
            accuracy = [row[name] for row in found]
            for values in zip(*(one["values"] for one in accuracy)):
                axes.plot(places, values, color=color, linewidth=0.5, alpha=0.5)
            axes.plot(places, [one["mean"] for one in accuracy], "o-", color=color, label=name)
        axes.set(xlabel=titles[panel], ylabel="top-1 %", xticks=places)
        right = axes.twinx()
        for element, color in zip(ELEMENTS, ("tab:red", "tab:orange", "black")):
            scores = [row[f"{element} score"]["mean"] for row in found]
            right.plot(places, scores, ":", color=color, label=f"{element}, score")
        right.set(ylabel="score (cosine) after the last block")
    labelled = [line for each in (axes, right) for line in each.get_legend_handles_labels()[0]]
    figure.legend(handles=labelled, loc="outside lower center", ncols=5)

# ==== Command line ================================================================================
def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config, Grid]:
    """The flags of this script, the settings that all runs share, and the panels asked for. Raises
    UserError."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    parser.add_argument("--data", help="with train/CLASS/... and val/CLASS/...")
    parser.add_argument("--out", default="runs/layers", help="folder of the runs [runs/layers]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of all runs [0]")
    parser.add_argument("--panels", nargs="+", default=[], help="of the grid [all]")
    options, rest = parser.parse_known_args(argv)
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one is twice")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands that it prints")
    given = {argument.partition("=")[0] for argument in rest}
    taken = given & {"--seed", "--equiv-layers", "--cls-layer", "--group", "--weight"}
    require(not taken, f"{' '.join(taken)}: the runs differ in it, leave it out")
    base = base_settings(options.data, rest)
    points = grid(base)
    panels = options.panels or list(points)
    wrong = [panel for panel in panels if panel not in points]
    require(not wrong, f"--panels {' '.join(wrong)}: choose among {' '.join(points)}")
    return options, base, {panel: points[panel] for panel in panels}

def work(argv: Sequence[str] | None) -> None:
    """Train and measure what is missing, and print. Raises UserError and SystemExit."""
    options, base, points = parse(argv)
    figure = empty_figure(10, 4)     # now, not after hours
    source = source_of(base)
    total = steps_of(base, len(source))
    out = Path(options.out)
    configs = runs(base, points, out, options.seeds)
    measured = complete(configs, total, ser.digest(source),
                        lambda cfg: evaluate(cfg, heads=("linear",)))

    rows = {name: summary(found, measured["base"], base.depth)
            for name, found in measured.items()}
    shown = {}
    for panel, its_points in points.items():
        for point, settings in its_points.items():
            shown[f"{panel}: {point}"] = rows[run_name(base, settings)]
    spent, sentence = budget(configs, options.seeds, len(source), total)
    text = f"{markdown(shown)}\n\n{sentence}."
    if len(options.seeds) == 1:
        text += " One seed: differences of a few points say nothing."
    stem = "-".join(map(str, ["layers", *options.panels, *options.seeds]))
    eval_linear.write_json(out / f"{stem}.json", {
        **spent, "settings": vars(base), "grid": points, "rows": shown, "text": text})
    if "layer" in points or "cls" in points:
        draw(figure, points, rows, base)
        write_png(figure, out / f"{stem}.png")
    print(text)

def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid and print; returns the exit code: 0, 2 after one line, or 128 + a signal."""
    return ser.guard(PROGRAM, lambda: resumable(lambda: work(argv)))

if __name__ == "__main__":
    ser.leave(main())
