"""The pure policy for the number of guesses, by the measured acceptance and the measured cost of passes and guesses."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

MOST_POSITIONS = 32  # rows × new positions of a pass; servers treat a larger pass as a prompt
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
_LEAST_GAIN = 1.08  # in tokens per second; with a smaller gain there is no speculation
_FIRST_PASSES = 2  # passes without guesses that measure the cost of a pass
_NUM_REMEMBERED = 6  # passes of each size
_MAX_AGE = 64  # passes after which a measurement is too old
_OUTLIER = 3.0  # times the median; a longer pass has waited for something else
_SLOPE_GUESS = 0.004  # the share of a pass's time that another position costs, until it is measured
_SLOPE_WEIGHT = 8.0  # the weight of that prior, in squares of a difference of positions; see ``_fit_slope``
_PRIOR_WEIGHT = 6.0  # the prior of the acceptance counts like this many guesses
_FORGET = 0.99  # the factor of old counts at each pass
_CATCH = {1: 0.0, 2: 0.12, 3: 0.18, 4: 0.22, 6: 0.27, 8: 0.3}  # by rows: the prior share of misses that others catch


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the expected tokens of a pass that verifies a line of guesses (Leviathan et al., 2023, equation 1)."""
    if acceptance >= 1:
        return length + 1
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class DraftPlan:
    """The guesses of a pass.

    Attributes:
        num_rows: the most lines of guesses that are verified together.
        length: the most guesses in a line.
        least: lines stop growing if the probability that one of them is completely right falls below this.
    """

    num_rows: int = 0
    length: int = 0
    least: float = 0.0

    @property
    def num_positions(self) -> int:
        return max(1, self.num_rows) * (self.length + 1)


PLAIN = DraftPlan()


class PassCosts:
    """The seconds of passes by their positions: those of one position, and a line through those of several."""

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[int, float]]] = {}  # by positions: the number of the pass, seconds
        self._num = 0
        self._slope_share = _SLOPE_GUESS  # the assumed share of a pass's time that another position costs

    @property
    def are_known(self) -> bool:
        return self._num >= _FIRST_PASSES

    def add(self, num_positions: int, seconds: float) -> None:
        self._passes.setdefault(num_positions, deque(maxlen=_NUM_REMEMBERED)).append((self._num, seconds))
        self._num += 1
        if num_positions > 1 and self.are_known:
            one, _, slope = self.fit()
            self._slope_share = slope / (one + slope)
        else:  # a measured slope fades within about a hundred passes
            self._slope_share += (1 - _FORGET) * (_SLOPE_GUESS - self._slope_share)

    def fit(self) -> tuple[float, float, float]:
        """Return the seconds of a one-position pass, of the step to several positions, and of each added position.

        Servers have a faster path for one position, so the second position costs more than later ones. The shortest
        passes are used, because disturbances only make a pass longer.
        """
        recent = [
            (positions, seconds)
            for positions, passes in self._passes.items()
            for number, seconds in passes
            if self._num - number <= _MAX_AGE
        ]
        middle = statistics.median(seconds for _, seconds in recent)
        kept = [(n, s) for n, s in recent if s <= _OUTLIER * middle]
        plain, several = [s for n, s in kept if n == 1], sorted((n, s) for n, s in kept if n > 1)
        slope = self._slope_share * middle
        if not several:
            return min(plain), 0.0, slope
        slope = _fit_slope(several, slope)
        line = max(min(s - slope * (n - 1) for n, s in several), 0.1 * middle)  # one position by the line of several
        one = min(plain) if plain else line
        return one, max(0.0, line - one), slope


class Acceptance:
    """The share of right guesses among the guesses that follow right ones, by the number of rows. Old counts fade."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._counts: dict[int, tuple[float, float]] = {}  # right guesses, all guesses

    def add(self, num_rows: int, num_right: int, num_guesses: int) -> None:
        """Count a pass's best line. Guesses after a wrong one do not count, because nobody knows if they were right."""
        tried = num_right + (num_right < num_guesses)
        right, all_ = self._counts.get(num_rows, (0.0, 0.0))
        self._counts[num_rows] = right + num_right, all_ + tried

    def forget(self) -> None:
        self._counts = {rows: (right * _FORGET, all_ * _FORGET) for rows, (right, all_) in self._counts.items()}

    def of(self, num_rows: int) -> float:
        """Return the acceptance with ``num_rows``. The prior of several rows is that of one, plus what they catch."""
        right, all_ = self._counts.get(1, (0.0, 0.0))
        one = (self._prior * _PRIOR_WEIGHT + right) / (_PRIOR_WEIGHT + all_)
        if num_rows == 1:
            return one
        caught = max((caught for rows, caught in _CATCH.items() if rows <= num_rows), default=0.0)
        prior = one + (1 - one) * caught
        right, all_ = self._counts.get(num_rows, (0.0, 0.0))
        return (prior * _PRIOR_WEIGHT + right) / (_PRIOR_WEIGHT + all_)


