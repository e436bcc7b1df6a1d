"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control (lambda = 0) and SER.

    python -m paper.imagenette --data imagenette2-160              three seeds, nine runs: hours on a CPU
    python -m paper.imagenette --data DIR --seeds 0 1 --epochs 5   flags of ser.py go to every arm alike

DIR holds train/CLASS/... and val/CLASS/... The arms of a seed have the same budget and the same images in the
same order; they differ in ARMS alone, and no setting was chosen on one of them. For each: linear probe, its
rate chosen on held-out training images, and 20-NN, on features of centre crops; the equivariance score of
Table 3 after every block; for SER, the gradient norms of both terms. The table goes to stdout, all numbers to
imagenette.json, learning curves and scores to one PNG. After SIGTERM or Ctrl-C the same command continues.
Runs may as well be trained elsewhere, side by side, by the commands of ser.py that it prints.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from tqdm import tqdm

import eval_linear
import ser
from eval_linear import Crops, Settings, Split
from ser import Config, UserError, ViT, require

ARMS: dict[str, dict[str, Any]] = {
    "moco": dict(ratio=0.0, cls_layer=0), "control": dict(weight=0.0), "ser": {}}
COLORS = {"untrained": "gray", "moco": "tab:blue", "control": "tab:orange", "ser": "tab:green"}
ELEMENTS = ("rot90", "hflip", "scale")
IMAGES, BATCHES = 512, 4   # val images of the equivariance score; training batches of the gradient norms

# The grid is 14 x 14, as that of ViT-S/16 at 224 px. A GPU has time for a ViT-S and the paper's epochs.
CPU = dict(image_size=112, patch_size=8, dim=192, depth=6, heads=3, cls_layer=2, equiv_layers=(2,),
           batch_size=32, ratio=0.125, moco_hidden=1024, base_lr=4e-3, warmup_epochs=0.1, epochs=1.0,
           workers=0, log_every=10, save_every=50)
GPU = dict(image_size=112, patch_size=8, batch_size=256, ratio=0.0625, base_lr=6e-4)

# ==== Training ==============================================================================================
def flags(cfg: Config) -> list[str]:
    """The arguments of ser.py that give cfg: all that is not a default."""
    found: list[str] = []
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if value != f.default:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            found += ["--" + f.name.replace("_", "-"), *map(str, values)]
    return found

def finished(cfg: Config, total: int) -> bool:
    """Whether the run in cfg.out has done all steps. Raises UserError for settings that are wrong, or are not
    those of the run that is there."""
    ser.check(cfg, 1)
    model, path = ser.build(cfg), Path(cfg.out, "last.pt")
    step = ser.resume(path, cfg, model, cfg.optimizer(model))
    require(step <= total, f"{path} has done {step} steps, not {total}: it saw other images, use a new --out")
    return step == total

