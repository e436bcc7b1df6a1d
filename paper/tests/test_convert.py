import pytest
import torch

import ser
from paper.experiments import convert
from paper.tests.toys import parsed, toy_checkpoint
from test_ser import noise, parametrize, sentence, shake

IMAGES = noise(3, 3, 16, 16, seed=1)


def run(*words):
    convert.convert(parsed(convert, *words))


@parametrize("heads", [2, 4, 12])     # of a bare state dict, DeiT's, and moco-v3's checkpoint
def test_timms_weights_give_timms_outputs_here(heads, tmp_path, monkeypatch):
    timms = pytest.importorskip("timm").models.VisionTransformer
    vit = shake(timms(16, 4, embed_dim=24, depth=2, num_heads=heads, num_classes=0).eval())
    others = vit.state_dict() | {"blocks.0.ls1.gamma": torch.ones(24)}     # no plain ViT's
    pytest.raises(RuntimeError, convert.from_timm, others, heads)
    state = vit.state_dict() | {"head.weight": torch.zeros(5, 24)}     # a classifier, left out
    moco = {f"module.base_encoder.{name}": w for name, w in state.items()}
    moco |= {f"module.momentum_encoder.{name}": 2 * w for name, w in state.items()}
    state = {2: state, 4: {"model": state}, 12: {"epoch": 300, "state_dict": moco}}[heads]
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(state, tmp_path / "timm.pth")     # as on a GPU
    out = tmp_path / "new" / "last.pt"
    run(f"--from-timm {tmp_path}/timm.pth {out} --heads {heads}")
    torch.testing.assert_close(ser.load_encoder(out)(IMAGES).cls, vit(IMAGES))
    run(f"--from-timm {tmp_path}/timm.pth {tmp_path}/late.pt --heads 2 --cls-layer 1")
    assert ser.load_encoder(tmp_path / "late.pt").cls_layer == 1
    settings = ser.load_checkpoint(out)["settings"]
    assert settings["data"] and not settings["equiv_layers"]     # evaluations ask for --data


def test_a_file_is_not_replaced(tmp_path):
    path = toy_checkpoint(tmp_path)
    assert "last.pt exists" in sentence(run, "--from-timm", "timm.pth", path, "--heads", 4)
