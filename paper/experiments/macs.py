"""Parameters and multiply-adds (MACs): the paper's table "Computation overhead", counted.

    python -m paper.experiments.overhead --rows counts      prints what is counted here

The paper's 18.48 G (MoCo-v3) and 18.63 G (SER, 1.008x) are the MACs of an image's forward passes,
two online and two momentum. `step_macs` counts what a training step does, with the backward pass.
All is counted on the device "meta", where tensors have a shape and no values.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ser

TOKENS = 196     # of an image of 224 px in patches of 16
GPUS = 8
B2 = 3           # images of b2 on a GPU, of 256: r = 0.01

def macs(work: Callable[[], Any]) -> float:
    """MACs of the matrix products and convolutions that `work` does."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2

def forward_macs(base: ser.MoCoV3) -> float:
    """The paper's convention: forward passes of an image's two views, online and momentum."""
    x = torch.empty(1, 3, 224, 224, device="meta")

    def forward() -> None:
        base.predictor(base.projector(base.encoder([x])[0].cls))
        base.momentum_projector(base.momentum_encoder([x])[0].cls)

    return 2 * macs(forward)

@functools.cache
def pass_macs(cfg: ser.Config, n_b1: int, *grids: tuple[int, int]) -> float:
    """MACs of forward and backward on n_b1 images and, with a grid for each view, cfg's b2, as they
    run: no backward in the momentum branch and the frozen patch embedding; blocks of L_equiv that
    are computed again count again; the backward of attention counts as its four products."""
    with torch.device("meta"):
        model = ser.build(cfg)
    unmoved = torch.zeros(cfg.b2_images(1), dtype=torch.int64)
    views = []
    for v, policy in enumerate(cfg.policies):
        images = []
        geometry = None
        if n_b1 > 0:
            images.append(torch.empty(n_b1, 3, policy.size, policy.size, device="meta"))
        if grids:
            height, width = grids[v]
            side = cfg.patch_size
            images.append(torch.empty(len(unmoved), 3, height * side, width * side, device="meta"))
            geometry = ser.Geometry(unmoved > 0, unmoved, grids[v])
        views.append(ser.View(images, None, None, geometry))
    no_autocast = mock.patch("torch.autocast", lambda *_, **__: contextlib.nullcontext())
    with no_autocast:     # meta has none
        return macs(lambda: model(ser.Batch(views))["loss"].backward())

def step_macs(cfg: ser.Config, *grids: tuple[int, int]) -> float:
    """MACs per image of a training step on one device. All add up over images but InfoNCE's logits,
    a hundred-thousandth of them: an image of b1 is counted as half of two."""
    n_b1 = cfg.batch_size
    total = 0.0
    if grids:
        n_b1 -= cfg.b2_images(1)
        total = pass_macs(cfg, 0, *grids)
    total += n_b1 * pass_macs(dataclasses.replace(cfg, ratio=0.0), 2) / 2
    return total / cfg.batch_size

def counted() -> dict[str, dict[str, float]]:
    """The table: name -> trainable parameters, MACs per image of the forward passes, and of forward
    and backward. SER has 3 of 256 images in b2 on each of 8 GPUs."""
    moco = ser.Config(batch_size=256, ratio=0.0, cls_layer=0)
    own = ser.Config(batch_size=256, ratio=B2 / 256)
    grids = {"MoCo-v3": [], "SER": [(14, 14), (14, 14)]}
    rows: dict[str, dict[str, float]] = {}
    for name, cfg in (("MoCo-v3", moco), ("SER", own)):
        with torch.device("meta"):
            model = ser.build(cfg)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows[name] = {"trainable": trainable, "forward_macs": forward_macs(model.eval().base),
                      "step_macs": step_macs(cfg, *grids[name])}
    # L_equiv, MACs of a GPU: the projector sees the tokens of both views; an anchor meets both
    # views of every gathered token. By the paper's count each GPU computes the loss of all images,
    # in both directions.
    anchors = B2 * TOKENS
    gathered = GPUS * anchors
    project = 2 * anchors * (384 * 512 + 512 * 512)
    of_an_anchor = 2 * gathered * 512
    row = rows["SER"]
    papers = row["forward_macs"] + (project + 2 * gathered * of_an_anchor) / 256
    rows["SER, the paper's count"] = {"trainable": row["trainable"], "forward_macs": papers}
    # ser.py: own anchors in one direction; `step_macs` lacks the tokens of 7 GPUs, in 3 products:
    # logits, gradient of the anchors, gradient of the keys. 588 anchors are one block.
    row["forward_macs"] += (project + anchors * of_an_anchor) / 256
    row["step_macs"] += 3 * anchors * 2 * (gathered - anchors) * 512 / 256
    return rows
