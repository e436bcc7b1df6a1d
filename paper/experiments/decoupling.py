"""The paper's add-ons at the last layer and at SER's: its table "layer decoupling", and Table 1.

    python -m paper.experiments.decoupling                       drawn images, 3 seeds, 30 runs
    python -m paper.experiments.decoupling --data imagenette2-160

The paper, ViT-S, 100 epochs of ImageNet, linear top-1 (M parameters):
                                  layer 12    layer 3
    MoCo-v3 (42.9)                68.44
    SER (43.4)                                69.28
    AugSelf (43.7)                67.55       68.23
    EquiMod (43.3)                68.95       69.51
    STL (62.2)                    65.49
    E-SSL (43.3; 2+4 views)       70.6

An add-on's loss is on [CLS] after block --layer, the last one or SER's, and [CLS] is there from the
first block on. Images, epochs and batch are alike, and weights are those of the methods' scripts;
nothing was tuned. EquiMod encodes a third view, E-SSL four small crops. STL and E-SSL at SER's
layer are ours. --ratio, --weight, --temperature, --cls-layer and --group go to SER alone, all other
flags of ser.py to all runs alike; --equiv-layers is SER's layer, and so the add-ons' early one.

It prints three tables: a row for each run, with differences to MoCo-v3 within a seed, retrieval
after SER's block, and the cost; what the layer changed; whether a method learned its own task,
beside chance. Numbers and picture go to decoupling-SEEDS.json and .png in --out. After SIGTERM or
Ctrl-C the same command continues. Seeds may be trained side by side, which slows their s/step:
--seeds 0 and --seeds 1 in two processes with one --out; then --seeds 0 1 only shows both.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Sequence

import torch

import eval_linear
import ser
from paper.experiments.curves import empty_figure, records, series, write_png
from paper.experiments.runs import (ELEMENTS, PLAIN, Measured, Rows, base_settings, budget,
                                    complete, evaluate, markdown, minutes, over_seeds, resumable,
                                    retrieval_chance, source_of, steps_of)
from paper.methods import augself, equimod, essl, stl
from ser import Config, require

PROGRAM = "paper.experiments.decoupling"
METHODS = {"AugSelf": augself, "EquiMod": equimod, "STL": stl, "E-SSL": essl}
ACCURACIES = ("linear, %", "20-NN, %")
# Name in the table -> key in log.jsonl, where KEY_chance is the value at chance, for AugSelf that
# of a head which always says 0. A loss is shown in percent of it.
TASKS = {
    "MoCo-v3": {"L_inv, % of chance": "inv"},
    "SER": {"L_equiv, % of chance": "equiv"},
    "AugSelf": {"crop loss, % of chance": "crop", "color loss, % of chance": "color"},
    "EquiMod": {"eqgain": "eqgain", "top-1": "equiv_top1"},
    "STL": {"action top-1": "action_top1", "reading top-1": "reading_top1"},
    "E-SSL": {"turn top-1": "turns_top1"},
}

# ==== The runs ====================================================================================
def add_on(module: Any, base: Config, layer: int) -> Any:
    """The settings of an add-on at a layer: those of `base`, but for the fields that the add-on has
    itself (`added`, such as cls_layer, 0) or refuses (`unused`), which are as in its script."""
    kind = module.Settings
    own = kind() if base.data else kind(**kind.drawn)
    kept = {*kind.added, *kind.unused}
    alike = {name: value for name, value in vars(base).items() if name not in kept}
    cfg = dataclasses.replace(own, **alike, layer=layer)
    if module is essl:
        # Choice: the small crop keeps the share of the view's side that its script gives it.
        side = base.image_size * own.local_size / own.image_size
        patches = max(1, round(side / base.patch_size))
        cfg = dataclasses.replace(cfg, local_size=patches * base.patch_size)
    return cfg

Runs = dict[str, list[Any]]     # title of a row -> the settings of the run with each seed

def runs(base: Config, out: Path, seeds: Sequence[int]) -> Runs:
    """All runs, in folders below `out`. Raises UserError where the two layers are one."""
    layer = max(base.equiv_layers)
    require(layer < base.depth, f"--equiv-layers {layer}: must be before the last block, "
            f"{base.depth}, to which SER's is compared")
    settings = {"MoCo-v3": dataclasses.replace(base, **PLAIN), "SER": base}
    for method, module in METHODS.items():
        for at in (base.depth, layer):
            settings[f"{method}, layer {at}"] = add_on(module, base, at)
    found = {}
    for title, cfg in settings.items():
        name = title.lower().replace(", layer ", "-")
        found[title] = [dataclasses.replace(cfg, seed=seed, out=str(out / f"{name}-{seed}"))
                        for seed in seeds]
    return found

def method_of(title: str) -> str:
    """The method of a row."""
    return title.partition(",")[0]

def builder(title: str) -> Callable[[Any], Any]:
    """What makes the model of a row's settings."""
    method = method_of(title)
    return METHODS[method].build if method in METHODS else ser.build

