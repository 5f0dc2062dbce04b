"""Print the counts of basic operations, and values that the host reads from the null GPU."""

import torch
from null_gpu import counted, finish

result = {"devices": [torch.cuda.get_device_name(number) for number in range(2)]}

layer = torch.nn.Linear(4, 4).cuda()
images = torch.zeros(2, 4, device="cuda", requires_grad=True)
layer(images).sum().backward()
with counted() as result["step"]:
    layer(images).sum().backward()
with counted() as result["item"]:
    layer.bias.sum().item()

pageable = torch.zeros(100)
with counted() as copies:
    pageable.cuda()
    pageable.pin_memory().cuda(non_blocking=True)
result["upload"] = {name: copies[name] for name in ("pinned_copies", "pageable_copies")}


def read(*, wait):
    """Copy the result of a kernel to pinned memory, wait, and read it."""
    copy = torch.ones(1, device="cuda:0").to("cpu", non_blocking=True)
    wait()
    return copy.item() if copy.isfinite() else str(copy.item())


def wait_for(stream):
    """Record an event in a stream, and wait for it."""
    event = torch.cuda.Event()
    event.record(stream)
    event.synchronize()


result["early"] = read(wait=lambda: None)
result["other stream"] = read(wait=lambda: wait_for(torch.cuda.Stream()))
result["other device"] = read(wait=lambda: wait_for(torch.cuda.current_stream("cuda:1")))
result["same stream"] = read(wait=lambda: wait_for(torch.cuda.current_stream()))
result["round trip"] = torch.tensor([1.0, 2.0]).cuda().tolist()
finish(result)
