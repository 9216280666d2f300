"""Our trainer against what one would take instead, doing the same work.

A step is one packed row of our loader. The peers train the same weights on the same sequences with
the same masks, laid below each other with padding, and must have the same losses at every step: HF
Trainer and Lightning on the same DiT, and HF Trainer on an EsmForMaskedLM whose weights the
ESM-compatible DiT has. In their favour, their masks are drawn beforehand and they keep no moving
average of the weights, which ours does within its time.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2plm.bench.arms import (
    Arm,
    Timings,
    Turns,
    require_same_losses,
    serve_arms,
    take_turns,
)
from d2plm.bench.rows import Row, rate_unit, ratio_row
from d2plm.bench.workload import LEARNING_RATE, TakeTurns, Workload, workload_of
from d2plm.core.alphabet import MASK, PAD, TOKENS
from d2plm.core.errors import BenchError
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.esm import UNUSED_POSITIONS, load_esm

MODULE, HF, LIGHTNING = (
    f"d2plm.bench.{name}" for name in ("peers", "hf_trainer", "lightning_trainer")
)
PACKED = "packed"
# Nobody has told it of bf16, which ours takes by itself where the processor has it.
AS_IT_COMES = "HF Trainer as it comes (fp32)"
# Times that the padded trainers take as long: to the longest of a batch, and to a fixed length.
GOALS = {"cpu": (3, 6), "cuda": (None, 5)}
WARM_UP = 3  # steps
# Relative: of losses about 3, four decimals; in bf16 twenty times what was seen to differ, which
# holds against fp32, too.
TOLERANCE = {"fp32": 1.5e-5, "bf16": 2e-3}
# What ESM-2 has not.
FROZEN = ["time_embedding.*", "blocks.*.modulation.*", "head.modulation.*"]


def bench_peers(
    proteins: Path,
    model: dict[str, Any],
    *,
    token_budget: int = 8192,
    max_length: int = 1024,
    longest_protein: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    compile: bool = True,
    turns: int = 12,
    steps: int = 1,
    threads: int | None = 1,
    pinned: bool = True,
    esm: dict[str, Any] | None = None,
    temporary_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Timings]]:
    """Measure the packed step against peers that pad.

    Args:
        proteins: FASTA of real proteins.
        model: settings of a `DiTConfig`.
        token_budget: tokens of a step.
        max_length: longest segment, to which the peers pad that do not pad to the longest.
        longest_protein: residues; longer proteins are left out. None keeps all.
        precision: fp32 or bf16, of all arms.
        compile: whether ours is compiled in a further arm.
        turns, steps: of each arm, and steps of a turn.
        threads: of each arm; None takes what training takes.
        pinned: whether all arms share one CPU.
        esm: sizes of an `EsmConfig` (`hidden_size`, `num_hidden_layers`, `num_attention_heads`,
            `intermediate_size`); None leaves EsmForMaskedLM out.
        report: called with one line per stage.

    Raises:
        BenchError: an arm fails, the arms' losses differ, or what they need is missing.
    """
    place = torch.device(resolve_device(device))
    dtype = resolve_precision(precision, place)
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if dtype not in kinds:
        raise BenchError(f"precision={precision}: the peers train in fp32 or bf16, choose one")
    with_lightning = importlib.util.find_spec("pytorch_lightning") is not None
    if not with_lightning:
        report("Lightning is left out, as it is not installed: pip install 'd2plm[lightning]'")
    settings = {"device": place.type, "precision": kinds[dtype]}
    with workload_of(
        proteins,
        model,
        token_budget=token_budget,
        max_length=max_length,
        longest_protein=longest_protein,
        temporary_dir=temporary_dir,
    ) as workload:
        total = WARM_UP + turns * steps
        arms = dit_arms(workload, steps=total, compile=compile, **settings)
        groups = [[arm for arm in arms if with_lightning or arm.module != LIGHTNING]]
        if esm is not None:
            checkpoint = Path(workload.store).with_name("esm")
            save_esm(checkpoint, esm, max_length, workload.seed)
            groups.append(esm_arms(workload, checkpoint, steps=total, compile=compile, **settings))
        rows, timings = _padding_rows(workload, total), list[Timings]()
        for arms in groups:
            taken = take_turns(
                arms,
                turns=turns,
                steps=steps,
                warm_up=WARM_UP,
                threads=threads,
                pinned=pinned,
                report=report,
            )
            rows += _group_rows(workload, taken, settings, turns=turns, steps=steps)
            timings += taken.values()
    return rows, timings


def dit_arms(
    workload: Workload, *, steps: int, compile: bool, device: str, precision: str
) -> list[Arm]:
    """Ours, and the peers on the same DiT, which take at most so many `steps`."""
    settings = {"workload": workload.arguments(), "device": device, "precision": precision}
    theirs = {**settings, "learning_rate": LEARNING_RATE}
    arms = _packed_arms(PACKED, settings, compile)
    arms.append(Arm("Lightning, packed", LIGHTNING, "packed", theirs))
    for label, pad_to in _paddings(workload).items():
        padded = {**theirs, "steps": steps, "pad_to": pad_to}
        arms.append(Arm(f"HF Trainer, {label}", HF, "dit", padded))
        arms.append(Arm(f"Lightning, {label}", LIGHTNING, "padded", padded))
        if precision == "bf16" and device == "cpu":
            unchanged = {**padded, "precision": "fp32"}
            arms.append(Arm(f"{AS_IT_COMES}, {label}", HF, "dit", unchanged))
    return arms


def esm_arms(
    workload: Workload, checkpoint: Path, *, steps: int, compile: bool, device: str, precision: str
) -> list[Arm]:
    """An EsmForMaskedLM in HF Trainer, and ours on the DiT with its weights."""
    settings = {"workload": workload.arguments(), "device": device, "precision": precision}
    settings |= {"checkpoint": str(checkpoint)}
    arms = _packed_arms(f"{PACKED}, ESM-compatible", settings, compile)
    for label, pad_to in _paddings(workload).items():
        padded = {"steps": steps, "pad_to": pad_to, "learning_rate": LEARNING_RATE}
        arms.append(
            Arm(f"EsmForMaskedLM in HF Trainer, {label}", HF, "esm", {**settings, **padded})
        )
    return arms


def save_esm(folder: Path, sizes: dict[str, Any], max_length: int, seed: int) -> None:
    """Write an `EsmForMaskedLM` of random weights, of ESM-2's kind, without dropout.

    Its output projection is not that of the embeddings, as in ours, so that both train alike.
    """
    from transformers import EsmConfig, EsmForMaskedLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = EsmConfig(
        vocab_size=len(TOKENS),
        mask_token_id=MASK,
        pad_token_id=PAD,
        max_position_embeddings=max_length + UNUSED_POSITIONS,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=sizes["hidden_size"] ** -0.5,
        tie_word_embeddings=False,
        **sizes,
    )
    torch.manual_seed(seed)
    EsmForMaskedLM(config).save_pretrained(folder)


def _paddings(workload: Workload) -> dict[str, int | None]:
    return {"to longest": None, f"to {workload.max_length:,}": workload.max_length}


def _packed_arms(name: str, settings: dict[str, Any], compile: bool) -> list[Arm]:
    names = {name: False} | ({f"{name}, compiled": True} if compile else {})
    return [
        Arm(label, MODULE, "packed", {**settings, "compile": compiled})
        for label, compiled in names.items()
    ]


def _padding_rows(workload: Workload, total: int) -> list[Row]:
    """How much longer padded batches are: an exact count over those that are timed."""
    lengths = [batch.sequence_lengths() for batch in workload.batches(total)[WARM_UP:]]
    tokens = sum(map(sum, lengths))
    return [
        Row(
            f"positions ÷ tokens, padded {label}",
            sum(len(step) * (pad_to or max(step)) for step in lengths) / tokens,
            "×",
        )
        for label, pad_to in _paddings(workload).items()
    ]


def _group_rows(
    workload: Workload,
    timings: dict[str, Timings],
    settings: dict[str, str],
    *,
    turns: int,
    steps: int,
) -> list[Row]:
    """Rates of all arms, and how many times ours they take, once their losses are the same."""
    precision = settings["precision"]
    tolerance = TOLERANCE[precision]
    difference = require_same_losses(list(timings.values()), tolerance)
    batches = workload.batches(WARM_UP + turns * steps)[WARM_UP:]
    tokens = sum(sum(batch.sequence_lengths()) for batch in batches) / turns
    unit = rate_unit(torch.device(settings["device"]))
    rows = [
        Row(
            name if name.startswith(AS_IT_COMES) else f"{name}, {precision}",
            timing.per_second(tokens),
            unit,
        )
        for name, timing in timings.items()
    ]
    goals = {
        f"{trainer}, {label}": goal
        for label, goal in zip(_paddings(workload), GOALS[settings["device"]], strict=True)
        for trainer in ("HF Trainer", "Lightning")
    }
    ours = [name for name in timings if name.startswith(PACKED)]
    for own in ours:
        for name in (name for name in timings if name not in ours):
            what, theirs = f"{name} ÷ {own}, {precision}", timings[name].seconds
            rows.append(ratio_row(what, theirs, timings[own].seconds, goals.get(name)))
    what = f"largest difference of their losses, {precision}"
    return [*rows, Row(what, difference, "relative", tolerance, at_most=True)]


def _work_packed(
    turns: Turns,
    *,
    workload: dict[str, Any],
    compile: bool,
    checkpoint: str | None = None,
    **settings: Any,
) -> None:
    if checkpoint is not None:
        settings |= {"model": load_esm(checkpoint, seed=workload["seed"]), "freeze": FROZEN}
    trainer = Workload(**workload).trainer(
        callbacks=(TakeTurns(turns),), compile=compile, **settings
    )
    if compile and not trainer.compiled:
        raise BenchError("the compiler does not work here, see above: run with compile=false")
    trainer.train()


if __name__ == "__main__":
    serve_arms({"packed": _work_packed})
