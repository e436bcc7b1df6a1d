"""Encoders to and from timm, from MoCo-v3's own checkpoints, and without what only training needs.

    python -m paper.experiments.convert --from-timm FILE.pth --out runs/given/last.pt
    python -m paper.experiments.convert --to-timm runs/moco/last.pt FILE.pth
    python -m paper.experiments.convert --encoder-only runs/ser/last.pt FILE.pt

--from-timm takes the state dict of a plain ViT of timm's (also DeiT's, DINO's), or a checkpoint of
MoCo-v3 (`--momentum`: its momentum encoder). `ser.py --init` and `eval_linear.py --checkpoint` take
what it writes. --to-timm, of a run with --cls-layer 0, writes a state dict for the model that it
prints. --encoder-only leaves out heads, momentum branch and optimizer: of a ViT-S, 87 MB stay. Each
prints what it wrote.

The function stays the same: with cls_layer 0 our ViT and timm's give equal outputs. Two things have
another form here. timm's position codes are rows (1, 1 + N, D), ours a map (1, D, g, g); and timm's
row for [CLS] is added to [CLS] itself. The number of heads is in no weight: --heads.
"""
from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

import ser
from ser import UserError, ViT, require

MOCO = ("module.base_encoder.", "module.momentum_encoder.")     # online, momentum

# What to write in place of timm's ViT where [CLS] enters late.
LATE = """\
encoder = ser.load_encoder("{path}")
encoded = encoder([ser.normalise(x)], [{layer}])[0]     # x: (B, 3, S, S) in [0, 1]
features = encoded.cls                                # (B, D)
tokens = encoded.maps[{layer}]                           # (B, D, H, W)"""

def foreign_weights(path: str, momentum: bool) -> tuple[dict[str, Tensor], bool]:
    """The encoder's weights in the file, by timm's names, and whether the file is MoCo-v3's. Raises
    UserError for what is no such file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:     # pickle, zip, torch and the system raise their own
        reason = str(error).split("\n")[0]
        raise UserError(f"--from-timm {path} cannot be read as tensors: {reason}") from None
    require(isinstance(state, dict), f"--from-timm {path} holds no state dict")
    state = state.get("state_dict", state.get("model", state))     # MoCo-v3's, DeiT's, timm's
    prefix = MOCO[1] if momentum else MOCO[0]
    of_moco = any(name.startswith(prefix) for name in state)
    require(of_moco or not momentum, f"--momentum: {path} holds no {prefix}*")
    if of_moco:
        state = {name[len(prefix):]: w for name, w in state.items() if name.startswith(prefix)}
    return {name: w for name, w in state.items() if not name.startswith("head")}, of_moco

def from_timm(weights: dict[str, Tensor], heads: int, cls_layer: int = 0) -> ViT:
    """Our ViT with timm's weights. heads 0: width / 64. Raises UserError for other models."""
    missing = {"cls_token", "pos_embed", "patch_embed.proj.weight"} - set(weights)
    require(not missing, f"no ViT of timm's with a [CLS]: without {' '.join(sorted(missing))}")
    weights = dict(weights)
    codes = weights["pos_embed"]                                      # (1, 1 + N, D) or (1, N, D)
    grid = math.isqrt(codes.shape[1])
    if grid ** 2 != codes.shape[1]:     # 1 + N: a row for [CLS] in front
        weights["cls_token"] = weights["cls_token"] + codes[:, :1]
        codes = codes[:, 1:]
        grid = math.isqrt(codes.shape[1])
    require(grid ** 2 == codes.shape[1], f"{codes.shape[1]} position codes: the grid is no square")
    codes = codes.mT.unflatten(2, (grid, grid))                       # (1, D, g, g)
    weights["pos_embed"] = codes
    patch = weights["patch_embed.proj.weight"].shape[-1]
    dim = codes.shape[1]
    depth = len([name for name in weights if name.endswith("attn.qkv.weight")])
    fixed = torch.allclose(codes, ser.sincos_codes(grid, dim), atol=1e-4)
    encoder = ViT(grid * patch, patch, dim, depth, heads or dim // 64, cls_layer,
                  "sincos" if fixed else "learned")
    own = encoder.state_dict()
    differ = [name for name in sorted(own.keys() | weights.keys())
              if name not in own or name not in weights or own[name].shape != weights[name].shape]
    require(not differ, f"no plain ViT: {' '.join(differ[:4])}")
    encoder.load_state_dict(weights)
    return encoder

