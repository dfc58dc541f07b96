"""Watch before you clip: observe a training run for 300 steps, then print the advice.

python examples/watch_first.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from carryclip import Norm
from carryclip.torch import UClip

torch.manual_seed(0)
torch.set_num_threads(1)  # sums in the same order on every machine
pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watcher = UClip(optimizer, Norm(0.5), observe=True)  # changes nothing

for _ in range(300):
    batch = torch.randint(len(y), (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()

print(watcher.advise())
