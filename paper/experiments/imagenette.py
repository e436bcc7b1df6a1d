"""The paper's central comparison at a size that anyone can run: MoCo-v3, the control, and SER.

    python -m paper.experiments.imagenette --data imagenette2-160
    python -m paper.experiments.imagenette --data DIR --seeds 0 1 --epochs 5

DIR holds train/CLASS/... and val/CLASS/... Three seeds, nine runs: hours on a CPU. Flags of ser.py
go to every arm alike. The arms of a seed have the same budget and the same images in the same order
and differ in ARMS alone (control: lambda = 0); no setting was chosen on one of them.

It prints a table, a row per measure, mean ± std over seeds and paired differences: linear and MLP
heads (their rate chosen on held-out training images) and 20-NN, on features of centre crops; after
blocks, retrieval and the score of Table 3; below it SER's gradient norms, images, steps, minutes.
All numbers go to imagenette.json in --out, learning curves and retrieval to one PNG. After SIGTERM
or Ctrl-C the same command continues. Runs may as well be trained side by side elsewhere, by the
commands of ser.py that it prints.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
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
from torch.utils.data import default_collate
from tqdm import tqdm

import eval_linear
import ser
from eval_linear import Settings
from paper.experiments.curves import empty_figure, records, series, write_png
from ser import Common, Config, require

PROGRAM = "paper.experiments.imagenette"
ARMS: dict[str, dict[str, Any]] = {
    "moco": dict(ratio=0.0, cls_layer=0), "control": dict(weight=0.0), "ser": {}}
COLORS = {"untrained": "gray", "moco": "tab:blue", "control": "tab:orange", "ser": "tab:green"}
ELEMENTS = ("rot90", "hflip", "scale")
BATCHES = 4     # of training, for the gradient norms
FREE = ("data", "out", "init", "workers", "log_every", "save_every", "compile")     # may change

# The grid is 14 x 14, as ViT-S/16's at 224 px. A GPU has time for ViT-S and the paper's epochs.
CPU = dict(image_size=112, patch_size=8, dim=192, depth=6, heads=3, cls_layer=2, equiv_layers=(2,),
           batch_size=32, ratio=0.125, moco_hidden=1024, base_lr=4e-3, warmup_epochs=0.1,
           epochs=1.0, workers=0, log_every=10, save_every=50)
GPU = dict(image_size=112, patch_size=8, batch_size=256, ratio=0.0625, base_lr=6e-4)

# ==== Training ====================================================================================
def flag(name: str, value: Any) -> list[str]:
    """A setting as arguments of ser.py."""
    words = ["--" + name.replace("_", "-")]
    if isinstance(value, tuple):
        words += map(str, value)
    elif value is not True:
        words.append(str(value))
    return words

def flags(cfg: Common) -> list[str]:
    """The arguments of its program that give cfg: all that is not a default, and without --data
    all that a default for drawn images would replace."""
    replaced = () if cfg.data else cfg.drawn
    found: list[str] = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != field.default or field.name in replaced:
            found += flag(field.name, value)
    return found

def shared(data: str, size: dict[str, Any], rest: Sequence[str]) -> Config:
    """The settings of all runs: `size`, but for what the arguments `rest` set. Raises UserError."""
    given = {argument.partition("=")[0] for argument in rest}
    words = flag("data", data) if data else []
    for name, value in size.items():
        if flag(name, value)[0] not in given:
            words += flag(name, value)
    return ser.parse([*words, *rest])

def steps_of(cfg: Config, images: int) -> int:
    """How many steps a run takes. Raises UserError for settings that are wrong."""
    ser.check(cfg, 1)
    require(images >= cfg.batch_size,
            f"{images} images are less than --batch-size {cfg.batch_size}")
    return max(1, round(cfg.epochs * (images // cfg.batch_size)))

def finished(cfg: Common, total: int, build: Callable[[Any], Any] = ser.build) -> bool:
    """Whether the run in cfg.out has done `total` steps. build: what makes its model. Raises
    UserError for settings that are wrong, or are not those of the run that is there."""
    ser.check(cfg, 1)
    with torch.device("meta"):
        build(dataclasses.replace(cfg, init=""))     # raises for layers that are not there
    path = Path(cfg.out, "last.pt")
    if not path.exists():
        return False
    state = ser.load_checkpoint(path)
    differ = [f"{name} {state['config'].get(name)} there, {value} here"
              for name, value in vars(cfg).items()
              if name not in FREE and state["config"].get(name) != value]
    require(not differ, f"{path} is of another run ({'; '.join(differ)}): use a new --out")
    require(state["step"] <= total, f"{path} has done {state['step']} steps, not {total}: it saw "
            "other images, use a new --out")
    return state["step"] == total

def train(cfg: Common, build: Callable[[Any], Any] = ser.build) -> None:
    """Run, or continue, cfg, and print the command that does the same. A stop signal lets it save,
    then raises SystemExit; the third ends at once."""
    tqdm.write(f"python {cfg.program} {shlex.join(flags(cfg))}", file=sys.stderr)
    stop: list[int] = []

    def remember(number: int, frame: Any) -> None:
        stop.append(number)
        if len(stop) == 3:
            os._exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, remember) for number in numbers]
    try:
        ser.train(cfg, build, stop)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
    if stop:     # during the last step, after which training ends by itself
        raise SystemExit(128 + stop[0])

def minutes(cfg: Common) -> float:
    """How long the steps of a run took: a record has the rate since the one before."""
    total = 0.0
    last = 0
    for step, rate in series(records(cfg.out), "images_per_s").items():
        total += (step - last) * cfg.batch_size / rate / 60
        last = step
    return total

# ==== Evaluation ==================================================================================
def once(path: Path, settings: dict[str, Any],
         measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the JSON file `path` holds if it is of the checkpoint beside it and of these settings;
    else measure(), which is written there with both."""
    digest = hashlib.sha256(path.with_name("last.pt").read_bytes()).hexdigest()
    identity = json.loads(json.dumps({"of": digest, "asked": settings}))     # lists for tuples
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found | identity == found:
            return found
    tqdm.write(f"measuring {path}", file=sys.stderr)
    path.unlink(missing_ok=True)     # eval_linear would not overwrite another checkpoint's result
    found = measure() | identity
    eval_linear.write_json(path, found)
    return found

