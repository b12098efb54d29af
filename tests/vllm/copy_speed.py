"""Copies from pinned memory to the device, in the interpreter of the engines: prints the picoseconds that a byte takes.

Arguments: the device, cpu or cuda; the bytes of a copy.
"""

import sys
import time

import torch

ROUNDS = 20


def main() -> None:
    device, size = sys.argv[1], int(sys.argv[2])
    host = torch.ones(size, dtype=torch.int8, pin_memory=device == "cuda")
    target, took = torch.zeros(size, dtype=torch.int8, device=device), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    print(round(min(took) * 1e12 / size, 1))


main()