def to_timm(encoder: ViT) -> dict[str, Tensor]:
    """Our encoder with cls_layer 0 as the state dict of timm's VisionTransformer without a head."""
    weights = dict(encoder.state_dict())
    rows = weights["pos_embed"].flatten(2).mT                         # (1, N, D)
    weights["pos_embed"] = torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1)
    return weights

def checkpoint(encoder: ViT, about: dict[str, Any]) -> dict[str, Any]:
    """What ser.load_encoder reads: the encoder's weights alone; about: step, config and others."""
    weights = {f"base.encoder.{name}": w for name, w in encoder.state_dict().items()}
    return about | {"shape": encoder.shape, "model": weights}

def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = argparse.ArgumentParser("paper.experiments.convert", description=__doc__,
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from-timm", default="", metavar="FILE")
    what.add_argument("--to-timm", nargs=2, metavar=("CHECKPOINT", "FILE"))
    what.add_argument("--encoder-only", nargs=2, metavar=("CHECKPOINT", "FILE"))
    parser.add_argument("--out", default="", help="of --from-timm: the file to write")
    parser.add_argument("--heads", type=int, default=0,
                        help="of --from-timm: attention heads [width / 64; MoCo-v3's files: 12]")
    parser.add_argument("--cls-layer", type=int, default=0,
                        help="of --from-timm: for a run that begins with these weights and lets "
                        "[CLS] in later; their function is then no longer timm's [0]")
    parser.add_argument("--momentum", action="store_true",
                        help="of --from-timm: the momentum encoder of a MoCo-v3 checkpoint")
    return parser.parse_args(argv)

def convert(options: argparse.Namespace) -> str:
    """Write the file that is asked for; returns what to print. Raises UserError."""
    if options.from_timm:
        source, target = options.from_timm, options.out
        require(target != "", "--from-timm needs --out FILE")
    else:
        source, target = options.to_timm or options.encoder_only
    require(not Path(target).exists(), f"{target} is there already: choose another name")
    if options.from_timm:
        weights, of_moco = foreign_weights(source, options.momentum)
        heads = options.heads or (12 if of_moco else 0)     # MoCo-v3's ViT-S; 0: width / 64
        encoder = from_timm(weights, heads, options.cls_layer)
        names = {field.name for field in dataclasses.fields(ser.Config)}
        shape = {name: value for name, value in encoder.shape.items() if name in names}
        state = checkpoint(encoder, dict(step=0, program="ser.py", images="",
                                         config=vars(ser.Config(**shape))))
        hint = f"ViT {encoder.shape}"
    elif options.encoder_only:
        about = ser.load_checkpoint(source)
        kept = {name: about[name] for name in ("step", "program", "images", "config")}
        state = checkpoint(ser.load_encoder(source), kept)
        hint = "for eval_linear.py and --init; a run cannot continue from it"
    else:
        encoder = ser.load_encoder(source)
        shape = encoder.shape
        layer = encoder.cls_layer
        if layer > 0:
            print(LATE.format(path=source, layer=layer))
            raise UserError(
                f"{source}: its [CLS] enters after block {layer}. timm's ViT has it from the first "
                "one on: it takes these weights, says that all keys match, and computes other "
                "features. Use the four lines above")
        state = to_timm(encoder)
        hint = (f"timm.models.VisionTransformer(img_size={shape['image_size']}, "
                f"patch_size={shape['patch_size']}, embed_dim={shape['dim']}, "
                f"depth={shape['depth']}, num_heads={shape['heads']}, num_classes=0)")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    ser.save_whole(Path(target), state)
    return f"{target}, {Path(target).stat().st_size / 1e6:.1f} MB: {hint}"

def main(argv: Sequence[str] | None = None) -> int:
    """Convert and print; returns the exit code."""
    return ser.guard("paper.experiments.convert", lambda: print(convert(parse(argv))))

if __name__ == "__main__":
    sys.exit(main())