def evaluate(cfg: Common, random_init: bool = False,
             heads: Sequence[str] = ("linear", "MLP")) -> dict[str, float]:
    """All that is measured on a finished run, by name, or on the encoder that it began with."""
    column = "untrained" if random_init else "trained"
    found = {}
    for head in heads:
        out = Path(cfg.out, f"{head}-{column}.json".lower())
        how = Settings(data=cfg.data, checkpoint=str(Path(cfg.out, "last.pt")), test=(), cache=True,
                       mlp=head == "MLP", equivariance=head == "linear", select_split=0.1,
                       workers=cfg.workers, random_init=random_init, out=str(out))
        asked = {name: value for name, value in vars(how).items()
                 if name not in ("checkpoint", "workers", "out")}
        result = once(out, asked, lambda: eval_linear.evaluate(how))
        found[f"{head}, top-1 %"] = result["linear"]["best"]["val"]["top1"]
        if head == "linear":
            found["20-NN, top-1 %"] = result["knn"]["val"]["top1"]
            for row in result["equivariance"]["rows"]:
                for measure in ("retrieval", "score"):
                    name = f"{row['element']}: {measure}, block {row['block']}"
                    found[name] = row[column][measure]
    return found

def gradients(cfg: Config, paths: Sequence[str],
              checkpoint: Path | None = None) -> dict[str, float]:
    """The norms of the gradients of L_inv and of lambda L_equiv by the weights of the blocks up to
    the SER layer, where both act, and the cosine between the two, of a checkpoint or at the
    beginning: means over the first batches of the run."""
    device = ser.setup()[0]
    model = ser.build(cfg)
    if checkpoint is not None:
        model.load_state_dict(ser.load_checkpoint(checkpoint)["model"])
    weights = list(model.to(device).base.encoder.blocks[:max(cfg.equiv_layers)].parameters())
    data = cfg.dataset(paths)
    sums = torch.zeros(3)
    for step, keys in enumerate(ser.batch_keys(len(paths), cfg, 0, BATCHES)):
        loaded = default_collate([data[key] for key in keys])[0]
        loaded = [(pixels.to(device), *draws) for pixels, *draws in loaded]
        batch = ser.make_views(loaded, cfg, step)
        parts = []
        # SER.forward gives only the sum a gradient: beside 1e6 L_equiv, L_inv is below what counts.
        for weight, scale in ((0.0, 1.0), (1e6, cfg.weight / 1e6)):
            model.weight = weight
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(batch)["loss"]
            found = torch.autograd.grad(loss, weights)
            parts.append(scale * torch.cat([gradient.flatten() for gradient in found]))
        inv, equiv = parts
        cosine = F.cosine_similarity(inv, equiv, dim=0)
        sums += torch.stack([inv.norm(), equiv.norm(), cosine]).cpu()
    return dict(zip(("inv", "equiv", "cosine"), (sums / BATCHES).tolist()))

# ==== Report ======================================================================================
Rows = dict[str, dict[str, dict[str, Any]]]     # measure -> column -> values, mean, std

def over_seeds(values: list[float]) -> dict[str, Any]:
    """The values of the seeds, their mean, and std (n - 1; None for one seed)."""
    std = stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": mean(values), "std": std}

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

def cell(name: str, value: dict[str, Any] | None) -> str:
    """mean ± std, with two digits after the point for what is named a percentage; "-" for None."""
    if value is None:
        return "-"
    digits = 2 if "%" in name else 3
    text = f"{value['mean']:.{digits}f}"
    if value["std"] is not None:
        text += f" ± {value['std']:.{digits}f}"
    return text

