"""Encoders from timm, and from MoCo-v3's own checkpoints.

    python -m paper.experiments.convert --from-timm vit_small.pth runs/given/last.pt --heads 6

This takes a plain ViT of timm's (DeiT's, DINO's; not AugReg's, which normalises otherwise) or
the base encoder of moco-v3's checkpoint. The result is for evaluations, not pre-training.
"""
import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

import ser


def from_timm(state: dict, heads: int, cls_layer: int = 0) -> dict:
    """Our checkpoint of timm's or moco-v3's. heads: of the attention, which weights do not tell."""
    state = state.get("state_dict", state.get("model", state))
    prefix = "module.base_encoder." if "module.base_encoder.cls_token" in state else ""
    weights = {name.removeprefix(prefix): weight for name, weight in state.items()
               if name.startswith(prefix) and not name.startswith(f"{prefix}head")}

    rows = weights["pos_embed"]                                         # (1, 1 + g g, D)
    weights["cls_token"] = weights["cls_token"] + rows[:, :1]           # it has no position here
    grid = math.isqrt(rows.shape[1] - 1)
    weights["pos_embed"] = rows[:, 1:].mT.unflatten(2, (grid, grid))    # (1, D, g, g)

    patch = weights["patch_embed.proj.weight"].shape[-1]
    depth = sum(name.endswith("attn.qkv.weight") for name in weights)

    # What evaluations ask for. How it was trained is not known.
    given = dict(data="images of another program", image_size=grid * patch, patch_size=patch,
                 dim=rows.shape[2], depth=depth, heads=heads, cls_layer=cls_layer,
                 equiv_layers=[], seed=0)
    ser.make_encoder(Namespace(**given)).load_state_dict(weights)     # of plain ViTs
    return dict(step=0, settings=given, encoder=weights)


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser()
    parser.add_argument("--from-timm", nargs=2, metavar=("FROM", "TO"), required=True)
    parser.add_argument("--heads", type=int, required=True, help="timm's ViT-S: 6, moco-v3's: 12")
    parser.add_argument("--cls-layer", type=int, default=0, help="last block before [CLS] entered")
    return parser.parse_args(argv)


def convert(args: Namespace) -> None:
    """Read a file and write the other."""
    source, target = args.from_timm
    if Path(target).exists():     # it may be the last checkpoint of a run
        sys.exit(f"{target} exists: name another file")
    state = torch.load(source, map_location="cpu", weights_only=True)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    ser.save(Path(target), **from_timm(state, args.heads, args.cls_layer))


if __name__ == "__main__":
    convert(settings())