class Policy:
    """The policy that chooses the size of the next pass of one generation.

    The policy takes the size with the most tokens per second. This rate is the expected tokens divided by the time of
    the pass: E / (R + s + c · positions + d · guesses).
    """

    def __init__(
        self, acceptance: float, most_rows: int = 8, least_pass_s: float = 0.0, costs: PassCosts | None = None
    ) -> None:
        """Begin with priors.

        Args:
            acceptance: the assumed share of right guesses, until it is measured.
            least_pass_s: there is no speculation if a plain pass takes less time.
            costs: the costs of another generation's passes, which this generation continues; None for new ones.
        """
        self._rows = [rows for rows in _CATCH if rows <= most_rows]
        self._least_pass_s = least_pass_s
        self.costs, self.acceptance = costs or PassCosts(), Acceptance(acceptance)
        self._num_passes = 0
        self._guesses_s: deque[tuple[int, float]] = deque(maxlen=_NUM_REMEMBERED)  # number of the pass, seconds a guess

    def choose(self, most_guesses: int, most_rows: int = MOST_POSITIONS) -> DraftPlan:
        """Return the size of the next pass; a line may have ``most_guesses`` at most."""
        if not self.costs.are_known or most_guesses < 1:
            return PLAIN
        pass_s, several_s, position_s = self.costs.fit()
        if pass_s < self._least_pass_s:
            return PLAIN
        recent = [seconds for number, seconds in self._guesses_s if self._num_passes - number <= _MAX_AGE]
        guess_s = statistics.median(recent) if recent else 0.0
        if self._guesses_s and not recent:  # guessing was too slow: one guess is tried again
            most_guesses = 1
        best, best_rate = PLAIN, _LEAST_GAIN / pass_s
        for rows in (rows for rows in self._rows if rows <= most_rows):
            acceptance = self.acceptance.of(rows)
            most_length = min(most_guesses, MOST_POSITIONS // rows - 1)
            for length in _LENGTHS[: bisect_right(_LENGTHS, most_length)]:
                seconds = pass_s + several_s + position_s * (rows * (length + 1) - 1) + guess_s * length
                rate = expected_tokens(acceptance, length) / seconds
                if rate > best_rate:
                    # Another guess in each row takes time in which this rate gives so many tokens.
                    best, best_rate = DraftPlan(rows, length, (position_s * rows + guess_s) * rate), rate
        return best

    def passed(self, size: DraftPlan, seconds: float, num_right: int, guess_s: float | None) -> None:
        """Record a pass that took ``seconds`` after its guesses were ready; the guesses took ``guess_s``.

        ``guess_s`` is None if the draft did more than guess.
        """
        self._num_passes += 1
        self.costs.add(size.num_positions, seconds)
        self.acceptance.forget()
        if size.length:
            self.acceptance.add(size.num_rows, num_right, size.length)
            if guess_s is not None:
                self._guesses_s.append((self._num_passes, guess_s / size.length))


def _fit_slope(several: list[tuple[int, float]], prior: float) -> float:
    """Return the seconds of each added position, from the positions and seconds of passes, in order of positions."""
    half = len(several) // 2
    while 0 < half < len(several) and several[half - 1][0] == several[half][0]:
        half += 1  # all passes of one size stay on one side
    few, many = several[:half], several[half:]
    if not few or not many:
        return prior
    less, more = (statistics.fmean(n for n, _ in side) for side in (few, many))
    weight = (more - less) ** 2 * min(len(few), len(many))
    found = max(0.0, (min(s for _, s in many) - min(s for _, s in few)) / (more - less))
    return (_SLOPE_WEIGHT * prior + weight * found) / (_SLOPE_WEIGHT + weight)
