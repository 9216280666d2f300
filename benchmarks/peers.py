"""Compare D2PLM's trainer with common alternatives that do the same work.

A step is one packed row of D2PLM's loader. The peers train the same weights on the same sequences
with the same masks, padded, and must have the same losses at every step: HF Trainer and Lightning
on the same DiT, and HF Trainer on an EsmForMaskedLM whose weights the ESM-compatible DiT shares. In
their favour, their masks are drawn beforehand and they keep no moving average of the weights.

The ratios depend on what else the machine does. With two states they are measured on an idle
machine and beside a loop on one core; the lower end of their range is what may be claimed.

    python -m benchmarks.peers
    python -m benchmarks.peers --longest-protein 700 --esm --states idle busy
"""

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import hf_trainer
from benchmarks.measure import (
    Arm,
    BenchError,
    Row,
    Timings,
    Turns,
    busy_core,
    parser,
    publish,
    rate_unit,
    ratio_row,
    require_same_losses,
    say,
    take_turns,
    training_arguments,
)
from benchmarks.workload import TakeTurns, Workload, model_settings, workload_of
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.core.vocabulary import ESM2_TOKENS, MASK, PAD
from d2plm.model.esm import UNUSED_POSITIONS, load_esm

try:
    from benchmarks import lightning_trainer
except ModuleNotFoundError:  # an extra: pip install 'd2plm[lightning]'
    lightning_trainer = None  # type: ignore[assignment]

PACKED = "packed"
# D2PLM uses bf16 by default if the processor supports it.
DEFAULT_PRECISION = "HF Trainer, default precision (fp32)"
# Goals for the time ratios of trainers that pad to the longest of a batch, and to a fixed length.
GOALS = {"cpu": (3, 6), "cuda": (None, 5)}
WARM_UP = 3  # steps
# Relative: of losses about 3, four decimals; in bf16 twenty times the observed difference, which
# also holds against fp32.
TOLERANCE = {"fp32": 1.5e-5, "bf16": 2e-3}
FROZEN = ["time_embedding.*", "blocks.*.modulation.*", "head.modulation.*"]  # absent in ESM-2
ESM: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 2}
ESM |= {"intermediate_size": 512}


def bench_peers(given: argparse.Namespace) -> tuple[list[Row], list[Timings]]:
    """Measure the packed step against peers that pad.

    Raises:
        BenchError: an arm fails, or the arms' losses differ.
    """
    place = torch.device(resolve_device(given.device))
    dtype = resolve_precision(given.precision, place)
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if dtype not in kinds:
        raise BenchError(f"precision={given.precision}: the peers train in fp32 or bf16")
    if lightning_trainer is None:
        say("Lightning is left out, because it is not installed: pip install 'd2plm[lightning]'")
    sizes = {key: getattr(given, key) for key in ("token_budget", "max_length", "longest_protein")}
    settings = {"device": place.type, "precision": kinds[dtype]}
    total, compile = WARM_UP + given.turns * given.steps, not given.no_compile
    with workload_of(given.proteins, model_settings(given.model), **sizes) as workload:
        groups = [dit_arms(workload, settings, total, compile)]
        if given.esm:
            checkpoint = Path(workload.store, "esm")
            save_esm(checkpoint, given.max_length, workload.seed)
            groups.append(esm_arms(workload, settings, total, compile, checkpoint))
        lengths = [batch.sequence_lengths() for batch in workload.batches(total)[WARM_UP:]]
        tokens = sum(map(sum, lengths))
        rows = [  # an exact count over the batches that are timed
            Row(
                f"positions ÷ tokens, padded {label}",
                sum(len(step) * (pad_to or max(step)) for step in lengths) / tokens,
                "×",
            )
            for label, pad_to in _paddings(workload).items()
        ]
        timings: list[Timings] = []
        for arms in groups:
            taken = take_turns(
                arms,
                turns=given.turns,
                steps=given.steps,
                warm_up=WARM_UP,
                threads=given.threads,
                pinned=given.threads == 1,  # arms of one thread disturb each other least so
            )
            rows += _group_rows(workload, arms, taken, settings, tokens / given.turns)
            timings += taken.values()
    return rows, timings


def dit_arms(workload: Workload, settings: dict[str, str], steps: int, compile: bool) -> list[Arm]:
    """Ours and the peers on the same DiT, for at most `steps` steps."""
    both: dict[str, Any] = {"workload": workload, **settings}
    arms = _packed_arms(PACKED, both, compile)
    if lightning_trainer is not None:
        arms.append(Arm("Lightning, packed", lightning_trainer.train_packed, both))
    for label, pad_to in _paddings(workload).items():
        padded = {**both, "steps": steps, "pad_to": pad_to}
        arms.append(Arm(f"HF Trainer, {label}", hf_trainer.train_dit, padded))
        if lightning_trainer is not None:
            arms.append(Arm(f"Lightning, {label}", lightning_trainer.train_padded, padded))
        if settings == {"device": "cpu", "precision": "bf16"}:
            unchanged = {**padded, "precision": "fp32"}
            arms.append(Arm(f"{DEFAULT_PRECISION}, {label}", hf_trainer.train_dit, unchanged))
    return arms


