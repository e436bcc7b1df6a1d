"""What the tests of paper/ share."""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""     # before torch looks: tests compare CPU tensors

import torch

torch.set_num_threads(1)     # sums depend on the number of threads; small ones are faster on one