# ==== Measurements ================================================================================
def measure(cfg: Any, layer: int, random_init: bool = False) -> dict[str, float]:
    """Accuracies, and retrieval after block `layer`, of a run or of the encoder it began with."""
    found = evaluate(cfg, random_init, heads=("linear",))
    values = {"linear, %": found["linear, top-1 %"], "20-NN, %": found["20-NN, top-1 %"]}
    for element in ELEMENTS:
        values[element] = found[f"{element}: retrieval, block {layer}"]
    return values

def step_seconds(cfg: Any) -> float:
    """Seconds a step, the mean over the run, with loading and saving."""
    return 60 * minutes(cfg) / max(records(cfg.out))

def parameters(title: str, cfg: Any) -> int:
    """How many parameters are trained."""
    with torch.device("meta"):     # shapes, no memory
        model = builder(title)(cfg)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def logged(cfg: Any, key: str) -> float:
    """The mean of a logged value over the last quarter of the steps: a record is of one batch."""
    values = series(records(cfg.out), key)
    require(len(values) > 0, f"{cfg.out}/log.jsonl has no {key}: remove that run to do it again")
    begin = 0.75 * max(values)
    return mean(value for step, value in values.items() if step > begin)

# ==== Report ======================================================================================
def differences(found: Measured, ours: str, other: str, name: str) -> dict[str, Any]:
    """What a row has more than another, seed by seed."""
    pairs = zip(found[ours], found[other])
    return over_seeds([a[name] - b[name] for a, b in pairs])

def summary(found: Measured, configs: Runs) -> Rows:
    """The main table."""
    table: Rows = {title: {} for title in found}
    for title, columns in table.items():
        measured = found[title]
        for name in measured[0]:
            columns[name] = over_seeds([one[name] for one in measured])
            if name in ACCURACIES:     # paired, within a seed
                paired = differences(found, title, "MoCo-v3", name)
                columns[f"{name} - MoCo-v3"] = None if title == "MoCo-v3" else paired
        columns |= {"s/step": None, "parameters, M": None}
        if title in configs:
            cfgs = configs[title]
            columns["s/step"] = over_seeds([step_seconds(cfg) for cfg in cfgs])
            columns["parameters, M"] = over_seeds([parameters(title, cfgs[0]) / 1e6])
    return table

def decoupled(found: Measured, layer: int, last: int) -> Rows:
    """A row for each add-on: what the accuracies at `layer` are above those at the last one."""
    rows: Rows = {}
    for method in METHODS:
        titles = f"{method}, layer {layer}", f"{method}, layer {last}"
        rows[f"{titles[0]} - layer {last}"] = {
            name: differences(found, *titles, name) for name in ACCURACIES}
    return rows