def esm_arms(
    workload: Workload, settings: dict[str, str], steps: int, compile: bool, checkpoint: Path
) -> list[Arm]:
    """An EsmForMaskedLM in HF Trainer, and ours on the DiT with its weights."""
    both: dict[str, Any] = {"workload": workload, "checkpoint": str(checkpoint), **settings}
    arms = _packed_arms(f"{PACKED}, ESM-compatible", both, compile)
    for label, pad_to in _paddings(workload).items():
        padded = {**both, "steps": steps, "pad_to": pad_to}
        arms.append(Arm(f"EsmForMaskedLM in HF Trainer, {label}", hf_trainer.train_esm, padded))
    return arms


def _packed_arms(name: str, settings: dict[str, Any], compile: bool) -> list[Arm]:
    names = {name: False} | ({f"{name}, compiled": True} if compile else {})
    return [
        Arm(label, train_packed, {**settings, "compile": compiled})
        for label, compiled in names.items()
    ]


def train_packed(
    turns: Turns,
    *,
    workload: Workload,
    compile: bool,
    checkpoint: str | None = None,
    **settings: Any,
) -> None:
    """Arm: our trainer."""
    if checkpoint is not None:
        settings |= {"model": load_esm(checkpoint, seed=workload.seed), "freeze": FROZEN}
    trainer = workload.trainer(callbacks=(TakeTurns(turns),), compile=compile, **settings)
    if compile and not trainer.compiled:
        raise BenchError("the compiler does not work here, see above: use --no-compile")
    trainer.train()


def save_esm(folder: Path, max_length: int, seed: int) -> None:
    """Write an `EsmForMaskedLM` of random weights, of ESM-2's kind, without dropout.

    Output projection and embeddings are separate weights, as in ours, so that both train alike.
    """
    from transformers import EsmConfig, EsmForMaskedLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = EsmConfig(
        vocab_size=len(ESM2_TOKENS),
        mask_token_id=MASK,
        pad_token_id=PAD,
        max_position_embeddings=max_length + UNUSED_POSITIONS,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=ESM["hidden_size"] ** -0.5,
        tie_word_embeddings=False,
        **ESM,
    )
    torch.manual_seed(seed)
    EsmForMaskedLM(config).save_pretrained(folder)


def _paddings(workload: Workload) -> dict[str, int | None]:
    return {"to longest": None, f"to {workload.max_length:,}": workload.max_length}


def _group_rows(
    workload: Workload,
    arms: list[Arm],
    timings: dict[str, Timings],
    settings: dict[str, str],
    tokens: float,
) -> list[Row]:
    """Rates of all arms in `tokens` a turn, and their times ÷ ours, if the losses are the same."""
    precision = settings["precision"]
    tolerance = TOLERANCE[precision]
    difference = require_same_losses(list(timings.values()), tolerance)
    unit = rate_unit(torch.device(settings["device"]))
    rows = [Row(name, timing.per_second(tokens), unit) for name, timing in timings.items()]
    goals = {
        f"{trainer}, {label}": goal
        for label, goal in zip(_paddings(workload), GOALS[settings["device"]], strict=True)
        for trainer in ("HF Trainer", "Lightning")
    }
    ours = [arm.name for arm in arms if arm.work is train_packed]
    for own in ours:
        for name in (name for name in timings if name not in ours):
            what, theirs = f"{name} ÷ {own}, {precision}", timings[name].seconds
            rows.append(ratio_row(what, theirs, timings[own].seconds, goals.get(name)))
    what = f"largest difference of the losses, {precision}"
    return [*rows, Row(what, difference, "relative", tolerance, at_most=True)]


def main() -> None:
    """The command line."""
    made = parser("peers", __doc__)
    training_arguments(made)
    made.add_argument("--model", default="nano", help="a file of configs/model")
    made.add_argument(
        "--longest-protein",
        type=int,
        help="residues; longer proteins are left out. 700: padding makes them 3.2 times as long, "
        "as those of UniRef50",
    )
    made.add_argument("--no-compile", action="store_true", help="leave out D2PLM's compiled arm")
    made.add_argument("--esm", action="store_true", help="also compare with an EsmForMaskedLM")
    made.add_argument(
        "--states",
        nargs="+",
        choices=("idle", "busy"),
        default=["idle"],
        help="of the machine, each measured in turn: as it is, and with one core kept busy",
    )
    given = made.parse_args()
    rows: dict[str, list[Row]] = {}
    details: dict[str, Any] = {}
    for state in given.states:
        with busy_core() if state == "busy" else nullcontext():
            rows[state], timings = bench_peers(given)
        details[state] = [asdict(timing) for timing in timings]
    publish(given, rows, details)


if __name__ == "__main__":
    main()
