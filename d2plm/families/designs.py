"""New members of a family, sampled from a model of its alignment.

A design is drawn in three steps, each conditional on the previous one:

1. Its path (its columns and the number of residues between them): that of a member, or, if residues
   or the length are given, a sample from the posterior of the family's profile HMM.
2. A member, by default the one that lends the path, and which of its residues are kept: each with
   probability 1 − μ.
3. The other residues, by a sampler of `d2plm.generation` that keeps the path fixed. Their denoiser
   is the closed form p(x_i = a | visible) ∝ D_i(a) exp(t_i(a)) of column profile D and pairs t.

Without pairs and at temperature 1 the distribution given a path is the mixture over members m of
Π_i [(1 − μ)·(x_i = m_i) + μ·D_i(x_i)], conditional on the given residues, letters to avoid and
number of mutations. μ, and the attenuation of the pairs once μ is at its maximum, follow from the
identity to the nearest given member that the designs should have.

Shape suffixes: N members, L columns, n residues, 20 letters.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.batch import Relatives, segment_ids
from d2plm.core.errors import ConfigError
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, PROTEIN, Tokens
from d2plm.data.family import Family
from d2plm.data.relatives import aligned_part
from d2plm.families.alignment import (
    COVERAGE,
    GAP,
    Letters,
    column_profile,
    family_hmm,
    letters_of,
    one_hot,
    sequence_weights,
)
from d2plm.families.pairs import MEMBERS, PairTable, sampled
from d2plm.families.paths import FamilyPath, PathSampler, in_columns, paths_of
from d2plm.families.profile_hmm import amino_frequencies
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.paradigms.diffusion import AbsorbingDiffusion

# Chosen by measurement, docs/science.md.
TEMPERATURE, HALF_OF_TEMPERATURE = 0.76, 6.7  # and the effective number at which it is halved
MOST_PAIRS, HALF_OF_PAIRS = 7.0, 15.0  # maximum sum of couplings, effective number with half
MOST_MUTATED = 0.8  # maximum μ before the pairs are attenuated
# Default identity to the nearest given member: this much less than natural members', clipped.
FURTHER, LEAST_IDENTITY, MOST_IDENTITY = 0.03, 0.7, 0.85
FEWEST_MEMBERS = 4  # minimum number of members for pairs
LONGEST_INSERTIONS = 1.0  # share of the columns; members with more lend no path, if others can

MOST_MEMBERS = 5_000  # larger families are sampled
BOUND_DRAWS = 24  # number of draws of visible residues per bound
CALIBRATED, TRIAL_STEPS, TRIALS = 32, 24, 6  # designs, their steps, and bisections that find μ
TABLE_ENTRIES = 250_000_000  # 1 GB; pairs of columns further apart are left out
GOLDEN = (5**0.5 - 1) / 2  # multiples modulo 1 are evenly spread
IMPOSSIBLE = -1e4  # logit; the samplers reject infinite ones

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Wishes:
    """What all designs of a call have in common.

    Attributes:
        keep: column → its letter.
        avoid: letters that are not drawn.
        near: a member and its number of mutated residues; None allows any member.
        identity: median identity to the nearest given member; None: FURTHER less than that of
            natural members, between LEAST_IDENTITY and MOST_IDENTITY.
    """

    keep: dict[int, int] = field(default_factory=dict)
    avoid: frozenset[int] = frozenset()
    near: tuple[int, int] | None = None
    identity: float | None = None


@dataclass(frozen=True)
class Design:
    """A new member, uint8 [n], with `kept` residues of the member with index `member`."""

    tokens: Tokens
    member: int
    kept: int


@dataclass(frozen=True)
class _Start:
    """A design before its residues are drawn; for `sites` see `FamilyDenoiser`."""

    template: Tokens
    sites: NDArray[np.int32]
    member: int
    kept: int


class FamilyDesigns:
    """The distribution of new members of a family.

    Args:
        family: at least one member.
        note: called with a progress message.
        named: members to include even if the family is too large to use all.

    Attributes:
        places: indices in the family of the members used.
    """

    def __init__(
        self,
        family: Family,
        note: Callable[[str], None] = lambda text: None,
        named: Collection[str] = (),
    ) -> None:
        self.places = family.some(MOST_MEMBERS, named)
        if len(self.places) < len(family.members):
            used = f"{len(self.places):,} of {len(family.members):,}"
            log.info("%s members are used", used)
            family = family.only(self.places)
        self.names = family.names
        typical = sorted(family.members, key=len)[len(family.members) // 2]
        self.members = [aligned_part(one, typical) for one in family.members]
        note(f"aligning {len(self.members):,} members")
        self.hmm = family_hmm(self.members, family.columns)
        self.paths, self.length = paths_of(self.hmm, self.members), self.hmm.M
        self.letters = [letters_of(one) for one in self.members]
        along = list(zip(self.paths, self.letters, strict=True))
        self.aligned_NL = np.stack([in_columns(*one, self.length) for one in along])
        note(f"comparing {len(self.members):,} members")
        self.weights = sequence_weights(self.aligned_NL)
        # The last row is for residues between columns.
        profile = column_profile(self.aligned_NL, self.weights)
        inserted = np.bincount(
            np.concatenate([own[path == self.length] for path, own in along]), minlength=GAP + 1
        )[:GAP]
        between = (inserted + GAP * amino_frequencies()) / (inserted.sum() + GAP)
        self.log_profile = np.log(np.concatenate([profile, between[None]]))
        self.pairs = self._pairs(profile, note)
        self._closeness = dict[tuple[float, float | None], tuple[float, float]]()

    def denoiser_of(
        self, factor: float, avoid: frozenset[int] = frozenset(), temperature: float = 1.0
    ) -> "FamilyDenoiser":
        """A `FamilyDenoiser` with the pairs multiplied by `factor`."""
        return FamilyDenoiser(self.log_profile, self.pairs, factor, avoid, temperature)

    @property
    def effective_number(self) -> float:
        return float(self.weights.sum())

    def design(
        self,
        templates: Sequence[Tokens | None],
        sampling: Sampling,
        wishes: Wishes = Wishes(),
        *,
        min_length: int = 1,
        max_length: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Design]:
        """A design for each template; each depends on its index and the seed.

        Args:
            templates: tokens with `<mask>` for residues to generate; None allows any length.
            sampling: see `FamilyDesigns.sampling`.
            min_length, max_length: limits for designs without a template.
            progress: see `sample`.

        Raises:
            ConfigError: if no member has such a length or such columns, or the wishes cannot be
                satisfied.
        """
        sampling = self.sampling(sampling)
        law = _Law(self, wishes, sampling, (min_length, max_length))
        starts = [
            law.start(template, place, np.random.default_rng((sampling.seed, place)))
            for place, template in enumerate(templates)
        ]
        rows = sample(
            law.denoiser,  # type: ignore[arg-type]  # it is given sites as relatives
            AbsorbingDiffusion(),
            [one.template for one in starts],
            sampling,
            max_length=1 << 30,
            relatives=[[one.sites] for one in starts],  # type: ignore[list-item]  # of int32
            progress=progress,
        )
        pairs = zip(rows, starts, strict=True)
        return [Design(row, start.member, start.kept) for row, start in pairs]

    def sampling(self, given: Sampling) -> Sampling:
        """The settings with the defaults of new members: `first_hitting`, a low temperature.

        Few observations make a flat profile, so the temperature is lower in small families.

        Raises:
            ConfigError: if the sampler cannot fill in masks, or does not have a setting.
        """
        number = self.effective_number
        temperature = TEMPERATURE * number / (number + HALF_OF_TEMPERATURE)
        defaults: dict[str, Any] = {
            "temperature": round(temperature, 3),
            "sampler": "first_hitting" if given.steps is None else "ancestral",
        }
        unset = {name: one for name, one in defaults.items() if getattr(given, name) is None}
        return replace(given, **unset).resolved(AbsorbingDiffusion())

    def columns_of(self, member: int, positions: Sequence[int]) -> list[int | None]:
        """The 0-based column of each residue of a member; None between columns."""
        return [None if c == self.length else int(c) for c in self.paths[member][list(positions)]]

    @cached_property
    def usual(self) -> NDArray[np.bool_]:
        """bool [N]: members that may lend their path: not short, without long insertions."""
        inserted = np.array([(path == self.length).sum() for path in self.paths])
        filled = (self.aligned_NL < GAP).sum(1)
        short = filled < COVERAGE * np.median(filled)
        usual = ~short & (inserted <= max(10, LONGEST_INSERTIONS * self.length))
        return usual if usual.any() else np.ones(len(filled), dtype=np.bool_)

    @cached_property
    def path_sampler(self) -> PathSampler:
        return PathSampler(self.hmm, [self.paths[i] for i in np.flatnonzero(self.usual)])

    def bound(self, protein: Tokens, random: np.random.Generator) -> float:
        """−log p(path) − log p(residues | path), nats; its expectation is at least −log p(protein).

        That holds for any path, as p(protein) is a sum over paths; this one is from its posterior.
        Each canonical residue is predicted from those before it in random order, at temperature 1
        and with nothing kept: their number times the mean over random numbers of visible residues
        (Hoogeboom et al., arXiv:2110.02037).
        """
        letters = letters_of(protein)
        path = self.path_sampler.sample(letters, 1, random)[0]
        known, log_p = np.flatnonzero(letters < GAP), self.path_sampler.log_p(path)
        if not len(known):
            return -log_p
        visible = (np.arange(BOUND_DRAWS) + random.random(BOUND_DRAWS)) / BOUND_DRAWS * len(known)
        hidden = [random.permutation(known)[int(count) :] for count in visible]
        shown = np.tile(letters, (BOUND_DRAWS, 1))
        for row, own in zip(shown, hidden, strict=True):
            row[own] = GAP
        in_rows = np.stack([in_columns(path, row, self.length) for row in shown])
        found = self.denoiser_of(1.0).log_probabilities(in_rows)
        for log_p_LA, own in zip(found, hidden, strict=True):
            log_p += len(known) / BOUND_DRAWS * float(log_p_LA[path[own], letters[own]].mean())
        return -log_p

    @cached_property
    def natural_identity(self) -> float:
        """Median over members of the identity to the nearest other member."""
        chosen = np.random.default_rng(0).permutation(len(self.members))[:MEMBERS]
        hot = one_hot(self.aligned_NL)
        same = hot[chosen] @ hot.T
        same[np.arange(len(chosen)), chosen] = 0
        filled = (self.aligned_NL[chosen] < GAP).sum(1)
        return float(np.median(same.max(1) / np.maximum(filled, 1)))

    def closeness(self, temperature: float, identity: float | None) -> tuple[float, float]:
        """μ, and the factor of the pairs, at which designs have this identity to members.

        Pairs estimated from few members reproduce them. So μ grows up to MOST_MUTATED, then the
        pairs are attenuated, and only for a requested identity the remaining residues are mutated.
        """
        asked = temperature, identity
        if asked in self._closeness:
            return self._closeness[asked]
        most = 2.0 if identity is None else 3.0
        if identity is None:
            identity = self.natural_identity - FURTHER
            identity = min(max(LEAST_IDENTITY, identity), MOST_IDENTITY)
        low, high = 0.0, most
        for _ in range(TRIALS):
            place = (low + high) / 2
            is_near = self._trial(temperature, *_along(place)) > identity
            low, high = (place, high) if is_near else (low, place)
        found = _along(high if high == most else (low + high) / 2)
        if high == 3 and (least := self._trial(temperature, *found)) > identity + 0.02:
            log.warning(
                "identity=%g cannot be reached: at temperature %g the designs have %.2g at "
                "least; raise generation.temperature",
                *(identity, temperature, least),
            )
        return self._closeness.setdefault(asked, found)

    def _trial(self, temperature: float, share: float, factor: float) -> float:
        """The median identity of approximate designs to the nearest member."""
        random, denoiser = np.random.default_rng(0), self.denoiser_of(factor)
        chosen = random.permutation(np.flatnonzero(self.usual))[:CALIBRATED]
        own = self.aligned_NL[chosen]
        # The step in which a residue is drawn; negative if it is kept.
        step = np.floor(TRIAL_STEPS * (1 - random.random(own.shape) / max(share, 1e-9)))
        letters = np.where((step >= 0) & (own < GAP), GAP, own).astype(np.int8)
        for number in range(TRIAL_STEPS):
            row, column = np.nonzero((step == number) & (own < GAP))
            log_p = denoiser.log_probabilities(letters)[row, column]
            cumulative = _tempered(log_p, temperature).cumsum(1)
            draws = random.random((len(row), 1)) * cumulative[:, -1:]
            letters[row, column] = np.minimum((cumulative <= draws).sum(1), GAP - 1)
        same = (one_hot(letters) @ one_hot(self.aligned_NL).T).max(1)
        return float(np.median(same / np.maximum((own < GAP).sum(1), 1)))

    def _pairs(self, profile: Floats, note: Callable[[str], None]) -> "PairTerms | None":
        if len(self.members) < FEWEST_MEMBERS:
            return None
        chosen, weights = sampled(self.weights, MEMBERS, np.random.default_rng(0))
        aligned = self.aligned_NL[chosen]
        independent, done = np.broadcast_to(profile, (*aligned.shape, GAP)), count(1)

        def advance() -> None:
            note(f"pairs of columns, {next(done) / (2 * self.length):.0%}")

        table = PairTable(aligned, weights, profile, independent, advance)
        total = MOST_PAIRS * self.effective_number / (self.effective_number + HALF_OF_PAIRS)
        return PairTerms(table, one_hot(aligned).T @ weights, total)


class PairTerms:
    """The pair terms of all columns at once, from a table in memory.

    t_i(a) = s_i Σ_j K_ij log_odds_i(a, j, x_j) over the visible letters x_j, where s_i limits the
    sum of the couplings K to `total`; then shrunk to its mean by one observation of each letter.

    Args:
        seen: float64 [L * 20], the weight of the members with each letter.
    """

    def __init__(self, table: PairTable, seen: Floats, total: float) -> None:
        length = table.length
        width = min(length, max(1, TABLE_ENTRIES // (GAP * GAP * length)))
        rows = length if width == length else max(1, width // 4)
        self.total, self.blocks = total, list[tuple[slice, slice, Tensor, Tensor]]()
        for first in range(0, length, rows):
            own = range(first, min(first + rows, length))
            begin = min(max(0, first + rows // 2 - width // 2), length - width)
            sources = slice(begin, begin + width)
            by_source = np.zeros((width * GAP + 1, len(own) * GAP), dtype=np.float32)
            for k, i in enumerate(own):  # the last row stays 0, for hidden letters
                odds = table.log_odds(i)[:, sources] * table.coupling[i, sources, None]
                by_source[:-1, GAP * k : GAP * (k + 1)] = odds.reshape(GAP, -1).T
                table.advance()
            coupled = torch.from_numpy(table.coupling[own.start : own.stop, sources]).float()
            block = slice(own.start, own.stop), sources, torch.from_numpy(by_source), coupled
            self.blocks.append(block)
        self.seen = torch.from_numpy(seen.reshape(length, GAP)).float()

    def __call__(self, letters: Tensor) -> Tensor:
        """float32 [S, L, 20] from int64 letters [S, L], GAP for hidden ones."""
        visible = (letters < GAP).float()
        found = torch.empty(*letters.shape, GAP)
        for own, sources, terms, coupled in self.blocks:
            shown, none = letters[:, sources], len(terms) - 1
            rows = torch.where(shown < GAP, shown + GAP * torch.arange(shown.shape[1]), none)
            raw = F.embedding_bag(rows, terms, mode="sum")
            scale = (self.total / (visible[:, sources] @ coupled.T).clamp(min=1e-9)).clamp(max=1)
            found[:, own] = raw.view(len(letters), -1, GAP) * scale[..., None]
        total = self.seen.sum(-1)[:, None].clamp(min=1e-9)
        mean = (self.seen * found).sum(-1, keepdim=True) / total
        return (self.seen * found + mean) / (self.seen + 1) - mean


class FamilyDenoiser:
    """The closed form as a denoiser: corrupted tokens and their paths → logits.

    Each sequence has `sites` in place of relatives: int32 [n], 21 times the column of each residue
    (L: none) plus the letter that it may not become (GAP: none).

    Args:
        factor: factor of the pairs.
        avoid: letters that no residue may become.
        temperature: divisor that the sampler applies to the logits.
    """

    def __init__(
        self,
        log_profile: Floats,
        pairs: PairTerms | None,
        factor: float = 1.0,
        avoid: frozenset[int] = frozenset(),
        temperature: float = 1.0,
    ) -> None:
        self.log_profile = torch.from_numpy(log_profile).float()
        self.pairs, self.factor, self.avoid = pairs, factor, list(avoid)
        self.impossible = IMPOSSIBLE * max(1.0, temperature)

    def log_probabilities(self, letters: Letters) -> Floats:
        """float64 [S, L + 1, 20] from visible letters [S, L]; the last row is between columns."""
        return self._logits(torch.from_numpy(letters).long()).log_softmax(-1).double().numpy()

    def __call__(
        self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor, given: Relatives
    ) -> Tensor:
        count, length = len(cu_seqlens) - 1, len(self.log_profile) - 1
        inner = torch.ones(len(tokens), dtype=torch.bool)
        inner[cu_seqlens[:-1].long()] = inner[cu_seqlens[1:].long() - 1] = False
        places, codes = inner.nonzero()[:, 0], torch.from_numpy(given.tokens).long()
        column, excluded = codes // (GAP + 1), codes % (GAP + 1)
        segment = segment_ids(cu_seqlens, len(tokens))[places]
        shown = tokens[places].long() - CANONICAL_START
        shown = torch.where((shown >= 0) & (shown < GAP), shown, GAP)
        letters = torch.full((count, length + 1), GAP)
        letters[segment, column] = shown
        found = self._logits(letters[:, :-1])[segment, column]
        found[:, self.avoid] = self.impossible
        found = F.pad(found, (0, 1))  # GAP
        found = found.scatter(1, excluded[:, None], self.impossible)[:, :GAP]
        logits = torch.full((len(tokens), PROTEIN.size), self.impossible)
        logits[places, CANONICAL_START : CANONICAL_START + GAP] = found
        return logits

    def _logits(self, letters: Tensor) -> Tensor:
        """float32 [S, L + 1, 20] from int64 letters [S, L]."""
        logits = self.log_profile.repeat(len(letters), 1, 1)
        if self.pairs is not None:
            logits[:, :-1] += self.factor * self.pairs(letters)
        return logits


class _Law:
    """The start of each design: path, member and kept residues, conditional on the wishes."""

    def __init__(
        self,
        designs: FamilyDesigns,
        wishes: Wishes,
        sampling: Sampling,
        lengths: tuple[int, int | None],
    ) -> None:
        assert sampling.temperature is not None
        temperature = self.temperature = sampling.temperature
        self.designs, self.wishes, self.lengths = designs, wishes, lengths
        self.mutated, factor = designs.closeness(temperature, wishes.identity)
        self.denoiser = designs.denoiser_of(factor, wishes.avoid, temperature)
        self.first = np.random.default_rng(sampling.seed).random()
        self.p = _tempered(designs.log_profile, temperature)
        self.allowed = np.ones((designs.length + 1, GAP), dtype=np.bool_)
        self.allowed[:, list(wishes.avoid)] = False
        for column, letter in wishes.keep.items():
            if letter in wishes.avoid:
                raise ConfigError("excludes a residue that is kept", {"avoid": CANONICAL[letter]})
            self.allowed[column] = np.arange(GAP) == letter
        if not self.allowed.any(1).all():
            avoided = "".join(CANONICAL[a] for a in sorted(wishes.avoid))
            raise ConfigError("leaves no residue to draw", {"avoid": avoided})

    def start(self, template: Tokens | None, place: int, random: np.random.Generator) -> _Start:
        """The design at this index; members take turns in proportion to their probabilities."""
        if self.wishes.near is not None:
            return self._mutant(*self.wishes.near, random)
        if template is None:
            turn = (self.first + place * GOLDEN) % 1
            member = int(np.searchsorted(self._shares.cumsum() / self._shares.sum(), turn, "right"))
            member = min(member, int(np.flatnonzero(self._shares)[-1]))
            path, own = self.designs.paths[member], self.designs.letters[member]
            return self._begun(path, own, self.allowed[path], None, member, random)
        given, keep = letters_of(template), self.wishes.keep
        open_, known = template == PROTEIN.mask, letters_of(template) < GAP
        none = np.full((len(self.designs.members), 1), GAP, dtype=np.int8)
        letters_NL = np.concatenate([self.designs.aligned_NL, none], 1)
        for path in self._paths(np.where(open_, GAP, given).astype(np.int8), random):
            columns = zip(path.tolist(), given.tolist(), known.tolist(), strict=True)
            if {*keep} - {*path.tolist()} or any(
                fixed and keep.get(column, letter) != letter for column, letter, fixed in columns
            ):
                continue
            allowed, own_NL = self.allowed[path], letters_NL[:, path]
            allowed[known] = np.arange(GAP) == given[known, None]
            stay, change = self._weights(path, own_NL, allowed)
            log_p = np.log(stay + change)[:, open_ | known].sum(1)
            p = np.exp(log_p - log_p.max())
            member = int(random.choice(len(p), p=p / p.sum()))
            return self._begun(path, own_NL[member], allowed, template, member, random)
        raise ConfigError(
            "no path through the family has these residues beside those of the template or length",
            {"keep": ", ".join(f"{CANONICAL[a]} in column {c + 1}" for c, a in keep.items())},
        )

    def _paths(self, letters: Letters, random: np.random.Generator) -> Iterator[FamilyPath]:
        """Paths of a template; further ones only if the first does not fit."""
        for number in (1, 100, 1000):
            yield from self.designs.path_sampler.sample(letters, number, random)

    @cached_property
    def _shares(self) -> Floats:
        """float64 [N]: p(member | the wishes) among members that lend their path."""
        found = np.full(len(self.designs.members), -np.inf)
        for i in np.flatnonzero(self.designs.usual):
            path, own = self.designs.paths[i], self.designs.letters[i]
            low, high = self.lengths
            fits = low <= len(path) and (high is None or len(path) <= high)
            if fits and {*self.wishes.keep} <= {*path.tolist()}:
                stay, change = self._weights(path, own, self.allowed[path])
                with np.errstate(divide="ignore"):
                    found[i] = np.log(stay + change).sum()
        if not np.isfinite(found).any():
            names = zip(("min_length", "max_length"), self.lengths, strict=True)
            limits = {name: limit for name, limit in names if limit is not None}
            raise ConfigError("no member has such a length and the columns that are kept", limits)
        p = np.exp(found - found.max())
        return np.asarray(p / p.sum())

    def _weights(
        self, path: FamilyPath, own: Letters, allowed: NDArray[np.bool_]
    ) -> tuple[Floats, Floats]:
        """float64 [..., n]: the weights of keeping the member's letter and of drawing one."""
        filled = own < GAP
        fits = np.pad(allowed, ((0, 0), (0, 1)))[np.arange(len(path)), own]
        drawn = (self.p[path] * allowed).sum(1)
        change: Floats = np.where(filled, self.mutated, 1.0) * drawn
        return np.asarray((1 - self.mutated) * fits, dtype=np.float64), change

    def _begun(
        self,
        path: FamilyPath,
        own: Letters,
        allowed: NDArray[np.bool_],
        template: Tokens | None,
        member: int,
        random: np.random.Generator,
    ) -> _Start:
        stay, change = self._weights(path, own, allowed)
        kept = random.random(len(path)) * (stay + change) < stay
        only = allowed.sum(1) == 1
        tokens = np.where(kept, own + CANONICAL_START, PROTEIN.mask)
        tokens = np.where(only, allowed.argmax(1) + CANONICAL_START, tokens).astype(np.uint8)
        if template is not None:  # includes non-canonical residues
            tokens = np.where(template == PROTEIN.mask, tokens, template)
        return _Start(tokens, _sites(path), member, int(kept.sum()))

    def _mutant(self, member: int, changes: int, random: np.random.Generator) -> _Start:
        """A member with `changes` mutations, at positions drawn as if they were independent."""
        designs = self.designs
        path, own = designs.paths[member], designs.letters[member]
        if missing := {*self.wishes.keep} - {*path.tolist()}:
            raise ConfigError(
                f"{designs.names[member]} has no residue in the kept column {min(missing) + 1}",
                {"near": f"{designs.names[member]}:{changes}"},
            )
        allowed, filled = self.allowed[path], own < GAP
        log_p = self.denoiser.log_probabilities(designs.aligned_NL[member][None])[0]
        p = _tempered(log_p, self.temperature)[path] * allowed
        p_own = np.where(filled, p[np.arange(len(own)), np.minimum(own, GAP - 1)], 1.0)
        stay, _ = self._weights(path, own, allowed)
        stay = np.where(filled, stay + self.mutated * p_own, 1.0)
        others = np.where(np.arange(GAP) == own[:, None], 0.0, p).sum(1)
        change = np.where(filled, self.mutated * others, 0.0)
        chosen = _chosen(stay, change, changes, random)
        if chosen is None:
            raise ConfigError(
                f"{designs.names[member]} cannot have that many mutations with what is kept and "
                "avoided",
                {"near": f"{designs.names[member]}:{changes}"},
            )
        tokens = np.where(chosen, PROTEIN.mask, designs.members[member])
        only = chosen & (allowed.sum(1) == 1)
        tokens = np.where(only, allowed.argmax(1) + CANONICAL_START, tokens).astype(np.uint8)
        excluded = np.where(chosen, own, GAP)
        return _Start(tokens, _sites(path, excluded), member, len(own) - changes)


