"""Rows of paper.experiments.overhead: parts of a step, each against another way to do it.

    python -m paper.experiments.overhead --rows packed loss
    python -m paper.experiments.overhead --rows loader --data FOLDER

Each prints the time of both sides and their ratio.
"""
from __future__ import annotations

import argparse
import functools
import random
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms

import ser
from paper.experiments import timing
from paper.experiments.timing import compared, now, peak, ratios, spread

# ==== Packing and the loss ========================================================================
def packed_batches(b1: int, b2: int, crops: int) -> dict[str, tuple[list[Tensor], list[list]]]:
    """Setting -> (the image batches of one call of the encoder, those of each of several calls, one
    for every size)."""
    noise = functools.partial(torch.randn, device=timing.DEVICE)
    pair = [noise(b1, 3, 224, 224) for _ in range(2)]
    pair += [noise(b2, 3, 192, 240) for _ in range(2)]
    large = [noise(crops, 3, 224, 224) for _ in range(2)]
    small = [noise(crops, 3, 96, 96) for _ in range(4)]
    return {f"2 views, {b1} images at 224 x 224 and {b2} at 192 x 240": (
                pair, [[torch.cat(pair[:2])], pair[2:3], pair[3:]]),
            f"2 views at 224 and 4 at 96 px of {crops} images": (
                large + small, [[torch.cat(large)], [torch.cat(small)]])}

def encode(encoder: ser.ViT, calls: list[list[Tensor]]) -> Tensor:
    """The [CLS] of all images from a pass per call, and the gradient of a function of them."""
    encoder.zero_grad()
    found = []
    with torch.autocast(timing.DEVICE.type, torch.bfloat16, enabled=timing.CUDA):
        for call in calls:
            found += [encoded.cls for encoded in encoder(call)]
        cls = torch.cat(found)
    cls.float().mean(0).square().sum().backward()
    return cls.detach()

def packed(options: argparse.Namespace) -> dict[str, Any]:
    """Forward + backward of the encoder, all batches packed into one pass, against a pass for each
    size, in one tensor: b1 of both views, b2 of each view; and 2 + 4 views."""
    ser.setup()
    encoder = ser.build(ser.Config()).base.encoder.to(timing.DEVICE)
    n_b2 = 3 if timing.CUDA else 4
    rows = {}
    settings = packed_batches(timing.IMAGES - n_b2, n_b2, timing.IMAGES // 2)
    for setting, (one, several) in settings.items():
        separate = f"{len(several)} passes"
        times = timing.in_turn(options.pairs, {"packed": lambda _: encode(encoder, [one]),
                                               separate: lambda _: encode(encoder, several)})
        rows[setting] = {"times": times, "ratio": ratios(times, "packed", separate)}
        print(f"  {setting}\n    packed {spread(times['packed']['wall'])}, {separate} "
              f"{spread(times[separate]['wall'])}\n    {compared(times, 'packed', separate)}")
    return rows

def bare_products(anchors: Tensor, keys: Tensor, chunk: int) -> None:
    """The matrix products of patch_ntxent's forward and backward pass and nothing else: the logits
    of each block, again if there are several, and the gradients of anchors and keys."""
    for part in anchors.split(chunk):
        logits = part @ keys.T
    for part in anchors.split(chunk):
        if chunk < len(anchors):
            logits = part @ keys.T
        logits @ keys
        logits.T @ part

def loss_alone(side: str, images: int = 64, tokens: int = 196,
               width: int = 512) -> dict[str, float]:
    """What --alone loss runs: forward and backward on 64 images x 196 tokens x 512."""
    z, z_prime = (torch.randn(images, tokens, width, device=timing.DEVICE, requires_grad=True)
                  for _ in range(2))
    ser.patch_ntxent(z[:4], z_prime[:4]).backward()
    memory = peak()
    since = now()[0]
    if side == "bare":
        keys = torch.cat([z, z_prime]).detach().flatten(0, 1)
        bare_products(keys[:images * tokens], keys, max(1, 2 ** 23 // len(keys)))     # of 32 MB
    else:
        chunk = images * tokens if side == "whole" else None
        ser.patch_ntxent(z, z_prime, chunk=chunk).backward()
    return {"seconds": now()[0] - since, "extra_mb": peak() - memory}

def loss(options: argparse.Namespace) -> dict[str, Any]:
    """patch_ntxent in blocks of 32 MB, computed again in the backward pass, against all logits at
    once, and against the bare matrix products of those blocks. Forward + backward, 64 x 196 x 512,
    fp32: time, and peak memory beyond the inputs, in fresh processes."""
    names = {"blocks": "blocks of 32 MB", "whole": "all logits at once", "bare": "bare products"}
    found = {side: {"seconds": [], "extra_mb": []} for side in names}
    for turn in range(min(3, options.pairs)):
        for side in reversed(names) if turn % 2 else names:
            found[side]["seconds"].append(timing.fresh("loss", side)["seconds"])
            if side != "bare":
                found[side]["extra_mb"].append(timing.fresh("loss", side, memory=True)["extra_mb"])
    for side, runs in found.items():
        ratio = [a / b for a, b in zip(runs["seconds"], found["blocks"]["seconds"])]
        memory = spread(runs["extra_mb"], "MB") if runs["extra_mb"] else ""
        print(f"  {names[side]:20} {spread(runs['seconds']):28} "
              f"{spread(ratio, 'x of the blocks'):36} {memory}")
    return found

# ==== Loader ======================================================================================
def moco_v3_pipeline(blur: float, solarize: float) -> transforms.Compose:
    """moco-v3's augmentation of one view, in Pillow and torchvision as its repository has it."""
    def smooth(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    return transforms.Compose([
        transforms.RandomResizedCrop(224, scale=(0.08, 1.0)),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.RandomApply([transforms.Lambda(smooth)], p=blur),
        transforms.RandomApply([transforms.Lambda(ImageOps.solarize)], p=solarize),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(ser.MEAN.flatten().tolist(), ser.STD.flatten().tolist())])

def loader(options: argparse.Namespace) -> dict[str, Any]:
    """Images per second of one core: ser.Dataset (decoding and two crops; jitter is the device's
    work) against moco-v3's whole recipe of two views on the CPU; at most 200 images of --data."""
    paths = ser.list_images(options.data)[:200]
    data = ser.Config().dataset(paths)
    first = moco_v3_pipeline(1.0, 0.0)
    second = moco_v3_pipeline(0.1, 0.2)

    def ours(turn: int) -> None:
        for i in range(len(paths)):
            data[ser.Key(turn, i, i, False)]

    def theirs(turn: int) -> None:
        for path in paths:
            image = Image.open(path).convert("RGB")
            first(image)
            second(image)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = timing.in_turn(options.pairs, {"ser": ours, "moco-v3": theirs})
    torch.set_num_threads(threads)
    for name in times:
        rates = [len(paths) / seconds for seconds in times[name]["wall"]]
        print(f"  {name:20} {spread(rates, 'images/s')}")
    ratio = ratios(times, "moco-v3", "ser")
    print(f"  {'moco-v3 / ser, time':20} {spread(ratio, 'x')}")
    return {**times, "ratio": ratio}
