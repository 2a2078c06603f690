"""How many guesses pay, decided by what has been measured: acceptance, and what passes and guesses cost. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

MOST_POSITIONS = 32  # rows × new positions of a pass: with more, servers take it for a prompt
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
_LEAST_GAIN = 1.08  # of tokens per second, or there is no speculation
_FIRST_PASSES = 2  # without guesses, from which a pass is known
_NUM_REMEMBERED = 6  # passes of each size
_MAX_AGE = 64  # passes since
_OUTLIER = 3.0  # times the median: a pass that waited for something else
_SLOPE_GUESS = 0.004  # of a pass's time: what another position costs until that is known,
_SLOPE_WEIGHT = 8.0  # which counts like two passes, of which one has four guesses
_PRIOR_WEIGHT = 6.0  # guesses
_FORGET = 0.99  # with each pass
_CATCH = {1: 0.0, 2: 0.12, 3: 0.18, 4: 0.22, 6: 0.27, 8: 0.3}  # of wrong guesses, that another row has right, at first


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of a pass that verifies a line of guesses: Leviathan et al., 2023, equation (1)."""
    if acceptance >= 1:
        return length + 1
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class Size:
    """Rows of guesses, and guesses in each; ``least`` as in ``Plan``."""

    num_rows: int = 0
    length: int = 0
    least: float = 0.0

    @property
    def num_positions(self) -> int:
        return max(1, self.num_rows) * (self.length + 1)


PLAIN = Size()


class PassCosts:
    """Seconds of a pass by its positions: of one, and a line through longer ones; a few of each size are remembered."""

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[int, float]]] = {}  # by positions: number of the pass, seconds
        self._num = 0
        self._slope_share = _SLOPE_GUESS  # of a pass's time, that another position costs as far as is believed

    @property
    def are_known(self) -> bool:
        return self._num >= _FIRST_PASSES

    def add(self, num_positions: int, seconds: float) -> None:
        self._passes.setdefault(num_positions, deque(maxlen=_NUM_REMEMBERED)).append((self._num, seconds))
        self._num += 1
        if num_positions > 1 and self.are_known:
            one, _, slope = self.fit()
            self._slope_share = slope / (one + slope)
        else:  # what has been found out is believed for a hundred passes or so
            self._slope_share += (1 - _FORGET) * (_SLOPE_GUESS - self._slope_share)

    def fit(self) -> tuple[float, float, float]:
        """Seconds of a pass of one position, what any more positions add at once, and what each of them adds.

        Servers have a shorter way for one position, so that the first one more is dearer than the others. What disturbs
        a pass makes it longer and never shorter: the shortest ones tell.
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
        half = len(several) // 2
        while 0 < half < len(several) and several[half - 1][0] == several[half][0]:
            half += 1  # a size is on one side
        few, many = several[:half], several[half:]
        if few and many:
            less, more = (statistics.fmean(n for n, _ in side) for side in (few, many))
            weight = (more - less) ** 2 * min(len(few), len(many))
            found = max(0.0, (min(s for _, s in many) - min(s for _, s in few)) / (more - less))
            slope = (_SLOPE_WEIGHT * slope + weight * found) / (_SLOPE_WEIGHT + weight)
        line = max(min(s - slope * (n - 1) for n, s in several), 0.1 * middle)  # of one position, were it like several
        one = min(plain) if plain else line
        return one, max(0.0, line - one), slope


class Acceptance:
    """How often a guess is right if those before it are, by the number of rows; forgets slowly."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._counts: dict[int, tuple[float, float]] = {}  # right, all

    def add(self, num_rows: int, num_right: int, num_guesses: int) -> None:
        """Of a pass's longest line; what comes behind a wrong guess says nothing."""
        tried = num_right + (num_right < num_guesses)
        right, all_ = self._counts.get(num_rows, (0.0, 0.0))
        self._counts[num_rows] = right + num_right, all_ + tried

    def forget(self) -> None:
        self._counts = {rows: (right * _FORGET, all_ * _FORGET) for rows, (right, all_) in self._counts.items()}

    def of(self, num_rows: int) -> float:
        """With more rows, what one has shown is what is believed at first, and some of the rest besides."""
        right, all_ = self._counts.get(1, (0.0, 0.0))
        one = (self._prior * _PRIOR_WEIGHT + right) / (_PRIOR_WEIGHT + all_)
        if num_rows == 1:
            return one
        prior = one + (1 - one) * _catch(num_rows)
        right, all_ = self._counts.get(num_rows, (0.0, 0.0))
        return (prior * _PRIOR_WEIGHT + right) / (_PRIOR_WEIGHT + all_)


class Policy:
    """Chooses the size of the next pass of one generation.

    Of several sizes the one with the most tokens per second, expected tokens divided by what the pass takes:
    E / (R + s + c · positions + d · guesses).
    """

    def __init__(
        self, acceptance: float, most_rows: int = 8, least_pass_s: float = 0.0, costs: PassCosts | None = None
    ) -> None:
        """
        Args:
            acceptance: how often a guess is right, as long as that has not been measured.
            least_pass_s: if a plain pass takes less, there is no speculation.
            costs: of passes of another generation, from which this one goes on.
        """
        self._rows = [rows for rows in _CATCH if rows <= most_rows]
        self._least_pass_s = least_pass_s
        self.costs, self.acceptance = costs or PassCosts(), Acceptance(acceptance)
        self._num_passes = 0
        self._guesses_s: deque[tuple[int, float]] = deque(maxlen=_NUM_REMEMBERED)  # number of the pass, seconds a guess

    def choose(self, most_guesses: int, most_rows: int = MOST_POSITIONS) -> Size:
        """``most_guesses``: in a line, which must not be longer."""
        if not self.costs.are_known or most_guesses < 1:
            return PLAIN
        pass_s, several_s, position_s = self.costs.fit()
        if pass_s < self._least_pass_s:
            return PLAIN
        recent = [seconds for number, seconds in self._guesses_s if self._num_passes - number <= _MAX_AGE]
        guess_s = statistics.median(recent) if recent else 0.0
        if self._guesses_s and not recent:  # they were too slow: one is tried again
            most_guesses = 1
        best, best_rate = PLAIN, _LEAST_GAIN / pass_s
        for rows in self._rows:
            acceptance = self.acceptance.of(rows)
            for length in _LENGTHS:
                if rows > most_rows or length > most_guesses or rows * (length + 1) > MOST_POSITIONS:
                    continue
                seconds = pass_s + several_s + position_s * (rows * (length + 1) - 1) + guess_s * length
                rate = expected_tokens(acceptance, length) / seconds
                if rate > best_rate:
                    best, best_rate = Size(rows, length, (position_s * rows + guess_s) * rate), rate
        return best

    def passed(self, size: Size, seconds: float, num_right: int, guess_s: float | None) -> None:
        """A pass is over, ``seconds`` after the guesses for it, which took ``guess_s``, were there.

        None: the draft had more to do than to guess.
        """
        self._num_passes += 1
        self.costs.add(size.num_positions, seconds)
        self.acceptance.forget()
        if size.length:
            self.acceptance.add(size.num_rows, num_right, size.length)
            if guess_s is not None:
                self._guesses_s.append((self._num_passes, guess_s / size.length))


def _catch(num_rows: int) -> float:
    return max((caught for rows, caught in _CATCH.items() if rows <= num_rows), default=0.0)
