"""Hugging Face classes that `AutoModel` and `AutoModelForMaskedLM` load from an exported folder.

    import d2plm.hugging_face
    from transformers import pipeline
    pipeline("fill-mask", model="examples/pretrained")

They accept the usual padded `input_ids` and `attention_mask`, or packed input. Importing this
module registers them with transformers; nothing else does.
"""

import json
import logging
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.constants import REPOCARD_NAME as CARD
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import cached_file

from d2plm.core.batch import Relatives
from d2plm.core.errors import ModelError, did_you_mean, require
from d2plm.core.files import PROVENANCE, SAVED_BY
from d2plm.core.vocabulary import FILE, FIRST, PAD, SAVED_TOKENIZER
from d2plm.evaluation.embedding import watched
from d2plm.evaluation.result import EVALUATION, SEQUENCE_SCORES
from d2plm.generation.lengths import FILE as LENGTHS
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Paradigm

IGNORED = -100  # transformers' label of a token without a loss
# Files of an export: the paradigm's, and those that are copied unchanged.
OF_PARADIGM = (Paradigm.config_name, FILE, SAVED_TOKENIZER)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
COMPANIONS = (CARD, LENGTHS, PROVENANCE, *TOKENIZER)
# Arguments of `from_pretrained` that locate a file.
PLACE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

log = logging.getLogger(__name__)


