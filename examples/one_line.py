"""One line beside an ordinary training loop: a small net on scikit-learn's digits, AdamW, U-Clip at norm 1.

python examples/one_line.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from carryclip.torch import Norm, UClip

torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
clipper = UClip(optimizer, Norm(1.0))  # instead of clip_grad_norm_ before every step
print(clipper)

for epoch in range(5):
    for batch in torch.randperm(len(y)).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()  # clips
    accuracy = (model(x).argmax(1) == y).float().mean()
    m = clipper.metrics()
    print(
        f"epoch {epoch + 1}: accuracy {accuracy:.1%}, gradient {m['grad_norm']:.2f} -> update {m['update_norm']:.2f}, "
        f"carry {m['carry_ratio']:.2f} radii, skipped {m['skipped_steps']:.0f}"
    )
