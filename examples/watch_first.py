"""Watch before you clip: observe two training runs for 300 steps each, then print the advice.

python examples/watch_first.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from carryclip.torch import Norm, UClip

torch.set_num_threads(1)  # sums in the same order on every machine


def classify_digits():
    """Pictures of digits, momentum: no gradient is much larger than the others."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    watcher = UClip(optimizer, Norm(0.5), observe=True)  # changes nothing
    for _ in range(300):
        batch = torch.randint(len(y), (16,))
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    print(watcher.advise())


def predict_amounts():
    """Amounts most of which are 0 and few very large, AdamW: the large ones make the mean."""
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = UClip(optimizer, Norm(1.0), observe=True)
    for _ in range(300):
        x = torch.randn(16, 10)
        paid = torch.rand(16) < 0.1
        amounts = 10 * paid * torch.exp(0.5 * x[:, 0] + torch.randn(16))
        optimizer.zero_grad()
        (model(x).squeeze(-1) - amounts).square().mean().backward()
        optimizer.step()
    print(watcher.advise())


torch.manual_seed(0)
classify_digits()
print()
predict_amounts()
