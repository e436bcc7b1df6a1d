"""Encoders to and from timm, and from MoCo-v3's own checkpoints.

    python -m paper.experiments.convert --from-timm vit_small.pth runs/given/last.pt --heads 6
    python -m paper.experiments.convert --to-timm runs/moco/last.pt moco_timm.pth

--from-timm takes a plain ViT of timm's (DeiT's, DINO's; not AugReg's, which normalises otherwise)
or the base encoder of moco-v3's checkpoint. Evaluations read its file; no training begins from it.
The "untrained" encoder that they measure beside it has the first weights of ser.py, not its own.
"""
import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

import ser


def from_timm(state: dict, heads: int) -> dict:
    """Our checkpoint of timm's or moco-v3's; heads: 0 if the command line does not tell."""
    heads = state.get("heads", heads)     # as --to-timm stored it
    state = state.get("state_dict", state.get("model", state))
    prefix = "module.base_encoder." if "module.base_encoder.cls_token" in state else ""
    weights = {name.removeprefix(prefix): weight for name, weight in state.items()
               if name.startswith(prefix) and not name.startswith(f"{prefix}head")}

    rows = weights["pos_embed"]                                         # (1, 1 + g g, D)
    weights["cls_token"] = weights["cls_token"] + rows[:, :1]           # [CLS] has no other here
    grid = math.isqrt(rows.shape[1] - 1)
    weights["pos_embed"] = rows[:, 1:].mT.unflatten(2, (grid, grid))    # (1, D, g, g)

    patch = weights["patch_embed.proj.weight"].shape[-1]
    depth = sum(name.endswith("attn.qkv.weight") for name in weights)
    dim = rows.shape[2]
    if not heads:     # weights do not tell
        sys.exit(f"--heads: how many have {depth} blocks of {dim}? timm's ViT-S 6, moco-v3's 12")

    # What evaluations ask for. How it was trained is not known.
    given = dict(data="images of another program", image_size=grid * patch, patch_size=patch,
                 dim=dim, depth=depth, heads=heads, cls_layer=0, equiv_layers=[], seed=0)
    # It raises an error for other networks than plain ViTs.
    ser.seed_and_make_encoder(Namespace(**given)).load_state_dict(weights)
    return dict(step=0, settings=given, encoder=weights)


def to_timm(checkpoint: dict) -> dict:
    """The weights of timm's VisionTransformer without a classifier, and the number of heads."""
    given = checkpoint["settings"]
    if given["cls_layer"] > 0:
        sys.exit(f"[CLS] enters after block {given['cls_layer']}, timm's before block 1: use ours")
    rows = checkpoint["encoder"]["pos_embed"].flatten(2).mT     # (1, g g, D)
    rows = torch.nn.functional.pad(rows, (0, 0, 1, 0))          # zeros for [CLS]
    return {"state_dict": checkpoint["encoder"] | {"pos_embed": rows}, "heads": given["heads"]}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser()
    what = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--from-timm", "--to-timm"):
        what.add_argument(flag, nargs=2, metavar=("FROM", "TO"))
    parser.add_argument("--heads", type=int, default=0, help="attention heads, for --from-timm")
    return parser.parse_args(argv)


def convert(args: Namespace) -> None:
    """Read a file and write the other."""
    source, target = args.from_timm or args.to_timm
    if Path(target).exists():     # it may be the last checkpoint of a run
        sys.exit(f"{target} exists: name another file")
    if args.from_timm:
        state = torch.load(source, map_location="cpu", weights_only=True)
        state = from_timm(state, args.heads)
    else:
        state = to_timm(ser.load_checkpoint(source))

    Path(target).parent.mkdir(parents=True, exist_ok=True)
    ser.save(Path(target), **state)


if __name__ == "__main__":
    convert(settings())
