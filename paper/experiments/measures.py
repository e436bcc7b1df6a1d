"""What paper.experiments.imagenette measures beside heads and equivariance: 20-NN by epoch,
transformation prediction, made corruptions, and the gradients of the two losses.
"""
from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import eval_linear
import ser
from paper.evaluations import robustness, transformations
from paper.evaluations.corruptions import CORRUPTIONS, SEVERITIES
from paper.experiments.runs import once
from ser import Config, require

BATCHES = 4                # of training, for the gradient norms
CURVE = (2000, 1000)       # images of train and of val for the curve of 20-NN
MOVED = (2000, 1000)       # the same for transformation prediction
CORRUPTED = 10             # val images of a class that are corrupted

class Kept(Config):
    """MoCo-v3, the control or SER, whose run keeps its encoder after every epoch but the last, or
    of 15 epochs and more about ten times."""

    @property
    def kept(self) -> range:
        """The epochs after which the encoder is kept."""
        every = max(1, round(self.epochs / 10))
        return range(every, round(self.epochs), every)

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        super().before_step(optimizer, epoch)
        path = Path(self.out, f"epoch-{round(epoch)}.pt")
        if epoch == 0:     # a new run: if some are there, they are of one that was deleted
            for old in path.parent.glob("epoch-*.pt"):
                old.unlink()
        if epoch in self.kept and not path.exists():     # whole at an epoch's first step alone
            # A run saves after every epoch: before the first step of one, this is the last's end.
            state = ser.load_checkpoint(path.with_name("last.pt"))
            state["model"] = {name: weight for name, weight in state["model"].items()
                              if name.startswith("base.encoder.")}
            del state["optimizer"]
            ser.save_whole(path, state)

def neighbours(cfg: Kept) -> dict[str, float]:
    """Epoch -> 20-NN top-1 in percent of a part of the images, from the untrained encoder on.
    Raises UserError where an encoder was not kept."""
    settings = eval_linear.Settings(data=cfg.data, test=(), workers=cfg.workers)
    device = ser.setup()[0]

    def measure() -> dict[str, Any]:
        _, whole = eval_linear.collect(settings, cfg.image_size)
        splits = {name: transformations.some(whole[name], n, seed=0)
                  for name, n in zip(("train", "val"), CURVE)}
        last = Path(cfg.out, "last.pt")
        found = {}
        for epoch in (0, *cfg.kept, round(cfg.epochs)):
            path = last if epoch in (0, cfg.epochs) else last.with_name(f"epoch-{epoch}.pt")
            require(path.exists(), f"{path} is missing: this run was not trained by this script; "
                    "--without curve leaves the curve out")
            encoder = ser.load_encoder(path)
            if epoch == 0:
                encoder = eval_linear.untrained(cfg.seed, encoder.shape)
            frozen = eval_linear.Frozen(encoder.to(device), 1, settings, splits)
            found[str(epoch)] = eval_linear.knn_splits(frozen)["val"]["top1"]
        return {"curve": found}

    asked = {"images": CURVE, "data": cfg.data}
    return once(Path(cfg.out, "curve.json"), asked, measure)["curve"]

def moved(cfg: Config, column: str) -> dict[str, float]:
    """How well turns and flips can be told from frozen tokens of an image and its moved version,
    after SER's block and the last."""
    layers = (max(cfg.equiv_layers), cfg.depth)
    path = Path(cfg.out, "transformations.json")
    images, tests = MOVED
    how = transformations.Settings(
        data=cfg.data, checkpoint=str(Path(cfg.out, "last.pt")), layers=layers, images=images,
        test_images=tests, workers=cfg.workers, out=str(path))
    asked = dict(images=images, tests=tests, layers=layers, data=cfg.data)
    result = once(path, asked, lambda: transformations.evaluate(how))
    found = {}
    for task in transformations.TASKS:
        for layer, accuracy in zip(layers, result[column][task]):
            found[f"{task} told from a pair, block {layer}, %"] = accuracy
    return found

def corrupted(cfg: Config, folder: Path, random_init: bool = False) -> dict[str, float]:
    """Top-1 of the linear head on made corruptions, by severity and as the paper's mean."""
    column = "untrained" if random_init else "trained"
    out = Path(cfg.out, f"robustness-{column}.json")
    how = robustness.Settings(
        checkpoint=str(Path(cfg.out, "last.pt")), random_init=random_init, c=str(folder),
        head=str(Path(cfg.out, f"linear-{column}-head.pt")), workers=cfg.workers,
        out=str(out))
    _, _, digest = eval_linear.frozen_encoder(how.probe)
    head = robustness.head_digest(eval_linear.load_head(how.head, digest))
    if out.exists():
        there = json.loads(out.read_text())
        if (there.get("sha256"), there.get("head")) != (digest, head):
            out.unlink()     # of a run that was trained anew, or of another head
    sets = robustness.evaluate(how)["sets"]
    found = {}
    for severity in SEVERITIES:
        found[f"corrupted, severity {severity}, %"] = mean(
            sets[f"c/{name}/{severity}"]["top1"] for name in CORRUPTIONS)
    return {"corrupted, mean, %": mean(found.values()), **found}

def gradients(cfg: Config, paths: Sequence[str],
              checkpoint: Path | None = None) -> dict[str, float]:
    """The norms of the gradients of L_inv and of lambda L_equiv by the weights of the blocks up to
    the SER layer, where both act, and the cosine between the two, of a checkpoint or at the
    beginning: means over the first batches of the run; without bfloat16 on a CPU."""
    device = ser.setup()[0]
    model = ser.build(cfg)
    if checkpoint is not None:
        model.load_state_dict(ser.load_checkpoint(checkpoint)["model"])
    blocks = model.to(device).base.encoder.blocks[:max(cfg.equiv_layers)]
    parameters = list(blocks.parameters())
    data = cfg.dataset(paths)
    sums = torch.zeros(3)
    for step, keys in enumerate(ser.batch_keys(len(paths), cfg, 0, BATCHES)):
        loaded, _ = default_collate([data[key] for key in keys])
        loaded = [(pixels.to(device), *draws) for pixels, *draws in loaded]
        batch = ser.make_views(loaded, cfg, step)
        parts = []
        # SER.forward gives a gradient to inv + weight * equiv alone. Weight 0 leaves L_inv; weight
        # 1e6, scaled back to lambda, leaves lambda L_equiv, and 1e-6 lambda of L_inv. A difference
        # of the gradients at lambda and at 0 would drown in the rounding of bfloat16.
        for weight, scale in ((0.0, 1.0), (1e6, cfg.weight / 1e6)):
            model.weight = weight
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(batch)["loss"]
            found = torch.autograd.grad(loss, parameters)
            parts.append(scale * torch.cat([gradient.flatten() for gradient in found]))
        inv, equiv = parts
        cosine = F.cosine_similarity(inv, equiv, dim=0)
        sums += torch.stack([inv.norm(), equiv.norm(), cosine]).cpu()
    return dict(zip(("inv", "equiv", "cosine"), (sums / BATCHES).tolist()))

def gradient_terms(cfg: Config, paths: Sequence[str]) -> dict[str, dict[str, float]]:
    """`gradients` of a finished run, at its beginning and at its end."""
    last = Path(cfg.out, "last.pt")

    def measure() -> dict[str, Any]:
        return {"untrained": gradients(cfg, paths), "trained": gradients(cfg, paths, last)}

    return once(last.with_name("gradients.json"), {"data": cfg.data, "batches": BATCHES}, measure)
