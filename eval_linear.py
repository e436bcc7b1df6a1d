"""Evaluation."""
from __future__ import annotations
from pathlib import Path
import torch, torch.nn.functional as F
from torch import Tensor
from ser import MEAN, STD, Config, ViT, build, draw_images, load_encoder, retrieval, rho, rng, sample_geometry

@torch.no_grad()
def equivariance(encoder: ViT, images: Tensor, layer: int, element: str) -> tuple[float, float]:
    found = []
    for n, x in enumerate(images.split(32)):
        g = sample_geometry(len(x), encoder.grid, elements=(element,), generator=rng(element, n))
        g = g._replace(flip=torch.full_like(g.flip, element == "hflip"),
                       turns=(1 + torch.arange(len(x)) % 3) * (element == "rot90"))
        still, moved = (e.maps[layer] for e in encoder([x, rho(g, x, encoder.patch_size)], (layer,)))
        z, z_prime = (m.flatten(2).transpose(1, 2) for m in (rho(g, still), moved))
        found.append((F.cosine_similarity(z, z_prime, dim=-1).mean().item(), retrieval(z, z_prime).item()))
    return tuple(sum(column) / len(found) for column in zip(*found))


@torch.no_grad()
def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: int = 20) -> float:
    train, test, right = F.normalize(train, dim=1), F.normalize(test, dim=1), 0
    for x, y in zip(test.split(1024), test_labels.split(1024)):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)
        right += (votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp()).argmax(1) == y).sum().item()
    return right / len(test)


def report(cfg: Config, path: Path) -> None:
    """Print what a run on drawn images taught its encoder: before and after, on images it has not seen."""
    sets = [draw_images(2048, cfg.image_size, seed=0), draw_images(512, cfg.image_size, seed=1)]
    images, rows = [(s[0].float() / 255 - MEAN) / STD for s in sets], {}
    for encoder in (build(cfg).base.encoder.eval(), load_encoder(path)):
        with torch.no_grad():
            train, test = (torch.cat([encoder([x])[0].cls for x in part.split(256)]) for part in images)
        for element in ("rot90", "hflip", "scale"):
            cosine, top1 = equivariance(encoder, images[1], cfg.equiv_layers[0], element)
            rows.setdefault(f"{element}: cosine of rho f(x) and f(rho x)", []).append(cosine)
            rows.setdefault(f"{element}: patch retrieval, top-1", []).append(top1)
        rows.setdefault("20-NN accuracy, 8 classes", []).append(knn(train, sets[0][1], test, sets[1][1]))
    print(f"\nHeld-out drawn images, tokens after block {cfg.equiv_layers[0]}    untrained   trained")
    print("\n".join(f"  {name:45}" + "".join(f"{value:10.3f}" for value in values) for name, values in rows.items()))
    print(f"\nNext, the control: python ser.py --weight 0 --out {cfg.out}-control"
          "\nor your own images: python ser.py --data FOLDER --batch-size 256 --out runs/mine")