def _sites(path: FamilyPath, excluded: Letters | int = GAP) -> NDArray[np.int32]:
    return ((GAP + 1) * path + excluded).astype(np.int32)


def _along(place: float) -> tuple[float, float]:
    """μ and the factor of the pairs, from 0 (a member itself) to 3 (none of it)."""
    share = MOST_MUTATED * min(place, 1.0) + (1 - MOST_MUTATED) * max(place - 2, 0.0)
    return share, 1 - min(max(place - 1, 0.0), 1.0)


def _tempered(log_p: Floats, temperature: float) -> Floats:
    scaled = log_p / temperature
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    # Positive at any temperature, as other residues may be excluded.
    return np.maximum(p / p.sum(-1, keepdims=True), np.finfo(np.float64).tiny)


def _chosen(
    stay: Floats, change: Floats, number: int, random: np.random.Generator
) -> NDArray[np.bool_] | None:
    """bool [n]: `number` changed places, with probability ∝ Π change · Π stay, or None."""
    if number > len(stay):
        return None
    with np.errstate(divide="ignore"):
        log_stay, log_change = np.log(stay), np.log(change)
    sums = np.full((len(stay) + 1, number + 1), -np.inf)  # j changes in the first i places
    sums[0, 0] = 0
    for i in range(len(stay)):
        sums[i + 1] = sums[i] + log_stay[i]
        sums[i + 1, 1:] = np.logaddexp(sums[i + 1, 1:], sums[i, :-1] + log_change[i])
    if not np.isfinite(sums[-1, -1]):
        return None
    chosen, left = np.zeros(len(stay), dtype=np.bool_), number
    for i in reversed(range(len(stay))):
        if left:
            p = np.exp(sums[i, left - 1] + log_change[i] - sums[i + 1, left])
            chosen[i] = random.random() < p
            left -= int(chosen[i])
    return chosen
