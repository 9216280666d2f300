"""Profile HMMs of a protein's relatives: the baseline for a model that is given them.

For each relative HMMER builds the profile HMM of a single sequence. Its forward score is the
logarithm of a likelihood ratio, so that a mixture of the relatives' HMMs and of the background is a
likelihood of the protein given the relatives; no alignment to the protein has entered.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pyhmmer.easel import AA, Alphabet, DigitalSequence, DigitalSequenceBlock, TextSequence
from pyhmmer.plan7 import Background, Builder, Pipeline

from d2plm.core.alphabet import CANONICAL, CANONICAL_START, decode, is_canonical

BACKGROUND_SHARE = 0.02  # of the mixture, for proteins that resemble no relative

NO_DOMAIN = 0.0  # nats of a pair in which HMMER finds no domain, whose score it does not tell

Tokens = NDArray[np.uint8]
Pair = tuple[int, int]


def log_ratios(
    targets: Sequence[Tokens],
    collection: Sequence[Tokens],
    pairs: Iterable[Pair],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Pair, float]:
    """log p(target | the HMM of a relative) − log p(target | background), nats, of each pair.

    Pairs in which HMMER finds no domain are left out.

    Args:
        targets, collection: uint8 residue tokens.
        pairs: of an index into `targets` and one into `collection`.
        progress: called with (HMMs done, their total).
    """
    of_relative: dict[int, list[int]] = defaultdict(list)
    for target, relative in pairs:
        of_relative[relative].append(target)
    alphabet = Alphabet.amino()
    # The simulations for E-values, which are not used, would take two thirds of the time.
    builder, background = Builder(alphabet, EmN=10, EvN=10, EfN=10), Background(alphabet)
    everything = partial(Pipeline, bias_filter=False, null2=False, F1=1.0, F2=1.0, F3=1.0, T=-1e6)
    found: dict[Pair, float] = {}
    for done, (relative, own) in enumerate(of_relative.items(), 1):
        hmm, _, _ = builder.build(_digital(collection[relative], relative, alphabet), background)
        block = DigitalSequenceBlock(alphabet, [_digital(targets[t], t, alphabet) for t in own])
        for hit in everything(alphabet, background).search_hmm(hmm, block):
            found[int(hit.name), relative] = hit.pre_score * math.log(2)
        progress(done, len(of_relative))
    return found


def mixture_nats(
    targets: Sequence[Tokens],
    relatives: Sequence[Sequence[int]],
    ratios: dict[Pair, float],
) -> NDArray[np.float64]:
    """float64 [N]: −log p of each target's canonical residues given its relatives.

    p = 0.98 · the mean over the relatives' HMMs + 0.02 · the background; the background alone where
    there are no relatives.

    Args:
        relatives: of each target, as indices.
        ratios: of the pairs, as of `log_ratios`.
    """
    nats = _background_nats(targets)
    for target, own in enumerate(relatives):
        if len(own):
            each = [ratios.get((target, relative), NO_DOMAIN) for relative in own]
            log_mean = float(np.logaddexp.reduce(each)) - math.log(len(own))
            given = math.log(1 - BACKGROUND_SHARE) + log_mean
            nats[target] -= np.logaddexp(given, math.log(BACKGROUND_SHARE))
    return nats


def _background_nats(targets: Sequence[Tokens]) -> NDArray[np.float64]:
    """−log p of the canonical residues under HMMER's background frequencies."""
    alphabet = Alphabet.amino()
    frequencies = np.array(Background(alphabet).residue_frequencies, dtype=float)
    by_letter = dict(zip(alphabet.symbols, frequencies / frequencies.sum(), strict=False))
    nats = -np.log([by_letter[letter] for letter in CANONICAL])
    residues = (tokens[is_canonical(tokens)].astype(int) - CANONICAL_START for tokens in targets)
    return np.array([float(nats[own].sum()) for own in residues])


def _digital(tokens: Tokens, number: int, alphabet: AA) -> "DigitalSequence[AA]":
    # HMMER gives an X the mean score.
    letters = "".join(letter if letter in CANONICAL else "X" for letter in decode(tokens))
    return TextSequence(name=str(number).encode(), sequence=letters).digitize(alphabet)
