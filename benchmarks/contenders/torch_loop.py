"""Contender: the reference job as a PyTorch loop, in one process or two (DDP, gloo)."""

from typing import Any

import torch
from contender import Follower, follow, free_address, pin, serve
from jobs import LEARNING_RATE, arguments, describe_data, job_of, load
from torch import distributed, nn


def network() -> nn.Module:
    """The reference network; Keras' momentum 0.99 is 0.01 here."""

    def conv(before: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(before, filters, 3), nn.ReLU()]

    def block(before: int, filters: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01)
        return [*conv(before, filters), *conv(filters, filters), nn.MaxPool2d(2), norm]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 64),
        *(nn.Flatten(), nn.Linear(1024, 256), nn.ReLU()),
        *(nn.BatchNorm1d(256, eps=1e-3, momentum=0.01), nn.Linear(256, 10)),
    )


def main() -> None:
    """Starts the second process if there is one, and trains."""
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.processes == 1:
        train(options, network())
        return
    pin(options.rank)
    torch.set_num_threads(1)
    address = options.address or free_address()
    follower = None if options.rank else Follower(address)
    distributed.init_process_group(
        "gloo", f"tcp://{address}", rank=options.rank, world_size=options.processes
    )
    train(options, nn.parallel.DistributedDataParallel(network()), follower)
    if follower is not None:
        follower.let_go()
        follower.wait()
    distributed.destroy_process_group()


def train(options: Any, model: nn.Module, follower: Follower | None = None) -> None:
    """Every process takes its share of each global batch."""
    job = job_of(options)
    x, y = load(job, options.data)
    images = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(y).long()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-7)
    lose = nn.CrossEntropyLoss()
    shuffling = torch.Generator().manual_seed(0)

    def repeat() -> dict[str, Any]:
        if follower is not None:
            follower.send_on()
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.long)
        order = torch.randperm(len(images), generator=shuffling)
        for chosen in order.split(job.batch_size):
            mine = chosen[options.rank :: options.processes]
            optimizer.zero_grad(set_to_none=True)
            logits = model(images[mine])
            loss = lose(logits, labels[mine])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(mine)
            hits += (logits.argmax(1) == labels[mine]).sum()
        share = len(images) / options.processes
        return {"loss": float(total) / share, "accuracy": int(hits) / share}

    if options.rank:
        follow(repeat)
        return
    serve(repeat, steps=job.steps, device="cpu", data=describe_data(options.data))


if __name__ == "__main__":
    main()
