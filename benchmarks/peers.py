"""Compare D2PLM's trainer with common alternatives that do the same work.

A step is one packed row of D2PLM's loader. The peers train the same weights on the same sequences
with the same masks, padded, and must have the same losses at every step: HF Trainer and Lightning
on the same DiT, and HF Trainer on an EsmForMaskedLM whose weights the ESM-compatible DiT shares. In
their favour, their masks are drawn beforehand and they keep no moving average of the weights.

    python -m benchmarks.peers
    python -m benchmarks.peers --longest-protein 700 --esm
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import hf_trainer
from benchmarks.measure import (
    PROTEINS,
    Arm,
    BenchError,
    Row,
    Timings,
    Turns,
    publish,
    rate_unit,
    ratio_row,
    require_same_losses,
    say,
    take_turns,
    training_parser,
)
from benchmarks.workload import TakeTurns, Workload, model_settings, workload_of
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.core.vocabulary import ESM2_TOKENS, MASK, PAD
from d2plm.model.esm import UNUSED_POSITIONS, load_esm

try:
    from benchmarks import lightning_trainer
except ModuleNotFoundError:  # an extra: pip install 'd2plm[lightning]'
    lightning_trainer = None  # type: ignore[assignment]

PACKED, HF = "packed", "HF Trainer"
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


def bench_peers(given: argparse.Namespace) -> list[Row]:
    """Measure the packed step against peers that pad.

    Raises:
        BenchError: an arm fails, or the arms' losses differ.
    """
    place = torch.device(resolve_device(given.device))
    low = resolve_precision(given.precision, place) == torch.bfloat16
    settings = {"device": place.type, "precision": "bf16" if low else "fp32"}
    if lightning_trainer is None:
        say("Lightning is left out, because it is not installed: pip install 'd2plm[lightning]'")
    sizes = {key: getattr(given, key) for key in ("token_budget", "max_length", "longest_protein")}
    total = WARM_UP + given.turns * given.steps
    with workload_of(PROTEINS, model_settings(given.model), **sizes) as workload:
        groups = [dit_arms(workload, settings, total)]
        if given.esm:
            groups.append(esm_arms(workload, settings, total))
        lengths = [batch.sequence_lengths() for batch in workload.batches(total)[WARM_UP:]]
        tokens, rows = sum(map(sum, lengths)), []
        for label, pad_to in _paddings(workload).items():  # counted, of the batches that are timed
            positions = sum(len(step) * (pad_to or max(step)) for step in lengths)
            rows.append(Row(f"positions ÷ tokens, padded {label}", positions / tokens, "×"))
        for arms in groups:
            times = {"turns": given.turns, "steps": given.steps, "threads": given.threads}
            timings = take_turns(arms, warm_up=WARM_UP, **times)
            rows += _group_rows(workload, arms, timings, settings, tokens / given.turns)
    return rows


def dit_arms(workload: Workload, settings: dict[str, str], steps: int) -> list[Arm]:
    """Ours and the peers on the same DiT, for at most `steps` steps."""
    both: dict[str, Any] = {"workload": workload, **settings}
    arms = _packed_arms(PACKED, both)
    if lightning_trainer is not None:
        arms.append(Arm("Lightning, packed", lightning_trainer.train, both))
    for label, pad_to in _paddings(workload).items():
        padded = {**both, "steps": steps, "pad_to": pad_to}
        arms.append(Arm(f"{HF}, {label}", hf_trainer.train, padded))
        if lightning_trainer is not None:
            arms.append(Arm(f"Lightning, {label}", lightning_trainer.train, padded))
        if settings == {"device": "cpu", "precision": "bf16"}:
            unchanged = {**padded, "precision": "fp32"}
            arms.append(Arm(f"{DEFAULT_PRECISION}, {label}", hf_trainer.train, unchanged))
    return arms


def esm_arms(workload: Workload, settings: dict[str, str], steps: int) -> list[Arm]:
    """An EsmForMaskedLM in HF Trainer, and ours on the DiT with its weights."""
    checkpoint = Path(workload.store, "esm")
    save_esm(checkpoint, workload.max_length, workload.seed)
    both: dict[str, Any] = {"workload": workload, "checkpoint": str(checkpoint), **settings}
    return _packed_arms(f"{PACKED}, ESM-compatible", both) + [
        Arm(
            f"EsmForMaskedLM in {HF}, {label}",
            hf_trainer.train,
            {**both, "steps": steps, "pad_to": pad_to},
        )
        for label, pad_to in _paddings(workload).items()
    ]


def _packed_arms(name: str, settings: dict[str, Any]) -> list[Arm]:
    return [
        Arm(f"{name}{', compiled' * compiled}", train_packed, {**settings, "compile": compiled})
        for compiled in (False, True)
    ]


def train_packed(
    turns: Turns, *, workload: Workload, checkpoint: str | None = None, **settings: Any
) -> None:
    """Arm: our trainer."""
    if checkpoint is not None:
        settings |= {"model": load_esm(checkpoint, seed=workload.seed), "freeze": FROZEN}
    trainer = workload.trainer(callbacks=(TakeTurns(turns),), **settings)
    if trainer.compiled != settings["compile"]:
        raise BenchError("the compiler does not work here, see above")
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
    difference = require_same_losses([*timings.values()], tolerance)
    unit = rate_unit(torch.device(settings["device"]))
    rows = [Row(name, tokens / median(arm.seconds), unit) for name, arm in timings.items()]
    goals = {
        f"{trainer}, {label}": goal
        for label, goal in zip(_paddings(workload), GOALS[settings["device"]], strict=True)
        for trainer in (HF, "Lightning")
    }
    ours = [arm.name for arm in arms if arm.work is train_packed]
    for own in ours:
        for name in (name for name in timings if name not in ours):
            what, theirs = f"{name} ÷ {own}, {precision}", timings[name]
            rows.append(ratio_row(what, theirs.seconds, timings[own].seconds, goals.get(name)))
            if name.startswith(HF):
                rows.append(ratio_row(f"{what}, wall-clock", theirs.wall, timings[own].wall))
    what = f"largest difference of the losses, {precision}"
    return [*rows, Row(what, difference, "relative", tolerance, at_most=True)]


if __name__ == "__main__":
    made = training_parser("peers", __doc__)
    made.add_argument("--model", default="nano", help="a file of configs/model")
    made.add_argument(
        "--longest-protein",
        type=int,
        help="residues; longer proteins are left out. 700: padding makes them 3.2 times as long, "
        "as those of UniRef50",
    )
    made.add_argument("--esm", action="store_true", help="also compare with an EsmForMaskedLM")
    given = made.parse_args()
    publish(given, bench_peers(given))
