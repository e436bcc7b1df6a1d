"""Encoders go to timm and come from it with equal outputs."""
import pytest
import torch
from torch.testing import assert_close

import ser
from paper.experiments import convert
from paper.tests.toys import seeded, toy_checkpoint

IMAGES = torch.randn(3, 3, 16, 16, generator=seeded(1))

def shaken_timm(heads):
    """timm's ViT of the toy's sizes, with random weights everywhere."""
    timms = pytest.importorskip("timm").models.VisionTransformer
    vit = timms(16, 4, embed_dim=24, depth=2, num_heads=heads, num_classes=0)
    for p in vit.eval().parameters():
        torch.nn.init.normal_(p, std=0.3, generator=seeded(len(p)))
    return vit

@pytest.mark.parametrize("form", ["timm", "base", "momentum"])
def test_timms_weights_give_timms_outputs_here(form, tmp_path):
    """A bare state dict, and both encoders of moco-v3's checkpoint, whose ViTs have 12 heads. A
    classifier is left out."""
    vit = shaken_timm(2 if form == "timm" else 12)
    state = vit.state_dict() | {"head.weight": torch.zeros(5, 24)}
    flags = {"timm": ["--heads", "2"], "base": [], "momentum": ["--momentum"]}[form]
    if form != "timm":
        moco = {"module.predictor.0.weight": torch.zeros(1)}
        for branch in ("base", "momentum"):
            factor = 1 if branch == form else 2
            moco |= {f"module.{branch}_encoder.{name}": factor * w for name, w in state.items()}
        state = {"epoch": 300, "state_dict": moco}
    torch.save(state, tmp_path / "timm.pth")
    out = tmp_path / "new" / "last.pt"
    convert.main(["--from-timm", str(tmp_path / "timm.pth"), str(out), *flags])
    with torch.no_grad():
        assert_close(ser.load_encoder(out)(IMAGES).cls, vit(IMAGES))

def test_our_encoder_gives_timm_its_outputs_and_comes_back(tmp_path):
    path = toy_checkpoint(tmp_path, dim=24, depth=2, cls_layer=0)
    convert.main(["--to-timm", path, str(tmp_path / "timm.pth")])
    vit = shaken_timm(2)
    vit.load_state_dict(torch.load(tmp_path / "timm.pth", weights_only=True))
    ours = ser.load_encoder(path)
    with torch.no_grad():
        assert_close(vit(IMAGES), ours(IMAGES).cls)
    back = tmp_path / "back.pt"
    convert.main(["--from-timm", str(tmp_path / "timm.pth"), str(back), "--heads", "2"])
    assert_close(ser.load_encoder(back).state_dict(), ours.state_dict())

def test_a_late_cls_does_not_go_to_timm(tmp_path):
    """timm would take the weights, and put [CLS] first."""
    with pytest.raises(SystemExit, match="after block 1"):
        convert.main(["--to-timm", toy_checkpoint(tmp_path), str(tmp_path / "timm.pth")])
    assert not (tmp_path / "timm.pth").exists()

def test_encoder_only_keeps_what_evaluations_read(tmp_path):
    path = toy_checkpoint(tmp_path)
    convert.main(["--encoder-only", path, str(tmp_path / "small.pt")])
    kept = torch.load(tmp_path / "small.pt", weights_only=True)
    there = torch.load(path, weights_only=True)
    assert str(kept) == str({name: there[name] for name in ("step", "settings", "encoder")})