class DiTForMaskedLM(DiT):
    """A `DiT` that predicts masked residues, with Hugging Face's arguments.

    Attributes:
        paradigm: `Paradigm` of the export, which maps fractions of masks to times; absorbing
            diffusion for a new model; None if the folder does not contain its settings, so that
            `times` must be passed.
        companions: contents of COMPANIONS in the folder, which `save_pretrained` writes.
    """

    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # the loss is the mean of each micro-batch
    _returned = slice(0)  # layers whose hidden states are always needed
    _has_warned = False

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.paradigm: Paradigm | None = AbsorbingDiffusion()
        self.companions: dict[str, bytes] = {}

    @classmethod
    def from_pretrained(cls, name: str | Path, *arguments: Any, **settings: Any) -> Self:
        """Load an export from a folder or the Hub, with its paradigm and companions.

        Raises:
            ModelError: if the paradigm's settings are missing or damaged.
        """
        loaded = super().from_pretrained(name, *arguments, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        place = {key: value for key, value in settings.items() if key in PLACE}
        found = dict[str, str | None]()
        for file in (*OF_PARADIGM, *COMPANIONS):
            required = file == Paradigm.config_name and not Path(name).is_dir()
            found[file] = cached_file(
                name, file, _raise_exceptions_for_missing_entries=required, **place
            )
        config = found[Paradigm.config_name]
        model.paradigm = load_paradigm(Path(config).parent) if config else None
        model.companions = {
            file: Path(path).read_bytes() for file in COMPANIONS if (path := found[file])
        }
        return loaded  # type: ignore[no-any-return]  # transformers is not typed

    def save_pretrained(
        self, folder: str | Path, is_main_process: bool = True, *arguments: Any, **settings: Any
    ) -> Any:
        """Save the model with its paradigm and companions; `push_to_hub` also calls this."""
        if is_main_process:  # an existing evaluation is of other weights
            for file in (EVALUATION, SEQUENCE_SCORES):
                Path(folder, file).unlink(missing_ok=True)
        result = super().save_pretrained(folder, is_main_process, *arguments, **settings)
        paradigm = self.paradigm
        if is_main_process and paradigm and paradigm.vocabulary.size == self.config.vocab_size:
            self._save_companions(Path(folder), paradigm)
        return result

    def _save_companions(self, folder: Path, paradigm: Paradigm) -> None:
        LengthHistogram.uniform(self.config.max_position_embeddings - 2).save(folder)
        for file, content in self.companions.items():
            if file not in TOKENIZER or not (folder / file).exists():
                (folder / file).write_bytes(content)
        paradigm.save_config(folder)
        provenance = json.loads(self.companions.get(PROVENANCE, b"{}"))
        provenance.pop("files", None)  # their digests
        provenance |= {"paradigm": paradigm.name, SAVED_BY: "transformers"}
        (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2))

    @classmethod
    def _from_config(cls, config: DiTConfig, **settings: Any) -> Self:
        model = super()._from_config(config, **settings)
        with torch.device("cpu"):
            model.initialise(int(torch.randint(2**62, ())))
        return model  # type: ignore[no-any-return]  # transformers is not typed

    def forward(  # type: ignore[override]  # padded input is added to the packed one
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *packed: Any,
        times: Tensor | float | None = None,
        labels: Tensor | None = None,
        relatives: Relatives | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> Any:
        """Logits of the clean residues: [B, L, V], 0 at padding; [T, V] for packed input.

        Args:
            input_ids: integer [B, L].
            attention_mask: [B, L], 1 for tokens; None: all except `<pad>`.
            *packed: with these, or with `tokens=`, the arguments are those of `DiT.forward`.
            times: float [B] in [0, 1], or one for all rows; None uses `times_of`.
            labels: integer [B, L], the clean tokens, or -100. The loss is the mean cross-entropy
                where the input is `<mask>`; other labels are ignored, with one warning.
            relatives: relatives of the rows, for a model that takes them.
            output_hidden_states: whether to return the hidden states, [B, L, D] for the input of
                the first block and the output of each block.
            return_dict: False returns a tuple. None, here and above: as in the model's config.

        Raises:
            TypeError: for an unknown argument.
            ConfigError: for an impossible value.
            ModelError: if no label is at a `<mask>`, or `times` is missing and the paradigm is not
                known.
        """
        if packed or "tokens" in more:
            inputs = (input_ids, attention_mask, *packed) if packed else ()
            named = {"times": times, "labels": labels, "relatives": relatives, **more}
            named |= {"output_hidden_states": output_hidden_states, "return_dict": return_dict}
            return self._forward_packed(inputs, named)
        for name, value in more.items():
            if value is not None and value is not False:  # as peft passes unset ones
                hint = did_you_mean(name, signature(DiTForMaskedLM.forward).parameters)
                raise TypeError(f"forward() got an unexpected keyword argument {name!r}{hint}")
        if input_ids is None:
            raise ModelError("pass input_ids, or packed input")
        keep = input_ids != PAD if attention_mask is None else attention_mask.bool()
        shape = tuple(input_ids.shape)
        require(len(shape) == 2, "input_ids.shape", shape, "[rows, tokens]")
        require(keep.shape == shape, "attention_mask.shape", tuple(keep.shape), f"{shape}")
        known = relatives is None or isinstance(relatives, Relatives)
        require(known, "relatives", type(relatives), "made by d2plm.core.batch.Relatives.pack")
        config, layers = self.config, range(len(self.blocks) + 1)
        wanted = "false: attention weights are never computed"
        require(not config.output_attentions, "config.output_attentions", True, wanted)
        times = (
            self.times_of(input_ids, keep) if times is None else _checked(times, input_ids[:, 0])
        )
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        with watched(self, layers if output_hidden_states else layers[self._returned]) as kept:
            logits = self.forward_padded(input_ids, keep, times, relatives)
        states = tuple(
            x.new_zeros(*shape, x.shape[-1]).masked_scatter(keep[..., None], x)
            for x in (kept[layer] for layer in sorted(kept))
        )
        loss = None if labels is None else self._loss(logits, input_ids, keep, labels)
        output = self._output(loss, logits, states[-1:], states if output_hidden_states else None)
        as_dict = config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _forward_packed(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {name: value for name, value in named.items() if value is not None}
        bound = signature(super().forward).bind(*inputs, **given)
        first = bound.arguments["cu_seqlens"][:-1]
        bound.arguments["times"] = _checked(bound.arguments["times"], first)
        return super().forward(*bound.args, **bound.kwargs)

    def times_of(self, input_ids: Tensor, keep: Tensor) -> Tensor:
        """float [B]: the time at which, on average, this fraction of the sequence is masked.

        A sequence without masks is treated as if it had one.
        """
        if self.paradigm is None:
            raise ModelError(f"{self.name_or_path}: has no {Paradigm.config_name}; pass times")
        vocabulary, mask = self.paradigm.vocabulary, self.config.vocab_size - 1
        stop = vocabulary.stop if vocabulary.mask == mask else mask
        is_mask = (input_ids == mask) & keep
        is_clean = (input_ids >= FIRST) & (input_ids < stop) & keep
        masked, maskable = is_mask.sum(1), (is_clean | is_mask).sum(1)
        fraction = masked.clamp(min=1).double() / maskable.clamp(min=1)
        return self.paradigm.time_at_corrupted_fraction(fraction).float()

    def _loss(self, logits: Tensor, input_ids: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        shape = tuple(keep.shape)
        require(labels.shape == shape, "labels.shape", tuple(labels.shape), f"{shape}")
        labelled = labels != IGNORED
        at_mask = labelled & keep & (input_ids == self.config.vocab_size - 1)
        others = int((labelled & ~at_mask).sum())
        if not at_mask.any():
            raise ModelError(
                f"labels: none of {others:,} is at a <mask>, where alone there is a loss; mask a "
                "larger share of the tokens, or use longer batches"
            )
        if others and not self._has_warned:
            self._has_warned = True
            log.warning(
                "labels: ignored where the token is not <mask> (%d in this batch); to label masks "
                "alone, give the data collator mask_replace_prob=1 and random_replace_prob=0",
                others,
            )
        targets = labels[at_mask].long()
        possible = (targets >= 0) & (targets < logits.shape[-1])
        require(bool(possible.all()), "labels", targets[~possible][:1].tolist(), "-100, or tokens")
        return nn.functional.cross_entropy(logits[at_mask].float(), targets)

    def _output(self, loss: Any, logits: Tensor, last: Any, states: Any) -> Any:
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=states)


class DiTModel(DiTForMaskedLM):
    """The same model, returning the last hidden states, for `AutoModel` and feature extraction."""

    _returned = slice(-1, None)

    def _output(self, loss: Any, logits: Tensor, last: Any, states: Any) -> Any:
        if loss is not None:
            raise TypeError("labels: AutoModel has no loss; load AutoModelForMaskedLM")
        return BaseModelOutput(last_hidden_state=last[0], hidden_states=states)


def _checked(times: Tensor | float, rows: Tensor) -> Tensor:
    """Expand one time, or one for each of B `rows`, to float [B] on their device."""
    given = torch.as_tensor(times, dtype=torch.float32, device=rows.device)
    of_each = given.expand(len(rows)) if given.ndim == 0 else given
    shape = f"({len(rows)},), one for each row, or a number"
    require(of_each.shape == rows.shape, "times.shape", tuple(given.shape), shape)
    wrong = of_each[~((of_each >= 0) & (of_each <= 1))].tolist()
    require(not wrong, "times", wrong, "between 0 and 1")
    return of_each


AutoConfig.register(DiTConfig.model_type, DiTConfig)
AutoModel.register(DiTConfig, DiTModel)
AutoModelForMaskedLM.register(DiTConfig, DiTForMaskedLM)
