import pytest
import torch

import ser
from paper.experiments import convert
from paper.tests.toys import toy_checkpoint
from test_ser import noise, sentence, shake

IMAGES = noise(3, 3, 16, 16, seed=1)


def run(*words):
    convert.convert(convert.settings([str(word) for word in words]))


def shaken_timm(heads):
    timms = pytest.importorskip("timm").models.VisionTransformer
    vit = timms(16, 4, embed_dim=24, depth=2, num_heads=heads, num_classes=0)
    return shake(vit.eval())


@pytest.mark.parametrize("heads", [2, 4, 12])
def test_timms_weights_give_timms_outputs_here(heads, tmp_path):
    """A bare state dict, DeiT's, and moco-v3's checkpoint, which has 12 heads."""
    vit = shaken_timm(heads)
    state = vit.state_dict() | {"head.weight": torch.zeros(5, 24)}     # a classifier, left out
    if heads == 4:
        state = {"model": state}
    if heads > 6:
        moco = {f"module.base_encoder.{name}": w for name, w in state.items()}
        moco |= {f"module.momentum_encoder.{name}": 2 * w for name, w in state.items()}
        state = {"epoch": 300, "state_dict": moco}
    torch.save(state, tmp_path / "timm.pth")
    out = tmp_path / "new" / "last.pt"
    run("--from-timm", tmp_path / "timm.pth", out, "--heads", heads)
    torch.testing.assert_close(ser.load_encoder(out)(IMAGES).cls, vit(IMAGES))
    settings = torch.load(out, weights_only=True)["settings"]
    assert settings["data"] and not settings["equiv_layers"]     # evaluations ask for --data
    assert "weight" not in settings     # how it was trained is not known


def test_our_encoder_gives_timm_its_outputs_and_comes_back(tmp_path):
    path = toy_checkpoint(tmp_path, dim=24, depth=2, cls_layer=0, heads=4)
    run("--to-timm", path, tmp_path / "timm.pth")
    vit = shaken_timm(4)
    pytest.importorskip("timm").models.load_checkpoint(vit, str(tmp_path / "timm.pth"))
    run("--from-timm", tmp_path / "timm.pth", tmp_path / "back.pt", "--heads", 2)     # it has 4
    for ours in (path, tmp_path / "back.pt"):
        torch.testing.assert_close(ser.load_encoder(ours)(IMAGES).cls, vit(IMAGES))


def test_what_cannot_be_converted_is_one_sentence(tmp_path):
    late_cls = toy_checkpoint(tmp_path)
    weights = tmp_path / "timm.pth"
    assert "after block 1" in sentence(run, "--to-timm", late_cls, weights)
    torch.save(shaken_timm(4).state_dict(), weights)
    assert "--heads" in sentence(run, "--from-timm", weights, tmp_path / "new.pt")
    assert "last.pt exists" in sentence(run, "--from-timm", weights, late_cls)
