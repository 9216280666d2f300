"""Masked language models in Hugging Face format as denoisers, for comparison.

The exact-k bound needs only masked predictions, so ESM-2 and similar models can be scored on the
same residues and masks as D2PLM's. They are read from local safetensors; code in their folders is
never run.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from d2plm.core.errors import ModelError, first_line
from d2plm.core.files import nearest_path
from d2plm.core.vocabulary import CLS, EOS, FIRST, PAD, PROTEIN

_SAFETENSORS = "*.safetensors"
_PADDED_TOKENS = 16384  # maximum size of a padded batch


class MaskedLM:
    """A masked language model as a `Denoiser` that ignores the time.

    Args:
        folder: model and tokenizer written by `save_pretrained`.

    Raises:
        ModelError: if the model is incomplete, or its vocabulary lacks a residue or special token.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        if not (folder / "config.json").is_file():
            near = nearest_path(folder)
            raise ModelError(f"{folder}: no model there{near}: config.json is missing")
        if not any(folder.glob(_SAFETENSORS)):
            raise ModelError(f"{folder}: no {_SAFETENSORS}; save the model in that format")
        disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, report = AutoModelForMaskedLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=torch.float32,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{folder}: not a masked language model: {first_line(error)}"
            ) from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise ModelError(f"{folder}: the weights lack {missing}; save the whole model")
        self._folder, self._model = folder, model.eval().to(device)
        self._ids = torch.tensor(_token_ids(tokenizer, folder), device=device)

    def __call__(
        self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor
    ) -> Tensor:
        """Logits [T, V] in the order of the protein alphabet; zero except canonical residues."""
        logits = torch.zeros(tokens.shape[0], PROTEIN.size, device=tokens.device)
        residues = slice(FIRST, PROTEIN.stop)
        for bounds in _padded_batches(tokens, cu_seqlens):
            rows = [self._ids[tokens[start:stop].long()] for start, stop in bounds]
            inputs = pad_sequence(rows, batch_first=True, padding_value=int(self._ids[PAD]))
            attended = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            try:
                found = self._model(input_ids=inputs, attention_mask=attended).logits
            except (RuntimeError, IndexError) as error:  # no position embeddings for this length
                raise ModelError(
                    f"{self._folder}: cannot take {inputs.shape[1]} tokens ({error}); compare "
                    "models on sequences that both can take"
                ) from error
            for row, (start, stop) in zip(found, bounds, strict=True):
                logits[start:stop, residues] = row[: stop - start, self._ids[residues]].float()
        return logits


def _padded_batches(tokens: Tensor, cu_seqlens: Tensor) -> Iterator[list[tuple[int, int]]]:
    """The bounds of the sequences in batches of similar length, without the padding tail."""
    bounds = [
        (start, stop)
        for start, stop in itertools.pairwise(cu_seqlens.tolist())
        if stop > start and tokens[start] == CLS
    ]
    batch: list[tuple[int, int]] = []
    for start, stop in sorted(bounds, key=lambda segment: segment[1] - segment[0]):
        if batch and (len(batch) + 1) * (stop - start) > _PADDED_TOKENS:
            yield batch
            batch = []
        batch.append((start, stop))
    if batch:
        yield batch


def _token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """The model's id of each token of the protein alphabet; `<unk>` for an optional letter."""
    unknown, end = tokenizer.unk_token_id, tokenizer.eos_token_id
    special = {
        CLS: tokenizer.cls_token_id,
        PAD: tokenizer.pad_token_id,
        EOS: tokenizer.sep_token_id if end is None else end,
        PROTEIN.mask: tokenizer.mask_token_id,
    }
    vocabulary = tokenizer.get_vocab()
    ids = []
    for index, token in enumerate(PROTEIN.tokens):
        found = special[index] if index in special else vocabulary.get(token, unknown)
        needed = index in special or FIRST <= index < PROTEIN.stop
        if needed and (found is None or found == unknown):
            raise ModelError(f"{folder}: its vocabulary lacks {token}; it is not a protein model")
        ids.append(0 if found is None else found)
    return ids