def tasks(configs: Runs) -> Rows:
    """A row for each task of each run: what the log says of it, beside chance."""
    found: Rows = {}
    for title, cfgs in configs.items():
        for name, key in TASKS[method_of(title)].items():
            values = [logged(cfg, key) for cfg in cfgs]
            chances = [logged(cfg, f"{key}_chance") for cfg in cfgs]
            if "%" in name:
                values = [100 * a / b for a, b in zip(values, chances)]
                chances = [100.0]
            chance = over_seeds([mean(chances)])     # its spread says nothing
            found[f"{title}: {name}"] = {"reached": over_seeds(values), "chance": chance}
    return found

def draw(figure: Any, table: Rows, layer: int) -> None:
    """A panel for each column. An add-on has two places, joined for each seed: left, hollow, at the
    last layer; right, filled, at SER's. Dotted: MoCo-v3; dashed: untrained."""
    names = list(TASKS)
    for axes, column in zip(figure.subplots(2, 3).flatten(), (*ACCURACIES, "s/step", *ELEMENTS)):
        for place, name in enumerate(names):
            titles = [title for title in table if method_of(title) == name]
            found = [table[title][column] for title in titles]
            x = [place, place + 0.3][:len(found)]
            for values in zip(*(one["values"] for one in found)):
                axes.plot(x, values, ".-", color="gray", linewidth=0.5, markersize=3)
            fills = ["none", "full"][-len(found):]
            for at, one, fill in zip(x, found, fills):
                axes.plot(at, one["mean"], "o", color=f"C{place}", fillstyle=fill)
        for title, style in (("MoCo-v3", ":"), ("untrained", "--")):
            if table[title][column] is not None:
                height = table[title][column]["mean"]
                axes.axhline(height, color="black", linestyle=style, linewidth=0.8)
        axes.set_xticks(range(len(names)), names, fontsize="small")
        axes.set(title=f"{column} retrieval, block {layer}" if column in ELEMENTS else column)

# ==== Command line ================================================================================
def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The flags of this script, and the settings that all runs share. Raises UserError."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    parser.add_argument("--data", help="with train/CLASS/... and val/CLASS/...")
    parser.add_argument("--out", default="runs/decoupling", help="of the runs [runs/decoupling]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    options, rest = parser.parse_known_args(argv)
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one is twice")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands that it prints")
    given = {argument.partition("=")[0] for argument in rest}
    require("--seed" not in given, "--seed: the runs differ in it, use --seeds")
    return options, base_settings(options.data, rest)

def work(argv: Sequence[str] | None) -> None:
    """Train and measure what is missing, and print. Raises UserError and SystemExit."""
    options, base = parse(argv)
    figure = empty_figure(12, 6)     # now, not after hours
    source = source_of(base)
    total = steps_of(base, len(source))
    layer = max(base.equiv_layers)
    out = Path(options.out)
    configs = runs(base, out, options.seeds)
    trained = complete(configs, total, ser.digest(source), lambda cfg: measure(cfg, layer),
                       builder)
    # Choice: MoCo-v3's encoder, as most runs began with a plain ViT.
    untrained = [measure(cfg, layer, random_init=True) for cfg in configs["MoCo-v3"]]
    found = {"untrained": untrained, **trained}
    table = summary(found, configs)
    parts = {"runs": table, "decoupled": decoupled(found, layer, base.depth),
             "tasks": tasks(configs)}
    spent, sentence = budget(configs, options.seeds, len(source), total)
    text = "\n\n".join(map(markdown, parts.values()))
    text += (f"\n\n{sentence}. Retrieval is after block {layer}, chance "
             f"{retrieval_chance(base):.2g}.")
    stem = "-".join(map(str, ["decoupling", *options.seeds]))     # of these seeds, and no others
    eval_linear.write_json(out / f"{stem}.json", {
        **spent, "text": text,
        "settings": {title: vars(cfgs[0]) for title, cfgs in configs.items()}, **parts})
    draw(figure, table, layer)
    write_png(figure, out / f"{stem}.png")
    print(text)

def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and print; returns 0, 2 after one line, or 128 + a signal."""
    return ser.guard(PROGRAM, lambda: resumable(lambda: work(argv)))

if __name__ == "__main__":
    ser.leave(main())
