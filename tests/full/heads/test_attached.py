"""A model with an attached head under torch.compile and DDP."""

import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.vision_transformer import VisionTransformer

from mldec.heads import attach

SMALL = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}


@torch.no_grad()
def test_model_compiles_to_one_graph():
    model = VisionTransformer(64, 16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)
    attach(model, 5, **SMALL).eval()
    images = torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))


def test_all_trainable_parameters_have_gradients_in_ddp(tmp_path):
    model = attach(timm.create_model("mobilenetv3_small_050"), 5, **SMALL)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        for _ in range(2):  # DDP checks for missing gradients in the second step
            parallel(torch.randn(2, 3, 64, 64)).square().sum().backward()
    finally:
        dist.destroy_process_group()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
