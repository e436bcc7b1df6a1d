"""The gradients of the authors' code, where SER_RELEASE names a clone of it."""
import os

import pytest
import torch
from torch import nn

from paper.experiments import release

CLONE = os.environ.get("SER_RELEASE")

def table(capsys):
    """Run the command; name -> the words of its line."""
    release.main(["--release", CLONE])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[1:] for words in lines}

def test_equal_gradients_are_told_from_others():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert release.norm(one) == "none" and release.same_bits(one, other)
    one.weight.grad = torch.full((1, 1), 3.0)
    one.bias.grad = torch.full((1,), -4.0)
    other.weight.grad, other.bias.grad = one.weight.grad.clone(), one.bias.grad.clone()
    assert release.norm(one) == "5" and release.same_bits(one, other)
    other.bias.grad[0] = torch.nextafter(torch.tensor(-4.0), torch.tensor(0.0))
    assert not release.same_bits(one, other)

@pytest.mark.skipif(not CLONE, reason="SER_RELEASE names no clone of the authors' code")
def test_a_gather_with_gradient_would_bring_it_back(capsys, monkeypatch):
    found = table(capsys)
    zero, large, *projector, same = found["release"]
    assert zero == large and projector == ["none", "none"] and same == "True"
    assert found["ours"][2] == "0" and float(found["ours"][3]) > 1000

    from builder import moco
    monkeypatch.setattr(moco, "concat_all_gather_different_shape", lambda x, _: (x, [len(x)]))
    _, _, before, after, same = table(capsys)["release"]
    assert before == "0" and float(after) > 1000 and same == "False"
