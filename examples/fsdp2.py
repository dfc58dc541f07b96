"""FSDP2: the clipper sees shards, and the carry is sharded, saved and resharded like the optimizer's own state.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from carryclip.torch import Norm, UClip


def build() -> tuple[nn.Module, torch.optim.Optimizer, UClip]:
    """A sharded model, its optimizer, and the clipper: attached before a checkpoint is loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, UClip(optimizer, Norm(0.2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Each rank on its own part of every batch; returns the last loss."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = torch.zeros(())
    for step in steps:
        mine = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:64][rank::size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train_and_resume()
    gc.collect()  # models of FSDP2 are in cycles; if they go after the process group, gloo may abort at exit
    dist.destroy_process_group()


def train_and_resume() -> None:
    model, optimizer, clipper = build()
    train(model, optimizer, range(60))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    first = train(model, optimizer, range(60, 120))

    model, optimizer, clipper = build()
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    second = train(model, optimizer, range(60, 120))
    if dist.get_rank() == 0:
        carry = clipper.carry(next(iter(model.parameters())))
        print(f"loss {first:.6f}, and {second:.6f} when resumed; carry of the first weight: {carry.placements}")


if __name__ == "__main__":
    main()
