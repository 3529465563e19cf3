"""Read a series of trials: the fastest size, the knee, the plateau, and the size at which
memory runs out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from feedmill.tuning.trials import Trial, Unmeasured
from feedmill.workers.pipeline.calibration import CLOSE_ENOUGH

#: Share of the best rate from which a size belongs to the plateau.
PLATEAU = 0.95


@dataclass(frozen=True)
class Curve:
    """Trials of growing sizes in one order, and the sizes that were not measured."""

    trials: Sequence[Trial]
    unmeasured: Sequence[Unmeasured] = ()

    @property
    def best_rate(self) -> float:
        rates = [trial.rate for trial in self.trials]
        return max(rates)

    @property
    def knee(self) -> Trial:
        """The smallest size that comes close to the best rate: smaller batches fill sooner and
        need less memory.
        """
        least = CLOSE_ENOUGH * self.best_rate
        return next(trial for trial in self.trials if trial.rate >= least)

    @property
    def plateau(self) -> tuple[Trial, Trial]:
        """The first and the last size at nearly the best rate: between them, a batch's time grows
        with its size.
        """
        least = PLATEAU * self.best_rate
        flat = [trial for trial in self.trials if trial.rate >= least]
        return flat[0], flat[-1]

    @property
    def out_of_memory(self) -> Unmeasured | None:
        """The smallest size that did not fit in memory."""
        for size in self.unmeasured:
            if size.is_out_of_memory:
                return size
        return None

    def sentences(self) -> list[str]:
        """Return what the curve shows, a sentence each."""
        if not self.trials:
            return [_no_size_fits(self.unmeasured)]
        sentences = [
            self._knee_sentence(),
            self._plateau_sentence(),
            self._memory_sentence(),
        ]
        return [sentence for sentence in sentences if sentence]

    def _knee_sentence(self) -> str:
        knee = self.knee
        sentence = (
            f"{knee.size} is the smallest size within {1 - CLOSE_ENOUGH:.0%} of the fastest: "
            f"{knee.posts_per_s:,.1f} posts/s, {knee.seconds_per_batch:.3f} s a batch."
        )
        clock_rates = [trial.posts_per_s for trial in self.trials]
        if knee.posts_per_s < CLOSE_ENOUGH * max(clock_rates):
            sentence += (
                " Sizes are compared by CPU time: other processes have disturbed these "
                "rates."
            )
        return sentence

    def _plateau_sentence(self) -> str:
        first, last = self.plateau
        if first.size == last.size:
            return ""
        start = f"{first.size.number:,}"
        end = f"{last.size.number:,}"
        sentence = f"The rate is flat from {start} to {end} {first.size.unit}"
        if first is not self.trials[0]:
            sentence += ", below which each batch costs more than its share"
        if last is not self.trials[-1]:
            sentence += f", and falls beyond {end}"
        return f"{sentence}. On the plateau, a batch's time grows in proportion to its size."

    def _memory_sentence(self) -> str:
        first_oversized = self.out_of_memory
        if first_oversized is not None:
            return f"Memory runs out at {first_oversized.size}: larger ones were not tried."
        measured = [trial for trial in self.trials if trial.memory_bytes is not None]
        if not measured:
            return ""
        least = measured[0]
        most = measured[-1]
        sentence = f"Memory: {_memory_at(least)}"
        if most is not least:
            sentence += f", {_memory_at(most)}"
        return f"{sentence} {most.size.unit}."


def _memory_at(trial: Trial) -> str:
    return f"{trial.memory_mb:,.0f} MB at {trial.size.number:,}"


def _no_size_fits(unmeasured: Sequence[Unmeasured]) -> str:
    reason = "no size was given"
    if unmeasured:
        reason = unmeasured[0].reason
    return f"No size was measured: {reason}."