def train(cfg: Config) -> None:
    """Run, or continue, cfg. A stop signal lets it save, then raises SystemExit; the third ends at once."""
    stop: list[int] = []

    def remember(number: int, _: Any) -> None:
        stop.append(number)
        if len(stop) > 2:
            os._exit(128 + number)

    before = [(number, signal.signal(number, remember)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        ser.train(cfg, stop=stop)
    finally:
        for handler in before:
            signal.signal(*handler)
    if stop:   # during the last step, after which training ends by itself
        raise SystemExit(128 + stop[0])

def records(cfg: Config) -> dict[int, dict[str, float]]:
    """Step -> record of log.jsonl; a resumed run does some steps again, and their last record counts."""
    lines = map(json.loads, Path(cfg.out, "log.jsonl").read_text().splitlines())
    found = {record["step"]: record for record in lines if "step" in record}   # the others hold settings
    return {step: found[step] for step in sorted(found)}

def minutes(cfg: Config) -> float:
    """How long the steps of a run took, from the rate since the record before, which each record has."""
    log = records(cfg)
    return sum((step - last) * cfg.batch_size / log[step]["images_per_s"] / 60
               for last, step in zip([0, *log], log))

# ==== Evaluation ============================================================================================
def write(path: Path, found: dict[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    eval_linear.write_whole(path, lambda file: file.write((json.dumps(found, indent=1) + "\n").encode()))

def once(path: Path, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the JSON file `path` holds if it is of the checkpoint beside it and of these settings; else
    measure(), which is written there with both."""
    digest = hashlib.sha256(path.with_name("last.pt").read_bytes()).hexdigest()[:16]   # as eval_linear's
    identity = json.loads(json.dumps({"sha256": digest, "settings": settings}))   # lists for tuples
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if found | identity == found:
            return found
    tqdm.write(f"measuring {path}", file=sys.stderr)
    write(path, found := measure() | identity)
    return found

@torch.no_grad()
def scores(encoder: ViT, images: Tensor, element: str) -> list[list[float]]:
    """eval_linear.equivariance, [cosine, retrieval], after block 1..depth, from one pass for all blocks: that
    takes a third of the time. images: (n, 3, S, S) normalised."""
    sums, blocks = torch.zeros(encoder.depth, 2, dtype=torch.float64), range(1, encoder.depth + 1)
    for n, x in enumerate(images.split(32)):
        g = ser.sample_geometry(len(x), encoder.grid, elements=(element,), generator=ser.rng(element, n))
        g = g._replace(flip=torch.full_like(g.flip, element == "hflip"),
                       turns=(1 + torch.arange(len(x)) % 3) * (element == "rot90"))
        still, moved = (e.maps for e in encoder([x, ser.rho(g, x, encoder.patch_size)], blocks))
        for block in blocks:
            z, z_prime = (m.flatten(2).mT for m in (ser.rho(g, still[block]), moved[block]))
            cosine = F.cosine_similarity(z, z_prime, dim=-1).mean()
            sums[block - 1] += len(x) * torch.stack([cosine, ser.retrieval(z, z_prime)]).double().cpu()
    return (sums / len(images)).tolist()

def evaluate(cfg: Config, val: Split, random_init: bool = False) -> dict[str, float]:
    """All that is measured on a finished run, or on the encoder that it began with, by name."""
    how = Settings(data=cfg.data, checkpoint=str(Path(cfg.out, "last.pt")), test=(), cache=True,
                   select_split=0.1, workers=cfg.workers, random_init=random_init)
    probe = once(how.result, vars(how), lambda: eval_linear.evaluate(how))

    def blocks() -> dict[str, list[list[float]]]:
        """Scores on images that are evenly spread over val, which is sorted by class."""
        device, crops = ser.setup()[0], Crops(val, cfg.image_size, seed=0)
        places = torch.linspace(0, len(val.labels) - 1, min(IMAGES, len(val.labels))).long().tolist()
        images = torch.stack([crops[None, i][0] for i in places]).float() / 255
        images, encoder = ((images - ser.MEAN) / ser.STD).to(device), eval_linear.frozen_encoder(how)[0]
        return {element: scores(encoder.to(device), images, element) for element in ELEMENTS}

    name = f"equivariance{'-random-init' * random_init}.json"
    found = once(how.result.with_name(name), {"data": cfg.data, "images": IMAGES}, blocks)
    return {"linear, top-1 %": probe["linear"]["best"]["val"]["top1"],
            "20-NN, top-1 %": probe["knn"]["val"]["top1"],
            **{f"{element}: {measure}, block {block}": values[i] for element in ELEMENTS
               for i, measure in enumerate(("cosine", "retrieval"))
               for block, values in enumerate(found[element], 1)}}

def gradients(cfg: Config, paths: Sequence[str], checkpoint: Path | None = None) -> dict[str, float]:
    """The norms of the gradients of L_inv and of lambda L_equiv by the weights of the blocks up to the SER
    layer, where both act, and the cosine between the two, of a checkpoint, or at the beginning: means over
    the first batches of the run."""
    device, model = ser.setup()[0], ser.build(cfg)
    if checkpoint:
        model.load_state_dict(ser.load_checkpoint(checkpoint)["model"])
    blocks, views = model.to(device).base.encoder.blocks[:max(cfg.equiv_layers)], ser.Views(paths, cfg)
    sums = torch.zeros(3)
    for step, keys in enumerate(ser.batch_keys(len(paths), cfg, 0, BATCHES, 0, 1)):
        images, draws, _ = default_collate([views[key] for key in keys])
        batch, parts = ser.make_views([x.to(device) for x in images], draws, cfg, step, 0, 1), []
        # SER.forward gives only the sum a gradient; beside 1e6 L_equiv, L_inv is below what counts.
        for model.weight, scale in ((0.0, 1.0), (1e6, cfg.weight / 1e6)):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(batch)["loss"]
            found = torch.autograd.grad(loss, list(blocks.parameters()))
            parts.append(scale * torch.cat([g.flatten() for g in found]))
        inv, equiv = parts
        sums += torch.stack([inv.norm(), equiv.norm(), F.cosine_similarity(inv, equiv, dim=0)]).cpu()
    return dict(zip(("inv", "equiv", "cosine"), (sums / BATCHES).tolist()))

# ==== Report ================================================================================================
def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """found[column]: for each seed, what was measured, by name. Returns rows[name][column]: the values of the
    seeds, mean, and std (n - 1; None for one seed); the last two columns are differences within a seed."""
    rows: dict[str, dict[str, Any]] = {}
    for name in found["ser"][0]:
        columns = {column: [one[name] for one in found[column]] for column in COLORS}
        for other in ("control", "moco"):
            columns[f"ser - {other}"] = [a - b for a, b in zip(columns["ser"], columns[other])]
        rows[name] = {column: {"values": values, "mean": mean(values),
                               "std": stdev(values) if len(values) > 1 else None}
                      for column, values in columns.items()}
    return rows

def table(rows: dict[str, dict[str, Any]]) -> str:
    """Aligned for the screen, and valid Markdown."""
    def cell(name: str, value: dict[str, Any]) -> str:
        numbers = [value["mean"]] if value["std"] is None else [value["mean"], value["std"]]
        return " ± ".join(f"{number:.{2 if '%' in name else 3}f}" for number in numbers)
    lines = [[name, *(cell(name, value) for value in columns.values())] for name, columns in rows.items()]
    lines.insert(0, ["", *next(iter(rows.values()))])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

def empty_figure() -> Any:
    """A figure of matplotlib's that needs no screen. Raises UserError where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the figure needs matplotlib: pip install -r paper/requirements.txt") from None
    return Figure(figsize=(10, 5.6), layout="constrained")

def draw(figure: Any, path: Path, runs: dict[str, list[Config]], rows: dict[str, dict[str, Any]]) -> None:
    """Above, learning curves; below, the cosine after every block. Thin lines: seeds; thick: their mean."""
    cfg, (above, below) = runs["ser"][0], figure.subplots(2, 3)

    def lines(axes: Any, column: str, curves: list[dict[int, float]]) -> None:
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), color=COLORS[column], linewidth=0.5, alpha=0.5)
        shared = sorted(set.intersection(*map(set, curves)))   # a stopped run has records of its own
        axes.plot(shared, [mean(c[x] for c in curves) for x in shared], color=COLORS[column], label=column)

    for axes, key, chance in zip(above, ("inv", "equiv", "patch_top1"), ("inv_chance", "equiv_chance", "")):
        for arm in [arm for arm in runs if key == "inv" or arm != "moco"]:   # moco has no b2
            lines(axes, arm, [{step: record[key] - record.get(chance, 0.0) for step, record in
                               records(run).items()} for run in runs[arm]])
        axes.set(xlabel="step", title=f"training: {key}{chance and ' - ' + chance}")
    for axes, element in zip(below, ELEMENTS):
        for column in COLORS:
            names = [f"{element}: cosine, block {block}" for block in range(1, cfg.depth + 1)]
            values = zip(*(rows[name][column]["values"] for name in names))
            lines(axes, column, [dict(enumerate(seed, 1)) for seed in values])
        axes.axvline(max(cfg.equiv_layers), color="black", linestyle=":", linewidth=0.8)
        axes.set(xlabel="after block (dotted: SER's)", title=f"{element}: equivariance score")
    for axes in (above[0], below[0]):
        axes.legend(fontsize="small")
    figure.savefig(drawn := io.BytesIO(), dpi=100)
    small = Image.open(drawn).convert("RGB").quantize(64)   # a third of the bytes
    eval_linear.write_whole(path, lambda file: small.save(file, "PNG"))

# ==== Command line ==========================================================================================
def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The flags of this script, and the settings that all arms share. Raises UserError."""
    parser = argparse.ArgumentParser("paper.imagenette", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train/CLASS/... and val/CLASS/...")
    parser.add_argument("--out", default="runs/imagenette", help="folder of the runs [runs/imagenette]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all arms [0 1 2]")
    parser.add_argument("--figure", default="", help="the PNG; none: imagenette.png in --out")
    parser.error = lambda message: require(False, f"{message}; see --help")
    options, rest = parser.parse_known_args(argv)
    taken = {"--seed", "--weight"} & {argument.partition("=")[0] for argument in rest}
    require(not taken, f"{' '.join(taken)}: the arms or their seeds differ in it, leave it out")
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one of them twice")
    require(options.data != "", "--data is empty: an unset shell variable?")
    require(Path(options.figure).parent.is_dir(), f"--figure {options.figure}: there is no such folder")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands of ser.py that it prints")
    size = GPU if torch.cuda.is_available() else CPU
    cfg = ser.parse([*flags(Config(data=options.data, **size)), *rest])
    require(cfg.ratio > 0, "--ratio 0 leaves SER no images: moco alone has it")
    return options, cfg

def run(options: argparse.Namespace, cfg: Config) -> str:
    """Train and measure what is missing; returns what to print. Raises UserError and SystemExit."""
    figure = empty_figure()   # now, not after hours
    classes, splits = eval_linear.collect(Settings(data=cfg.data, test=()), cfg.image_size)
    paths, out = ser.list_images(cfg.data), Path(options.out)
    total = max(1, round(cfg.epochs * (len(paths) // cfg.batch_size)))   # as ser.train
    runs = {arm: [dataclasses.replace(cfg, seed=seed, out=str(out / f"{arm}-{seed}"), **changes)
                  for seed in options.seeds] for arm, changes in ARMS.items()}
    everything = [one for cfgs in runs.values() for one in cfgs]
    for one in everything:   # a mistake shows now, too
        finished(one, total)
    found: dict[str, list[dict[str, float]]] = {column: [] for column in COLORS}
    terms: list[dict[str, dict[str, float]]] = []
    for seed in range(len(options.seeds)):   # all arms of a seed, then the next: a part of the work is paired
        for arm in ARMS:
            one = runs[arm][seed]
            if not finished(one, total):
                tqdm.write(f"python ser.py {shlex.join(flags(one))}", file=sys.stderr)
                train(one)
            found[arm].append(evaluate(one, splits["val"]))
        found["untrained"].append(evaluate(one, splits["val"], random_init=True))
        terms.append(once(Path(one.out, "gradients.json"), {"data": cfg.data, "batches": BATCHES},
                          lambda: {"untrained": gradients(one, paths),
                                   "trained": gradients(one, paths, Path(one.out, "last.pt"))}))

    rows, layer, spent = compare(found), max(cfg.equiv_layers), sum(map(minutes, everything))
    names = [name for name in rows if "%" in name] + [
        f"{element}: {name}" for element in ELEMENTS for name in
        (f"cosine, block {layer}", f"retrieval, block {layer}", f"cosine, block {cfg.depth}")]
    text = [table({name: rows[name] for name in names}), ""]
    for when in ("untrained", "trained"):
        inv, equiv, cosine = (mean(one[when][key] for one in terms) for key in ("inv", "equiv", "cosine"))
        text.append(f"SER {when}, gradient norms in blocks 1 to {layer}: L_inv {inv:.3g}, lambda L_equiv "
                    f"{equiv:.3g} ({equiv / inv:.2g} of it), cosine between them {cosine:.2g}.")
    settings = shlex.join(flags(dataclasses.replace(cfg, data="")))
    text.append(f"Seeds {' '.join(map(str, options.seeds))}; {len(paths)} images, {total} steps of "
                f"{cfg.batch_size}, {spent:.0f} minutes of training in all; chance: accuracy "
                f"{100 / len(classes):.3g} %, retrieval {(cfg.patch_size / cfg.image_size) ** 2 / 32:.2g}; "
                f"{settings}")
    write(out / "imagenette.json", {
        "seeds": options.seeds, "images": len(paths), "steps": total, "minutes": spent, "settings": vars(cfg),
        "arms": ARMS, "rows": rows, "gradients": terms, "text": text})
    draw(figure, Path(options.figure or out / "imagenette.png"), runs, rows)
    return "\n".join(text)

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code: 0, 2 after one line about a mistake, 128 + a signal."""
    try:
        print(run(*parse(argv)))
        return 0
    except UserError as error:
        code, message = 2, str(error)
    except (SystemExit, KeyboardInterrupt) as stopped:
        code, message = getattr(stopped, "code", 128 + signal.SIGINT), "stopped; the same command continues"
    if code:   # --help has none
        tqdm.write(f"paper.imagenette: {message}", file=sys.stderr)
    return code

if __name__ == "__main__":
    ser.leave(main())