def table(rows: Rows) -> str:
    """Aligned for the screen, and valid Markdown."""
    lines = [["", *next(iter(rows.values()))]]
    for name, columns in rows.items():
        cells = [cell(name + column, value) for column, value in columns.items()]
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

def plot_seeds(axes: Any, column: str, curves: list[dict[int, float]]) -> None:
    """A thin line for each seed, and a thick one for their mean."""
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), color=COLORS[column], linewidth=0.5, alpha=0.5)
    shared = sorted(set.intersection(*map(set, curves)))     # a stopped run has records of its own
    means = [mean(curve[x] for curve in curves) for x in shared]
    axes.plot(shared, means, color=COLORS[column], label=column)

def draw(figure: Any, runs: dict[str, list[Config]], rows: Rows) -> None:
    """Above, learning curves; below, retrieval after every block. The cosine is not shown: it
    rises, too, where all tokens grow alike."""
    cfg = runs["ser"][0]
    above, below = figure.subplots(2, 3)
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
            curves: list[dict[int, float]] = [{} for _ in runs["ser"]]
            for block in range(1, cfg.depth + 1):
                values = rows[f"{element}: retrieval, block {block}"][column]["values"]
                for curve, value in zip(curves, values):
                    curve[block] = value
            plot_seeds(axes, column, curves)
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
    options, rest = parser.parse_known_args(argv)
    taken = {"--seed", "--weight"} & {argument.partition("=")[0] for argument in rest}
    require(not taken, f"{' '.join(taken)}: the arms or their seeds differ in it, leave it out")
    require(len(set(options.seeds)) == len(options.seeds), f"--seeds {options.seeds}: one is twice")
    require(options.data != "", "--data is empty: an unset shell variable?")
    folder = Path(options.figure).parent
    require(folder.is_dir(), f"--figure {options.figure}: there is no such folder")
    require("RANK" not in os.environ, "one process: with torchrun, run the commands that it prints")
    size = GPU if torch.cuda.is_available() else CPU
    cfg = shared(options.data, size, rest)
    require(cfg.ratio > 0, "--ratio 0 leaves SER no images: moco alone has it")
    return options, cfg

def run(options: argparse.Namespace, cfg: Config) -> str:
    """Train and measure what is missing; returns what to print. Raises UserError and SystemExit."""
    figure = empty_figure(10, 5.6)     # now, not after hours
    classes, _ = eval_linear.collect(Settings(data=cfg.data, test=()), cfg.image_size)
    paths = ser.list_images(cfg.data)
    out = Path(options.out)
    total = steps_of(cfg, len(paths))
    runs: dict[str, list[Config]] = {}
    for arm, changes in ARMS.items():
        runs[arm] = [dataclasses.replace(cfg, seed=seed, out=str(out / f"{arm}-{seed}"), **changes)
                     for seed in options.seeds]
        for one in runs[arm]:     # a mistake shows now, too
            finished(one, total)
    found: dict[str, list[dict[str, float]]] = {column: [] for column in COLORS}
    terms = []
    for place in range(len(options.seeds)):     # all arms of a seed, so that a part is paired
        for arm in ARMS:
            one = runs[arm][place]
            if not finished(one, total):
                train(one)
            found[arm].append(evaluate(one))
        found["untrained"].append(evaluate(one, random_init=True))
        last = Path(one.out, "last.pt")
        terms.append(once(Path(one.out, "gradients.json"), {"data": cfg.data, "batches": BATCHES},
                          lambda: {"untrained": gradients(one, paths),
                                   "trained": gradients(one, paths, last)}))

    rows = compare(found)
    spent = 0.0
    for cfgs in runs.values():
        spent += sum(map(minutes, cfgs))
    layer = max(cfg.equiv_layers)
    names = [name for name in rows if "%" in name]
    for element in ELEMENTS:
        names += [f"{element}: retrieval, block {layer}",
                  f"{element}: retrieval, block {cfg.depth}",
                  f"{element}: score, block {cfg.depth}"]
    text = [table({name: rows[name] for name in names}), ""]
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
        "arms": ARMS, "settings": vars(cfg), "rows": rows, "gradients": terms, "text": text})
    draw(figure, runs, rows)
    write_png(figure, Path(options.figure or out / "imagenette.png"))
    return "\n".join(text)

def resumable(work: Callable[[], None]) -> None:
    """Do the work; a stop becomes one line and SystemExit, 128 + the number of its signal."""
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)     # of all but `train`, which has its own
    try:
        work()
    except (KeyboardInterrupt, SystemExit) as stopped:
        code = getattr(stopped, "code", 128 + signal.SIGINT)
        if code:     # --help has none
            tqdm.write("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code: 0, 2 after one line, or 128 + a signal."""
    return ser.guard(PROGRAM, lambda: resumable(lambda: print(run(*parse(argv)))))

if __name__ == "__main__":
    ser.leave(main())
