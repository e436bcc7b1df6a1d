"""Encoders to and from timm, from MoCo-v3's own checkpoints, and without what only training needs.

    python -m paper.experiments.convert --from-timm vit_small.pth runs/given/last.pt
    python -m paper.experiments.convert --to-timm runs/moco/last.pt moco_timm.pth
    python -m paper.experiments.convert --encoder-only runs/ser/last.pt encoder.pt

--from-timm takes the state dict of a plain ViT of timm's (DeiT's, DINO's), or moco-v3's checkpoint
(--momentum: its momentum encoder); eval_linear.py and paper/evaluations read what it writes, but no
training begins from it. --to-timm is for runs with --cls-layer 0. --encoder-only: 87 MB of a ViT-S.

With cls_layer 0 our ViT computes what timm's does. Its position codes are a map (1, D, g, g), where
timm's are rows (1, 1 + g g, D), the first of which it adds to [CLS]: here [CLS] contains it.
"""
from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Sequence

import torch
from torch import Tensor

import ser

def from_timm(state: dict, heads: int, momentum: bool) -> dict:
    """Our checkpoint of timm's or moco-v3's. heads: 0 means 12 for moco-v3's ViTs, else D / 64."""
    state = state.get("state_dict", state.get("model", state))     # moco-v3's, DeiT's, timm's
    of_moco = "module.base_encoder.cls_token" in state
    prefix = ""
    if of_moco:
        prefix = "module.momentum_encoder." if momentum else "module.base_encoder."
    weights = {name.removeprefix(prefix): weight for name, weight in state.items()
               if name.startswith(prefix) and not name.startswith(f"{prefix}head")}
    codes = weights["pos_embed"]                                      # (1, 1 + N, D)
    weights["cls_token"] = weights["cls_token"] + codes[:, :1]
    grid = math.isqrt(codes.shape[1] - 1)
    weights["pos_embed"] = codes[:, 1:].mT.unflatten(2, (grid, grid))      # (1, D, g, g)
    patch = weights["patch_embed.proj.weight"].shape[-1]
    depth = sum(name.endswith("attn.qkv.weight") for name in weights)
    dim = codes.shape[2]
    heads = heads or (12 if of_moco else dim // 64)
    shape = dict(image_size=grid * patch, patch_size=patch, dim=dim, depth=depth, heads=heads)
    args = ser.parse([], small=shape | dict(cls_layer=0, ratio=0.0))
    ser.new_encoder(args).load_state_dict(weights)     # raises for what is no plain ViT
    return dict(step=0, settings=vars(args), encoder=weights)

def to_timm(checkpoint: dict) -> dict[str, Tensor]:
    """The state dict of timm's VisionTransformer without a head."""
    layer = checkpoint["settings"]["cls_layer"]
    if layer > 0:
        sys.exit(f"[CLS] enters after block {layer}, in timm's ViT before the first: it would take "
                 "these weights and compute other features; use ser.load_encoder")
    codes = checkpoint["encoder"]["pos_embed"].flatten(2).mT          # (1, N, D)
    codes = torch.cat([torch.zeros_like(codes[:, :1]), codes], dim=1)
    return checkpoint["encoder"] | {"pos_embed": codes}

def main(argv: Sequence[str] | None = None) -> None:
    """Read a file and write the other."""
    parser = ArgumentParser(allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--from-timm", "--to-timm", "--encoder-only"):
        what.add_argument(flag, nargs=2, metavar=("FROM", "TO"))
    parser.add_argument("--heads", type=int, default=0, help="of --from-timm [12 or D / 64]")
    parser.add_argument("--momentum", action="store_true", help="moco-v3's momentum encoder")
    args = parser.parse_args(argv)
    source, target = args.from_timm or args.to_timm or args.encoder_only
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    state = torch.load(source, map_location="cpu", weights_only=True)
    if args.from_timm:
        state = from_timm(state, args.heads, args.momentum)
    elif args.to_timm:
        state = to_timm(state)
    else:
        state = {name: state[name] for name in ("step", "settings", "encoder")}
    ser.save(Path(target), **state)

if __name__ == "__main__":
    main()
