"""Encoders go to timm and come from it with equal outputs."""
import pytest
import torch
from torch.testing import assert_close

import ser
from paper.experiments import convert
from paper.tests.toys import seeded, toy_checkpoint

IMAGES = torch.randn(3, 3, 16, 16, generator=seeded(1))

def run(*words):
    convert.convert(convert.settings([str(word) for word in words]))

def shaken_timm(heads):
    """timm's ViT of the toy's sizes, with random weights everywhere."""
    timms = pytest.importorskip("timm").models.VisionTransformer
    vit = timms(16, 4, embed_dim=24, depth=2, num_heads=heads, num_classes=0)
    for p in vit.eval().parameters():
        torch.nn.init.normal_(p, std=0.3, generator=seeded(len(p)))
    return vit

@pytest.mark.parametrize("form, heads", [("timm", 2), ("timm", 4), ("moco", 12)])
def test_timms_weights_give_timms_outputs_here(form, heads, tmp_path):
    """A bare state dict, and moco-v3's checkpoint of two encoders; a classifier is left out."""
    vit = shaken_timm(heads)
    state = vit.state_dict() | {"head.weight": torch.zeros(5, 24)}
    flags = ["--heads", heads]
    if form == "moco":
        flags = []
        moco = {"module.predictor.0.weight": torch.zeros(1)}
        for branch, factor in (("base", 1), ("momentum", 2)):
            moco |= {f"module.{branch}_encoder.{name}": factor * w for name, w in state.items()}
        state = {"epoch": 300, "state_dict": moco}
    torch.save(state, tmp_path / "timm.pth")
    out = tmp_path / "new" / "last.pt"
    run("--from-timm", tmp_path / "timm.pth", out, *flags)
    with torch.no_grad():
        assert_close(ser.load_encoder(out)(IMAGES).cls, vit(IMAGES))
    assert torch.load(out, weights_only=True)["settings"]["data"]     # evaluations ask for --data

def test_our_encoder_gives_timm_its_outputs_and_comes_back(tmp_path):
    """With its number of heads: nobody has to name it."""
    path = toy_checkpoint(tmp_path, dim=24, depth=2, cls_layer=0, heads=4)
    run("--to-timm", path, tmp_path / "timm.pth")
    vit = shaken_timm(4)
    pytest.importorskip("timm").models.load_checkpoint(vit, str(tmp_path / "timm.pth"))
    ours = ser.load_encoder(path)
    with torch.no_grad():
        assert_close(vit(IMAGES), ours(IMAGES).cls)
    run("--from-timm", tmp_path / "timm.pth", tmp_path / "back.pt")
    back = ser.load_encoder(tmp_path / "back.pt")
    assert_close(back.state_dict(), ours.state_dict())
    with torch.no_grad():
        assert_close(back(IMAGES).cls, ours(IMAGES).cls)

def test_heads_are_asked_for_unless_the_model_is_known(tmp_path, monkeypatch):
    torch.save(shaken_timm(2).state_dict(), tmp_path / "timm.pth")
    with pytest.raises(SystemExit, match="--heads"):
        run("--from-timm", tmp_path / "timm.pth", tmp_path / "last.pt")
    assert not (tmp_path / "last.pt").exists()
    assert convert.KNOWN[384, 12] == 6     # ViT-S of timm, DeiT and DINO
    monkeypatch.setitem(convert.KNOWN, (24, 2), 6)
    run("--from-timm", tmp_path / "timm.pth", tmp_path / "last.pt")
    assert ser.load_encoder(tmp_path / "last.pt").blocks[0].heads == 6

def test_a_late_cls_does_not_go_to_timm(tmp_path):
    """timm would take the weights, and put [CLS] first."""
    with pytest.raises(SystemExit, match="after block 1"):
        run("--to-timm", toy_checkpoint(tmp_path), tmp_path / "timm.pth")
    assert not (tmp_path / "timm.pth").exists()

def test_encoder_only_keeps_what_evaluations_read(tmp_path):
    path = toy_checkpoint(tmp_path)
    run("--encoder-only", path, tmp_path / "small.pt")
    kept = torch.load(tmp_path / "small.pt", weights_only=True)
    there = torch.load(path, weights_only=True)
    assert str(kept) == str({name: there[name] for name in ("step", "settings", "encoder")})
