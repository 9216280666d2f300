"""A device against the CPU in fp32: masks, loss and gradients of one packed batch.

python -m benchmarks.agreement --model 450m --layers 2 --token-budget 2048
"""

import torch
from torch import Tensor

from benchmarks.measure import Row, parser, publish
from benchmarks.workload import Workload, model_settings, workload_of
from d2plm.core.noise import Key
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.core.vocabulary import MASK
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.parallelise import in_precision

LOSS, GRADIENTS = 2e-2, 5e-2  # relative, of a lower precision


def agreement_rows(workload: Workload, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Differences between the device and the CPU in fp32, of the first batch."""
    masked, loss, gradients = _one_step(workload, torch.device("cpu"), torch.float32)
    other_masked, other_loss, others = _one_step(workload, device, dtype)
    difference = torch.stack([(a - b).norm() for a, b in zip(gradients, others, strict=True)])
    relative = float(difference.norm() / torch.stack([a.norm() for a in gradients]).norm())
    what = f"{device.type} {str(dtype).removeprefix('torch.')} against cpu fp32"
    changed = float((masked != other_masked).sum())
    return [
        Row(f"{what}: tokens with another mask", changed, "", 0, at_most=True),
        Row(f"{what}: loss", abs(other_loss - loss) / loss, "relative", LOSS, at_most=True),
        Row(f"{what}: gradients", relative, "relative", GRADIENTS, at_most=True),
    ]


def _one_step(
    workload: Workload, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float, list[Tensor]]:
    """Masks, summed loss and gradients, on the CPU."""
    model, paradigm = workload.new_model().to(device).train(), AbsorbingDiffusion()
    batch = workload.batches(1)[0].to(device)
    corrupted = paradigm.corrupt(batch, Key(workload.seed))
    logits = in_precision(model, dtype)(
        corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times
    )
    loss, _ = paradigm.loss(logits, batch, corrupted)
    loss.backward()
    gradients = [p.grad.cpu().float() for p in model.parameters() if p.grad is not None]
    return (corrupted.tokens == MASK).cpu(), float(loss.detach()), gradients


def main() -> None:
    """The command line."""
    made = parser("agreement", __doc__)
    made.add_argument("--model", default="nano", help="a file of configs/model")
    made.add_argument("--layers", type=int, help="of the model, if not its own")
    made.add_argument("--token-budget", type=int, default=2048, help="tokens of the batch")
    made.add_argument("--max-length", type=int, default=1024, help="tokens of a sequence")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = made.parse_args()
    model = {**model_settings(given.model), "initial_gate": 1.0}
    if given.layers is not None:
        model["num_hidden_layers"] = given.layers
    place = torch.device(resolve_device(given.device))
    sizes = {"token_budget": given.token_budget, "max_length": given.max_length}
    with workload_of(given.proteins, model, **sizes) as workload:
        publish(given, agreement_rows(workload, place, resolve_precision("auto", place)))


if __name__ == "__main__":
    main()
