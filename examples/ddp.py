"""DistributedDataParallel in both orders: average, then clip (UClip); or clip on each rank, then average (LocalUClip).

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --each-rank
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from carryclip.torch import LocalUClip, Norm, UClip


def digits() -> TensorDataset:
    """8x8 digits, which come with scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each-rank", action="store_true", help="clip on each rank, then average")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # A carry on every rank, or the same carry on all of them.
    clipper = LocalUClip(model, optimizer, Norm(1.0)) if options.each_rank else UClip(optimizer, Norm(1.0))
    data = digits()
    sampler = DistributedSampler(data, seed=0)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    accuracy = (net(images).argmax(1) == labels).float().mean().item()
    carry = clipper.metrics()["carry_norm"]
    order = "clip, then average" if options.each_rank else "average, then clip"
    print(f"rank {rank}, {order}: accuracy {accuracy:.3f}, carry {carry:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
