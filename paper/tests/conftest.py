"""What the tests of paper/ share."""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""     # before torch looks: tests compare CPU tensors

import torch

torch.set_num_threads(1)     # sums depend on the number of threads; small ones are faster on one

def pytest_configure(config):
    """torchvision announces that its image decoders will go."""
    config.addinivalue_line("filterwarnings", "ignore:The image decoding and encoding")
