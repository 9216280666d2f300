"""Hugging Face classes that `AutoModel` and `AutoModelForMaskedLM` load from an exported folder.

    import d2plm.hugging_face
    from transformers import pipeline
    pipeline("fill-mask", model="runs/demo/model")

They accept the usual padded `input_ids` and `attention_mask`, or packed input. Importing this
module registers them with transformers; nothing else does.
"""

import json
from pathlib import Path
from typing import Any, Self

from huggingface_hub.constants import REPOCARD_NAME as CARD
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import cached_file

from d2plm.core.errors import ModelError
from d2plm.core.files import PROVENANCE, SAVED_BY
from d2plm.core.vocabulary import FILE, FIRST, PAD, SAVED_TOKENIZER
from d2plm.evaluation.embedding import watched
from d2plm.evaluation.findings import EVALUATION
from d2plm.generation.lengths import FILE as LENGTHS
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Paradigm

# Files of an export: those of its paradigm, and those that are kept as they are.
OF_PARADIGM = (Paradigm.config_name, FILE, SAVED_TOKENIZER)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
COMPANIONS = (CARD, LENGTHS, PROVENANCE, *TOKENIZER)
# Arguments of `from_pretrained` that say where a file is.
PLACE = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    "token",
)


class DiTForMaskedLM(DiT):
    """A `DiT` that predicts masked residues, with Hugging Face's arguments.

    Attributes:
        paradigm: `Paradigm` of the export, which maps fractions of masks to times; absorbing
            diffusion for a new model; None if the folder does not contain its settings, so that
            `times` must be passed.
        companions: contents of COMPANIONS in the folder, which `save_pretrained` writes.
    """

    main_input_name = "input_ids"

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
        result = super().save_pretrained(folder, is_main_process, *arguments, **settings)
        paradigm = self.paradigm
        if is_main_process and paradigm and paradigm.vocabulary.size == self.config.vocab_size:
            self._save_companions(Path(folder), paradigm)
        return result

    def _save_companions(self, folder: Path, paradigm: Paradigm) -> None:
        """Write what `load_model` needs; an evaluation is removed, as the weights may differ."""
        LengthHistogram.uniform(self.config.max_position_embeddings - 2).save(folder)
        for file, content in self.companions.items():
            if file not in TOKENIZER or not (folder / file).exists():
                (folder / file).write_bytes(content)
        paradigm.save_config(folder)
        provenance = json.loads(self.companions.get(PROVENANCE, b"{}"))
        provenance.pop("files", None)  # their digests
        provenance |= {"paradigm": paradigm.name, SAVED_BY: "transformers"}
        (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2))
        (folder / EVALUATION).unlink(missing_ok=True)

    def forward(  # type: ignore[override]  # padded input is added to the packed one
        self,
        *inputs: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **more: Any,
    ) -> Any:
        """Logits of the clean residues: [B, L, V], 0 at padding; [T, V] for packed input.

        Args:
            *inputs: one or two are `input_ids` and `attention_mask`; more are the packed input of
                `DiT.forward`, which may also be passed by name.
            input_ids: integer [B, L].
            attention_mask: [B, L], 1 for tokens; None: all except `<pad>`.
            output_hidden_states: whether to return the hidden states, [B, L, D] for the input of
                the first block and the output of each block.
            **more: `times`, float [B]; computed by `times_of` unless given.

        Raises:
            ModelError: if `times` is missing and the paradigm is not known.
        """
        if len(inputs) > 2 or "tokens" in more:
            return super().forward(*inputs, **more)
        if inputs:
            input_ids, attention_mask = inputs[0], inputs[1] if inputs[1:] else attention_mask
        if input_ids is None:
            raise ModelError("pass input_ids, or packed input")
        keep = input_ids != PAD if attention_mask is None else attention_mask.bool()
        times = more.get("times")
        times = self.times_of(input_ids, keep) if times is None else times
        layers = range(len(self.blocks) + 1)
        with watched(self, layers if output_hidden_states else ()) as kept:
            logits = self.forward_padded(input_ids, keep, times)
        states = None
        if output_hidden_states:
            empty = kept[0].new_zeros(*input_ids.shape, kept[0].shape[-1])
            states = tuple(empty.masked_scatter(keep[..., None], kept[layer]) for layer in layers)
        return self._output(logits, states)

    def times_of(self, input_ids: Tensor, keep: Tensor) -> Tensor:
        """float [B]: the time at which this fraction of a sequence is masked on average.

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

    def _output(self, logits: Tensor, states: tuple[Tensor, ...] | None) -> Any:
        return MaskedLMOutput(logits=logits, hidden_states=states)


class DiTModel(DiTForMaskedLM):
    """The same model, returning the last hidden states, for `AutoModel` and feature extraction."""

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        return super().forward(*inputs, **{**settings, "output_hidden_states": True})

    def _output(self, logits: Tensor, states: tuple[Tensor, ...] | None) -> Any:
        assert states is not None
        output = BaseModelOutput(last_hidden_state=states[-1], hidden_states=states)
        output["logits"] = logits
        return output


AutoConfig.register(DiTConfig.model_type, DiTConfig)
AutoModel.register(DiTConfig, DiTModel)
AutoModelForMaskedLM.register(DiTConfig, DiTForMaskedLM)
