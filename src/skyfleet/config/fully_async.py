"""FullyAsync: training beside rollouts, with SkyRL's keys."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from skyfleet.config.section import Section


class FullyAsync(Section):
    """Rollouts and updates at the same time, instead of in turn."""

    enabled: bool = False
    """Train on groups as they finish, while other episodes run."""
    max_staleness_steps: int = Field(4, ge=0)
    """Updates that the policy may have made since it sampled a token that it is trained on; 0 trains \
exactly as without fully_async."""
    num_parallel_generation_workers: int | None = Field(None, ge=1)
    """Groups in flight, from train_batch_size to train_batch_size x (max_staleness_steps + 1), which \
is the default. SkyRL's default is 768."""
    sample_full_batch: bool = False
    """Replace groups from which nothing is learnt (equal rewards, too few grades) by the next ones."""
    clear_kv_cache_on_weight_sync: bool = False
    """Recompute the KV cache of running episodes after an update; false keeps it. vLLM always \
recomputes it."""

    def count_workers(self, train_batch_size: int) -> int:
        """Groups in flight at most."""
        most = train_batch_size * (self.max_staleness_steps + 1)
        return self.num_parallel_generation_workers or most

    def find_conflicts(self, train_batch_size: int) -> Iterator[str]:
        """One sentence if the number of groups in flight contradicts the batch."""
        workers = self.num_parallel_generation_workers
        most = train_batch_size * (self.max_staleness_steps + 1)
        if self.enabled and workers is not None and not train_batch_size <= workers <= most:
            yield (
                f"trainer.fully_async.num_parallel_generation_workers={workers} is not between "
                f"trainer.train_batch_size={train_batch_size} and {most}, which is train_batch_size x "
                "(max_staleness_steps + 1): fewer do not fill a batch, and more never run; "
                "leave it out or change it"
            )
